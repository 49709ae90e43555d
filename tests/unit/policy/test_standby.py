"""Each bound of what is kept ready at its own edge, and which instance goes or comes first."""

from __future__ import annotations

import pytest

from policy import standby
from policy.standby import Instance, Machine, Plan

AMPLE = Machine(24_000, 20_000)


@pytest.mark.parametrize(
    ("total_mb", "reserve_mb"), [(24_000, 2_400), (5_130, 513), (5_120, 512), (2_000, 512), (800, 400), (3, 1)]
)
def test_what_stays_for_those_that_run(total_mb: int, reserve_mb: int) -> None:
    assert Machine(total_mb, 0).reserve_mb == reserve_mb


@pytest.mark.parametrize(
    ("available_mb", "some", "room"),
    [(576, 0.0, True), (575, 0.0, False), (576, 10.0, True), (576, 10.1, False), (20_000, 10.1, False)],
)
def test_one_more_is_made_only_beside_reserve_and_where_little_waits(
    available_mb: int, some: float, room: bool
) -> None:
    machine = Machine(2_000, available_mb, some)
    assert machine.room is room
    if some > 10:
        assert machine.lacks == "programs wait for memory 10.1 % of the time, 10 % at most"
    elif not room:
        assert machine.lacks == "575 MiB of memory are available; one takes 64, and 512 stay for runs"
    assert standby.plan({"a": 1}, [], machine) == Plan("a" if room else None)


@pytest.mark.parametrize(
    ("available_mb", "full", "short_mb"),
    [
        (2_000, 0.0, 0),
        (512, 0.0, 0),
        (511, 0.0, 1),
        (400, 0.0, 112),
        (2_000, 5.0, 0),
        (2_000, 5.1, 64),
        (400, 5.1, 112),
    ],
)
def test_what_is_given_back(available_mb: int, full: float, short_mb: int) -> None:
    assert Machine(2_000, available_mb, 0.0, full).short_mb == short_mb


def test_oldest_too_many_go_and_of_two_as_old_later() -> None:
    assert standby.plan({"a": 1}, [Instance(1, "a", 1.0), Instance(2, "a", 2.0)], AMPLE) == Plan(None, (1,))
    assert standby.plan({"a": 1}, [Instance(1, "a", 1.0), Instance(2, "a", 1.0)], AMPLE) == Plan(None, (2,))
    assert standby.plan({}, [Instance(1, "a", 1.0)], AMPLE) == Plan(None, (1,))


@pytest.mark.parametrize(
    ("there", "available_mb", "ends"),
    [
        # Of the kind that has most, although another is older.
        ([(1, "a", 1.0), (2, "a", 2.0), (3, "a", 3.0), (4, "b", 0.0)], 400, (1, 2)),
        ([(1, "a", 1.0), (2, "a", 2.0), (3, "a", 3.0), (4, "b", 0.0)], 448, (1,)),
        ([(1, "a", 1.0), (2, "a", 2.0), (3, "a", 3.0), (4, "b", 0.0)], 447, (1, 2)),
        ([(1, "a", 5.0), (2, "b", 3.0)], 448, (2,)),
        ([(2, "a", 1.0), (1, "b", 1.0)], 448, (1,)),
        ([(1, "a", 1.0)], 0, (1,)),
    ],
)
def test_where_memory_is_short_as_many_go_as_make_up_for_it(
    there: list[tuple[int, str, float]], available_mb: int, ends: tuple[int, ...]
) -> None:
    instances = [Instance(*one) for one in there]
    assert standby.plan({"a": 9, "b": 9}, instances, Machine(2_000, available_mb)) == Plan(None, ends)


def test_one_at_time_of_kind_that_lacks_most() -> None:
    def made(a: int, b: int, *waiting: str, ready: bool = True) -> str | None:
        names = "a" * a + "b" * b
        there = [Instance(number, name, 0.0, ready) for number, name in enumerate(names)]
        return standby.plan({"a": 4, "b": 2}, there, AMPLE, waiting=waiting).make

    assert made(0, 0) == made(1, 1) == made(2, 1) == "a"
    assert made(3, 1) == made(1, 0) == "b"
    assert made(1, 1, "a") == "b"
    assert made(4, 1, "b") is None
    assert made(4, 2) is None
    # While one is being made there is no other.
    assert made(1, 1, ready=False) is None


def test_wait_doubles_up_to_longest() -> None:
    waits = [standby.wait_after(failures) for failures in (-1, 0, 1, 2, 3, 9, 10, 1000)]
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0, 256.0, 300.0, 300.0]
    restless = [standby.wait_after(failures, restless=True) for failures in (0, 1, 10, 17, 18, 1000)]
    assert restless == [0.0, 1.0, 512.0, 65_536.0, 86_400.0, 86_400.0]
