/*
 * Starts the agent of a run that is granted keys of SSH, and carries the bytes of its clients to the run's gate: it
 * listens at SSH_AUTH_SOCK, leaves a child of init that serves, and executes the agent in its own place. No libc, no
 * memory but its stack; sandbox/rootfs/init_program.py holds the assembled bytes.
 *
 *     ssh_relay PROGRAM ARGUMENT...
 *
 * As C:
 *
 *     listener = socket(AF_UNIX); bind(listener, path); listen(listener, 16)
 *     if (all three did not fail)
 *         if (clone(CLONE_PARENT | SIGCHLD) == 0) serve();
 *     execve(argv[1], argv + 1, envp);
 *     exit(errno == ENOENT ? 127 : 126);
 *
 *     serve:
 *         block every signal; close every descriptor but listener
 *         for (;;) {
 *             listen for clients only where a pair is free; ppoll(1 + 2 * 16 descriptors)
 *             for each of a pair that is ready: read, and write all of it to the other; close both at an end
 *             if (listener is ready) pair = (accept4(listener), connect(the gate))
 *         }
 *
 * It is a child of init, so that the agent does not wait for a process that it did not start. Started again by the
 * agent, it finds the path taken and executes the program alone.
 *
 * Registers: rbp &argv[1], r13 envp, r12d the listener, rbx an index, r14d a descriptor, r15d a free pair's index.
 * Stack of serve: 0 33 struct pollfd, 512 a buffer of 4096. x86_64.
 */
	.globl _start
	.text
_start:
	mov	(%rsp), %rax
	lea	16(%rsp), %rbp
	lea	16(%rsp,%rax,8), %r13
	mov	$125, %edi
	cmp	$2, %rax
	jl	exit			/* no program to start */
	mov	$1, %edi		/* AF_UNIX */
	mov	$0x80001, %esi		/* SOCK_STREAM | SOCK_CLOEXEC */
	xor	%edx, %edx
	mov	$41, %eax		/* socket */
	syscall
	test	%eax, %eax
	js	start
	mov	%eax, %r12d
	mov	%eax, %edi
	lea	path(%rip), %rsi
	mov	$(gate - path), %edx
	mov	$49, %eax		/* bind */
	syscall
	test	%eax, %eax
	js	start
	mov	%r12d, %edi
	mov	$16, %esi
	mov	$50, %eax		/* listen */
	syscall
	test	%eax, %eax
	js	start
	mov	$0x8011, %edi		/* CLONE_PARENT and SIGCHLD */
	xor	%esi, %esi
	xor	%edx, %edx
	xor	%r10d, %r10d
	xor	%r8d, %r8d
	mov	$56, %eax		/* clone */
	syscall
	test	%eax, %eax
	jz	serve
	mov	$125, %edi
	js	exit			/* more processes than are granted */
start:
	mov	(%rbp), %rdi
	mov	%rbp, %rsi
	mov	%r13, %rdx
	mov	$59, %eax		/* execve */
	syscall
	mov	$126, %edi
	cmp	$-2, %eax		/* ENOENT */
	jne	exit
	mov	$127, %edi
exit:
	mov	$231, %eax		/* exit_group */
	syscall

serve:
	sub	$4608, %rsp
	movq	$-1, (%rsp)
	mov	$2, %edi		/* SIG_SETMASK */
	mov	%rsp, %rsi
	xor	%edx, %edx
	mov	$8, %r10d
	mov	$14, %eax		/* rt_sigprocmask: a Ctrl-C is for the agent */
	syscall
	/* A descriptor that it kept open would keep the agent's end of a pipe open after the agent closed it. */
	lea	1(%r12), %edi
	mov	$0x7fffffff, %esi
	xor	%edx, %edx
	mov	$436, %eax		/* close_range */
	syscall
	test	%r12d, %r12d
	jz	clear
	xor	%edi, %edi
	lea	-1(%r12), %esi
	xor	%edx, %edx
	mov	$436, %eax		/* close_range */
	syscall
