"""landlock(7): hold a process to TCP connections to single ports, where the running kernel can.

It is a second wall: what it holds is held by the code of that process first. ``covenant doctor`` names it.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from sandbox.kernel import libc as own_libc

_SYS_LANDLOCK_CREATE_RULESET = 444  # asm-generic/unistd.h, the same on every architecture
_SYS_LANDLOCK_ADD_RULE, _SYS_LANDLOCK_RESTRICT_SELF = 445, 446
_CREATE_RULESET_VERSION = 1
_ABI_OF_PORTS, _ABI_OF_SCOPES = 4, 6
_RULE_OF_PORT = 2
_CONNECT_TCP, _ABSTRACT_UNIX = 1 << 1, 1 << 0


def abi() -> int:
    """The ABI version of the running kernel, 0 when it is built without landlock or starts without it."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET)
    return max(0, int(libc.syscall(number, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_RULESET_VERSION))))


def hold_to_ports(ports: Iterable[int]) -> bool:
    """Let this thread and its later children connect by TCP to these ports alone, and to no abstract unix socket.

    Returns whether the kernel can: from ABI 4 for ports, from ABI 6 for sockets. Sets no_new_privs.

    Raises:
        OSError: Raised when the kernel refuses a step.
    """
    version = abi()
    if version < _ABI_OF_PORTS:
        return False
    # handled_access_fs, handled_access_net, scoped (linux/landlock.h); shorter before ABI 6.
    attributes = struct.pack("=QQQ", 0, _CONNECT_TCP, _ABSTRACT_UNIX)[: 24 if version >= _ABI_OF_SCOPES else 16]
    own_libc.set_no_new_privs()
    ruleset = _call(_SYS_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    try:
        for port in ports:
            _call(_SYS_LANDLOCK_ADD_RULE, ruleset, _RULE_OF_PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0)
        _call(_SYS_LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)
    return True


def _call(number: int, *words: int | bytes) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    given = (ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_long(word) for word in words)
    result = int(libc.syscall(ctypes.c_long(number), *given))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
