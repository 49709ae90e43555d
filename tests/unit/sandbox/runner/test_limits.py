"""The processor time of a run: from the start of the agent, as often as it could be used up, over is an error."""

from __future__ import annotations

import pytest

from policy import errors
from sandbox.runner.limits import SHORTEST_SECONDS, CpuTime


class Clock:
    """A processor time that the test sets, in milliseconds."""

    def __init__(self) -> None:
        self.ms = 0

    def read(self) -> int:
        return self.ms * 1000


def test_what_start_took_is_not_agents() -> None:
    clock = Clock()
    held = CpuTime(100, clock.read, cores=2)
    round_ = held.round()
    clock.ms = 500
    assert round_.look() is None
    held.started()
    clock.ms = 600
    assert round_.look() is None
    clock.ms = 601
    error = round_.look()
    assert isinstance(error, errors.CpuTimeError)
    assert error.message == "101 ms of processor time used (clock: cpu_time_ms, 100 ms)"
    assert error.details["clock"] == "cpu_time_ms"
    assert error.hint


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_it_is_looked_at_before_every_core_together_could_use_it_up(cores: int) -> None:
    clock = Clock()
    held = CpuTime(1000, clock.read, cores=cores)
    held.started()
    round_ = held.round()
    assert round_.wait is not None
    assert round_.seconds == round_.wait()
    looks = 0
    while (error := round_.look()) is None:
        wait = round_.wait()
        assert wait >= SHORTEST_SECONDS
        clock.ms += int(wait * 1000 * cores) or 1
        looks += 1
    # Every core busy all the time: over by no more than the shortest wait, and that within a few looks.
    assert clock.ms <= 1000 + SHORTEST_SECONDS * 1000 * cores
    assert looks < 5
    assert error is not None


def test_slow_user_is_looked_at_more_often_towards_end() -> None:
    clock = Clock()
    held = CpuTime(1000, clock.read, cores=2)
    held.started()
    round_ = held.round()
    waits = []
    for used in (0, 500, 900, 999, 1000):
        clock.ms = used
        assert round_.look() is None
        assert round_.wait is not None
        waits.append(round_.wait())
    assert waits == pytest.approx([0.5, 0.25, 0.05, SHORTEST_SECONDS, SHORTEST_SECONDS])
