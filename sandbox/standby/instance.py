"""An instance: an agent that is started, attested and frozen before an intent for it arrives, and used once.

    (1) everything of a run up to "the agent has started" (sandbox.lifecycle.run), under the full procedure
    (2) the agent waits on its stdin, as the kernel shows (kernel.proc.epoll_waiters): freeze it, and listen
        (sandbox.standby.dispatch)
    (3) an intent arrives: check again everything that may have changed, and write the start durably
    (4) thaw the agent, with its intent in the pipe
    (5) everything of a run from there on

Step (3) and a timer compare the files that it was made of. A change ends the instance, and the intent is run cold. An
idle sandbox that is not frozen takes 6 % of a core (docs/standby.md).
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import structs

from policy import decide, errors, standby
from policy.host import HostFacts
from policy.lifecycle import State
from policy.rules.case import Unsigned
from policy.signing import trust
from sandbox.control import tree_kill
from sandbox.kernel.proc import epoll_waiters
from sandbox.lifecycle.context import RunContext
from sandbox.lifecycle.run import Run
from sandbox.lifecycle.start_mode import StartRecord
from sandbox.lifecycle.types import Request, RunDependencies
from sandbox.run_io import IntentDelivery, Outcome, PeriodicCheck, RunOutcome
from sandbox.rundir import label as rundir_label
from sandbox.rundir import marks
from sandbox.runner import gvisor
from sandbox.standby import dispatch, fingerprints
from sandbox.standby.dispatch import PeerGoneError

# The bytes of an instance to its maker: ready (with its run id), dispatched, make no other, the agent never waited.
READY, TAKEN, HOPELESS, RESTLESS = b"r", b"t", b"x", b"n"
# How often what an instance is made of is looked at: what costs little, and every file of its root directory.
LOOK_SECONDS, FILES_SECONDS = 5.0, 60.0
# A frozen agent is attested so many times less often than one that runs: nothing inside can change anything.
ATTEST_LESS: Final = 10
# The pool makes no other instance for so long after a dispatch, so that the answer has the processors.
ALONE_SECONDS: Final = 0.1
# The row "working" is written after so long, so that a fast answer has both processors.
MOMENT_SECONDS: Final = 0.003
# As long as a self-test of its policy counts (sandbox.lifecycle.probe_run).
MOST_SECONDS = 86_400
# What was looked at before an instance was offered holds for so long after that: the word to go takes a millisecond.
FRESH_SECONDS: Final = 0.05


class UnusedError(Exception):
    """The instance ended before anybody had an intent for it."""


class WarmSandbox:
    """Start a run ahead of its intent: the start mode (sandbox.lifecycle.start_mode) of one warm sandbox.

    ``tell`` is called with each byte of its progress. ``alive`` is readable once its maker has exited. That ends the
    instance, unless it was given an intent. The run raises ``UnusedError`` when no client came.

    Make it before the ``Run`` of ``context``: what it is made of is recorded here, and so is the head of the log.
    """

    def __init__(self, context: RunContext, *, alive: int, tell: Callable[[bytes], None]) -> None:
        dependencies = context.dependencies
        self._mark = dependencies.ledger.mark
        self._made_of = fingerprints.Files.of_state(dependencies.state).joined(
            fingerprints.Files.of_config(dependencies.config)
        )
        self._context, self._tell = context, tell
        # The descriptors that may end the wait for an intent.
        self.watches: Mapping[int, Callable[[], Outcome]] = {alive: ended}
        self._settings = dependencies.config.digest
        self._listening, self._stack = contextlib.ExitStack(), contextlib.ExitStack()
        self._client: socket.socket | None = None
        self._since = time.monotonic()
        self._untold = self._unshown = False
        self._looked = 0.0

    # --- (1) ------------------------------------------------------------------------------------------------

    def decided(
        self, trusted: trust.TrustedPackage | Unsigned, decision: decide.Decision | None, facts: HostFacts
    ) -> None:
        """Record the files that the run is made of.

        Raises:
            errors.UnsignedError, errors.NotEnforceableError: the agent is not kept ready.
        """
        if not isinstance(trusted, trust.TrustedPackage):
            raise errors.UnsignedError("only a signed package is kept ready")
        if decision is None:
            raise errors.NotEnforceableError("it is not kept ready: it has no sandbox", grant="sandbox.backend")
        if not self._context.standby:
            why = "".join(self._context.standby_notes) or "its manifest asks for no instance"
            raise errors.NotEnforceableError(f"it is not kept ready: {why}", grant="sandbox.standby")
        self._trusted, self._decision = trusted, decision
        networked = decision.artefacts.json("network.json")["mode"] != "off"
        self._made_of = self._made_of.joined(fingerprints.Files.of_run(facts, networked=networked))

    def check_serial(self, trusted: trust.TrustedPackage, last: trust.Accepted | None) -> None:
        """Refuse a serial that would be a new highest: a cold run has it accepted.

        Raises:
            errors.BusyError: the serial was not accepted yet.
        """
        if last is not None and trusted.statement.serial > last.serial:
            raise errors.BusyError("its serial was not accepted yet", hint="run it again")

    def adapt(self, spec: gvisor.SandboxSpec) -> gvisor.SandboxSpec:
        """Return the spec of a sandbox that waits for its intent."""
        self._sources = fingerprints.Sources.of(self._decision, spec.files.sources)
        self._made_of = self._made_of.joined(fingerprints.Files.of_root(spec.files.root_file))
        return structs.replace(
            spec,
            intent=b"",
            label={**spec.label, rundir_label.STANDBY: "yes"},
            rounds=(
                *spec.rounds,
                PeriodicCheck(MOMENT_SECONDS, self._answering, lambda: MOST_SECONDS),
                PeriodicCheck(ALONE_SECONDS, self._still_working, lambda: MOST_SECONDS),
            ),
            later=functools.partial(_DeferredIntent, self),
        )

    def begin(self, record: StartRecord, log_start: Callable[[StartRecord], None]) -> None:
        """Write that the instance is made. The start itself is written when the intent has come."""
        self._context.rows.transition(State.ISOLATED, standby.MADE_AHEAD)
        self._record, self._log_start = record, log_start

    # --- (2) ------------------------------------------------------------------------------------------------

    def on_frozen(self, started: gvisor.StartedSandbox) -> socket.socket:
        """It waits: stop it, have at hand what a dispatch takes, and let it be found.

        Raises:
            errors.KernelError, errors.NotEnforceableError: it cannot be stopped.
        """
        started.leaf.freeze()
        started.leaf.keep_frozen()
        rundir_label.expect_relabel(started.directory)
        self._limit_files = fingerprints.LimitFiles(started, self._stack)
        self._context.rows.expect_start()
        listener = self._listening.enter_context(dispatch.listening(started.directory, self._context.request.package))
        self._looked = time.monotonic()
        self._tell(READY + self._context.run_id.encode())
        return listener

    def watch(self, started: gvisor.StartedSandbox) -> Outcome:
        """The look by the clock: what it was made of holds, and it has not waited for too long."""
        now = time.monotonic()
        if now - self._since > MOST_SECONDS:
            return errors.KilledError("standby: its self-test is a day old")
        if int(time.time() * 1000) >= self._trusted.statement.expires_at:
            return errors.KilledError("standby: its envelope has expired")
        every = now - self._looked >= FILES_SECONDS
        if every:
            self._looked = now
        changed = self._another_root() or self._changed(started, every_file=every)
        if every and changed is None:
            changed = self._context.outdated(self._trusted)
        return None if changed is None else errors.KilledError(f"standby: {changed}")

    # --- (3) and (4) ----------------------------------------------------------------------------------------

    def accept(
        self, started: gvisor.StartedSandbox, listener: socket.socket
    ) -> IntentDelivery | errors.RunError | None:
        """Accept a client and do what it orders. Returns None where the instance goes on waiting."""
        came = dispatch.accepted(listener)
        if came is None:
            return None
        connection, message = came
        with contextlib.ExitStack() as stack:
            stack.enter_context(connection)
            result = self._handle_order(started, connection, message)
            if result is not None:
                # Keep nothing for a client that is sent elsewhere: many may come in a day.
                self._stack.push(stack.pop_all())
        return result

    def _handle_order(
        self, started: gvisor.StartedSandbox, connection: socket.socket, message: Mapping[str, Any]
    ) -> IntentDelivery | errors.RunError | None:
        try:
            if message.get("op") == "end":
                return errors.KilledError(f"standby: {message.get('reason', 'it is not wanted')}")
            request = dispatch.ordered(message, self._context.request.package)
            if request is None:
                dispatch.send(connection, {"cold": "another package"})
                return None
            if message["settings"] != self._settings:
                # The supervisor has read a newer configuration since this process started, or the client started before
                # it did. The pool knows which of the two is old, and ends it.
                dispatch.send(connection, {"cold": "another configuration"})
                return None
            return self._dispatch(started, request, connection)
        except (PeerGoneError, KeyError) as e:
            # The client has disconnected, and the agent was told nothing. A row of a start needs a row of an end.
            return errors.KilledError(f"whoever asked for it went away: {e}") if self._context.rows.started else None

    def _dispatch(
        self, started: gvisor.StartedSandbox, request: Request, connection: socket.socket
    ) -> IntentDelivery | errors.RunError | None:
        changed = self._changed(started, every_file=False)
        if changed is not None:
            _send_elsewhere(connection, changed)
            return errors.KilledError(f"standby: {changed}")
        context = self._context
        # No client waited while it was made.
        context.laps.restart()
        context.now_ms = int(time.time() * 1000)
        try:
            assignment = context.assignment_of(request, request.intent_id or context.intent_id)
        except errors.UsageError as e:
            # What no agent could be told costs no instance.
            dispatch.send(connection, {"cold": e.message})
            return None
        try:
            dispatch.send(connection, {"offer": context.run_id, "since": self._mark})
            offered = time.monotonic()
            trusted = self._verify_again()
            before, context.assignment = context.assignment, assignment
            deadline = context.deadline(trusted, self._decision.manifest)
            place = structs.replace(
                context.place,
                trusted=trusted,
                package_name=request.package_name,
                caller=request.issuer["display"],
                itself=context.run_id,
            )
            label, claim = context.label_for(place, self.check_serial)
            # A client that gave up meanwhile runs it elsewhere. Until it accepts, nothing starts and the wait goes on.
            if not dispatch.told_to_go(connection, context.run_id):
                context.assignment = before
                return None
            try:
                settle = functools.partial(self._settle, started, trusted, offered, claim)
                rundir_label.relabel(started.directory, label, settle)
            except (errors.RuleViolation, errors.BusyError) as e:
                # The live runs leave no room for this client's run. The instance waits for others, as before.
                context.assignment = before
                _send_elsewhere(connection, e.message)
                return None
            self._context.rows.asked_by(request.issuer)
            with self._context.rows.together(functools.partial(_count, started)):
                self._log_start(structs.replace(self._record, trusted=trusted, deadline=deadline))
                self._context.rows.transition(State.RUNNING, "it is given its intent")
        except errors.CovenantError as e:
            # The cold run reports the error as usual: in its own row, to the client.
            _send_elsewhere(connection, e.message)
            return errors.KilledError(f"standby: it cannot be used: {e.message}")
        self._client, self._untold, self._unshown = connection, True, True
        watches: dict[int, Callable[[], Outcome]] = {connection.fileno(): self._client_gone}
        if context.dependencies.config.on_supervisor_exit == "end":
            watches |= self.watches

        def release() -> None:
            # One that is ended with others at this moment stands until it is killed, which its watch says.
            over = errors.RunRevokedError, errors.KilledError
            with contextlib.suppress(*over), tree_kill.allow_thaw(started.directory):
                started.leaf.thaw()

        return IntentDelivery(context.line, context.limits(deadline), watches, release)

    def _settle(
        self, started: gvisor.StartedSandbox, trusted: trust.TrustedPackage, offered: float, claim: Callable[[], None]
    ) -> None:
        """Check again behind the gate, before the instance is shown as a run.

        Marks are set behind the gate. An instance of a superseded serial may not hold the agent's id against the newer
        one (rule 8). After a client that was slow to accept, everything is checked as it is now.
        """
        if (marked := marks.verdict(started.directory)) is not None:
            raise marked
        if time.monotonic() - offered > FRESH_SECONDS:
            self._context.now_ms = int(time.time() * 1000)
            self._verify_again()
            if (changed := self._changed(started, every_file=False)) is not None:
                raise errors.KilledError(changed)
        claim()

    def _verify_again(self) -> trust.TrustedPackage:
        """Verify the package again as of now, from our memory, under the root that it was verified under.

        The decisions, above all which signers count for this role, were made under that root.

        INVARIANT: before anything starts, ``revocation.refuse`` checks behind the gate and under the state's lock that
        this root is still the installed one, and ``State.accept`` checks the ratchet there.
        """
        dependencies = self._context.dependencies
        return trust.again(
            self._trusted,
            self._context.root,
            now_ms=self._context.now_ms,
            audience=dependencies.config.host,
            serials=trust.NoSerials(),
            greatest_time_ms=dependencies.state.time_under(self._trusted.root_version),
        )

    def _answering(self) -> Outcome:
        """It was let go and has had a moment for itself, in which most answer: nothing here takes a processor then."""
        if self._unshown:
            self._unshown = False
            # Refuse a second client at once.
            self._listening.close()
            self._context.rows.show()
        return None

    def _still_working(self) -> Outcome:
        if self._untold:
            self._untold = False
            self._tell(TAKEN)
        return None

    def _client_gone(self) -> Outcome:
        return errors.KilledError("whoever asked for it went away")

    def _another_root(self) -> str | None:
        """That another trust root holds, in words: which a dispatch asks when it verifies again."""
        version = self._context.dependencies.state.root_version()
        return None if version == self._trusted.root_version else f"trust root version {version} holds now"

    def _changed(self, started: gvisor.StartedSandbox, *, every_file: bool) -> str | None:
        """Return in words another change since the instance was made, or None."""
        if (revoked := marks.verdict(started.directory)) is not None:
            return revoked.message
        if (name := self._made_of.changed(every_file=every_file) or self._sources.changed()) is not None:
            return f"`{name}` was changed"
        if not started.leaf.frozen():
            return "somebody thawed it"
        name = self._limit_files.loosened()
        return None if name is None else f"its limit {name} was changed"

    # --- (5) ------------------------------------------------------------------------------------------------

    def ended(self, outcome: RunOutcome) -> None:
        """Write the last rows of an instance that had no intent.

        Raises:
            UnusedError: it had none.
        """
        if not self._context.rows.started:
            self._context.denials.flush()
            if self._context.rows.state is not State.TERMINATED:
                self._context.rows.transition(State.TERMINATED, "standby: it ended before its intent", waits=True)
            self._context.rows.transition(State.ARCHIVED, "nothing was asked of it")
            raise UnusedError from outcome.error

    def failed(self, error: BaseException, log_failure: Callable[[BaseException], None]) -> None:
        """Write nothing yet: ``keep`` answers the client first."""

    def write_failure(self, error: BaseException) -> None:
        """Write the last rows of an instance that did not end by itself."""
        if self._context.rows.started or self._context.rows.state is not State.ISOLATED:
            self._context.log_failure(error)
        else:
            self._context.rows.transition(State.TERMINATED, f"standby: {error}", waits=True)
            self._context.rows.transition(State.ARCHIVED, "nothing was asked of it")

    def answer(self, message: Mapping[str, Any]) -> None:
        """Send the result to the client, if it is still connected."""
        if self._client is not None:
            with contextlib.suppress(PeerGoneError):
                dispatch.send(self._client, message)

    def close(self) -> None:
        """Let go of everybody who came; another is made in its place now at the latest."""
        self._listening.close()
        self._stack.close()
        self._still_working()
        self._context.rows.leave()


def ended() -> Outcome:
    """Return the error of an instance whose supervisor has exited: it would not be replaced or used."""
    return errors.KilledError("standby: the supervisor ended")


def _count(started: gvisor.StartedSandbox) -> None:
    """Count the use from here on: nothing in the sandbox runs, and the agent is about to be given its intent."""
    with contextlib.suppress(OSError):  # which is asked again just before, and says it
        started.meter.begin()


def _send_elsewhere(connection: socket.socket, why: str) -> None:
    """Have the client run it cold. An instance of no use ends, also where the client has disconnected."""
    with contextlib.suppress(PeerGoneError):
        dispatch.send(connection, {"cold": why})


class _DeferredIntent:
    """The intent of a warm sandbox (run_io.DeferredIntent)."""

    def __init__(self, instance: WarmSandbox, started: gvisor.StartedSandbox) -> None:
        self._instance, self._started = instance, started
        self._inode = os.fstat(started.stdin).st_ino
        self._listener: socket.socket | None = None
        attestor = started.attestor
        self.rounds: Sequence[PeriodicCheck] = (
            PeriodicCheck(LOOK_SECONDS, functools.partial(instance.watch, started)),
            *((_seldom(attestor.round()),) if attestor is not None else ()),
        )
        self.watches = instance.watches

    def settled(self) -> bool:
        if not epoll_waiters.reads_from(self._started.leaf.pids(), self._inode):
            return False
        self._listener = self._instance.on_frozen(self._started)
        return True

    def fileno(self) -> int:
        return -1 if self._listener is None else self._listener.fileno()

    def take(self) -> IntentDelivery | errors.RunError | None:
        assert self._listener is not None
        return self._instance.accept(self._started, self._listener)


def keep(dependencies: RunDependencies, request: Request, *, alive: int, tell: Callable[[bytes], None]) -> None:
    """In a shim: make an instance of the package in ``request``, and hold it until it was used or is of no use.

    Raises:
        errors.CovenantError: it could not be made, or the machine failed it; either is in the log.
    """
    context = RunContext(dependencies, request, now_ms=int(time.time() * 1000))
    one = WarmSandbox(context, alive=alive, tell=tell)
    run = Run(context, one)
    with run.signals:  # until its last row is written
        _kept(run, one, tell)


def _kept(run: Run, one: WarmSandbox, tell: Callable[[bytes], None]) -> None:
    try:
        one.answer({"answer": run.go().to_json()})
    except UnusedError as e:
        # What of ours ended it says nothing of its agent.
        if not isinstance(e.__cause__, errors.KilledError | errors.RevokedError | None):
            tell(RESTLESS)
    except BaseException as e:
        if isinstance(e, errors.CovenantError):
            one.answer({"error": e.to_json()})
            if not isinstance(e, errors.MachineError | errors.RunError | errors.ResourceViolation):
                tell(HOPELESS)  # the author or signer must act: the next run that succeeds asks for an instance again
        one.write_failure(e)
        if not isinstance(e, KeyboardInterrupt):
            raise
    finally:
        one.close()


def _seldom(one: PeriodicCheck) -> PeriodicCheck:
    return structs.replace(one, seconds=one.seconds * ATTEST_LESS, wait=None)
