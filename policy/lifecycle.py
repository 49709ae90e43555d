"""The states of a run, and the one table of how it goes from each to the next (docs/lifecycle.md shows it).

A state is the last one that was written to the log: each transition is an audit event (``run_state``) that is written
before the act. Only this table lets a run change its state, for any requester.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from policy import errors


class State(StrEnum):
    """Where a run is."""

    PROVISIONED = "Provisioned"
    VALIDATED = "Validated"
    ISOLATED = "Isolated"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    TERMINATED = "Terminated"
    ARCHIVED = "Archived"
    REJECTED = "Rejected"


MEANING: dict[State, str] = {
    State.PROVISIONED: "its package and its intent were received, and nothing of them is believed yet",
    State.VALIDATED: "the signature, the bytes and the nine rules hold, and its policy is compiled and proved",
    State.ISOLATED: "cgroup, mounts, filter and network are made for it, and its process waits; no intent was given",
    State.RUNNING: "the agent has its intent",
    State.SUSPENDED: "every thread of it stands, its sandbox included; its clocks run on",
    State.TERMINATED: "it has ended, or is being ended and does no more; what it held is released",
    State.ARCHIVED: "its last record is in the archive, and nothing else of it is left",
    State.REJECTED: "it was refused, and nothing of it was started",
}


class Transition(Struct, frozen=True):
    """From ``source`` (None: a run that is new) to ``target``, and what brings it about."""

    source: State | None
    target: State
    when: str


_S = State
TRANSITIONS: tuple[Transition, ...] = (
    Transition(None, _S.PROVISIONED, "a request is received"),
    Transition(_S.PROVISIONED, _S.VALIDATED, "everything that decides has said yes"),
    Transition(_S.PROVISIONED, _S.REJECTED, "a signature, a rule or a demand that cannot be held says no"),
    Transition(_S.VALIDATED, _S.ISOLATED, "its start is written down, and its sandbox is about to be made"),
    Transition(_S.VALIDATED, _S.REJECTED, "its policy's self-test fails, or another took its place or its serial"),
    Transition(_S.ISOLATED, _S.RUNNING, "its first process runs, and is about to be given its intent"),
    Transition(_S.ISOLATED, _S.TERMINATED, "the sandbox did not start, or it was ended before its intent"),
    Transition(_S.RUNNING, _S.SUSPENDED, '`covenant suspend`, or its ttl with on_expiry = "suspend"'),
    Transition(_S.RUNNING, _S.TERMINATED, "the agent exits, a clock or a limit ends it, or somebody who may does"),
    Transition(_S.SUSPENDED, _S.RUNNING, "`covenant resume`, or the kernel could not stop it"),
    Transition(_S.SUSPENDED, _S.TERMINATED, "a clock ends it, or somebody who may does"),
    Transition(_S.TERMINATED, _S.ARCHIVED, "nothing of it runs any more, and its record is about to be written"),
)

# Of the archive: how many runs it holds, and how many bytes the record of one may have.
ARCHIVE_RECORDS = 1024
ARCHIVE_RECORD_BYTES = 32 * 1024

# INVARIANT: nothing leads out of these.
FINAL = frozenset({State.ARCHIVED, State.REJECTED})
# Those of a run that can be seen and asked: it has a directory, and processes or is about to.
LIVE = frozenset({State.ISOLATED, State.RUNNING, State.SUSPENDED})

_ALLOWED = frozenset((one.source, one.target) for one in TRANSITIONS)


class Operation(Struct, frozen=True):
    """A request to a run from outside: the states that allow it, and the state afterwards."""

    name: str
    sources: frozenset[State]
    target: State
    does: str


OPERATIONS: dict[str, Operation] = {
    one.name: one
    for one in (
        Operation("suspend", frozenset({State.RUNNING}), State.SUSPENDED, "stop every thread of it by the freezer"),
        Operation("resume", frozenset({State.SUSPENDED}), State.RUNNING, "let it go on where it was"),
        Operation("kill", LIVE, State.TERMINATED, "end it at once, with the code `stopped`"),
    )
}
_MENDS = {
    (State.SUSPENDED, "suspend"): "covenant resume lets it go on, covenant kill ends it",
    (State.RUNNING, "resume"): "it runs already",
    (State.ISOLATED, "suspend"): "it is just starting: ask again in a moment, or end it with covenant kill",
}


def step(source: State | None, target: State) -> State:
    """``target``, when the table leads there from ``source``.

    Raises:
        errors.WrongStateError: it does not.
    """
    if (source, target) not in _ALLOWED:
        raise errors.WrongStateError(f"no run goes from {source or 'nowhere'} to {target}")
    return target


def asked(source: State, operation: str) -> State:
    """The state in which the operation leaves a run that is in ``source``.

    Raises:
        errors.WrongStateError: a run in that state takes no such operation.
    """
    wanted = OPERATIONS[operation]
    if source not in wanted.sources:
        raise errors.WrongStateError(
            f"a run that is {source.lower()} cannot be asked to {operation}", hint=_MENDS.get((source, operation), "")
        )
    return step(source, wanted.target)


def page() -> str:
    """docs/lifecycle.md, so that the page cannot say anything else than the table."""
    states = [f"| {state} | {meaning} |" for state, meaning in MEANING.items()]
    moves = [f"| {one.source or ''} | {one.target} | {one.when} |" for one in TRANSITIONS]
    verbs = [
        f"| `covenant {one.name}` | {', '.join(s for s in State if s in one.sources)} | {one.target} | {one.does} |"
        for one in OPERATIONS.values()
    ]
    return _PAGE.format(
        states="\n".join(states), moves="\n".join(moves), verbs="\n".join(verbs), records=ARCHIVE_RECORDS
    )


_PAGE = """\
# The life of a run

