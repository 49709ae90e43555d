"""Runs in sandboxes: each is requested from covenant-supervisor over its socket. The daemon runs no agent.

One connection is one run. It passes a descriptor of the package's directory, which the supervisor reads with this
process's rights and verifies itself. Closing the connection ends its run, so a cancelled call leaves none behind. There
is no other way to run an agent here.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import anyio

from covenant import fair_share
from covenant.runtime import packages, run_tools, supervisor_report
from covenant.runtime.attached import AttachedTerminal, AttachmentPipes
from covenant.runtime.packages import Card
from covenant.runtime.runner import Intent, RunResult, Spent, Usage, with_spent
from covenant.wire.types import AgentId
from policy import errors
from sandbox import run_result, unix_wire
from sandbox.serve.api import client, paths
from sandbox.storage import atomic_file

_LOG: Final = logging.getLogger(__name__)

# The time beyond a run's own clocks: for its queue, its start and its clean-up.
_BEYOND_SECONDS: Final = 600.0
# The limit for all other requests.
_ASK_SECONDS: Final = 60.0
# Below the default of 32 open requests that a supervisor allows one user (`caller_requests`), with room for `ps` and
# `kill`.
MOST_RUNS: Final = 24
# The pause before a busy supervisor is asked again; it doubles each time up to the longest.
_FIRST_PAUSE: Final = 0.05
_LONGEST_PAUSE: Final = 2.0

# Parsing a larger document would block the loop too long.
_LARGE: Final = 256 * 1024
# The same limit in rows.
_MANY_ROWS: Final = 64

# Key in the details of a NoSupervisorError: this machine has a supervisor that does not listen now.
CONFIGURED: Final = "configured"

# Makes a connection; blocks, so it is called in a thread.
Connect = Callable[[], socket.socket]


class Supervised:
    """Runs requested from the supervisor that ``connect`` reaches; at most ``most`` at a time, the others wait. Every
    caller without the key ``operator`` has a share of these places (``shares``)."""

    def __init__(
        self,
        connect: Connect,
        *,
        now_ms: Callable[[], int],
        grace_ms: int = 2000,
        most: int = MOST_RUNS,
        operator: str = "",
    ) -> None:
        self._connect, self._now_ms, self._grace_ms = connect, now_ms, grace_ms
        self._allowance: Callable[[Card], int | None] = lambda card: None
        self._places = fair_share.Shares(most, operator=operator)
        self._tools: run_tools.ToolServer | None = None

    def allow(self, allowance: Callable[[Card], int | None]) -> None:
        """Hold runs to ``allowance``: the credits that each may spend at its service gate, None without a budget."""
        self._allowance = allowance

    def serve_tools(self, tools: run_tools.ToolServer) -> None:
        """Serve these tools to runs whose package declares tools of the daemon."""
        self._tools = tools

    async def run(self, card: Card, intent: Intent, *, caller: AgentId, deadline: int | None) -> RunResult:
        """As ``runner.Runner``. The supervisor identifies us by peer credentials, and ``caller`` as the user we act
        for. Its reply includes its log rows of the run and its descendants (``told``), also for a failed run."""
        beside: list[dict[str, Any]] = []
        try:
            async with self._places.place(caller.pubkey):
                with _limited(_patience(card), "holds a run for longer than its clocks allow"):
                    document = await self._until_taken(lambda: self._ask_run(card, intent, caller, deadline, beside))
        except errors.CovenantError as e:
            raise supervisor_report.with_told(e, await _told(beside[-1]) if beside else None) from None
        return _result(run_result.RunResult.from_json(document), card, await _told(beside[-1] if beside else None))

    async def check(self, card: Card) -> bool:
        """Have the supervisor verify a package without running it. Returns False if this machine has none
        (``connector``).

        Raises:
            errors.CovenantError: it refuses the package or this user, or cannot be reached although there is one: the
                daemon must not decide in its place.
        """
        try:
            async with packages.reached(card) as one:
                with _limited(_ASK_SECONDS, "did not verify the package in time"):
                    checked = await self._until_taken(
                        lambda: self._ask("check_package", fds=[one.directory], manifest_sha256=card.digest)
                    )
        except errors.NoSupervisorError as e:
            if e.details.get(CONFIGURED):
                raise
            return False
        if (checked.get("kind"), checked.get("agent_id")) != ("checked", card.id):
            raise errors.ServiceError("the supervisor does not speak as one: it verified another package")
        return True

    async def end(self, intent_id: str, *, reason: str, whole: bool = False) -> bool:
        """As ``runner.Runner``: SIGTERM, ``grace_ms``, then the sandbox is killed. ``whole``: the whole tree is
        stopped, then killed."""
        how: dict[str, Any] = {"tree": True} if whole else {"grace_ms": self._grace_ms}
        with _limited(_ASK_SECONDS, "did not end the run in time"):
            runs = _runs(await self._ask("ps"))
            run_id = next((one.get("run_id") for one in runs if one.get("intent_id") == intent_id), None)
            if run_id is None:
                return False
            try:
                await self._ask("operate", operation="kill", run=run_id, reason=reason, **how)
            except errors.NoRunError:
                return False  # the run ended by itself meanwhile
        return True

    async def used(self) -> dict[str, tuple[int | None, int]]:
        """Return the usage of our live runs by intent: CPU time in ms, None if it is not counted, and current memory.

        Raises:
            errors.CovenantError: the supervisor cannot be reached.
        """
        with _limited(_ASK_SECONDS, "did not say in time what runs use"):
            runs = _runs(await self._ask("top"))
        return {
            one["intent_id"]: (one.get("cpu_ms"), one.get("memory_bytes") or 0) for one in runs if one.get("intent_id")
        }

    async def ask(self, kind: str, /, **fields: Any) -> Mapping[str, Any]:
        """Send one request without descriptors, as this process's user, and return the reply.

        Raises:
            errors.CovenantError: the supervisor cannot be reached, or refused.
        """
        with _limited(_ASK_SECONDS, "did not answer in time"):
            return await self._ask(kind, **fields)

    async def _ask_run(
        self, card: Card, intent: Intent, caller: AgentId, deadline: int | None, beside: list[dict[str, Any]]
    ) -> dict[str, Any]:
        optional = {} if deadline is None else {"timeout_ms": max(1, deadline - self._now_ms())}
        credits_ = self._allowance(card)
        if credits_ is not None:
            optional["credits"] = credits_
        fields = {
            "text": intent.text,
            "intent_id": intent.id,
            "priority": str(intent.priority),
            # The caller was checked for this manifest, and other processes can write to the directory.
            "manifest_sha256": card.digest,
            "on_behalf_of": {"pubkey_b58": caller.pubkey, "display": caller.display},
            "rows": True,
            **optional,
        }
        async with packages.reached(card) as one:
            tools = self._tools
            if tools is None or not await run_tools.declares(card, one):
                return await self._ask("run", fds=[one.directory], beside=beside, **fields)
            with run_tools.opened(tools, caller) as line:
                fds, named = [one.directory, line.theirs.fileno()], line.tools

                async def ask() -> dict[str, Any]:
                    return await self._ask("run", fds=fds, beside=beside, daemon_tools=named, **fields)

                return await run_tools.while_served(tools, line, ask, intent=intent, caller=caller, card=card)

    async def _until_taken(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        """Repeat the request while the supervisor is busy: other clients of this uid may use its places too."""
        pause = _FIRST_PAUSE
        while True:
            try:
                return await ask()
            except errors.BusyError:
                await anyio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    @contextlib.asynccontextmanager
    async def session(
        self, directory: int, pipes: Sequence[int]
    ) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
        """Open a session with the package in ``directory``, as this process's user; the end of the block ends it.

        ``pipes`` are its ends of stdin, stdout and stderr. Yields a function that returns the supervisor's next
        document: states, and at last how the session ended.

        Raises:
            errors.CovenantError: the supervisor cannot be reached, or refused; also by what is yielded.
        """
        async with self._asked("session", fds=[directory, *pipes]) as heard:
            yield heard

    @contextlib.asynccontextmanager
    async def attached(self, run: str, rows: int, columns: int) -> AsyncIterator[AttachedTerminal]:
        """Attach to the terminal of the run whose id begins so, as this process's user; the end of the block detaches.

        Raises:
            errors.CovenantError: the supervisor cannot be reached, or refused.
        """
        pipes = AttachmentPipes()
        try:
            terminal = {"rows": rows, "columns": columns}
            async with self._asked("attach", fds=pipes.theirs, run=run, terminal=terminal) as heard:
                with _limited(_ASK_SECONDS, "did not attach in time"):
                    state = await heard()
                pipes.release()

                async def ended() -> Mapping[str, Any]:
                    with _limited(_ASK_SECONDS, "did not say in time how the session ended"):
                        record: Mapping[str, Any] = (await heard())["record"]
                    return record

                yield AttachedTerminal(str(state.get("run_id")), pipes, ended)
        finally:
            pipes.close()

    async def _ask(
        self, kind: str, *, fds: Sequence[int] = (), beside: list[dict[str, Any]] | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send one request on a new connection and return the reply. ``beside`` receives the rows before it.

        Raises:
            errors.CovenantError: the supervisor cannot be reached, or refused.
        """
        async with self._asked(kind, fds=fds, **fields) as heard:
            while True:
                document = await heard()
                if document.get("kind") == "rows" and beside is not None:
                    beside.append(document)
                elif document.get("kind") != "state":
                    return document

    @contextlib.asynccontextmanager
    async def _asked(
        self, kind: str, *, fds: Sequence[int] = (), **fields: Any
    ) -> AsyncIterator[Callable[[], Awaitable[dict[str, Any]]]]:
        """Send one request on a new connection, which ends with the block. Yields what returns its next document.

        Raises:
            errors.CovenantError: the supervisor cannot be reached, or refused; also by what is yielded.
        """
        try:
            frame = unix_wire.encode({"kind": kind, **fields})
        except UnicodeEncodeError as e:
            raise errors.UsageError("the request is not valid Unicode") from e
        if len(frame) - unix_wire.LENGTH.size > unix_wire.REQUEST_BYTES:
            raise errors.UsageError("the intent is too large")
        # In a thread: connect(2) waits if the supervisor's queue is full, and the listener's credentials are checked.
        sock = await anyio.to_thread.run_sync(self._connect, abandon_on_cancel=False)

        async def heard() -> dict[str, Any]:
            document = await _document(sock)
            if document.get("kind") == "error":
                raise errors.restored(document)
            return document

        try:
            sock.setblocking(False)
            # The supervisor may have refused and closed its half already: its reply must still be read.
            with contextlib.suppress(OSError):
                await _send(sock, frame, fds)
            yield heard
        finally:
            sock.close()


