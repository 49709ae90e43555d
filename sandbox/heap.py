"""Keep one heap of malloc for all threads of a process that lives for months."""

from __future__ import annotations

from sandbox.kernel import libc


def share() -> None:
    """Let each thread that starts from now on allocate from the first thread's heap (mallopt(3), M_ARENA_MAX).

    Otherwise each thread frees into a heap of its own, which no other thread uses: the daemon kept 40 MB that way after
    a month of simulated work.
    """
    libc.one_arena()