Written by `python tests/golden/test_lifecycle_page.py` from the table in `policy/lifecycle.py`; do not edit.

Each transition is a row of the audit log (`run_state`: the state and the reason), written before the act. What cannot
be written down does not happen, and a run whose row cannot be written is ended. A row that repeats the state remarks on
something that changed none.

| state | a run in it |
|---|---|
{states}

| from | to | when |
|---|---|---|
{moves}

![The states of a run, and what brings it from one to the next](diagrams/states.svg)

Nothing leads out of Archived and Rejected. Self-tests and canaries are no runs: they have no states and are not listed.

## What can be asked of a run

| verb | from | to | what it does |
|---|---|---|---|
{verbs}

```sh
covenant ps                          # who lives now; --tree, --json, and --watch on a terminal
covenant suspend RUN                 # RUN is a run id, or how it begins
covenant resume RUN
covenant kill RUN --reason "why"     # with --tree: the run and everything below it
covenant logs RUN                    # stderr of the agent, --follow while it lives; PACKAGE is its newest run
covenant wait RUN                    # until it has ended: its own outcome and exit status
```

With `--tree` the whole subtree is stopped first, so that nothing of it starts another run while the rest is asked.
`covenant kill --tree` asks no run: it stops all of them, marks each, names all of them in one row (`runs_stopped`) and
kills them at once, their networks cut with them. Where whoever asked was killed over it, a run that is marked ends by
itself with everything below it: that stands, is not resumed, and ends after ten seconds.

What somebody else has stopped, such as a kill or a revocation that was killed before it had asked or marked anything,
stands in the state Running; `covenant resume` finds that, writes both rows and lets it go on, and `covenant kill` ends
it.

A newer serial of its agent id ends a run in each of these states with the code `superseded`, or lets it finish:
`on_newer_serial` ([docs/trust.md](trust.md#a-newer-version-of-a-package)).

## Clocks

- A suspended run's clocks run on: what ends a run at its deadline ends it while it is suspended, too.
- `on_expiry = "suspend"`: at `ttl_seconds` the run is suspended instead of ended. It may be resumed, and ends at twice
  `ttl_seconds`, whatever happened in between.
- A run that has been suspended for `ttl_seconds` without a break is ended, whoever suspended it. Without `ttl_seconds`
  only its other clocks end it.
- A run that is suspended, or that is being ended and has a grace, starts no child: also none that it asked for just
  before. One that goes on may ask again (`wrong_state`).
- A run that is suspended is attested like any other, and what was refused to it before is still told.

## The archive

When a run has ended, its last record is written below `archive/` of the supervisor's state: agent, package, issuer,
state, code, message, times, the hash of its result, how often something was refused to it, and the end of its stderr.
It never holds the intent or the result. stderr is the agent's own text: whoever writes secrets there leaves them in
that file, which only root can read, until {records:,} later runs have taken its place.
"""
