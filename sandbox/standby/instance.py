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
import dataclasses
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from policy import clocks, contract, decide, errors
from policy.host import HostFacts
from policy.lifecycle import State
from policy.manifest.agent import Manifest
from policy.rules.case import Unsigned
from policy.signing import trust
from sandbox.control import tree_kill
from sandbox.kernel.proc import epoll_waiters
from sandbox.lifecycle import run
from sandbox.lifecycle.types import Request, RunDependencies, RunResult
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


class WarmSandbox(run.Run):
    """Hold one warm sandbox. ``tell`` is called with each byte of its progress.

    ``alive`` is readable once its maker has exited. That ends the instance, unless it was given an intent. ``go`` is
    the run's own, and raises ``UnusedError`` when no client came.
    """

    def __init__(
        self, dependencies: RunDependencies, request: Request, *, alive: int, tell: Callable[[bytes], None]
    ) -> None:
        self._mark = dependencies.ledger.mark
        self._made_of = fingerprints.Files.of_state(dependencies.state).joined(
            fingerprints.Files.of_config(dependencies.config)
        )
        super().__init__(dependencies, request, now_ms=int(time.time() * 1000))
        self._alive, self._tell = alive, tell
        self._settings = dependencies.config.digest
        self._listening, self._stack = contextlib.ExitStack(), contextlib.ExitStack()
        self._client: socket.socket | None = None
        self._since = time.monotonic()
        self._untold = self._unshown = False
        self._looked = 0.0

    # --- (1) ------------------------------------------------------------------------------------------------

    def _job(
        self,
        trusted: trust.TrustedPackage | Unsigned,
        decision: decide.Decision,
        facts: HostFacts,
        deadline: clocks.Deadline,
        stack: contextlib.ExitStack,
    ) -> gvisor.SandboxSpec:
        if not isinstance(trusted, trust.TrustedPackage):
            raise errors.UnsignedError("only a signed package is kept ready")
        if notes := self._stands_by(decision) or not self.standby:
            raise errors.NotEnforceableError(f"it is not kept ready: {notes}", grant="sandbox.standby")
        self._trusted, self._decision = trusted, decision
        networked = decision.artefacts.json("network.json")["mode"] != "off"
        self._made_of = self._made_of.joined(fingerprints.Files.of_run(facts, networked=networked))
        job = super()._job(trusted, decision, facts, deadline, stack)
        self._sources = fingerprints.Sources.of(decision, job.sources)
        return dataclasses.replace(
            job,
            intent=b"",
            label={**job.label, rundir_label.STANDBY: "yes"},
            rounds=(
                *job.rounds,
                PeriodicCheck(MOMENT_SECONDS, self._answering, lambda: MOST_SECONDS),
                PeriodicCheck(ALONE_SECONDS, self._still_working, lambda: MOST_SECONDS),
            ),
            later=functools.partial(_DeferredIntent, self),
        )

    def _begin(
        self,
        trusted: trust.TrustedPackage | Unsigned,
        manifest: Manifest,
        deadline: clocks.Deadline,
        *,
        policy_digest: str | None = None,
        not_enforced: tuple[str, ...] = (),
    ) -> None:
        """(4) of a run is put off: what is about to be made is written down, and nothing of it is a start."""
        self._rows.transition(State.ISOLATED, "standby: made ahead of its intent")
        self._policy_digest, self._not_enforced = policy_digest, not_enforced

    # --- (2) ------------------------------------------------------------------------------------------------

    def on_frozen(self, started: gvisor.StartedSandbox) -> socket.socket:
        """It waits: stop it, have at hand what a dispatch takes, and let it be found.

        Raises:
            errors.KernelError, errors.NotEnforceableError: it cannot be stopped.
        """
        started.leaf.freeze()
        started.leaf.keep_frozen()
        rundir_label.expect_relabel(started.directory)
        self._limit_files = fingerprints.Limits(started, self._stack)
        self._rows.expect_start()
        listener = self._listening.enter_context(dispatch.listening(started.directory, self._request.package))
        self._looked = time.monotonic()
        self._tell(READY + self.run_id.encode())
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
            changed = self._outdated(self._trusted)
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
            request = dispatch.ordered(message, self._request.package)
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
            return errors.KilledError(f"whoever asked for it went away: {e}") if self._rows.started else None

    def _dispatch(
        self, started: gvisor.StartedSandbox, request: Request, connection: socket.socket
    ) -> IntentDelivery | errors.RunError | None:
        changed = self._changed(started, every_file=False)
        if changed is not None:
            _send_elsewhere(connection, changed)
            return errors.KilledError(f"standby: {changed}")
        # No client waited while it was made.
        self._timings, self._clock = {}, time.perf_counter()
        self._now_ms = int(time.time() * 1000)
        try:
            intent_id = request.intent_id or self.intent_id
            line = contract.Intent(intent_id, request.text, request.reads, self._now_ms, request.priority).line()
        except errors.UsageError as e:
            # What no agent could be told costs no instance.
            dispatch.send(connection, {"cold": e.message})
            return None
        try:
            dispatch.send(connection, {"offer": self.run_id, "since": self._mark})
            offered = time.monotonic()
            trusted, manifest = self._verify_again(), self._decision.manifest
            before = self._request, self._line, self.intent_id
            self._request, self._line, self.intent_id = request, line, intent_id
            deadline = self._deadline(trusted, manifest)
            place = dataclasses.replace(
                self._place,
                trusted=trusted,
                package_name=request.package_name,
                caller=request.issuer["display"],
                itself=self.run_id,
            )
            label, claim = self._claim(place)
            # A client that gave up meanwhile runs it elsewhere. Until it accepts, nothing starts and the wait goes on.
            if not dispatch.told_to_go(connection, self.run_id):
                self._request, self._line, self.intent_id = before
                return None
            try:
                settle = functools.partial(self._settle, started, trusted, offered, claim)
                rundir_label.relabel(started.directory, label, settle)
            except (errors.RuleViolation, errors.BusyError) as e:
                # The live runs leave no room for this client's run. The instance waits for others, as before.
                self._request, self._line, self.intent_id = before
                _send_elsewhere(connection, e.message)
                return None
            self._rows.asked_by(request.issuer)
            with self._rows.together(functools.partial(_count, started)):
                super()._begin(
                    trusted,
                    manifest,
                    deadline,
                    policy_digest=self._policy_digest,
                    not_enforced=self._not_enforced,
                )
                self._rows.transition(State.RUNNING, "it is given its intent")
        except errors.CovenantError as e:
            # The cold run reports the error as usual: in its own row, to the client.
            _send_elsewhere(connection, e.message)
            return errors.KilledError(f"standby: it cannot be used: {e.message}")
        self._client, self._untold, self._unshown = connection, True, True
        watches: dict[int, Callable[[], Outcome]] = {connection.fileno(): self._client_gone}
        if self._dependencies.config.on_supervisor_exit == "end":
            watches[self._alive] = ended

        def release() -> None:
            # One that is ended with others at this moment stands until it is killed, which its watch says.
            over = errors.RunRevokedError, errors.KilledError
            with contextlib.suppress(*over), tree_kill.allow_thaw(started.directory):
                started.leaf.thaw()

        return IntentDelivery(self._line, self._limits(deadline), watches, release)

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
            self._now_ms = int(time.time() * 1000)
            self._verify_again()
            if (changed := self._changed(started, every_file=False)) is not None:
                raise errors.KilledError(changed)
        claim()

    def _ratchet(self, trusted: trust.TrustedPackage) -> trust.Accepted | None:
        """Raises as for a run, and errors.BusyError: the serial would be a new highest. A cold run has it accepted."""
        last = super()._ratchet(trusted)
        if last is not None and trusted.statement.serial > last.serial:
            raise errors.BusyError("its serial was not accepted yet", hint="run it again")
        return last

    def _verify_again(self) -> trust.TrustedPackage:
        """Verify the package again as of now, from our memory, under the root that it was verified under.

        The decisions, above all which signers count for this role, were made under that root.

        INVARIANT: before anything starts, ``revocation.refuse`` checks behind the gate and under the state's lock that
        this root is still the installed one, and ``State.accept`` checks the ratchet there.
        """
        return trust.again(
            self._trusted,
            self._root,
            now_ms=self._now_ms,
            audience=self._dependencies.config.host,
            serials=trust.NoSerials(),
            greatest_time_ms=self._dependencies.state.time_under(self._trusted.root_version),
        )

    def _answering(self) -> Outcome:
        """It was let go and has had a moment for itself, in which most answer: nothing here takes a processor then."""
        if self._unshown:
            self._unshown = False
            # Refuse a second client at once.
            self._listening.close()
            self._rows.show()
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
        version = self._dependencies.state.root_version()
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

    def _finish(
        self, manifest: Manifest, finished: RunOutcome, policy_digest: str | None, not_enforced: tuple[str, ...]
    ) -> RunResult:
        if not self._rows.started:
            self._denials.flush()
            if self._rows.state is not State.TERMINATED:
                self._rows.transition(State.TERMINATED, "standby: it ended before its intent", waits=True)
            self._rows.transition(State.ARCHIVED, "nothing was asked of it")
            raise UnusedError from finished.error
        return super()._finish(manifest, finished, policy_digest, not_enforced)

    def _failed(self, error: BaseException) -> None:
        pass  # ``keep`` answers the client first

    def failed(self, error: BaseException) -> None:
        """The last rows of one that did not come to its end by itself."""
        if self._rows.started or self._rows.state is not State.ISOLATED:
            self.log_failure(error)
        else:
            self._rows.transition(State.TERMINATED, f"standby: {error}", waits=True)
            self._rows.transition(State.ARCHIVED, "nothing was asked of it")

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
        self._rows.leave()


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
    """An instance as the exchange sees it (run_io.DeferredIntent)."""

    def __init__(self, instance: WarmSandbox, started: gvisor.StartedSandbox) -> None:
        self._instance, self._started = instance, started
        self._inode = os.fstat(started.stdin).st_ino
        self._listener: socket.socket | None = None
        attestor = started.attestor
        self.rounds: Sequence[PeriodicCheck] = (
            PeriodicCheck(LOOK_SECONDS, functools.partial(instance.watch, started)),
            *((_seldom(attestor.round()),) if attestor is not None else ()),
        )
        self.watches = {instance._alive: ended}  # noqa: SLF001 - one thing in two classes

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
    one = WarmSandbox(dependencies, request, alive=alive, tell=tell)
    with one.signals:  # until its last row is written
        _kept(one, tell)


def _kept(one: WarmSandbox, tell: Callable[[bytes], None]) -> None:
    try:
        one.answer({"answer": dispatch.answer_document(one.go())})
    except UnusedError as e:
        # What of ours ended it says nothing of its agent.
        if not isinstance(e.__cause__, errors.KilledError | errors.RevokedError | None):
            tell(RESTLESS)
    except BaseException as e:
        if isinstance(e, errors.CovenantError):
            one.answer({"error": e.to_json()})
            if not isinstance(e, errors.MachineError | errors.RunError | errors.ResourceViolation):
                tell(HOPELESS)  # the author or signer must act: the next run that succeeds asks for an instance again
        one.failed(e)
        if not isinstance(e, KeyboardInterrupt):
            raise
    finally:
        one.close()


def _seldom(one: PeriodicCheck) -> PeriodicCheck:
    return dataclasses.replace(one, seconds=one.seconds * ATTEST_LESS, wait=None)