clear:
	mov	%r12d, (%rsp)
	mov	$1, %ebx
each:
	movl	$-1, (%rsp,%rbx,8)
	movl	$1, 4(%rsp,%rbx,8)	/* POLLIN */
	inc	%ebx
	cmp	$33, %ebx
	jl	each

wait:
	xor	%r15d, %r15d
	movl	$0, 4(%rsp)
	mov	$1, %ebx
free:
	cmpl	$-1, (%rsp,%rbx,8)
	je	room
	add	$2, %ebx
	cmp	$33, %ebx
	jl	free
	jmp	poll
room:
	mov	%ebx, %r15d
	movl	$1, 4(%rsp)
poll:
	mov	%rsp, %rdi
	mov	$33, %esi
	xor	%edx, %edx
	xor	%r10d, %r10d
	mov	$8, %r8d
	mov	$271, %eax		/* ppoll, without an end */
	syscall
	mov	$125, %edi
	test	%eax, %eax
	js	exit

	mov	$1, %ebx
pair:
	cmpw	$0, 6(%rsp,%rbx,8)
	je	next
	mov	(%rsp,%rbx,8), %edi
	test	%edi, %edi
	js	next			/* its other end was closed in this turn */
	lea	512(%rsp), %rsi
	mov	$4096, %edx
	xor	%eax, %eax		/* read */
	syscall
	test	%eax, %eax
	jle	drop
	mov	%eax, %r14d
	lea	512(%rsp), %rsi
write:
	lea	-1(%rbx), %eax
	xor	$1, %eax
	mov	8(%rsp,%rax,8), %edi
	mov	%r14d, %edx
	mov	$1, %eax		/* write: SIGPIPE is blocked */
	syscall
	test	%eax, %eax
	jle	drop
	add	%rax, %rsi
	sub	%eax, %r14d
	jnz	write
	jmp	next
drop:
	mov	(%rsp,%rbx,8), %edi
	mov	$3, %eax		/* close */
	syscall
	movl	$-1, (%rsp,%rbx,8)
	lea	-1(%rbx), %r14d
	xor	$1, %r14d
	mov	8(%rsp,%r14,8), %edi
	movl	$-1, 8(%rsp,%r14,8)
	mov	$3, %eax		/* close */
	syscall
next:
	inc	%ebx
	cmp	$33, %ebx
	jl	pair

	cmpw	$0, 6(%rsp)
	je	wait
	mov	%r12d, %edi
	xor	%esi, %esi
	xor	%edx, %edx
	mov	$0x80000, %r10d		/* SOCK_CLOEXEC */
	mov	$288, %eax		/* accept4 */
	syscall
	test	%eax, %eax
	js	wait
	mov	%eax, %r14d
	mov	$2, %edi		/* AF_INET */
	mov	$0x80001, %esi		/* SOCK_STREAM | SOCK_CLOEXEC */
	xor	%edx, %edx
	mov	$41, %eax		/* socket */
	syscall
	test	%eax, %eax
	js	refuse
	mov	%eax, %ebx
	mov	%eax, %edi
	lea	gate(%rip), %rsi
	mov	$16, %edx
	mov	$42, %eax		/* connect */
	syscall
	test	%eax, %eax
	js	undo
	mov	%r14d, (%rsp,%r15,8)
	mov	%ebx, 8(%rsp,%r15,8)
	jmp	wait
undo:
	mov	%ebx, %edi
	mov	$3, %eax		/* close */
	syscall
refuse:
	mov	%r14d, %edi
	mov	$3, %eax		/* close */
	syscall
	jmp	wait

path:
	.short	1			/* AF_UNIX */
	.asciz	"/tmp/.covenant-ssh-agent"
gate:
	.short	2			/* AF_INET */
	.byte	0, 81, 192, 0, 0, 1	/* port and address of the gate */
	.quad	0