def connector(candidates: Sequence[str], *, named: bool, mark: Path | None = None) -> Connect:
    """Return a function that connects to a supervisor: the first of the sockets with a listener.

    ``named``: the operator configured the path, so no other is tried. ``mark`` is a file that is created once a
    supervisor was reached, and from then on says that this daemon has one. An error has ``CONFIGURED`` among its
    details: true if the machine has a supervisor that does not listen now, because it restarts or was stopped.
    """
    reached = False

    def connect() -> socket.socket:
        nonlocal reached
        for path in candidates:
            with client.connected(path) as sock:
                if sock is not None:
                    reached = True
                    _keep(mark)
                    return sock.dup()
        where = candidates[0] if candidates else ""
        start = paths.start(candidates)
        marked = mark is not None and _is_there(mark)
        if named or reached or marked or _any_is_there(candidates):
            raise errors.NoSupervisorError(
                f"no supervisor listens at `{where}` now, or not for this user",
                hint=f"{start}, and name this uid in `callers` of its configuration; then ask again"
                + (f" (where there is to be none any more, remove {mark})" if marked else ""),
                where=where,
                **{CONFIGURED: True},
            )
        raise errors.NoSupervisorError(
            "no supervisor is there to ask",
            hint=f"{start}, and name this uid in `callers` of its configuration",
            where=where,
        )

    return connect


