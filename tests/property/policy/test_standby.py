"""Check the plan of standbys: memory limits it first, and no agent gets more than it asked for."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from policy import standby
from policy.standby import Instance, Machine

KEYS = st.sampled_from("abcd")
WANTED = st.dictionaries(KEYS, st.integers(1, 6))
AMPLE = Machine(24_000, 20_000)


@st.composite
def _there(draw: st.DrawFn) -> list[Instance]:
    kinds = draw(st.lists(st.tuples(KEYS, st.floats(0, 100), st.booleans()), max_size=20))
    return [Instance(number, key, since, ready) for number, (key, since, ready) in enumerate(kinds)]


MACHINES = st.builds(
    Machine,
    total_mb=st.integers(256, 100_000),
    available_mb=st.integers(0, 100_000),
    some=st.floats(0, 100),
    full=st.floats(0, 100),
)


@given(wanted=WANTED, there=_there(), machine=MACHINES, waiting=st.sets(KEYS))
def test_step_ends_only_what_there_is_and_makes_only_what_is_asked_for(
    wanted: dict[str, int], there: list[Instance], machine: Machine, waiting: set[str]
) -> None:
    step = standby.plan(wanted, there, machine, waiting=waiting)
    assert len(set(step.end)) == len(step.end)
    assert set(step.end) <= {one.id for one in there}
    left = Counter(one.key for one in there if one.id not in step.end)
    assert all(left[key] <= wanted.get(key, 0) for key in left)
    if step.make is not None:
        assert machine.room
        assert not machine.short_mb
        assert step.make not in waiting
        assert left[step.make] < wanted[step.make]
        assert all(one.ready for one in there if one.id not in step.end)
    if machine.short_mb:
        kept = sum(left.values())
        assert step.make is None
        assert kept == 0 or len(step.end) * standby.COST_MB >= machine.short_mb


@given(wanted=WANTED, there=_there())
def test_with_memory_enough_it_comes_to_what_is_asked_for_and_stays_there(
    wanted: dict[str, int], there: list[Instance]
) -> None:
    there = [Instance(one.id, one.key, one.since) for one in there]
    number = len(there)
    for _ in range(60):
        step = standby.plan(wanted, there, AMPLE)
        there = [one for one in there if one.id not in step.end]
        if step.make is None:
            break
        there.append(Instance(number, step.make, 1000.0 + number))
        number += 1
    assert Counter(one.key for one in there) == Counter(wanted)
    assert standby.plan(wanted, there, AMPLE) == standby.Plan()


@given(wanted=WANTED, machine=MACHINES)
def test_what_is_made_is_not_given_back_at_once(wanted: dict[str, int], machine: Machine) -> None:
    """No oscillation: a standby that the machine had room for is not removed right after its start."""
    step = standby.plan(wanted, [], machine)
    if step.make is not None:
        after = Machine(machine.total_mb, machine.available_mb - standby.COST_MB, machine.some, 0.0)
        assert standby.plan(wanted, [Instance(0, step.make, 0.0)], after).end == ()


@given(failures=st.integers(0, 1000))
def test_wait_grows_and_has_bound(failures: int) -> None:
    assert standby.wait_after(failures) <= standby.wait_after(failures + 1) <= standby.LONGEST_WAIT
    assert (standby.wait_after(failures) == 0) == (failures == 0)
    assert standby.wait_after(failures, restless=True) >= standby.wait_after(failures)
    assert standby.wait_after(failures, restless=True) <= standby.wait_after(failures + 1, restless=True) <= 86_400


def test_whose_agent_does_not_wait_runs_no_more_than_once_day_in_end() -> None:
    waits = [standby.wait_after(failures, restless=True) for failures in range(1, 40)]
    assert waits[:3] == [1.0, 2.0, 4.0]
    assert waits[-1] == 86_400
