"""Check the table of a run's states: closed, every state reachable, no way out of final states, no other moves."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from policy import errors, lifecycle
from policy.lifecycle import State

MOVES = {(one.source, one.target) for one in lifecycle.TRANSITIONS}
# The states of OctantOS, by name; a new one changes the published list.
PUBLISHED = ["Provisioned", "Validated", "Isolated", "Running", "Suspended", "Terminated", "Archived", "Rejected"]


def test_states_are_published_ones() -> None:
    assert [state.value for state in State] == PUBLISHED
    assert set(lifecycle.MEANING) == set(State)
    assert len(MOVES) == len(lifecycle.TRANSITIONS)


def test_every_state_is_reached_from_nowhere() -> None:
    reached: set[State | None] = {None}
    while more := {target for source, target in MOVES if source in reached} - reached:
        reached |= more
    assert reached == {None, *State}


def test_every_state_leads_to_end_and_nothing_out_of_it() -> None:
    assert {state for state in State if not any(source == state for source, _ in MOVES)} == lifecycle.FINAL
    ends: set[State | None] = set(lifecycle.FINAL)
    while more := {source for source, target in MOVES if target in ends} - ends:
        ends |= more
    assert ends == {None, *State}


def test_nothing_that_was_started_is_rejected_and_nothing_that_was_not_is_archived() -> None:
    """A run that started has an end in the log and a record; a refused one has neither."""
    started = {State.ISOLATED, State.RUNNING, State.SUSPENDED, State.TERMINATED}
    assert {source for source, target in MOVES if target == State.REJECTED} == {State.PROVISIONED, State.VALIDATED}
    assert {source for source, target in MOVES if target == State.TERMINATED} == started - {State.TERMINATED}
    assert {source for source, target in MOVES if target == State.ARCHIVED} == {State.TERMINATED}


@pytest.mark.parametrize("source", [None, *State])
@pytest.mark.parametrize("target", list(State))
def test_step_is_table_or_refused(source: State | None, target: State) -> None:
    if (source, target) in MOVES:
        assert lifecycle.step(source, target) is target
    else:
        with pytest.raises(errors.WrongStateError, match=f"to {target}"):
            lifecycle.step(source, target)


@pytest.mark.parametrize("operation", sorted(lifecycle.OPERATIONS))
@pytest.mark.parametrize("source", list(State))
def test_what_may_be_asked_lies_within_table(source: State, operation: str) -> None:
    wanted = lifecycle.OPERATIONS[operation]
    if source in wanted.sources:
        assert (source, wanted.target) in MOVES
        assert lifecycle.asked(source, operation) is wanted.target
    else:
        with pytest.raises(errors.WrongStateError, match=f"{source.lower()} cannot be asked to {operation}"):
            lifecycle.asked(source, operation)


def test_whatever_is_live_can_be_ended_and_nothing_else() -> None:
    assert lifecycle.OPERATIONS["kill"].sources == lifecycle.LIVE


@pytest.mark.parametrize(
    ("source", "operation", "hint"),
    [
        (State.SUSPENDED, "suspend", "covenant resume lets it go on, covenant kill ends it"),
        (State.RUNNING, "resume", "it runs already"),
        (State.ISOLATED, "suspend", "it is just starting: ask again in a moment, or end it with covenant kill"),
        (State.TERMINATED, "kill", ""),
    ],
)
def test_whoever_asks_too_early_or_twice_is_told_what_to_do(source: State, operation: str, hint: str) -> None:
    with pytest.raises(errors.WrongStateError) as told:
        lifecycle.asked(source, operation)
    assert told.value.hint == hint


def test_archive_is_bounded_as_it_says() -> None:
    assert (lifecycle.ARCHIVE_RECORDS, lifecycle.ARCHIVE_RECORD_BYTES) == (1024, 32_768)


class AnyRun(stateful.RuleBasedStateMachine):
    """Any sequence of steps and operations: each moves as the table says, or is refused and changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.state = lifecycle.step(None, State.PROVISIONED)
        self.seen = [self.state]

    @stateful.rule(target_state=st.sampled_from(State))
    def step(self, target_state: State) -> None:
        try:
            self.state = lifecycle.step(self.state, target_state)
        except errors.WrongStateError:
            assert (self.state, target_state) not in MOVES
        else:
            self.seen.append(self.state)

    @stateful.rule(operation=st.sampled_from(sorted(lifecycle.OPERATIONS)))
    def ask(self, operation: str) -> None:
        try:
            self.state = lifecycle.asked(self.state, operation)
        except errors.WrongStateError:
            assert self.state not in lifecycle.OPERATIONS[operation].sources
        else:
            self.seen.append(self.state)

    @stateful.invariant()
    def it_went_by_the_table(self) -> None:
        assert set(zip(self.seen, self.seen[1:], strict=False)) <= MOVES
        assert not lifecycle.FINAL & set(self.seen[:-1])
        # The states before Running are exactly these.
        if State.RUNNING in self.seen:
            assert self.seen[:4] == [State.PROVISIONED, State.VALIDATED, State.ISOLATED, State.RUNNING]


AnyRun.TestCase.settings = hypothesis.settings(max_examples=100, stateful_step_count=30, deadline=None)
TestAnyRun = AnyRun.TestCase
