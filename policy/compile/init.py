"""When an agent is started by an init: a first process that reaps orphans and passes signals on (docs/adr/0072)."""

from __future__ import annotations

from typing import Final

from policy.grants.effective import Effective

# Its place in the agent's root, where nothing else is (sandbox.rootfs.init_program), and its machines and system calls.
DIRECTORY: Final = "/.covenant"
PROGRAM: Final = f"{DIRECTORY}/init"
ARCHES: Final = frozenset({"x86_64"})
CALLS: Final = frozenset(
    {"clone", "close_range", "execve", "exit_group", "ioctl", "kill", "rt_sigprocmask", "rt_sigtimedwait", "wait4"}
)


def wanted(effective: Effective, arch: str) -> bool:
    """Whether an agent with these grants has an init: it may start programs, and init's calls are among its own.

    An agent whose manifest denies one of these calls is the first process itself, as every agent without programs.
    """
    return arch in ARCHES and bool(effective.executables) and effective.syscalls.names >= CALLS