def _keep(mark: Path | None) -> None:
    """Create the file that says that there was a supervisor. If that fails, only this process remembers it."""
    if mark is None:
        return
    try:
        if not os.path.lexists(mark):
            os.close(os.open(mark, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            atomic_file.sync_directory(mark.parent)
    except OSError as e:
        _LOG.warning("that a supervisor was reached is not kept in `%s`: %s", mark, e)


def _any_is_there(candidates: Sequence[str]) -> bool:
    """Whether a supervisor is set up at one of the paths. Its socket exists without a listener or cannot be examined,
    or the machine's own state exists."""
    machine = [paths.SYSTEM_STATE] if paths.SYSTEM_SOCKET in candidates else []
    return any(_is_there(path) for path in (*candidates, *machine))


def _is_there(path: str | Path) -> bool:
    """Whether this name exists; an error other than a missing file counts as existing."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def _limited(seconds: float, what: str) -> Iterator[None]:
    """Limit the time of the block.

    Raises:
        errors.ServiceError: the block took longer, and was cancelled.
    """
    with anyio.move_on_after(seconds) as scope:
        yield
    if scope.cancelled_caught:
        raise errors.ServiceError(f"the supervisor {what}", hint="see the log of covenant-supervisor")


def _runs(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    runs = document.get("runs")
    if not isinstance(runs, list) or not all(isinstance(one, dict) for one in runs):
        raise errors.ServiceError("the supervisor does not speak as one: it lists no runs")
    return runs


def _patience(card: Card) -> float:
    manifest = card.manifest
    return manifest.resources.cpu_ms_per_task / 1000 + 2 * (manifest.lifetime.ttl_seconds or 0) + _BEYOND_SECONDS


async def _told(document: dict[str, Any] | None) -> supervisor_report.SupervisorReport:
    """Return the rows, each checked against its hash."""
    many = document is not None and isinstance(document.get("rows"), list) and len(document["rows"]) > _MANY_ROWS
    return (
        await anyio.to_thread.run_sync(supervisor_report.read, document) if many else supervisor_report.read(document)
    )


def _result(answer: run_result.RunResult, card: Card, told_: supervisor_report.SupervisorReport) -> RunResult:
    used = answer.usage
    usage = Usage(used.cpu_ms, used.memory_peak_bytes, used.wall_ms)
    took = Spent(usage, answer.run_id, answer.policy_digest, answer.denials, told_)
    if answer.error is not None:
        raise with_spent(supervisor_report.with_told(answer.error, told_), took)
    if answer.result is None or answer.agent_id != card.id:
        # The caller was checked for another agent.
        stale = errors.StaleAgentError(
            f"the package of agent `{card.id}` holds agent `{answer.agent_id}` now",
            where=card.where,
        )
        raise with_spent(supervisor_report.with_told(stale, told_), took)
    result = answer.result
    return RunResult(
        text=result.text,
        sources=result.sources,
        runtime_events=result.runtime_events,
        files=result.files,
        usage=usage,
        run_id=answer.run_id,
        policy_digest=answer.policy_digest,
        denials=answer.denials,
        told=told_,
    )


# --- frames, without a thread that waits --------------------------------------------------------------------------


async def _send(sock: socket.socket, frame: bytes, fds: Sequence[int]) -> None:
    view = memoryview(frame)
    while view:
        try:
            sent = socket.send_fds(sock, [view[: 1 << 18]], list(fds)) if fds else sock.send(view[: 1 << 18])
        except BlockingIOError:
            await anyio.wait_writable(sock)
            continue
        # Descriptors are sent once, with the first bytes that are accepted.
        view, fds = view[sent:], ()


async def _document(sock: socket.socket) -> dict[str, Any]:
    (size,) = unix_wire.LENGTH.unpack(await _exactly(sock, unix_wire.LENGTH.size))
    if size > unix_wire.ANSWER_BYTES:
        raise errors.ServiceError(f"the supervisor does not speak as one: it answers with {size} bytes")
    raw = await _exactly(sock, size)
    try:
        document = json.loads(raw) if size < _LARGE else await anyio.to_thread.run_sync(json.loads, raw)
    except ValueError as e:
        raise errors.ServiceError(f"the supervisor does not speak as one: {e}") from e
    if not isinstance(document, dict):
        raise errors.ServiceError("the supervisor does not speak as one: it answers with no object")
    return document


async def _exactly(sock: socket.socket, size: int) -> bytes:
    raw = bytearray()
    while len(raw) < size:
        try:
            part = sock.recv(min(size - len(raw), 1 << 16))
        except BlockingIOError:
            await anyio.wait_readable(sock)
            continue
        except ConnectionError:
            part = b""
        if not part:
            raise errors.ServiceError(
                "the supervisor ended the conversation before its answer", hint="see the log of covenant-supervisor"
            )
        raw += part
    return bytes(raw)
