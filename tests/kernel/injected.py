"""Have a process of a live run make a system call: root's hand in a run's own descriptors (ptrace(2))."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import time
from collections.abc import Iterator
from typing import Final

_ATTACH, _DETACH, _STEP = 16, 17, 9
_GETREGSET, _SETREGSET, _PEEKTEXT = 0x4204, 0x4205, 1
_PRSTATUS = 1

# linux/user.h and asm/ptrace.h: (the call's instruction, its length, index of number, result, pc, first arguments)
_X86: Final = (0x050F, 2, 10, 10, 16, (14, 13, 12, 7, 9, 8))
_ARM: Final = (0xD4000001, 4, 8, 0, 32, (0, 1, 2, 3, 4, 5))
_MACHINE: Final = _X86 if platform.machine() == "x86_64" else _ARM
_ORIG_RAX = 15
_SECONDS = 30.0
DUP, DUP3, CLOSE = (32, 292, 3) if platform.machine() == "x86_64" else (23, 24, 57)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def call(pid: int, number: int, *arguments: int) -> int:
    """Make a thread of a process make this call. Returns its result, which must be no error."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            with contextlib.suppress(ProcessLookupError), _stopped(thread):
                before = _registers(thread)
                # A thread that just runs has no instruction of a call to be sent back to.
                if not _waits(thread, before):
                    continue
                made = _made(thread, before, number, arguments)
                _set(thread, before)
                assert made >= 0, os.strerror(-made)
                return made
    raise AssertionError("no thread of the process waits in a system call")


def _waits(thread: int, registers: list[int]) -> bool:
    code, length, _, _, at_pc, _ = _MACHINE
    return _ptrace(_PEEKTEXT, thread, registers[at_pc] - length) & ((1 << 8 * length) - 1) == code


def _made(pid: int, before: list[int], number: int, arguments: tuple[int, ...]) -> int:
    _, length, at_number, at_result, at_pc, places = _MACHINE
    now = list(before)
    now[at_pc] -= length
    if at_number == at_result:
        now[_ORIG_RAX] = (1 << 64) - 1  # the call that it waits in is not to be restarted in between
    now[at_number] = number
    for place, value in zip(places, arguments, strict=False):
        now[place] = value
    _set(pid, now)
    _ptrace(_STEP, pid)
    os.waitpid(pid, 0x40000000)
    result = _registers(pid)[at_result]
    return result - (1 << 64) if result >> 63 else result


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    _ptrace(_ATTACH, pid)
    os.waitpid(pid, 0x40000000)  # __WALL
    try:
        yield
    finally:
        _ptrace(_DETACH, pid)


def _registers(pid: int) -> list[int]:
    buffer = ctypes.create_string_buffer(1024)
    vector = _Vector(ctypes.addressof(buffer), len(buffer))
    _ptrace(_GETREGSET, pid, _PRSTATUS, ctypes.addressof(vector))
    return list(struct.unpack(f"{vector.length // 8}Q", buffer.raw[: vector.length]))


def _set(pid: int, registers: list[int]) -> None:
    buffer = ctypes.create_string_buffer(struct.pack(f"{len(registers)}Q", *registers))
    vector = _Vector(ctypes.addressof(buffer), 8 * len(registers))
    _ptrace(_SETREGSET, pid, _PRSTATUS, ctypes.addressof(vector))


def _ptrace(request: int, pid: int, address: int = 0, data: int = 0) -> int:
    ctypes.set_errno(0)
    result: int = _libc.ptrace(request, pid, address, data)
    if result == -1 and (number := ctypes.get_errno()):
        raise OSError(number, os.strerror(number))
    return result & ((1 << 64) - 1)
