"""Check operations on a live run: table lookup, audit row, then action, in this order under any failure."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
from hypothesis import strategies as st

from policy import errors, lifecycle
from policy.lifecycle import State
from sandbox.audit.denials import DenialLog
from sandbox.audit.log import Ledger
from sandbox.audit.run_events import RunEvents
from sandbox.control import tree_kill
from sandbox.kernel.proc.pipes import BoundedTail
from sandbox.lifecycle.run_log import RunLog
from sandbox.run_io import ContainerIO, Limits
from sandbox.rundir import lock, marks
from sandbox.shim import control_socket
from sandbox.shim import operations as shim_operations
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.operations import RunOperations
from sandbox.shim.stdio import StdioSession
from sandbox.storage import atomic_file
from tests.doubles.run_parts import Handle

ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
MOVES = {(one.source, one.target) for one in lifecycle.TRANSITIONS}


class Log:
    """A double of the ledger that records the order of rows and actions. ``full`` makes it refuse rows."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.full = False
        self.place = Path("/nonexistent/audit")

    def append_all(self, records: Any, *, issuer: Mapping[str, str], **how: Any) -> None:
        if self.full:
            raise errors.LedgerError("no space left")
        self.said += [f"{one.fields['state']}: {one.fields['reason']}" for one in records]


