/*
 * The first process of a run that may start programs: it starts the agent, reaps orphans, passes signals on, and exits
 * with the agent's status. No libc, no memory but its stack; sandbox/rootfs/init_program.py holds the assembled bytes.
 *
 *     init PROGRAM ARGUMENT...
 *
 * As C:
 *
 *     block every signal; keep the old mask
 *     child = fork()
 *     if (child == 0) {
 *         if (stdin is a terminal && setpgid(0, 0) == 0 && tcsetpgrp(0, getpid()) != 0)
 *             setpgid(0, 1);
 *         restore the old mask
 *         execve(argv[1], argv + 1, envp);
 *         exit(errno == ENOENT ? 127 : 126);
 *     }
 *     close every descriptor
 *     for (;;) {
 *         while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
 *             if (pid == child) exit(its status, or 128 + its signal);
 *         if ((signal = sigwaitinfo(every signal)) > 0) { if (signal != SIGCHLD) kill(child, signal); }
 *         else if (errno != EINTR) exit(125);
 *     }
 *
 * Registers: rbp &argv[1], r13 envp, r12d the child. Stack: 0 every signal, 8 the old mask, 16 a status or group,
 * 32 a struct termios. x86_64; numbers of system calls are those of policy/data/syscalls/x86_64.toml.
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
	sub	$128, %rsp
	movq	$-1, (%rsp)
	mov	$2, %edi		/* SIG_SETMASK */
	mov	%rsp, %rsi
	lea	8(%rsp), %rdx
	mov	$8, %r10d
	mov	$14, %eax		/* rt_sigprocmask */
	syscall

	mov	$17, %edi		/* SIGCHLD and no flag: a fork */
	xor	%esi, %esi
	xor	%edx, %edx
	xor	%r10d, %r10d
	xor	%r8d, %r8d
	mov	$56, %eax		/* clone */
	syscall
	mov	%eax, %r12d
	test	%eax, %eax
	jz	child
	mov	$125, %edi
	js	exit			/* more processes than are granted */

	/* A descriptor that init kept open would keep the agent's end of a pipe open after the agent closed it. */
	xor	%edi, %edi
	mov	$0x7fffffff, %esi	/* gVisor takes no more */
	xor	%edx, %edx
	mov	$436, %eax		/* close_range */
	syscall

reap:
	mov	$-1, %rdi
	lea	16(%rsp), %rsi
	mov	$1, %edx		/* WNOHANG */
	xor	%r10d, %r10d
	mov	$61, %eax		/* wait4 */
	syscall
	cmp	%r12d, %eax
	je	ended
	test	%eax, %eax
	jg	reap

	mov	%rsp, %rdi
	xor	%esi, %esi
	xor	%edx, %edx
	mov	$8, %r10d
	mov	$128, %eax		/* rt_sigtimedwait, without an end */
	syscall
	cmp	$-4, %eax		/* EINTR: stopped and continued */
	je	reap
	mov	$125, %edi
	test	%eax, %eax
	js	exit
	cmp	$17, %eax		/* SIGCHLD */
	je	reap
	mov	%r12d, %edi
	mov	%eax, %esi
	mov	$62, %eax		/* kill: the child is not reaped yet, so its number is its own */
	syscall
	jmp	reap

ended:
	mov	16(%rsp), %edi
	mov	%edi, %eax
	shr	$8, %edi
	and	$0xff, %edi
	and	$0x7f, %eax
	jz	exit
	lea	128(%rax), %edi
exit:
	mov	$231, %eax		/* exit_group */
	syscall

child:
	xor	%edi, %edi
	mov	$0x5401, %esi		/* TCGETS */
	lea	32(%rsp), %rdx
	mov	$16, %eax		/* ioctl */
	syscall
	test	%eax, %eax
	jnz	start
	/* A terminal signals its foreground group. In one of its own the agent gets such a signal once, not twice. */
	xor	%edi, %edi
	xor	%esi, %esi
	mov	$109, %eax		/* setpgid */
	syscall
	test	%eax, %eax
	jnz	start
	mov	$39, %eax		/* getpid */
	syscall
	mov	%eax, 16(%rsp)
	xor	%edi, %edi
	mov	$0x5410, %esi		/* TIOCSPGRP */
	lea	16(%rsp), %rdx
	mov	$16, %eax		/* ioctl */
	syscall
	test	%eax, %eax
	jz	start
	xor	%edi, %edi
	mov	$1, %esi
	mov	$109, %eax		/* setpgid: in the background it could not read */
	syscall
start:
	mov	$2, %edi		/* SIG_SETMASK */
	lea	8(%rsp), %rsi
	xor	%edx, %edx
	mov	$8, %r10d
	mov	$14, %eax		/* rt_sigprocmask */
	syscall
	mov	(%rbp), %rdi
	mov	%rbp, %rsi
	mov	%r13, %rdx
	mov	$59, %eax		/* execve */
	syscall
	mov	$126, %edi
	cmp	$-2, %eax		/* ENOENT */
	jne	exit
	mov	$127, %edi
	jmp	exit
