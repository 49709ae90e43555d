"""The step that this process is at, in words for a terminal that shows it (covenant.cli.spinner)."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Step:
    """Words, and when the step began (seconds of the monotonic clock)."""

    what: str
    began: float = field(default_factory=time.monotonic)


_steps: list[Step] = []


def current() -> Step | None:
    """Return the innermost step."""
    # One read: the main thread may leave the step meanwhile.
    innermost = _steps[-1:]
    return innermost[0] if innermost else None


@contextlib.contextmanager
def step(what: str) -> Iterator[Callable[[str], None]]:
    """Name something that may take long; ``what`` is a word of ours, never of an agent's.

    Yields a function that changes the words: how far the step has come. Steps of other threads do not count.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda words: None
        return
    one = Step(what)

    def further(words: str) -> None:
        one.what = words

    _steps.append(one)
    try:
        yield further
    finally:
        # A generator that is closed late may end a step below another.
        _steps.remove(one)
