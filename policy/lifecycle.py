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
    State.PROVISIONED: "its package and its intent were received; neither is trusted yet",
    State.VALIDATED: "signature, bytes and nine rules hold; the policy is compiled and proved",
    State.ISOLATED: "cgroup, mounts, filter and network are made, and its process waits for the intent",
    State.RUNNING: "the agent has its intent",
    State.SUSPENDED: "every thread is stopped, those of its sandbox included; its clocks continue",
    State.TERMINATED: "it has ended, or is being ended and does no more; its resources are released",
    State.ARCHIVED: "its last record is in the archive; nothing else of it remains",
    State.REJECTED: "it was refused before anything of it started",
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
    Transition(_S.RUNNING, _S.TERMINATED, "the agent exits, a clock or a limit ends it, or an authorised caller does"),
    Transition(_S.SUSPENDED, _S.RUNNING, "`covenant resume`, or the kernel could not stop it"),
    Transition(_S.SUSPENDED, _S.TERMINATED, "a clock ends it, or an authorised caller does"),
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
        Operation("suspend", frozenset({State.RUNNING}), State.SUSPENDED, "stop every thread by the freezer"),
        Operation("resume", frozenset({State.SUSPENDED}), State.RUNNING, "let it continue"),
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
    """Return docs/lifecycle.md, made from the table."""
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

The states of a run, the commands that change them, and its clocks. Written by
`python tests/golden/test_lifecycle_page.py` from the table in `policy/lifecycle.py`; do not edit.

```sh
covenant ps                          # live runs; --tree, --json, and --watch on a terminal
covenant suspend RUN                 # RUN is a run id, or the beginning of one
covenant resume RUN
covenant kill RUN --reason "why"     # with --tree: the run and everything below it
covenant logs RUN                    # stderr of the agent, --follow while it lives; PACKAGE is its newest run
covenant wait RUN                    # until it has ended: its own outcome and exit status
```

Each transition is a row of the audit log (`run_state`: the state and the reason), written before the act. A transition
that cannot be logged does not happen, and the run is ended. A row that repeats the state is a remark.

| state | a run in it |
|---|---|
{states}

| from | to | when |
|---|---|---|
{moves}

![The states of a run, and what brings it from one to the next](diagrams/states.svg)

Archived and Rejected are final. Self-tests and canaries are no runs: they have no states and are not listed.

## Operations

| command | from | to | effect |
|---|---|---|---|
{verbs}

`--tree` first stops the whole subtree, so that no part of it starts another run meanwhile. `covenant kill --tree`
stops all runs, marks each, names all in one row (`runs_stopped`), and kills them at once with their networks. If the
killing process is killed, a marked run stays stopped, cannot be resumed, and ends with everything below it after ten
seconds.

A run that another process has stopped without a mark, such as a kill or revocation that was killed too early, is in the
state Running. `covenant resume` notices this, writes both rows and lets it continue; `covenant kill` ends it.

A newer serial of its agent id ends a run in each of these states with the code `superseded`, or lets it finish:
`on_newer_serial` ([docs/trust.md](trust.md#a-newer-version-of-a-package)).

## Clocks

- A suspended run's clocks continue: its deadline ends it while it is suspended, too.
- `on_expiry = "suspend"`: at `ttl_seconds` the run is suspended instead of ended. It may be resumed, and ends at twice
  `ttl_seconds` in any case.
- A run that has been suspended for `ttl_seconds` without a break is ended. Without `ttl_seconds` only its other clocks
  end it.
- A machine that sleeps stops only the time of a task (`--timeout`, `cpu_ms_per_task`). `ttl_seconds` and the end of
  the package go on: a run that has outlived one of them ends when the machine wakes up. So does a run whose package
  has ended by a clock that was behind and was set right.
- A run that is suspended, or in its grace before the end, starts no child, not even one that it requested before. If it
  continues, it may ask again (`wrong_state`).
- A suspended run is attested like any other, and earlier denials are still logged.

## The archive

When a run has ended, the supervisor writes its last record below `archive/` of its state: agent, package, issuer,
state, code, message, times, the hash of its result, the number of denials, and the end of its stderr. It contains
neither intent nor result. Secrets that an agent writes to stderr stay in that file, which only root can read, until
{records:,} later runs have replaced it.
"""
