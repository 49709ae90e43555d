"""Core dumps of a process with RLIMIT_CORE = 1, by the kernel's core_pattern (core(5), fs/coredump.c). Pure.

A limit of 0 stops core files alone: a handler behind `|` gets the whole memory under any limit, with one
exception. At exactly 1 the kernel starts no handler, and 1 byte is less than the least size of a core file. So 1 is
never worse than 0. A handler behind a socket (`@`, from Linux 6.16) has no such exception.
"""

from __future__ import annotations

from typing import Final, Literal

LIMIT: Final = 1


def destination(core_pattern: str) -> Literal["file", "program", "socket"]:
    """Where the kernel sends a core dump."""
    return {"|": "program", "@": "socket"}.get(core_pattern[:1], "file")  # type: ignore[return-value]


def stopped(core_pattern: str, limit: int) -> bool:
    """Whether a process under this limit leaves no dump at all, neither a file nor one with a handler."""
    where = destination(core_pattern)
    return limit == LIMIT if where == "program" else limit in (0, LIMIT) and where == "file"
