"""The daemon's side of a log that a process of its own writes (``scribe``): rows go there while others are made.

Everything here runs on the loop. Whoever waits for a row hears of it when the scribe has said that it is durable. When
the scribe is gone, or says what it cannot say, nobody knows what is on the disk: everything that waits is refused, and
so is everything later, as after a disk that failed (``covenant.stores.turns``).
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

import covenant
from covenant.stores import turns
from covenant.stores.audit import files, frames, scribe
from policy import errors, ledger

# What the daemon itself was started from is imported, before another of the same name; where an installation has it
# anyway the standard library stays before it.
_START: Final = (
    "import sys; sys.argv[2] in sys.path or sys.path.insert(0, sys.argv[2]); "
    "from covenant.stores.audit import scribe; scribe.main(int(sys.argv[1]))"
)
_STARTS_SECONDS: Final = 10.0
_ENDS_SECONDS: Final = 10.0
_MOST_AT_ONCE: Final = 1024
# What is sent and not acknowledged: more than the scribe can write while more is made, and little to hold.
_UNDERWAY_BYTES: Final = 1 << 20
_BUFFER_BYTES: Final = 1 << 20
_READ_BYTES: Final = 1 << 18
# What a terminal or a unit says to all of its group. One that was stopped stays so when only the daemon is told to go
# on, and no row would be written from then on.
_KEPT_OFF: Final = {
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
}


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one moment as they go into the log: of whom each is, and for each item that waits the rows of it."""

    now_ms: int
    rows: list[ledger.Row]
    pubkeys: list[str]
    answers: list[list[ledger.Row]]


