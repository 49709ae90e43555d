"""How many requests there were, what became of them and how long they took: numbers for ``GET /metrics``.

Both tables are closed, the kinds and the codes of errors, so that no client makes a series of its own.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from covenant.wire import responses
from sandbox.control.prometheus import Histogram

OK = "ok"


class Answered:
    """One request on its way; ``outcome`` is set once there is one."""

    outcome = OK

    def be(self, response: responses.Response) -> None:
        """Take the outcome from the response."""
        self.outcome = response.code or "error" if isinstance(response, responses.Error) else OK


class Meter:
    """Counts since the daemon's start. ``clock`` gives seconds that never go back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.seconds: dict[str, Histogram] = {}
        self.running: Counter[str] = Counter()
        # What never came to be a request: by the status of HTTP.
        self.refused: Counter[str] = Counter()
        # Who was not let in and has no row of their own in the log: by transport.
        self.unwritten: Counter[str] = Counter()

    @contextmanager
    def request(self, kind: str) -> Iterator[Answered]:
        """One request of ``kind``, from here to the end of the block; one that is cancelled counts as that."""
        answered, began = Answered(), self._clock()
        self.running[kind] += 1
        try:
            yield answered
        except BaseException:
            answered.outcome = "cancelled"
            raise
        finally:
            self.running[kind] -= 1
            self.outcomes[kind, answered.outcome] += 1
            histogram = self.seconds.get(kind)
            if histogram is None:
                histogram = self.seconds[kind] = Histogram()
            histogram.observe(self._clock() - began)
