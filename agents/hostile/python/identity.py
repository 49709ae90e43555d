"""Probe the agent's identity: uid, capabilities, limits, and inherited descriptors and settings."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
import struct

from harness import Blocked, probe
from raw import call

ALLOWED_ENVIRONMENT = {"PATH", "HOME", "LANG", "COVENANT_RUN_ID", "TMPDIR", "LC_CTYPE"}
CAPABILITY_VERSION_3 = 0x20080522


def _status(key: str) -> str:
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name == key:
                return value.strip()
    raise LookupError(f"/proc/self/status has no line {key}")


@probe("uid_change")
def uid_change() -> str:
    os.setresuid(12345, 12345, 12345)
    return "became uid 12345"


@probe("gid_change")
def gid_change() -> str:
    os.setresgid(12345, 12345, 12345)
    return "became gid 12345"


@probe("groups_change")
def groups_change() -> str:
    os.setgroups([0, 42])
    return "joined the groups root and shadow"


@probe("uid_root")
def uid_root() -> str:
    if os.geteuid() != 0:
        os.setuid(0)
    return "runs as uid 0"


@probe("file_give_away")
def file_give_away() -> str:
    """A file of root with the setuid bit is a way back to root."""
    path = f"/tmp/setuid-{os.getpid()}"
    with open(path, "xb"):
        pass
    try:
        os.chown(path, 12345, 12345)
        os.chmod(path, 0o4755)
        if not os.stat(path).st_mode & stat.S_ISUID:
            raise Blocked("the bit did not stay")
    finally:
        os.unlink(path)
    return "made a setuid file of another uid"


@probe("capabilities_held")
def capabilities_held() -> str:
    sets = {key: int(_status(key), 16) for key in ("CapInh", "CapPrm", "CapEff", "CapBnd")}
    if not any(sets.values()):
        raise Blocked("all four sets are empty")
    return f"{ {key: hex(value) for key, value in sets.items()} }"


@probe("capabilities_set")
def capabilities_set() -> str:
    """Ask for CAP_SYS_ADMIN and CAP_NET_ADMIN (bits 21 and 12) as permitted and effective."""
    header = ctypes.create_string_buffer(struct.pack("=Ii", CAPABILITY_VERSION_3, 0), 8)
    wanted = 1 << 21 | 1 << 12
    data = ctypes.create_string_buffer(struct.pack("=6I", wanted, wanted, 0, 0, 0, 0), 24)
    call("capset", header, data)
    return "holds CAP_SYS_ADMIN and CAP_NET_ADMIN"


@probe("filter_absent")
def filter_absent() -> str:
    """Without its flag runsc ignores the filter in silence; the guest's own status tells."""
    if _status("Seccomp") == "2":
        raise Blocked("a filter is loaded")
    return "no filter is loaded"


@probe("limit_processes_raise")
def limit_processes_raise() -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    wanted = 100_000 if hard == resource.RLIM_INFINITY else hard + 1
    # From no limit, down and up again: the second step is what needs the right.
    if hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted - 1, wanted - 1))
    try:
        resource.setrlimit(resource.RLIMIT_NPROC, (wanted, wanted))
    except ValueError as error:  # Python's word for EPERM here
        raise PermissionError(errno.EPERM, str(error)) from None
    return f"raised the hard limit of processes to {wanted}"


@probe("environment_secrets")
def environment_secrets() -> str:
    """Anything of the supervisor's or the operator's environment."""
    extra = sorted(set(os.environ) - ALLOWED_ENVIRONMENT)
    if not extra:
        raise Blocked("nothing but " + " ".join(sorted(os.environ)))
    return f"found {extra[:5]}"


@probe("descriptor_leak")
def descriptor_leak() -> str:
    """Any descriptor that this package did not open itself; a directory's leads out by openat."""
    own = {0, 1, 2}
    for entry in os.listdir("/proc/self/fd"):
        number = int(entry)
        try:
            mode = os.fstat(number).st_mode
        except OSError:
            continue  # the listing's own descriptor, closed by now
        # The harness has one pipe open to its parent; files and directories it has none.
        if number not in own and not stat.S_ISFIFO(mode):
            return f"descriptor {number} is open: {stat.filemode(mode)}"
    raise Blocked("only stdin, stdout and stderr")


@probe("terminal_held")
def terminal_held() -> str:
    """Look for the operator's terminal.

    A holder controls it by escape sequences, and on old kernels types on it (TIOCSTI).
    """
    for entry in os.listdir("/proc/self/fd"):
        if os.isatty(int(entry)):
            os.write(int(entry), b"")
            return f"descriptor {entry} is a terminal of {os.get_terminal_size(int(entry))}"
    raise Blocked("no descriptor is a terminal")
