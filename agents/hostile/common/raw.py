"""System calls by number, for what Python has no function for."""

from __future__ import annotations

import ctypes
import os

_MACHINES = ("x86_64", "aarch64")

# name: (x86_64, aarch64); None where the architecture lacks the call.
# Source: asm/unistd_64.h and asm-generic/unistd.h of Linux 6.8.
_NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "acct": (163, 89), "add_key": (248, 217), "adjtimex": (159, 171), "bpf": (321, 280), "capset": (126, 91),
    "clock_adjtime": (305, 266), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "execveat": (322, 281), "fanotify_init": (300, 262), "finit_module": (313, 273),
    "fsopen": (430, 430), "init_module": (175, 105), "io_uring_setup": (425, 425), "ioperm": (173, None),
    "iopl": (172, None), "kcmp": (312, 272), "kexec_file_load": (320, 294), "kexec_load": (246, 104),
    "keyctl": (250, 219), "lookup_dcookie": (212, 18), "memfd_secret": (447, 447), "migrate_pages": (256, 238),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "move_pages": (279, 239),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "personality": (135, 92), "pidfd_getfd": (438, 438), "pidfd_open": (434, 434),
    "pivot_root": (155, 41), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "ptrace": (101, 117),
    "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218), "sched_setscheduler": (144, 119),
    "setdomainname": (171, 162), "sethostname": (170, 161), "setns": (308, 268), "settimeofday": (164, 170),
    "swapoff": (168, 225), "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "vhangup": (153, 58), "mount": (165, 40), "landlock_create_ruleset": (444, 444),
}

_libc = ctypes.CDLL(None, use_errno=True)
_column = _MACHINES.index(os.uname().machine)


def number(name: str) -> int:
    """The number of a call on this architecture, -1 (ENOSYS everywhere) where it has none."""
    found = _NUMBERS[name][_column]
    return -1 if found is None else found


def call(name: str, *args: object) -> int:
    """Make a system call; integers go as 64 bit, None as NULL, structures and arrays by address.

    Raises:
        OSError: with the kernel's errno.
    """
    return by_number(number(name), *args, name=name)


def by_number(call_number: int, *args: object, name: str = "") -> int:
    """As `call`, by number."""
    converted = [ctypes.c_long(arg) if isinstance(arg, int) else _pointer(arg) for arg in args]
    ctypes.set_errno(0)
    value = int(_syscall(ctypes.c_long(call_number), *converted))
    if value == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error), name or str(call_number))
    return value


def _syscall(*args: object) -> int:
    function = _libc.syscall
    function.restype = ctypes.c_long
    return int(function(*args))


def _pointer(arg: object) -> object:
    return ctypes.byref(arg) if isinstance(arg, ctypes.Structure) else arg


class IoVector(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
