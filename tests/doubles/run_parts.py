"""Doubles of the parts around an exchange: a sandbox's handle and a run's observer (sandbox.run_io).

The protocols are the contract: mypy checks these and the real parts against them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from policy import denials, errors
from policy.prove import live
from sandbox.run_io import Freezer


def _nothing() -> None:
    pass


@dataclasses.dataclass
class Handle:
    """A sandbox of a test (run_io.SandboxHandle)."""

    terminate: Callable[[], None] = _nothing
    kill: Callable[[], None] = _nothing
    freezer: Freezer | None = None
    out_of_memory: Callable[[], bool] = lambda: False


@dataclasses.dataclass
class Observer:
    """An observer that records events in their order (run_io.RunObserver)."""

    events: list[object] = dataclasses.field(default_factory=list)

    def denied(self, denial: denials.Denial, *, count: int = 1) -> None:
        self.events.append((denial, count))

    def drifted(self, layer: live.Layer) -> None:
        self.events.append(layer)

    def starting(self) -> None:
        self.events.append("starting")

    def ending(self, error: errors.RunError) -> None:
        self.events.append(error)


class FullLog(Observer):
    """An observer whose log takes no row."""

    def starting(self) -> None:
        raise errors.LedgerError("no space left")