class Freezer:
    """A double of the cgroup's leaf."""

    def __init__(self, log: Log) -> None:
        self._log, self.freezable, self.broken = log, True, False
        self.standing = False
        self.there: list[int] = []

    def pids(self) -> list[int]:
        return self.there

    def freeze(self, *, allow_thaw: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        try:
            self._act("freeze")
        except errors.KernelError:
            with allow_thaw():
                self._log.said.append("undone")
            raise

    def thaw(self) -> None:
        self._act("thaw")

    def frozen(self) -> bool:
        if self.broken:
            raise errors.KernelError("it is gone")
        return self.standing

    def _act(self, name: str) -> None:
        if self.broken:
            raise errors.KernelError(f"cannot {name}")
        self._log.said.append(name)


class World:
    """A run in the state Running."""

    runs: Path

    def __init__(self, *, ttl: int | None = None, suspends: bool = False, leaf: bool = True) -> None:
        self.below: list[tuple[str, str]] = []
        self.log = Log()
        self.rows = RunEvents(cast("Ledger", self.log), "r", ISSUER)
        for state in (State.PROVISIONED, State.VALIDATED, State.ISOLATED):
            self.rows.transition(state, "")
        self.freezer = Freezer(self.log)
        self.operations = RunOperations(
            self.rows,
            ttl_seconds=ttl,
            suspends=suspends,
            shown=lambda raw: raw.decode(),
            allow_thaw=tree_kill.allow_thaw,
            below=lambda by, reason: self.below.append((by, reason)),
        )
        self.directory = self.operations._directory = Path(tempfile.mkdtemp(dir=self.runs))
        calls = self.log.said.append
        handle = Handle(lambda: calls("ask"), lambda: calls("kill"), self.freezer if leaf else None)
        observer = RunLog(self.rows, DenialLog(self.rows.denied), self.operations)
        channel = ContainerIO(*(-1, -1, -1, -1, -1), has_started=lambda: True, handle=handle, observer=observer)
        self.channel = self.operations.joined(channel)
        self.exchange = AgentLoop(self.channel, StdioSession(), b"", Limits(1, 1, "clock"))
        self.exchange._stderr, self.exchange._exited = BoundedTail(64 * 1024), False
        self.operations.converses(self.exchange)
        self.channel.observer.starting()
        self.log.said.clear()

    @property
    def state(self) -> str:
        return str(self.rows.state)

    def ask(self, operation: str, **fields: Any) -> control_socket.Reply:
        return self.operations.table[operation](fields)


@pytest.fixture(scope="module", autouse=True)
def _runs(tmp_path_factory: pytest.TempPathFactory) -> None:
    World.runs = tmp_path_factory.mktemp("runs")


def test_each_is_written_down_before_it_is_done() -> None:
    one = World()
    assert one.ask("suspend", by="uid7@local", reason="why").answer == {"state": "Suspended"}
    assert one.ask("resume").answer == {"state": "Running"}
    reply = one.ask("kill", by="uid7@local", reason="enough")
    assert one.log.said == [
        *("Suspended: asked by uid7@local: why", "freeze"),
        *("Running: asked by root", "thaw"),
        "Terminated: stopped by uid7@local: enough",
    ]
    assert isinstance(reply.end, errors.KilledError)
    # The exchange ends the run now; its end is in the log already.
    one.channel.observer.ending(reply.end)
    assert len(one.log.said) == 5


def test_what_another_stopped_who_wrote_nothing_down_can_be_let_go_on() -> None:
    """A revoking process was killed between the stop and the mark."""
    one = World()
    one.freezer.standing = True
    assert one.ask("resume", by="uid7@local").answer == {"state": "Running"}
    assert one.log.said == ["Suspended: somebody else has stopped it", "Running: asked by uid7@local", "thaw"]
    one.freezer.standing = False
    for one.freezer.broken in (False, True):
        with pytest.raises(errors.WrongStateError):
            one.ask("resume")
    assert len(one.log.said) == 3


ENDING: dict[str, Any] = {"by": "uid7@local", "reason": "enough", "ending": True}


@pytest.mark.parametrize("stands", [False, True])
def test_what_is_to_be_ended_with_its_tree_ends_where_whoever_asked_does_not_come_back(
    monkeypatch: pytest.MonkeyPatch, *, stands: bool
) -> None:
    one = World()
    (forsaken,) = one.channel.rounds
    if stands:
        one.ask("suspend")
        one.log.said.clear()
    for _ in range(2):  # the second request changes nothing: the shim has promised the end already
        assert one.ask("suspend", **ENDING).answer == {"state": "Suspended"}
    freezes = [] if stands else ["freeze"]
    assert one.log.said == ["Suspended: to be ended, asked by uid7@local: enough", *freezes]
    with pytest.raises(errors.WrongStateError, match="the run is to be ended"):
        one.ask("resume")
    assert forsaken.look() is None
    assert one.below == []
    later = time.monotonic() + shim_operations.ENDING_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    error = forsaken.look()
    assert isinstance(error, errors.KilledError)
    assert error.message == "ended by uid7@local: enough"
    assert one.below == [("uid7@local", "enough")]
    assert forsaken.look() is None


@pytest.mark.parametrize("left", [False, True])
def test_what_is_ended_with_its_tree_by_another_who_is_gone_ends_by_itself_with_all_below_it(left: bool) -> None:
    one = World()
    marks.mark_stopped(one.directory, "uid7@local", "enough")
    # The tree's killers are done, or were killed halfway and left the rest to the run's shim.
    one.freezer.there = [7] if left else []
    error = marks.verdict(one.directory)
    assert isinstance(error, errors.KilledError)
    one.channel.observer.ending(error)
    assert one.log.said == ["Terminated: stopped: ended by uid7@local: enough"]
    assert one.below == ([("uid7@local", "enough")] if left else [])
    one.channel.handle.terminate()
    assert one.log.said[1:] == ["kill"]  # a frozen run cannot be asked to end


def test_what_signal_ended_leaves_nobody_below_it_to_whoever_is_gone() -> None:
    """The run is killed before its end is written, so its end does not name the process that killed it."""
    for marked in (True, False):
        one = World()
        if marked:
            marks.mark_stopped(one.directory, "uid7@local", "enough")
        one.freezer.there = []
        one.channel.observer.ending(errors.StoppedError("interrupted"))
        assert one.below == ([("uid7@local", "enough")] if marked else [])


def test_what_is_marked_does_not_go_on() -> None:
    one = World()
    one.ask("suspend")
    marks.mark_stopped(one.directory, "uid7@local", "enough")
    one.log.said.clear()
    with pytest.raises(errors.KilledError, match="ended by uid7@local: enough"):
        one.ask("resume")
    assert one.log.said == []


def test_what_is_over_cannot_be_had_stand_to_be_ended() -> None:
    one = World()
    one.ask("suspend")
    one.exchange._exited = True
    with pytest.raises(errors.NoRunError):
        one.ask("suspend", **ENDING)
    bare = World(leaf=False)
    with pytest.raises(errors.NotEnforceableError):
        bare.ask("suspend", **ENDING)
    assert bare.log.said == []


def test_what_is_being_revoked_is_not_let_go_on() -> None:
    one = World()
    one.ask("suspend")
    marks.mark_revoked(one.directory, "it leaks")
    one.log.said.clear()
    with pytest.raises(errors.RunRevokedError, match="it leaks"):
        one.ask("resume")
    assert (one.log.said, one.state) == ([], "Suspended")


@pytest.mark.parametrize("by", ["somebody", "its ttl"])
def test_what_is_being_revoked_and_does_not_stop_is_not_let_go_on(by: str) -> None:
    """The revoking process has frozen it; a shim that failed to freeze it would let it run until it is killed."""
    one = World(ttl=0, suspends=True) if by == "its ttl" else World()
    one.freezer.broken = True
    marks.mark_revoked(one.directory, "it leaks")
    if by == "somebody":
        with pytest.raises(errors.RunRevokedError, match="it leaks"):
            one.ask("suspend")
    else:
        assert isinstance(one.operations._clocks(), errors.RunRevokedError)
    assert one.log.said[1:] == []
    assert one.state == "Suspended"


def test_mark_is_set_before_thaw_or_after_it_and_never_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A revoking process holds the gate and is about to set the mark: until then the run must not resume."""
    monkeypatch.setattr(tree_kill, "GATE_SECONDS", 0.05)
    one = World()
    one.ask("suspend")
    one.log.said.clear()
    with lock.gate(one.directory.parent), pytest.raises(errors.KeeperError):
        one.ask("resume")
    assert (one.log.said, one.state) == ([], "Suspended")
    held: list[bool] = []
    monkeypatch.setattr(one.freezer, "thaw", lambda: held.append(atomic_file.held(one.directory.parent / ".gate")))
    one.ask("resume")
    assert held == [True]


def test_idle_run_is_frozen_until_asked() -> None:
    one = World()
    assert one.operations.rest() is None
    assert (one.state, one.log.said[-1]) == ("Suspended", "freeze")
    assert one.operations.rest() is None, "once is enough"
    assert one.operations.wake() is None
    assert (one.state, one.log.said[-1]) == ("Running", "thaw")


def test_call_wakes_no_run_that_operator_suspended() -> None:
    one = World()
    one.operations.rest()
    assert one.ask("suspend", by="uid7@local").answer == {"state": "Suspended"}
    assert one.operations.wake() is None
    assert one.state == "Suspended"
    assert one.ask("resume").answer == {"state": "Running"}
    one.operations.rest()
    assert one.ask("suspend", **ENDING).answer == {"state": "Suspended"}
    assert one.operations.wake() is None
    assert one.state == "Suspended", "it is to be ended"


def test_idle_run_that_operator_resumed_rests_again() -> None:
    one = World()
    one.operations.rest()
    assert one.ask("resume").answer == {"state": "Running"}
    assert one.operations.wake() is None
    assert one.operations.rest() is None
    assert one.state == "Suspended"


def test_idle_run_that_cannot_be_frozen_goes_on() -> None:
    one = World()
    one.freezer.broken = True
    assert one.operations.rest() is None
    assert one.state == "Running"


def test_idle_run_that_cannot_be_thawed_ends() -> None:
    one = World()
    one.operations.rest()
    one.freezer.broken = True
    assert isinstance(one.operations.wake(), errors.KilledError)


def test_idle_run_that_is_marked_is_not_thawed() -> None:
    one = World()
    one.operations.rest()
    marks.mark_revoked(one.directory, "it leaks")
    assert one.operations.wake() is None
    assert one.state == "Suspended"


def test_reason_in_log_is_bounded() -> None:
    one = World()
    one.ask("suspend", by="b" * 9000, reason="r" * 9000)
    assert len(one.log.said[0]) < 3 * marks.WORDS


@pytest.mark.parametrize("operation", ["suspend", "resume", "kill"])
def test_what_cannot_be_written_down_is_not_done(operation: str) -> None:
    one = World()
    if operation == "resume":
        one.ask("suspend")
        one.log.said.clear()
    one.log.full = True
    with pytest.raises(errors.LedgerError):
        one.ask(operation)
    assert one.log.said == []


def test_freezer_that_fails_leaves_run_as_it_was_and_says_so() -> None:
    one = World()
    one.freezer.broken = True
    with pytest.raises(errors.KernelError, match="cannot freeze"):
        one.ask("suspend")
    assert one.state == "Running"
    assert one.log.said[-1] == "Running: it could not be stopped: cannot freeze"
    one.freezer.broken = False
    one.ask("suspend")
    one.freezer.broken = True
    with pytest.raises(errors.KernelError, match="cannot thaw"):
        one.ask("resume")
    assert one.state == "Suspended"


def test_where_nothing_can_be_frozen_it_is_said_and_everything_else_works() -> None:
    for one in (World(leaf=False), World()):
        one.freezer.freezable = False
        with pytest.raises(errors.NotEnforceableError, match="cannot be suspended"):
            one.ask("suspend")
        assert one.log.said == []
        assert one.ask("kill").end is not None


def test_nothing_is_asked_of_run_over() -> None:
    for operation in ("suspend", "kill"):
        one = World()
        one.exchange._exited = True
        with pytest.raises(errors.NoRunError):
            one.ask(operation)
        assert one.log.said == []


@pytest.mark.parametrize(
    ("operation", "fields"),
    [
        ("suspend", {"by": 1}),
        ("suspend", {"reason": ["x"]}),
        ("suspend", {"code": "stopped"}),
        ("resume", {"x": 1}),
        ("kill", {"code": "usage"}),
        ("kill", {"code": 3}),
        ("kill", {"code": "no such"}),
        ("logs", {"offset": -1}),
        ("logs", {"offset": "0"}),
        ("logs", {"offset": True}),
        ("logs", {"limit": 1}),
        ("state", {"x": 1}),
    ],
)
def test_what_is_no_request_does_nothing(operation: str, fields: dict[str, Any]) -> None:
    one = World()
    if operation == "resume":
        one.ask("suspend")
    said = list(one.log.said)
    with pytest.raises(errors.UsageError):
        one.ask(operation, **fields)
    assert one.log.said == said


def test_end_for_another_cause_has_its_code() -> None:
    one = World()
    reply = one.ask("kill", code="cut_off", by="its parent")
    assert isinstance(reply.end, errors.CutOffError)
    assert one.log.said == ["Terminated: cut_off by its parent"]


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("stands", [True, False])
def test_suspended_run_is_killed_and_not_asked_to_end(*, stands: bool, asked: bool) -> None:
    """Follow the order of an exchange: the end is written first, for any cause.

    A frozen run would use up the whole grace period without doing anything.
    """
    one = World()
    if stands:
        one.ask("suspend")
    error = one.ask("kill", grace_ms=60_000).end if asked else errors.DeadlineError("it is over", clock="ttl_seconds")
    assert error is not None
    one.channel.observer.ending(error)
    one.channel.handle.terminate()
    assert one.state == "Terminated"
    assert one.log.said[-1] == ("kill" if stands else "ask")


def _clock(one: World, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(shim_operations, "boot_seconds", lambda: now[0])
    one.operations._given_at = now[0]
    return now


def test_ttl_suspends_once_and_one_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    one = World(ttl=10, suspends=True)
    now = _clock(one, monkeypatch)
    _, look = [r.look for r in one.channel.rounds]
    assert look() is None
    now[0] += 10
    assert look() is None
    assert one.state == "Suspended"
    one.ask("resume")
    now[0] += 9
    assert look() is None  # only once: the second end of the ttl is the exchange's own deadline
    assert one.state == "Running"
    one.ask("suspend")
    now[0] += 9.9
    assert look() is None
    now[0] += 0.1
    error = look()
    assert isinstance(error, errors.DeadlineError)
    assert error.details["clock"] == "ttl_seconds"


def test_run_that_another_suspended_ends_after_one_more_ttl_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    one = World(ttl=10)
    now = _clock(one, monkeypatch)
    _, look = [r.look for r in one.channel.rounds]
    now[0] += 100
    assert look() is None
    assert one.state == "Running"  # its ttl terminates, which is the exchange's own deadline
    one.ask("suspend")
    now[0] += 10
    assert isinstance(look(), errors.DeadlineError)
    assert len(World().channel.rounds) == 1  # no clock of its own


def test_who_cannot_be_stopped_at_its_ttl_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    for leaf in (True, False):
        one = World(ttl=10, suspends=True, leaf=leaf)
        now = _clock(one, monkeypatch)
        one.freezer.broken = True
        now[0] += 10
        _, look = [r.look for r in one.channel.rounds]
        assert isinstance(look(), errors.DeadlineError)


def test_logs_are_read_on_from_anywhere_in_pieces_that_end_with_line() -> None:
    one = World()
    whole = b"".join(b"line %d\n" % n for n in range(6000))
    one.exchange._stderr.feed(whole)
    at, read = 0, ""
    while (answer := one.ask("logs", offset=at).answer)["next"] > at:
        assert (answer["begins"], answer["ends"]) == (at, len(whole))
        assert answer["text"].endswith("\n")
        at, read = answer["next"], read + answer["text"]
    assert read.encode() == whole
    one.exchange._stderr.feed(b"no line" * 100_000)
    assert one.ask("logs", offset=at).answer["begins"] > at


OPERATIONS = st.sampled_from(["suspend", "resume", "kill", "full", "free", "break", "mend", "exit"])


@hypothesis.given(st.lists(OPERATIONS, max_size=12))
@hypothesis.settings(max_examples=300, deadline=None)
def test_any_sequence_lands_as_table_says_or_is_refused(operations: list[str]) -> None:
    """After any failures in between, the state is the last one written, and every step is in the table."""
    one = World()
    for operation in operations:
        if operation in ("full", "free"):
            one.log.full = operation == "full"
        elif operation in ("break", "mend"):
            one.freezer.broken = operation == "break"
        elif operation == "exit":
            one.exchange._exited = True
        else:
            try:
                reply = one.ask(operation)
            except (errors.WrongStateError, errors.NoRunError, errors.LedgerError, errors.KernelError):
                continue
            if reply.end is not None:
                break
    written = [State(line.partition(":")[0]) for line in one.log.said if ":" in line]
    path = [State.RUNNING, *written]
    assert set(itertools.pairwise(path)) <= MOVES
    assert one.state == path[-1]
