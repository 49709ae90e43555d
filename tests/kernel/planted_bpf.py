"""BPF programs that root's hand attaches: each of two instructions, which let everything by."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterator

from sandbox.kernel import libc

# linux/bpf.h: commands, program types, places (enum bpf_attach_type).
_PROG_LOAD, _LINK_CREATE, _PROG_ATTACH, _PROG_DETACH = 5, 28, 8, 9
SCHED_CLS, XDP, CGROUP_SKB, FLOW_DISSECTOR, SK_LOOKUP = 3, 6, 8, 22, 30
AT_CGROUP_EGRESS, AT_SK_LOOKUP, AT_XDP, AT_TCX_INGRESS = 1, 36, 37, 46
_LIBC = ctypes.CDLL(None, use_errno=True)


def _bpf(command: int, attribute: bytes) -> int:
    # The kernel takes no attribute that it does not know: what is beyond must be zero.
    room = ctypes.create_string_buffer(attribute, 128)
    result: int = _LIBC.syscall(libc.SYS_BPF, command, room, 128)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"bpf {command}: {os.strerror(ctypes.get_errno())}")
    return result


def loaded(kind: int, place: int, *, gives: int = 1) -> int:
    """A descriptor of a program that always gives this number."""
    code = struct.pack("=BBhi", 0xB7, 0, 0, gives) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    text, license_ = ctypes.create_string_buffer(code), ctypes.create_string_buffer(b"GPL")
    head = struct.pack("=IIQQIIQII", kind, 2, ctypes.addressof(text), ctypes.addressof(license_), 0, 0, 0, 0, 0)
    # prog_name (16 bytes), prog_ifindex, expected_attach_type
    return _bpf(_PROG_LOAD, head + bytes(16) + struct.pack("=II", 0, place))


@contextlib.contextmanager
def linked(kind: int, place: int, target: int, *, gives: int = 1) -> Iterator[None]:
    """Attached by a link to a device (its index) or a namespace (a descriptor), in the calling thread's namespace."""
    program = loaded(kind, place, gives=gives)
    try:
        link = _bpf(_LINK_CREATE, struct.pack("=IIII", program, target, place, 0))
        try:
            yield
        finally:
            os.close(link)
    finally:
        os.close(program)


@contextlib.contextmanager
def attached(kind: int, place: int, target: int) -> Iterator[None]:
    """Attached to a cgroup or a namespace, by a descriptor of it."""
    program = loaded(kind, place)
    try:
        _bpf(_PROG_ATTACH, struct.pack("=IIII", target, program, place, 0))
        try:
            yield
        finally:
            _bpf(_PROG_DETACH, struct.pack("=IIII", target, program, place, 0))
    finally:
        os.close(program)
