"""When an agent is started by an init: a first process that reaps orphans and passes signals on (docs/adr/0072).

An agent with keys of SSH is started by the relay of the ssh-agent service, which the init starts (docs/adr/0124).
"""

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

# The relay: its place, the socket at which it listens inside, and its system calls.
SSH_RELAY: Final = f"{DIRECTORY}/ssh-relay"
SSH_SOCKET: Final = "/tmp/.covenant-ssh-agent"  # noqa: S108 (the agent's own)
SSH_CALLS: Final = frozenset(
    {"accept4", "bind", "clone", "close", "close_range", "connect", "execve", "exit_group"}
    | {"listen", "ppoll", "read", "rt_sigprocmask", "socket", "write"}
)


def relays(effective: Effective, arch: str) -> bool:
    """Whether an agent with these grants can have the ssh-agent service: an init, the calls, and a writable place."""
    scratch = effective.filesystem.mode != "read-only-package"
    return wanted(effective, arch) and effective.syscalls.names >= SSH_CALLS and scratch


def wanted(effective: Effective, arch: str) -> bool:
    """Whether an agent with these grants has an init: it may start programs, and init's calls are among its own.

    An agent whose manifest denies one of these calls is the first process itself, as every agent without programs.
    """
    return arch in ARCHES and bool(effective.executables) and effective.syscalls.names >= CALLS
