"""Children of a running agent: it requests them over its broker, and each has a shim forked from the parent's.

(1) the parent's agent sends an agent id, a text, and whether fewer grants than requested are enough
(2) its shim forks the child's, and passes the parent's identity from its own memory
(3) the child's shim finds the package, verifies it, checks the nine rules with the parent's effective grants,
    compiles, proves, and takes the child's place behind the gate (sandbox.rundir.admission)
(4) it reports over a pipe that the child is admitted, or the refusal, and at the end the result

So the parent's shim reads no package and waits for nothing, and a failure in a child's shim stays there. Each child's
shim holds the read end of a pipe whose only write end is the parent's shim's. Its end of file means that the parent is
gone, for any cause, and the child follows its ``on_parent_exit``.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from policy import denials, errors
from policy.audit_log import event_text
from policy.rules.parent import Drawn
from sandbox.broker.server import Broker, BrokerCall, Handler
from sandbox.broker.spawn_request import FieldError, SpawnRequest, parse_request
from sandbox.rate_limit import Tokens
from sandbox.run_io import Outcome
from sandbox.rundir.admission import Lineage, ParentRun
from sandbox.shim import process

# A child costs the machine a process and the reading of a package before any rule refuses it.
PER_SECOND, BURST = 8.0, 64.0
# The log of all runs has the whole text of a child that answers (version 1's row has the intent), with up to six
# bytes for one that the agent sends. So many bytes of rows may come at once, and then so many a second. That is
# 8 KiB for each of the children that may be started. Each run below has as much, and costs a place and a start.
LOGGED_PER_SECOND, LOGGED_BURST = 64 * 1024, 4 << 20
# Limits of the results that the agent has not asked for yet: number and bytes.
UNREAD, UNREAD_BYTES = 1024, 64 << 20
# How long a child that ends with its parent may take beyond the grace, and then after its kill (seconds).
_LEAVING_SECONDS, _STOPPING_SECONDS = 20.0, 20.0
_CHUNK = 1 << 18

# Messages from a child's shim to its parent's: one JSON object a line.
Say = Callable[[Mapping[str, Any]], None]
# Starts a child by the fields of a request, and gives its outcome to the second argument, once. What it returns stops
# the child, if it still runs.
Spawn = Callable[[Mapping[str, Any], Say], Callable[[], None]]
_OUTLIVES: Final = "adopt"


class CommandStreams(Struct, frozen=True):
    """The arguments of a command's call, and the child's ends of its streams."""

    argv: tuple[str, ...]
    stdin: int
    stdout: int
    stderr: int

    @property
    def fds(self) -> set[int]:
        """Return the descriptors."""
        return {self.stdin, self.stdout, self.stderr}


class ChildRequest(Struct, frozen=True):
    """The request for one child. ``alive`` is at its end of file once the shim of the parent is gone.

    ``command`` is the call of a command, whose child has streams and no intent.
    """

    run_id: str
    agent_id: str
    text: str
    timeout_ms: int | None
    lineage: Lineage
    alive: int
    command: CommandStreams | None = None


@dataclass
class _Child:
    run_id: str
    agent_id: str
    keeper: process.Shim
    pipe: int
    call: BrokerCall | None
    done: Say | None = None
    command: bool = False
    # What a command's shim has reported.
    outcome: Mapping[str, Any] | None = None
    fate: str = ""
    cancelled: bool = False
    heard: bytearray = field(default_factory=bytearray)
    waiting: list[BrokerCall] = field(default_factory=list)


class ChildManager:
    """Start the children of one run.

    ``member`` is that run. ``start`` does (3) and (4) in the shim of the child, ``keep`` are descriptors that it
    needs, and ``use`` returns the resources that the run uses itself at the moment.

    ``denied`` is called for each refused child. ``used`` gets the processor time in milliseconds of each child that
    ended and of the runs below it: an agent cannot avoid its bill by leaving its work to children. While the run is
    ``ending`` it starts no more children.
    """

    def __init__(
        self,
        member: ParentRun,
        *,
        start: Callable[[ChildRequest, Say], None],
        use: Callable[[], Drawn],
        denied: denials.Told,
        used: Callable[[int], None],
        grace_seconds: float,
        keep: Collection[int] = (),
        ending: Callable[[], errors.CovenantError | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member, self._start, self._use, self._denied, self._used = member, start, use, denied, used
        self._grace, self._keep, self._ending, self._clock = grace_seconds, tuple(keep), ending, clock
        self._rate = Tokens(PER_SECOND, BURST, clock())
        # Up to when the rate of texts is used up; never further back than the burst.
        self._logged_at = clock() - LOGGED_BURST / LOGGED_PER_SECOND
        self._broker: Broker | None = None
        self._children: dict[str, _Child] = {}
        self._results: dict[str, bytes] = {}
        self._waiting: deque[tuple[BrokerCall, str]] = deque()
        self._deadline: float | None = None
        self._alive: tuple[int, int] | None = None
        self._closing = False

    @property
    def table(self) -> dict[str, Handler]:
        """Return the requests that it answers, each with its handler."""
        return {"spawn": self.spawn, "wait": self.wait}

    def served_by(self, broker: Broker) -> None:
        """Add the requests to the broker, which also watches the children."""
        self._broker = broker

    def started(self, task_seconds: float) -> None:
        """Note that the agent is given its intent: no child outlives the rest of its task."""
        self._deadline = time.monotonic() + task_seconds

    def spawn(self, call: BrokerCall) -> None:
        """``spawn``: start a child. Answered with its run id when it is admitted, else with the refusal."""
        self._spawn(call)

    def _spawn(self, call: BrokerCall) -> str:
        """Start a child, and return its run id; empty where it is refused."""
        try:
            asked = parse_request(call.fields)
            self._check()
        except errors.CovenantError as e:
            self._refused(str(call.fields.get("agent", "")), e.code)
            call.failed(e)
            return ""
        except FieldError as e:
            call.refuse("malformed_request", str(e))
            return ""
        if (refused := self._no_task()) is not None:
            code, error = refused
            if code == error.code:
                call.failed(error)
            else:
                call.refuse(code, error.message)
            return ""
        if not self._rate.take(self._clock()):
            self._refused(asked.agent_id, "too_many_requests")
            call.refuse("too_many_requests", f"{PER_SECOND:g} children a second are started at most")
            return ""
        if not self._may_log(asked.text):
            self._refused(asked.agent_id, "too_many_requests")
            call.refuse("too_many_requests", f"{LOGGED_PER_SECOND} bytes of texts a second are taken at most")
            return ""
        try:
            return self._fork(call, asked)
        except (OSError, errors.KernelError) as e:
            call.refuse("kernel_error", f"no process can be started for it: {e}")
            return ""

    def spawn_for_result(
        self, fields: Mapping[str, Any], done: Say, *, cancelled: Callable[[str, str], None]
    ) -> Callable[[], None]:
        """Start a child as ``spawn`` does, and give its outcome to ``done`` as ``wait`` does.

        What it returns stops the child. ``cancelled`` is called before that, with the child's run id and agent id.
        """

        def started(said: Mapping[str, Any], secret: object) -> None:
            if "ok" in said:
                self.wait(BrokerCall(said["ok"], lambda outcome, secret: done(outcome)))
            else:
                done(said)

        run_id = self._spawn(BrokerCall(fields, started))
        return functools.partial(self._cancel, run_id, cancelled)

    def _cancel(self, run_id: str, cancelled: Callable[[str, str], None]) -> None:
        child = self._children.get(run_id)
        if child is None or run_id in self._results or child.cancelled:
            return
        child.cancelled = True
        cancelled(run_id, child.agent_id)  # INVARIANT: the row before the act
        child.keeper.signal(signal.SIGTERM)

    def run_command(self, agent_id: str, streams: CommandStreams, *, timeout_ms: int | None, done: Say) -> str:
        """Start the child of a command's call, and return its run id. ``done`` gets its outcome, once.

        Raises:
            errors.CovenantError: no child may be started now.
            OSError: no process can be started for it.
        """
        self._check()
        if (refused := self._no_task()) is not None:
            raise refused[1]
        if not self._rate.take(self._clock()):
            raise errors.BusyError(f"{PER_SECOND:g} children a second are started at most", hint="call it again")
        return self._fork(None, SpawnRequest(agent_id, "", "reject", timeout_ms, None), streams, done)

    def end_command(self, run_id: str, number: int) -> None:
        """Send a signal to the shim of a command's child, which ends with it."""
        if (child := self._children.get(run_id)) is not None:
            child.keeper.signal(number)

    def _no_task(self) -> tuple[str, errors.CovenantError] | None:
        """Return why no child may be started now, with the code of it."""
        refused = self._ending()
        if isinstance(refused, errors.WrongStateError):
            return refused.code, refused
        if self._deadline is None or self._closing or refused is not None:
            message = "children are started while the agent has a task, and at no other time"
            return "no_task", errors.WrongStateError(message)
        return None

    def wait(self, call: BrokerCall) -> None:
        """``wait``: the result of a child, once, or the error that it ended with."""
        run_id = call.fields.get("run")
        if set(call.fields) != {"run"} or not isinstance(run_id, str):
            call.refuse("malformed_request", "`wait` takes `run`, a text")
        elif run_id in self._results:
            self._waiting.append((call, run_id))
            self.look()
        elif (child := self._children.get(run_id)) is not None:
            child.waiting.append(call)
        else:
            call.refuse("unknown_run", "no child of this run has that id, or its result was given already")

    def look(self) -> None:
        """Answer with the results that are awaited, as far as the agent reads them.

        Unread results stay here, where they are bounded.
        """
        while self._waiting and self._broker is not None and self._broker.room:
            call, run_id = self._waiting.popleft()
            result = self._results.pop(run_id, None)
            if result is None:
                call.refuse("unknown_run", "its result was given already, or too many were not asked for")
            else:
                _tell(call, json.loads(result))

    def close(self) -> None:
        """End with the run: children follow ``on_parent_exit``, and those that end with it are waited for.

        INVARIANT: the run's directory still exists. Until its children are gone, they and the run are counted.
        """
        self._closing = True
        if self._alive is None:
            return
        os.close(self._alive[1])
        until = self._clock() + self._grace + _LEAVING_SECONDS
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            for child in self._children.values():
                if number is not None:
                    child.keeper.signal(number)
            self._listen(until)
            until = self._clock() + _STOPPING_SECONDS
        os.close(self._alive[0])
        self._alive = None

    def _listen(self, until: float) -> None:
        """Wait until no child is left but those that outlive the run. A child may still report now which kind it is."""
        while self._clock() < until:
            for child in [one for one in self._children.values() if one.fate == _OUTLIVES]:
                self._let_go(child)
                child.keeper.close()
                del self._children[child.run_id]
            if not self._children:
                break
            poll = select.poll()
            for child in self._children.values():
                poll.register(child.pipe, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(max(0, until - self._clock()) * 1000)}
            for child in list(self._children.values()):
                if child.pipe in ready:
                    self._hear(child)

    def _check(self) -> None:
        """Refuse a malformed request without a look at a package. The shim of the child checks the rules again."""
        spawning = self._member.effective.spawning
        if not spawning.allowed:
            raise errors.SpawnBudgetViolation(
                f"agent `{self._member.agent_id}` may not start agents", grant="spawn.allowed"
            )
        most = spawning.max_descendants
        if most is not None and len(self._children) >= most:
            raise errors.SpawnBudgetViolation(
                f"agent `{self._member.agent_id}` has {len(self._children)} live descendants and may have {most}",
                grant="spawn.max_descendants",
                hint="wait until one of them has ended",
            )

    def _may_log(self, text: str) -> bool:
        """Whether a child's text may go into the log now. A refused text takes nothing from the next one's rate."""
        now = self._clock()
        since = max(self._logged_at, now - LOGGED_BURST / LOGGED_PER_SECOND)
        at = since + len(event_text.quoted(text)) / LOGGED_PER_SECOND
        if at > now:
            return False
        self._logged_at = at
        return True

    def _fork(
        self,
        call: BrokerCall | None,
        asked: SpawnRequest,
        command: CommandStreams | None = None,
        done: Say | None = None,
    ) -> str:
        assert self._broker is not None
        assert self._deadline is not None
        if self._alive is None:
            self._alive = os.pipe2(os.O_CLOEXEC)
        run_id, fds = str(uuid.uuid4()), command.fds if command is not None else set[int]()
        lineage = self._member.lineage(
            deadline=self._deadline, own=self._use(), on_excess=asked.on_excess, only=asked.only
        )
        child_request = ChildRequest(
            run_id, asked.agent_id, asked.text, asked.timeout_ms, lineage, self._alive[0], command
        )
        with contextlib.ExitStack() as undo:
            read, write = os.pipe2(os.O_CLOEXEC)
            undo.callback(os.close, read)
            try:
                work = functools.partial(_work, self._start, child_request, write)
                started = process.fork(work, keep={write, child_request.alive, *self._keep, *fds})
            finally:
                os.close(write)
            undo.pop_all()
        os.set_blocking(read, False)
        child = _Child(run_id, asked.agent_id, started, read, call, done, command is not None)
        self._children[run_id] = child
        self._broker.watch(read, functools.partial(self._hear, child))
        return run_id

    def _hear(self, child: _Child) -> None:
        try:
            data = os.read(child.pipe, _CHUNK)
        except BlockingIOError:
            return
        child.heard += data
        if b"\n" in data:
            *lines, rest = bytes(child.heard).split(b"\n")
            child.heard = bytearray(rest)
            for line in lines:
                self._said(child, json.loads(line))
        if not data:
            self._ended(child)

    def _said(self, child: _Child, said: Mapping[str, Any]) -> None:
        if "admitted" in said:
            child.fate = said["admitted"]["on_parent_exit"]
            if child.call is not None:
                child.call.answer({"run": child.run_id})
                child.call = None
        elif "used" in said:
            self._used(said["used"])
        elif child.call is not None:
            self._refused(child.agent_id, said["error"]["code"])
            _tell(child.call, said)
            child.call = None
        elif child.command:
            child.outcome = said
        else:
            self._keep_result(child.run_id, said)

    def _keep_result(self, run_id: str, said: Mapping[str, Any]) -> None:
        self._results[run_id] = json.dumps(said).encode()
        while len(self._results) > UNREAD or sum(map(len, self._results.values())) > UNREAD_BYTES:
            del self._results[next(iter(self._results))]

    def _ended(self, child: _Child) -> None:
        """Handle the end of file of a child's shim: it has reported everything."""
        if child.call is not None or child.run_id not in self._results:
            gone = {"error": {"code": errors.CutOffError.code, "message": "whoever kept the run is gone"}}
            child.outcome = child.outcome or gone
            if child.call is not None:
                _tell(child.call, gone)
            elif child.fate and not child.command:
                self._keep_result(child.run_id, gone)
        self._waiting.extend((call, child.run_id) for call in child.waiting)
        self.look()
        self._let_go(child)
        child.keeper.reap()
        child.keeper.close()
        del self._children[child.run_id]
        if child.done is not None and child.outcome is not None:
            child.done(child.outcome)  # its place is free: the agent's next command may take it

    def _let_go(self, child: _Child) -> None:
        if self._broker is not None:
            self._broker.forget(child.pipe)
        os.close(child.pipe)

    def _refused(self, agent_id: str, code: str) -> None:
        self._denied(denials.Denial("spawn", agent_id, code))


def _tell(call: BrokerCall, said: Mapping[str, Any]) -> None:
    if "ok" in said:
        call.answer(said["ok"])
    else:
        error = dict(said["error"])
        call.refuse(error.pop("code"), error.pop("message"), **error)


def _work(start: Callable[[ChildRequest, Say], None], child_request: ChildRequest, pipe: int) -> None:
    """Run in the child's shim. A parent that is gone reads nothing, and the child still ends in order."""

    def say(what: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(what).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(pipe, data) :]

    start(child_request, say)


def gone(alive: int) -> bool:
    """Whether the parent's shim is gone."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    return bool(poll.poll(0))


def on_parent_exit(fate: str, adopted: Callable[[], None]) -> Callable[[], Outcome]:
    """Act once on the end of the parent: ``terminate`` ends the child at once, ``wind-down`` asks it to end within
    the grace, ``adopt`` lets it go on."""
    done = False

    def look() -> Outcome:
        nonlocal done
        if done:
            return None
        done = True
        if fate == _OUTLIVES:
            adopted()
            return None
        return errors.ParentEndedError(
            "its parent's run has ended", hint="on_parent_exit says what becomes of it", gently=fate == "wind-down"
        )

    return look
