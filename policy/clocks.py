"""Which clock ends a run: the earliest of --timeout, cpu_ms_per_task, ttl, the parent's and expires_at."""

from __future__ import annotations

from msgspec import Struct


class Deadline(Struct, frozen=True):
    """``milliseconds`` from the moment the intent is written, and the name of the clock that gives it.

    The other two go on while the machine sleeps, and so are kept by themselves: ``ttl_ms`` from the same moment, and
    ``expires_at_ms``, a Unix time. None without one.
    """

    milliseconds: int
    clock: str
    ttl_ms: int | None = None
    expires_at_ms: int | None = None


def effective_deadline(
    *,
    now_ms: int,
    cpu_ms_per_task: int,
    timeout_ms: int | None = None,
    ttl_seconds: int | None = None,
    suspends: bool = False,
    parent_deadline_ms: int | None = None,
    expires_at_ms: int | None = None,
) -> Deadline:
    """The earliest of the five (decisions.md, Clocks). ``parent_deadline_ms`` and ``expires_at_ms`` are Unix times.

    Where ``ttl_seconds`` ``suspends`` the run it ends it one more ttl later (docs/lifecycle.md).

    On a tie the one that the operator or the author can most easily change comes first.
    """
    ttl_ms = None if ttl_seconds is None else ttl_seconds * (2000 if suspends else 1000)
    candidates = {
        "timeout": timeout_ms,
        "cpu_ms_per_task": cpu_ms_per_task,
        "ttl_seconds": ttl_ms,
        "parent": None if parent_deadline_ms is None else parent_deadline_ms - now_ms,
        "expires_at": None if expires_at_ms is None else expires_at_ms - now_ms,
    }
    present = [(max(0, ms), name) for name, ms in candidates.items() if ms is not None]
    milliseconds, clock = min(present, key=lambda pair: pair[0])
    return Deadline(milliseconds, clock, ttl_ms, expires_at_ms)
