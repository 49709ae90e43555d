"""landlock(7): only whether it is there. Nothing of ours depends on it yet; ``covenant doctor`` names it."""

from __future__ import annotations

import ctypes

_SYS_LANDLOCK_CREATE_RULESET = 444  # asm-generic/unistd.h, the same on every architecture
_CREATE_RULESET_VERSION = 1


def abi() -> int:
    """The ABI version of the running kernel, 0 when it is built without landlock or starts without it."""
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(_SYS_LANDLOCK_CREATE_RULESET)
    return max(0, int(libc.syscall(number, None, ctypes.c_size_t(0), ctypes.c_uint32(_CREATE_RULESET_VERSION))))
