"""The groups of systemd's SystemCallFilter=, as far as the profile of a manifest has their calls (systemd 252).

A call of that profile that is in no group stands in ``UNGROUPED``: a test holds the two together, so that a profile
that grows cannot pass a denied group.
"""

from __future__ import annotations

from typing import Final

_GROUPS: Final = {
    "aio": "",
    "basic-io": """
        close close_range dup dup2 dup3 lseek pread64 preadv preadv2 pwrite64 pwritev pwritev2 read readv write
        writev
    """,
    "chown": "chown fchown fchownat lchown",
    "clock": "",
    "cpu-emulation": "",
    "debug": "",
    "default": """
        arch_prctl brk clock_getres clock_gettime clock_nanosleep execve exit exit_group futex get_robust_list
        getegid geteuid getgid getgroups getpgid getpgrp getpid getppid getrandom getresgid getresuid getrlimit
        getsid gettid gettimeofday getuid membarrier mmap mprotect munmap nanosleep pause prlimit64 restart_syscall
        rseq rt_sigreturn sched_getaffinity sched_yield set_robust_list set_tid_address time
    """,
    "file-system": """
        access chdir chmod close creat faccessat faccessat2 fallocate fchdir fchmod fchmodat fcntl fgetxattr
        flistxattr fremovexattr fsetxattr fstat fstatfs ftruncate futimesat getcwd getdents getdents64 getxattr
        inotify_add_watch inotify_init inotify_init1 inotify_rm_watch lgetxattr link linkat listxattr llistxattr
        lremovexattr lsetxattr lstat mkdir mkdirat mknod mknodat newfstatat open openat readlink readlinkat
        removexattr rename renameat renameat2 rmdir setxattr stat statfs statx symlink symlinkat truncate unlink
        unlinkat utime utimensat utimes
    """,
    "io-event": """
        epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 poll ppoll
        pselect6 select
    """,
    "ipc": "msgctl msgget msgrcv msgsnd pipe pipe2 semctl semget semop semtimedop shmat shmctl shmdt shmget",
    "keyring": "",
    "memlock": "mlock mlock2 mlockall munlock munlockall",
    "module": "",
    "mount": "",
    "network-io": """
        accept accept4 bind connect getpeername getsockname getsockopt listen recvfrom recvmmsg recvmsg sendmmsg
        sendmsg sendto setsockopt shutdown socket socketpair
    """,
    "obsolete": "",
    "pkey": "pkey_alloc pkey_free pkey_mprotect",
    "privileged": "chown fchown fchownat lchown setfsuid setresuid setreuid setuid",
    "process": """
        capget clone fork getrusage kill pidfd_open pidfd_send_signal prctl rt_sigqueueinfo rt_tgsigqueueinfo tgkill
        times tkill vfork wait4 waitid
    """,
    "raw-io": "",
    "reboot": "",
    "resources": "ioprio_set sched_setaffinity sched_setparam sched_setscheduler setpriority setrlimit",
    "setuid": "setgid setregid setresgid setresuid setreuid setuid",
    "signal": "rt_sigaction rt_sigpending rt_sigprocmask rt_sigsuspend rt_sigtimedwait sigaltstack signalfd4",
    "swap": "",
    "sync": "fdatasync fsync msync sync sync_file_range syncfs",
    "system-service": """
        accept accept4 access alarm arch_prctl bind brk capget chdir chmod chown clock_getres clock_gettime
        clock_nanosleep clone close close_range connect copy_file_range creat dup dup2 dup3 epoll_create
        epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd eventfd2 execve exit exit_group
        faccessat faccessat2 fadvise64 fallocate fchdir fchmod fchmodat fchown fchownat fcntl fdatasync fgetxattr
        flistxattr flock fork fremovexattr fsetxattr fstat fstatfs fsync ftruncate futex futimesat get_robust_list
        getcpu getcwd getdents getdents64 getegid geteuid getgid getgroups getitimer getpeername getpgid getpgrp
        getpid getppid getpriority getrandom getresgid getresuid getrlimit getrusage getsid getsockname getsockopt
        gettid gettimeofday getuid getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch ioctl
        ioprio_get ioprio_set kill lchown lgetxattr link linkat listen listxattr llistxattr lremovexattr lseek
        lsetxattr lstat madvise membarrier mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mprotect mremap
        msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat open openat pause
        personality pidfd_open pidfd_send_signal pipe pipe2 poll ppoll prctl pread64 preadv preadv2 prlimit64
        pselect6 pwrite64 pwritev pwritev2 read readahead readlink readlinkat readv recvfrom recvmmsg recvmsg
        removexattr rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask
        rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_tgsigqueueinfo sched_get_priority_max
        sched_get_priority_min sched_getaffinity sched_getparam sched_getscheduler sched_setaffinity sched_setparam
        sched_setscheduler sched_yield select semctl semget semop semtimedop sendfile sendmmsg sendmsg sendto
        set_robust_list set_tid_address setfsgid setfsuid setgid setitimer setpgid setpriority setregid setresgid
        setresuid setreuid setrlimit setsid setsockopt setuid setxattr shmat shmctl shmdt shmget shutdown
        sigaltstack signalfd4 socket socketpair splice stat statfs statx symlink symlinkat sync sync_file_range
        syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_settime
        timerfd_create timerfd_gettime timerfd_settime times tkill truncate umask uname unlink unlinkat utime
        utimensat utimes vfork vmsplice wait4 waitid write writev
    """,
    "timer": """
        alarm getitimer setitimer timer_create timer_delete timer_getoverrun timer_gettime timer_settime
        timerfd_create timerfd_gettime timerfd_settime times
    """,
}
UNGROUPED: Final = frozenset({"mincore", "seccomp"})


def members(group: str) -> frozenset[str] | None:
    """Return the calls of a group, named without its `@`; None where there is no such group."""
    found = _GROUPS.get(group)
    return None if found is None else frozenset(found.split())
