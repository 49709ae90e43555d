"""Operations on a live run (state, suspend, resume, kill, logs) and its suspension timers.

Each operation checks the state table (policy.lifecycle), writes its row, acts, and then answers. Operations run in the
exchange's own turns, so nothing else of the run changes meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from policy import errors, lifecycle
from policy.lifecycle import State
from sandbox.audit.run_events import RunEvents
from sandbox.run_io import CallerStreams, ContainerIO, Freezer, Outcome, PeriodicCheck, SandboxHandle, Watches
from sandbox.rundir import marks
from sandbox.shim import control_socket, idleness
from sandbox.shim.agent_loop import AgentLoop, boot_seconds
from sandbox.shim.live_lines import LiveLines
from sandbox.shim.terminal import TerminalSession

# The most bytes of stderr in one answer; each byte may become six in JSON.
LOG_BYTES = 16 * 1024
_LOOK_SECONDS = 0.25
# Rows or columns, as the kernel has them (ioctl_tty(2)).
_LARGEST_SIZE = 65_535
# A run that is frozen to be killed with its tree ends by itself after this time: the caller is gone by then.
ENDING_SECONDS = 10.0
_IDLE = "idle: nothing is asked of it"


class RunOperations:
    """Operations of one run. It is ``listening`` while its directory exists, and ``joined`` once there is a sandbox.

    - ``ttl_seconds`` is the manifest's, None without one; with ``suspends`` it suspends the run instead of ending it.
    - ``shown`` filters stderr to text for readers of logs.
    - ``allow_thaw`` is entered around a thaw, and raises if the run must stay frozen (sandbox.control.tree_kill).
    - ``live`` takes the lines of stderr as they come, for a client that shows them.
    - ``idle`` says whether something is asked of the run (shim.idleness). Without it the run never rests.
    - ``below`` ends all descendants of the run, with the caller's name and reason, if that caller does not come back.
    - ``table`` contains the operations. Others may add some before the run listens.
    """

    def __init__(
        self,
        rows: RunEvents,
        *,
        ttl_seconds: int | None,
        suspends: bool,
        shown: Callable[[bytes], str],
        allow_thaw: Callable[[Path], contextlib.AbstractContextManager[None]],
        below: Callable[[str, str], None] = lambda by, reason: None,
        live: Callable[[str], None] | None = None,
        idle: int | None = None,
    ) -> None:
        self._live, self._idle = live, idle
        # Whether it is suspended only because nothing is asked of it.
        self._rests = False
        self._rows, self._ttl, self._shown, self._allow_thaw, self._below = rows, ttl_seconds, shown, allow_thaw, below
        self._expires = suspends and ttl_seconds is not None
        self._freezer: Freezer | None = None
        self._directory: Path | None = None
        self._exchange: AgentLoop | None = None
        self._watches: dict[int, Callable[[], Outcome]] = {}
        self._given_at: float | None = None
        self._suspended_at = 0.0
        # Whether it was frozen when its end was logged.
        self._stood = False
        # When the run ends by itself, and the request with caller and reason.
        self._to_end: tuple[float, Mapping[str, Any]] | None = None
        self.table: dict[str, control_socket.Handler] = {
            "state": self._state,
            "suspend": self._suspend,
            "resume": self._resume,
            "kill": self._kill,
            "logs": self._logs,
            "attach": self._attach,
        }

    @contextlib.contextmanager
    def listening(self, directory: Path) -> Iterator[None]:
        """Make the run visible and its socket ready until the block ends. It answers while the exchange runs."""
        self._directory = directory
        with control_socket.ControlServer(directory, self.table) as server, contextlib.ExitStack() as stack:
            self._server = server
            try:
                self._rows.show_state(directory)
                self._watches = server.watches
                if self._idle is not None:
                    switch = idleness.IdleSwitch(self._idle, rest=self.rest, wake=self.wake)
                    self._watches = {**self._watches, **stack.enter_context(contextlib.closing(switch)).watches}
                yield
            finally:
                self._rows.show_state(None)

    def before(self) -> Watches:
        """Return the watches that serve clients before there is a sandbox; ``joined`` includes them."""
        return self._watches

    def joined(self, channel: ContainerIO) -> ContainerIO:
        """Return the channel with the run's operations and timers."""
        self._freezer = channel.handle.freezer
        return structs.replace(
            channel,
            handle=_Operated(channel.handle, lambda: self._stood),
            watches={**channel.watches, **self._watches},
            rounds=(
                *channel.rounds,
                PeriodicCheck(_LOOK_SECONDS, self._forsaken),
                *([] if self._ttl is None else [PeriodicCheck(_LOOK_SECONDS, self._clocks)]),
            ),
        )

    def converses(self, exchange: AgentLoop) -> None:
        """Set the run's exchange. Called before it begins."""
        self._exchange = exchange
        if self._live is not None:
            exchange.heard = LiveLines(self._shown, self._live).feed
        if (session := self._terminal()) is not None:
            session.left = lambda: self._rows.note("its caller has left, and it goes on")

    def _terminal(self) -> TerminalSession | None:
        session = None if self._exchange is None else self._exchange.session
        return session if isinstance(session, TerminalSession) else None

    # --- the run's own transitions --------------------------------------------------------------------------

    def starting(self) -> None:
        """Write that the agent is about to be given its intent (run_io.RunObserver)."""
        if self._rows.state is not State.RUNNING:  # an instance gets this row with its start (sandbox.standby)
            self._rows.transition(State.RUNNING, "it is given its intent")
        self._given_at = boot_seconds()

    def ending(self, error: errors.RunError) -> None:
        """Write the end that is about to come (run_io.RunObserver), and end descendants whose killer is gone."""
        if self._rows.state is not State.TERMINATED:  # a kill has logged it already
            # After a signal the agent is already dead; do not block on the log's lock here.
            self._terminated(f"{error.code}: {error.message}", waits=isinstance(error, errors.StoppedError))
        # A process that kills the whole tree does so before this run continues: survivors are left to this shim. After
        # a signal nothing is alive any more, so the leaf cannot tell.
        left = isinstance(error, errors.StoppedError) or (self._freezer is not None and self._freezer.pids())
        if (stopped := self._marked()) is not None and left:
            self._below(*stopped)

    def _terminated(self, words: str, *, waits: bool = False) -> None:
        self._stood = self._rows.state is State.SUSPENDED or self._marked() is not None
        self._rows.transition(State.TERMINATED, words, waits=waits)

    def _marked(self) -> tuple[str, str] | None:
        return None if self._directory is None else marks.stopped_of(self._directory)

    def _clocks(self) -> Outcome:
        """Apply the ttl: it suspends the run, and ends it after the same time in suspension."""
        assert self._ttl is not None
        now = boot_seconds()
        if self._rows.state is State.SUSPENDED and now - self._suspended_at >= self._ttl:
            return self._expired(f"suspended for {self._ttl} s")
        due = self._given_at is not None and now - self._given_at >= self._ttl
        if self._expires and due and self._rows.state is State.RUNNING:
            self._expires = False
            try:
                self._freeze(f"ttl_seconds: {self._ttl} s are over")
            except errors.RunError as e:
                return e
            except (errors.KernelError, errors.KeeperError, errors.NotEnforceableError) as e:
                # A run that must be suspended and cannot be must not go on.
                return self._expired(f"still running after {self._ttl} s, and it cannot be suspended: {e.message}")
        return None

    def _forsaken(self) -> Outcome:
        """End the run and its descendants if the caller froze it for that and did not come back in time."""
        if self._to_end is None or time.monotonic() < self._to_end[0]:
            return None
        asked, self._to_end = self._to_end[1], None
        self._below(asked.get("by", ""), asked.get("reason", ""))
        return errors.KilledError(_words("ended", asked))

    def _expired(self, words: str) -> errors.DeadlineError:
        return errors.DeadlineError(f"{words} (clock: ttl_seconds)", clock="ttl_seconds")

    # --- a run of which nothing is asked --------------------------------------------------------------------

    def rest(self) -> Outcome:
        """Suspend the run until something is asked of it. A run that cannot be frozen goes on."""
        freezable = self._freezer is not None and self._freezer.freezable
        if self._rows.state is State.RUNNING and freezable and self._to_end is None:
            try:
                self._freeze(_IDLE)
            except errors.RunError as e:
                return e
            except (errors.KernelError, errors.NotEnforceableError):
                return None
            except errors.KeeperError as e:
                return errors.KilledError(f"it cannot go on: {e.message}")
            self._rests = True
        return None

    def wake(self) -> Outcome:
        """Resume the run, where it only rests. One that an operator suspended, or that is to be ended, stays so."""
        rests, self._rests = self._rests, False
        if not rests or self._rows.state is not State.SUSPENDED or self._to_end is not None:
            return None
        try:
            self._thaw("a call came", waits=True)
        except errors.RunError:
            return None  # it is marked, and its mark ends it
        except (errors.KernelError, errors.KeeperError) as e:
            return errors.KilledError(f"it was idle and cannot be resumed: {e.message}")
        return None

    # --- what can be asked ----------------------------------------------------------------------------------

    def _state(self, request: Mapping[str, Any]) -> control_socket.Reply:
        _only(request)
        return control_socket.Reply({"state": str(self._rows.state)})

    def _suspend(self, request: Mapping[str, Any]) -> control_socket.Reply:
        """Suspend the run.

        ``ending``: the run is to be killed with its tree once the whole tree is frozen. It cannot be resumed then. If
        the caller does not come back, the run ends by itself with all its descendants.
        """
        _only(request, "by", "reason", "ending")
        rests, self._rests = self._rests, False
        if request.get("ending", False) is True:
            self._stand(request)
        elif rests and self._rows.state is State.SUSPENDED:
            self._rows.note(_words("asked", request))  # from now on no call resumes it
        else:
            self._may("suspend")
            self._freeze(_words("asked", request))
        return control_socket.Reply({"state": str(self._rows.state)})

    def _stand(self, request: Mapping[str, Any]) -> None:
        if self._to_end is not None:
            return
        words = _words("to be ended, asked", request)
        if self._rows.state is State.SUSPENDED:
            self._may("kill")
            self._rows.note(words)
        else:
            self._may("suspend")
            self._freeze(words)
        self._to_end = time.monotonic() + ENDING_SECONDS, request

    def _resume(self, request: Mapping[str, Any]) -> control_socket.Reply:
        _only(request, "by", "reason")
        self._found_standing()
        self._may("resume")
        if self._to_end is not None:
            raise errors.WrongStateError("the run is to be ended", hint="covenant ps says when it is gone")
        self._thaw(_words("asked", request))
        self._rests = False
        return control_socket.Reply({"state": str(self._rows.state)})

    def _thaw(self, words: str, *, waits: bool = False) -> None:
        """Log the resumption, and thaw the leaf. Raises as ``allow_thaw``, and where it does not thaw."""
        assert self._freezer is not None
        assert self._directory is not None
        with self._allow_thaw(self._directory):
            self._rows.transition(State.RUNNING, words, waits=waits)
            try:
                self._freezer.thaw()
            except errors.KernelError as e:
                self._rows.transition(State.SUSPENDED, f"it could not be thawed: {e.message}")
                raise

    def _found_standing(self) -> None:
        """Log a freeze from outside: a revoking process logs nothing before its mark, and may be killed in between."""
        standing = False
        if self._rows.state is State.RUNNING and self._freezer is not None and self._freezer.freezable:
            with contextlib.suppress(errors.KernelError):  # it has just ended
                standing = self._freezer.frozen()
        if standing:
            self._rows.transition(State.SUSPENDED, "somebody else has stopped it")
            self._suspended_at = boot_seconds()

    def _kill(self, request: Mapping[str, Any]) -> control_socket.Reply:
        """End the run.

        ``code`` is the code of another cause than a caller's wish. ``grace_ms`` is the agent's grace after the request
        to end; without it there is none.
        """
        _only(request, "by", "reason", "code", "grace_ms")
        grace = request.get("grace_ms")
        if grace is not None and (type(grace) is not int or grace < 0):
            raise errors.UsageError("a grace is a number of milliseconds")
        held = self._exchange
        if grace is None and held is not None and held.error is not None and not held.forced:
            # The run is ending within a grace, and this request cuts that short.
            return control_socket.Reply({"state": str(self._rows.state)}, errors.KilledError(_words("ended", request)))
        self._may("kill")
        code = request.get("code", errors.KilledError.code)
        cause = errors.TABLE.get(code) if isinstance(code, str) else None
        if cause is None or not issubclass(cause, errors.RunError):
            raise errors.UsageError("no run ends with such a code")
        words = _words(cause.code, request)
        self._terminated(words)
        self._to_end = None
        patience: dict[str, Any] = {} if grace is None else {"gently": True, "grace_seconds": grace / 1000}
        error = cause(f"ended {words.partition(' ')[2]}", **patience)
        return control_socket.Reply({"state": str(self._rows.state)}, error)

    def _attach(self, request: Mapping[str, Any]) -> control_socket.Reply:
        """Connect a caller to the run's terminal; its pipes come with the request."""
        _only(request, "by", "rows", "columns")
        size = _number(request, "rows"), _number(request, "columns")
        session = self._terminal()
        if session is None:
            raise errors.WrongStateError(
                "the run has no terminal, so nothing can be attached to it", hint="covenant logs RUN shows its stderr"
            )
        fds = self._server.taken()
        try:
            if len(fds) != control_socket.DESCRIPTORS:
                raise errors.UsageError("a caller that attaches brings three pipes")
            stdin, stdout, resizes = fds
            if self._exchange is None or self._exchange.over:
                raise errors.NoRunError("the run has just ended")
            session.check_free()
            self._rows.note(_words("attached", request))
            session.take(CallerStreams(stdin, stdout, size=size, resizes=resizes))
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return control_socket.Reply({"state": str(self._rows.state)})

    def _logs(self, request: Mapping[str, Any]) -> control_socket.Reply:
        _only(request, "offset", "stream")
        offset = request.get("offset", 0)
        if type(offset) is not int or offset < 0:
            raise errors.UsageError("an offset is a number of bytes from 0 on")
        begins, kept = self._kept(offset, stdout=request.get("stream") == "stdout")
        piece = kept[:LOG_BYTES]
        if len(kept) > len(piece) and b"\n" in piece:
            piece = piece[: piece.rindex(b"\n") + 1]
        place = {"begins": begins, "next": begins + len(piece), "ends": begins + len(kept)}
        return control_socket.Reply({**place, "text": self._shown(piece)})

    def _kept(self, offset: int, *, stdout: bool) -> tuple[int, bytes]:
        """Return stderr from an offset on, or what a terminal has shown. No other stdout is shown before its end."""
        if self._exchange is None:
            return offset, b""
        if not stdout:
            return self._exchange.stderr_since(offset)
        session = self._terminal()
        return (offset, b"") if session is None else session.scrollback.since(offset)

    def _may(self, operation: str) -> None:
        """Refuse an operation that the table does not allow, and every operation on a run that is over.

        Raises:
            errors.WrongStateError: Raised when the run is in another state.
            errors.NoRunError: Raised when the run has ended or is ending.
            errors.NotEnforceableError: Raised when there is no freezer for a suspension.
        """
        assert self._rows.state is not None
        lifecycle.asked(self._rows.state, operation)
        if self._exchange is not None and self._exchange.over:
            raise errors.NoRunError("the run has just ended")
        if operation == "suspend" and (self._freezer is None or not self._freezer.freezable):
            raise errors.NotEnforceableError(
                "this run cannot be suspended: it has no cgroup that can be frozen",
                hint="on version 1 mount the controller `freezer`; trusted-local has none",
            )

    def _freeze(self, words: str) -> None:
        """Log the suspension, freeze the leaf, and read back that it is frozen.

        Raises:
            errors.KernelError: Raised when it does not freeze. The run continues, and the log says so.
            errors.RunRevokedError, errors.KeeperError: Raised when it does not freeze and must not continue.
        """
        if self._freezer is None or self._directory is None:
            raise errors.NotEnforceableError("this run has no cgroup that can be frozen")
        self._rows.transition(State.SUSPENDED, words)
        self._suspended_at = boot_seconds()
        try:
            self._freezer.freeze(allow_thaw=functools.partial(self._allow_thaw, self._directory))
        except (errors.KernelError, errors.NotEnforceableError) as e:
            self._rows.transition(State.RUNNING, f"it could not be stopped: {e.message}")
            raise


class _Operated:
    """A sandbox whose frozen processes are killed where others are asked to end: they cannot handle a request."""

    def __init__(self, handle: SandboxHandle, frozen: Callable[[], bool]) -> None:
        self._handle, self._frozen = handle, frozen
        self.freezer = handle.freezer
        self.kill, self.out_of_memory = handle.kill, handle.out_of_memory

    def terminate(self) -> None:
        """Send SIGTERM, or kill. The end is logged by now."""
        if self._frozen():
            self._handle.kill()
        else:
            self._handle.terminate()


def _only(request: Mapping[str, Any], *names: str) -> None:
    unknown = sorted(set(request) - set(names))
    if unknown:
        raise errors.UsageError(f"a request of this kind has no `{unknown[0][: marks.WORDS]}`")


def _number(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if type(value) is not int or not 0 <= value <= _LARGEST_SIZE:
        raise errors.UsageError("a size is rows and columns")
    return value


def _words(what: str, request: Mapping[str, Any]) -> str:
    """Return caller and reason as text for the log."""
    by, reason = request.get("by", ""), request.get("reason", "")
    if not isinstance(by, str) or not isinstance(reason, str):
        raise errors.UsageError("who asks, and why, are text")
    return marks.in_words(what, by, reason)