Waiter = asyncio.Future[Any]
Item = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What the log is asked and told: rows of items that wait, rows that are durable, and answers in their order."""

    make: Callable[[Sequence[Item]], Batch]
    wrote: Callable[[Batch], None]
    publish: Callable[[Sequence[list[ledger.Row] | Exception]], None]


class Dictation:
    """Rows on their way to a scribe. Make it, ``start`` it, and give it the log with ``begin``."""

    def __init__(self, of: files.Files, told: Told, *, what: str) -> None:
        self._files = of
        self._told = told
        self._what = what
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[Waiter, Item]] = deque()
        # In the order of sending: who waits for what, and how long it is.
        self._sent: deque[tuple[list[Waiter], Batch, int]] = deque()
        self._underway = 0
        # Whether the scribe is still to hear that nobody else is ready.
        self._owed = False
        self._scheduled = False
        # Whether rows may be sent; whether the scribe has the log; whether it is being asked for it.
        self._begun = self._given = self._ending = False
        self._failure: str | None = None
        self._closed: str | None = None
        self._unsent: deque[memoryview] = deque()
        self._incoming = frames.Incoming()
        # Who waits for what is no answer to rows, in the order of asking.
        self._asked: deque[asyncio.Future[frames.Frame]] = deque()
        self._moved = asyncio.Event()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._burying: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process; when this returns it may be given the log.

        Raises:
            OSError, errors.CovenantError: it did not start; nothing was given.
        """
        ours, theirs = socket.socketpair()
        self._sock = ours
        try:
            with theirs:
                for end in (ours, theirs):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
                self._process = _spawn(theirs)
            ours.setblocking(False)
            self._loop.add_reader(ours.fileno(), self._readable)
            ready: asyncio.Future[frames.Frame] = self._loop.create_future()
            self._asked.append(ready)
            with anyio.fail_after(_STARTS_SECONDS):
                kind, *_ = await ready
            if kind != frames.READY:
                raise frames.garbage()
        except BaseException as e:
            self._failure = self._failure or "its scribe did not start"
            await self._let_go()
            if isinstance(e, TimeoutError):
                raise errors.LedgerError(f"the scribe was not ready within {_STARTS_SECONDS:.0f} s") from e
            raise

    def begin(self) -> None:
        """Give the log to the scribe. INVARIANT: nobody else writes it from now on until ``end`` returned.

        Raises:
            OSError, errors.StoreError: the scribe is gone already, and was given nothing.
        """
        if self._sock is None:
            raise self._refused()
        of = self._files
        given = of.hand()
        key = of.key.private_bytes_raw().hex()
        hello = frames.document(frames.HELLO, 0, home=str(of.at.home), key=key, **scribe.told(given))
        sent = socket.send_fds(self._sock, [hello], [of.at.log, of.at.head, *given.fds])
        if sent != len(hello):
            self._send(hello[sent:])
        self._begun = self._given = True
        self._flush(frames.LAST)

    def submit(self, item: Item) -> Waiter:
        """Have the rows written; await them. Cancelled, they may have been written or not.

        Raises:
            errors.StoreError: an earlier write failed in a way that left the disk's state unknown.
        """
        if (self._failure is not None and self._given) or self._closed is not None:
            raise self._refused()
        mine = self._loop.create_future()
        self._queue.append((mine, item))
        if not self._scheduled:
            self._scheduled = True
            # Whoever is ready to write gets to queue first.
            self._loop.call_soon(self._rest)
        elif len(self._queue) >= scribe.CROWD:
            self._flush(frames.ROWS)
        return mine

    async def snapshot(self) -> files.Snapshot | None:
        """How the files are between two writes; None once the log was handed back.

        Raises:
            errors.StoreError: the scribe failed.
        """
        while self._ending and self._given and self._failure is None:
            # Nobody answers what is asked behind the question for the log.
            await self._move()
        if not self._given:
            return None
        _, _, body = await self._ask(frames.SHOW, frames.SHOWN)
        shown, signed = body[frames.SIZES.size :][: ledger.HEAD_BYTES], body[frames.SIZES.size + ledger.HEAD_BYTES :]
        # Not the head that is acknowledged by now: the sizes are of that moment.
        head = ledger.read_signed_head(signed, self._files.key.public_key())
        if head is None:
            raise frames.garbage()
        return files.Snapshot(head, shown, *frames.SIZES.unpack_from(body))

    async def drained(self) -> None:
        """Wait until nobody waits for a row."""
        while self._failure is None and (self._sent or self._queue):
            await self._move()

    async def end(self) -> deque[tuple[Waiter, Item]]:
        """Take the log back when what is underway is written; what was not sent yet, for somebody else to write.

        Raises:
            errors.StoreError: the scribe failed; nobody knows what is on the disk.
        """
        self._begun, self._ending = False, True
        # Behind what was sent: its answers come before this one.
        _, _, body = await self._ask(frames.BYE, frames.GONE)
        given = frames.members(body, head=str, before=str, end=int)
        fds = self._files.fds
        self._files.taken_back(files.Handed(fds, given["head"].encode(), given["before"].encode(), given["end"]))
        self._given = False
        self._moved.set()
        # What comes meanwhile waits for the same one.
        await self._let_go()
        return self._left()

    async def withdraw(self) -> deque[tuple[Waiter, Item]]:
        """Let go of a scribe that was not given the log; what waits is for somebody else to write."""
        await self._let_go()
        return self._left()

    async def abandon(self, reason: str) -> None:
        """Refuse what waits, and let go of the scribe, which ends."""
        self._fail(reason)
        if self._burying is not None:
            await asyncio.wait([self._burying])

    def refuse(self, reason: str) -> None:
        """Take no more rows; what waits is still written."""
        self._closed = reason

    @property
    def begun(self) -> bool:
        """Whether the scribe has the log, or had it when it failed."""
        return self._given

    # --- to the scribe ----------------------------------------------------------------------------------

    def _rest(self) -> None:
        self._scheduled = False
        self._flush(frames.LAST)

    def _flush(self, kind: int) -> None:
        """Send what queued. The last frame is of this kind, unless not all of it may be underway at once."""
        if not self._begun or self._failure is not None or not (self._queue or self._owed):
            return
        queue = self._queue
        while queue and self._underway < _UNDERWAY_BYTES:
            waiting: list[Waiter] = []
            items: list[Item] = []
            size = 0
            while queue and len(items) < _MOST_AT_ONCE and size < _UNDERWAY_BYTES:
                waiter, item = queue.popleft()
                # INVARIANT: what was cancelled before it was sent is never written.
                if not waiter.cancelled():
                    waiting.append(waiter)
                    items.append(item)
                    size += sum([len(body) for body, _ in item])
            self._dictate(waiting, items, frames.ROWS if queue else kind)
        if self._owed and kind == frames.LAST and not queue:
            # INVARIANT: however much is underway. It is what the scribe waits for, and nobody else would send it.
            self._dictate([], [], kind)

    def _dictate(self, waiting: list[Waiter], items: Sequence[Item], kind: int) -> None:
        try:
            batch = self._told.make(items)
            body = frames.rows(batch.rows)
        except Exception as e:
            for waiter in waiting:
                if not waiter.done():
                    turns.refuse(waiter, e)
            waiting, batch, body = [], Batch(0, [], [], []), b""
        self._sent.append((waiting, batch, len(body)))
        self._underway += len(body)
        # Of a crowd the scribe need not hear that nobody else is ready.
        self._owed = kind == frames.ROWS and len(batch.rows) < scribe.CROWD
        self._send(frames.frame(kind, batch.now_ms, body))

    async def _ask(self, kind: int, answer: int) -> frames.Frame:
        if self._failure is not None:
            raise self._refused()
        mine: asyncio.Future[frames.Frame] = self._loop.create_future()
        self._asked.append(mine)
        self._send(frames.frame(kind))
        found = await mine
        if found[0] != answer:
            self._fail(frames.garbage().message)
            raise self._refused()
        return found

    def _send(self, data: bytes) -> None:
        assert self._sock is not None
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError as e:
                # Not from within whoever submits: what waits is refused in one place.
                self._loop.call_soon(self._gone, e)
                return
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)
        self._unsent.append(memoryview(data))

    def _writable(self) -> None:
        assert self._sock is not None
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError as e:
                self._gone(e)
                return
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _gone(self, error: OSError) -> None:
        # It may have said why.
        if self._sock is not None:
            self._readable()
        self._fail(f"its scribe is gone: {error.strerror}")

    # --- from the scribe --------------------------------------------------------------------------------

    def _readable(self) -> None:
        assert self._sock is not None
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail("its scribe ended")
            return
        try:
            self._incoming.feed(data)
            while self._failure is None and (frame := self._incoming.take()) is not None:
                self._hear(*frame)
        except errors.CovenantError as e:
            self._fail(e.message)

    def _hear(self, kind: int, number: int, body: bytes) -> None:
        if kind == frames.DONE:
            self._acknowledged(number, body)
        elif kind == frames.FULL:
            said = frames.members(body, message=str, hint=str, where=str)
            for waiting, batch in self._taken(number):
                refused = [errors.StoreFullError(**said) for _ in batch.answers]
                self._answer(waiting, refused)
        elif kind == frames.FAILED:
            self._fail(str(frames.members(body, reason=str)["reason"]))
        elif self._asked:
            turns.answer([self._asked.popleft()], [(kind, number, body)])
        else:
            raise frames.garbage()

    def _acknowledged(self, count: int, signed: bytes) -> None:
        done = self._taken(count)
        self._files.acknowledged(signed)
        for waiting, batch in done:
            self._told.wrote(batch)
            self._answer(waiting, batch.answers)

    def _taken(self, count: int) -> list[tuple[list[Waiter], Batch]]:
        """Who waits for so many frames, the oldest."""
        if not 0 < count <= len(self._sent):
            raise frames.garbage()
        found = []
        for _ in range(count):
            waiting, batch, size = self._sent.popleft()
            self._underway -= size
            found.append((waiting, batch))
        self._moved.set()
        if self._queue and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._rest)
        return found

    def _answer(self, waiting: Sequence[Waiter], answers: Sequence[list[ledger.Row] | Exception]) -> None:
        try:
            self._told.publish(answers)
        except Exception as e:
            # As whatever a callback of the loop raises: others wait for what came with this.
            self._loop.call_exception_handler({"message": "a listener of the audit log failed", "exception": e})
        turns.answer(waiting, answers)

    def _fail(self, reason: str) -> None:
        """Refuse everything that waits, and everything later; but rows of a log that it never had are another's."""
        if self._failure is None:
            self._failure = reason
        waiting: list[asyncio.Future[Any]] = [one for group, *_ in self._sent for one in group]
        waiting += self._asked
        self._sent.clear()
        self._asked.clear()
        if self._given:
            waiting += [one for one, _ in self._queue]
            self._queue.clear()
        for waiter in waiting:
            if not waiter.done():
                turns.refuse(waiter, self._refused())
        self._moved.set()
        self._silence()
        if self._given and self._burying is None:
            self._burying = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        """Whoever reads waits for the lock of a scribe that was killed as long as our descriptors hold it."""
        if await self._let_go():
            self._files.let_readers_in()

    def _left(self) -> deque[tuple[Waiter, Item]]:
        left, self._queue = self._queue, deque()
        self._failure = self._failure or "its scribe was sent away"
        return left

    def _refused(self) -> errors.StoreError:
        return turns.refused(self._what, self._failure or self._closed or "")

    # --- the process ------------------------------------------------------------------------------------

    async def _move(self) -> None:
        self._moved.clear()
        await self._moved.wait()

    def _silence(self) -> None:
        """Hear and say no more: the scribe ends when it has nobody left to tell."""
        if self._sock is not None:
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._sock = None
        self._unsent.clear()

    async def _let_go(self) -> bool:
        """Have the process end; whether it is gone."""
        self._silence()
        process, self._process = self._process, None
        gone = process is None
        if process is not None:
            with anyio.CancelScope(shield=True):
                gone = await anyio.to_thread.run_sync(_reaped, process)
        return gone


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    # A stop of the whole group, or of the unit, is the daemon's to hear: it has rows to write on its way out. Blocked
    # before there is a process, so that there is no moment at which one of them ends it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _KEPT_OFF)
    try:
        # -I: no variable and no directory of the caller's decides what is imported.
        root = str(Path(covenant.__file__).resolve().parents[1])
        return subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _START, str(theirs.fileno()), root],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd="/",
            env={"LC_ALL": "C.UTF-8"},
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _reaped(process: subprocess.Popen[bytes]) -> bool:
    """Wait until the process is gone; one that hangs in a disk nobody can end, and the lock says that it is there."""
    for seconds in (_ENDS_SECONDS, 1.0):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return True
        process.kill()
    return False
