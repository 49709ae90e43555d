"""The log's files, for one thread: a group of rows is acknowledged by one sync.

    audit-head/pending     written first, and synced: the rows, and the signed head behind them
    (policy.audit_log.write_ahead) audit/events.jsonl, audit/events.chain.jsonl     written while the disk takes that,
    synced now and then audit-head/head.json   written when ``pending`` is synced, itself synced now and then

So the files are what ``pending`` leads to, or lack some of it; the next opening completes them. What stands in them
beyond it, as a power cut may leave it, nobody acknowledged: it is set aside in a file beside, and told. Readers wait
for the lock that a write holds on ``events.jsonl`` (``covenant audit verify``).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from covenant.stores.audit import paths
from policy import errors
from policy.audit_log import chain, events, write_ahead
from sandbox.storage import atomic_file

# What `pending` has room for before the files are synced and it begins anew; its blocks are there from the start, so
# that a sync of it writes no metadata.
PENDING_BYTES: Final = 4 * 1024 * 1024
LOCK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.002
NEW: Final = ".new"

_CHUNK_BYTES: Final = 1 << 20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_BLANK: Final = b" " * (chain.SLOT_BYTES - 1) + b"\n"
_HINT: Final = "run `covenant audit verify`; keep audit and audit-head aside as evidence before starting a new log"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is acknowledged, what ``head.json`` holds, and how long the files are."""

    head: chain.Head
    shown: bytes
    events_bytes: int
    chain_bytes: int


class Files:
    """The open files of the log. ``head`` is what is acknowledged; ``recovered`` what was found and set right."""

    def __init__(self, at: paths.Places) -> None:
        """Open the files.

        Raises:
            errors.LedgerError: a file is unsafe, or the log does not hold together.
        """
        self.recovered: list[str] = []
        self.at = at
        self.head = self._before = chain.Head()
        self._end = 0
        self._last_signed: tuple[chain.Head, bytes] | None = None
        self._writing = threading.Lock()
        # Whether a write failed: the disk's state is unknown then, and the next opening finds out.
        self._failed = False
        with contextlib.ExitStack() as stack:
            new = not any(at.exists(name) for name in (paths.HEAD, paths.KEY, paths.PENDING))
            self.events = self._file(paths.EVENTS, at.log, stack)
            self.chain = self._file(paths.CHAIN, at.log, stack)
            if new and (os.fstat(self.events).st_size or os.fstat(self.chain).st_size):
                self._broken("the log holds records and its head is missing")
            self.key = at.signing_key(make=new or not at.exists(paths.HEAD))
            self._signer = chain.key_id(self.key.public_key())
            self._head_fd = self._file(paths.HEAD, at.head, stack)
            self._pending = self._file(paths.PENDING, at.head, stack)
            with self._turn():
                self._recover()
            self._identify()
            self._stack = stack.pop_all()

    def append(self, rows: Sequence[chain.Row]) -> None:
        """Acknowledge rows: when this returns they are durable.

        Raises:
            errors.StoreFullError: there is no room for them; the log is as it was.
            errors.LedgerError, OSError: anything else; nobody knows what is on the disk until it is opened again.
        """
        lines = b"".join([row.line + b"\n" for row in rows])
        entries, before, head = chain.extend(self.head, rows)
        record = b"".join((self._signed(head), b"\n", lines))
        with self._writing, self._turn():
            self._check_names()
            if self._end + len(record) > PENDING_BYTES:
                self._settle()
            try:
                _write(self._pending, record, self._end)
                # This begins to write to the disk, and does not wait: the files get theirs meanwhile. It is no more
                # than advice, which a file system may not take; the sync below tells what became of it.
                with contextlib.suppress(OSError):
                    os.posix_fadvise(self._pending, self._end, len(record), os.POSIX_FADV_DONTNEED)
                _write(self.events, lines, self.head.events_bytes)
                _write(self.chain, entries, self.head.chain_bytes)
                shown = self._slots(head, before)
                os.fdatasync(self._pending)
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                self._take_back()
                raise self._full(f"the audit log could not take {len(rows)} rows", e) from e
            self.head, self._before = head, before
            self._end += len(record)
            _write(self._head_fd, shown, 0)

    def settle(self) -> None:
        """Sync the files, so that they need nothing of ``pending``."""
        with self._turn():
            self._settle()

    def replace(self, before: chain.Head, head: chain.Head) -> None:
        """Put the files beside the log's, named ``.new`` and synced, in their place: all of them or none.

        ``head`` is theirs, ``before`` their head one row before.
        """
        with self._turn():
            self._settle()
            # The commit: before it the log is the old one, after it the next opening finishes what is left to do.
            record = write_ahead.opening(self._signed(before), self._signed(head), rebased=True)
            _write(self._pending, record, 0)
            os.fdatasync(self._pending)
            self._rename(head)
            self.head, self._before = head, before
            self._show_again()
            self._settle()

    def lines(self, start: int = 0, end: int | None = None) -> Iterator[tuple[int, bytes]]:
        """The acknowledged lines between two offsets where lines begin, each with its own."""
        stop = self.head.events_bytes if end is None else end
        return _lines(self.events, start, stop)

    def entries(self) -> Iterator[tuple[int, bytes]]:
        """The acknowledged lines of the chain."""
        return _lines(self.chain, 0, self.head.chain_bytes)

    def snapshot(self) -> Snapshot:
        """How the files are between two writes."""
        with self._writing:
            sizes = (os.fstat(fd).st_size for fd in (self.events, self.chain))
            return Snapshot(self.head, os.pread(self._head_fd, chain.HEAD_BYTES, 0), *sizes)

    def close(self) -> None:
        """Sync and close the files. After a failed write only close them."""
        # INVARIANT: a refused sync is told once (lib/errseq.c of Linux), and the next one succeeds without the rows. So
        # `pending`, which still holds them, must not begin anew.
        if not self._failed:
            with contextlib.suppress(OSError, errors.CovenantError):
                self.settle()
        self._stack.close()

    # --- opening ----------------------------------------------------------------------------------------

    def _file(self, name: str, folder: int, stack: contextlib.ExitStack) -> int:
        fd = self.at.file(name, folder=folder)
        stack.callback(os.close, fd)
        return fd

    def _recover(self) -> None:
        """Bring the files to what was acknowledged.

        (1) What is acknowledged: `pending` where it begins with a head that verifies, else the newest in `head.json`.
        (2) A cut that was decided is finished.
        (3) The rows of `pending` are written again, also where they are there; what is beyond is set aside.
        (4) The last record must be the one that the head signs.
        (5) The files and `head.json` are synced.
        """
        # (1)
        public = self.key.public_key()
        raw = os.pread(self._pending, os.fstat(self._pending).st_size, 0)
        found = write_ahead.replay(raw, public)
        shown_raw = os.pread(self._head_fd, chain.HEAD_BYTES, 0)
        slots = chain.read_heads(shown_raw, public)
        shown = slots[0] if slots else None
        if found is None:
            if shown is None and (os.fstat(self._head_fd).st_size or os.fstat(self.events).st_size):
                self._broken("no head record verifies under the log's key")
            head = shown or chain.Head()
            found = write_ahead.Replay(head, head, slots[-1] if slots else head, b"", b"", 0, b"")
        # INVARIANT: before a file changes or `head.json` names its rows. A daemon that was killed may have left
        # `pending` without its sync.
        _hear_of_refusals(self._pending)
        _write(self._pending, raw[: found.end], 0)
        os.fdatasync(self._pending)
        # (2)
        if found.rebased:
            self._rename(found.base)
        else:
            self._discard_new()
            if shown is not None and shown.count > found.head.count:
                self._broken("the head names rows that `pending` does not hold")
        # (3)
        _hear_of_refusals(self.events, self.chain, self._head_fd)
        base, head = found.base, found.head
        self._complete(self.events, paths.EVENTS, found.events, base.events_bytes, head)
        self._complete(self.chain, paths.CHAIN, found.chain, base.chain_bytes, head)
        # (4)
        self._check_last(head)
        self.head, self._before = head, found.before
        self._show_again()
        # (5)
        self._settle()

    def _complete(self, fd: int, name: str, lines: bytes, base: int, head: chain.Head) -> None:
        size, end = os.fstat(fd).st_size, base + len(lines)
        if size < base:
            self._broken(f"`{name}` is shorter than its signed head says")
        there = os.pread(fd, len(lines), base)
        if there != lines:
            # After a power cut blocks of a file may hold zeros, or nothing yet.
            if there.strip(b"\0") and not lines.startswith(there):
                self._aside(name, there, head.count)
            self.recovered.append(f"`{name}` got {len(lines)} acknowledged bytes that it lacked or held otherwise")
        # INVARIANT: also where they are there. The kernel shows what the disk has refused as if it were written, and
        # told a daemon that is gone.
        _write(fd, lines, base)
        if size > end:
            self._aside(name, os.pread(fd, size - end, end), head.count)
            os.ftruncate(fd, end)

    def _aside(self, name: str, tail: bytes, count: int) -> None:
        # Named by content: a crash in here repeats the same steps and ends in the same file.
        aside = f"{name}.aside-{count}-{hashlib.sha256(tail).hexdigest()[:16]}"
        atomic_file.replace(self.at.log, aside, tail)
        self.recovered.append(f"{len(tail)} unacknowledged bytes of `{name}` set aside in `{aside}`")

    def _check_last(self, head: chain.Head) -> None:
        if not head.count:
            return
        event = last_line(self.events, head.events_bytes)
        anchor = chain.Anchor.parse(last_line(self.chain, head.chain_bytes))
        expected = (head.chain_hash_hex, chain.event_hash(event), head.count - 1)
        if anchor is None or (anchor.chain_hash_hex, anchor.event_hash_hex, anchor.index) != expected:
            self._broken("the last record is not the one that the head signs")

    # --- writing ----------------------------------------------------------------------------------------

    def _signed(self, head: chain.Head) -> bytes:
        # Two signatures of one head are the same bytes (RFC 8032), and the newest is asked for again and again.
        last = self._last_signed
        if last is None or last[0] is not head:
            last = self._last_signed = head, chain.signed_head(head, self.key, signer=self._signer)
        return last[1]

    def _show_again(self) -> None:
        _write(self._head_fd, self._slots(self.head, self._before), 0)

    def _slots(self, head: chain.Head, before: chain.Head) -> bytes:
        """Return the bytes of ``head.json``: both heads signed, each in its slot; a slot without a head is blank."""
        heads = {one.count: one for one in (before, head)}.values()
        # ``head`` first: its signature is the one that ``_signed`` still has.
        signed = {chain.slot_offset(one): chain.slot(self._signed(one)) for one in reversed(heads)}
        return signed.get(0, _BLANK) + signed.get(chain.SLOT_BYTES, _BLANK)

    def _settle(self) -> None:
        if not os.fstat(self._head_fd).st_size:
            self._show_again()
        for fd in (self.events, self.chain, self._head_fd):
            os.fdatasync(fd)
        # INVARIANT: only now: until the files are synced, what they lack is nowhere else.
        record = write_ahead.opening(self._signed(self._before), self._signed(self.head))
        size = os.fstat(self._pending).st_size
        if size != PENDING_BYTES:
            # INVARIANT: no row stands behind an opening that is not there: where this fails, the next begins here.
            self._end = PENDING_BYTES
            try:
                os.ftruncate(self._pending, 0)
                _write(self._pending, record + bytes(PENDING_BYTES - len(record)), 0)
                os.fsync(self._pending)
            except OSError as e:
                if e.errno not in _FULL:
                    raise
                # The files need nothing of it, and nothing else was begun.
                raise self._full("the audit log has no room for the rows that come", e) from e
        else:
            # The byte behind it ends what an earlier use left there.
            _write(self._pending, record + b"\0", 0)
            # INVARIANT: before rows stand behind it. A power cut may keep any pages of one sync: rows of the new use
            # behind the old opening would be no rows, and the log would end before what its head says.
            os.fdatasync(self._pending)
        self._end = len(record)

    def _take_back(self) -> None:
        """Undo a group that there was no room for."""
        os.ftruncate(self.events, self.head.events_bytes)
        os.ftruncate(self.chain, self.head.chain_bytes)
        if os.fstat(self._pending).st_size > PENDING_BYTES:
            os.ftruncate(self._pending, max(PENDING_BYTES, self._end))
        _write(self._pending, b"\0", self._end)
        os.fdatasync(self._pending)

    def _rename(self, head: chain.Head) -> None:
        held: int | None = None
        try:
            for name, size in ((paths.EVENTS, head.events_bytes), (paths.CHAIN, head.chain_bytes)):
                with contextlib.suppress(FileNotFoundError):
                    self._check_size(name + NEW, size)
                    if name == paths.EVENTS:
                        # INVARIANT: whoever finds the new file under its name finds it locked: its chain comes later.
                        held = self.at.file(name + NEW, folder=self.at.log)
                        fcntl.flock(held, fcntl.LOCK_EX)
                    os.rename(name + NEW, name, src_dir_fd=self.at.log, dst_dir_fd=self.at.log)
            os.fsync(self.at.log)
            if held is not None:
                # Whoever waits for the lock of the old file looks again at which file has the name (covenant audit).
                os.dup2(held, self.events, inheritable=False)
        finally:
            if held is not None:
                os.close(held)
        for fd, name in ((self.events, paths.EVENTS), (self.chain, paths.CHAIN)):
            self._take_over(fd, name)
        self._identify()

    def _check_size(self, name: str, size: int) -> None:
        fd = self.at.file_if_there(name)
        try:
            if os.fstat(fd).st_size != size:
                self._broken(f"`{name}` is not what the signed head says")
        finally:
            os.close(fd)

    def _take_over(self, fd: int, name: str) -> None:
        """Have the descriptor be of the file that now has the name."""
        fresh = self.at.file(name, folder=self.at.log)
        try:
            if not os.path.sameopenfile(fd, fresh):
                os.dup2(fresh, fd, inheritable=False)
        finally:
            os.close(fresh)

    def _identify(self) -> None:
        infos = (os.fstat(fd) for fd in (self.events, self.chain, self._pending, self._head_fd))
        self._identities = [(info.st_dev, info.st_ino) for info in infos]

    def _discard_new(self) -> None:
        for name in (paths.EVENTS, paths.CHAIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + NEW, dir_fd=self.at.log)

    def _check_names(self) -> None:
        """The open files must still be the ones under their names, and hold what we wrote: anything else was not us."""
        for name, folder, identity, size in (
            (paths.EVENTS, self.at.log, self._identities[0], self.head.events_bytes),
            (paths.CHAIN, self.at.log, self._identities[1], self.head.chain_bytes),
            (paths.PENDING, self.at.head, self._identities[2], None),
            (paths.HEAD, self.at.head, self._identities[3], None),
        ):
            try:
                found, length = atomic_file.which(folder, name)
            except FileNotFoundError:
                self._broken(f"`{name}` was removed while the log was open")
            if found != identity:
                self._broken(f"`{name}` was replaced while the log was open")
            if size is not None and length != size:
                self._broken(f"somebody else wrote to `{name}`")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock that readers wait for; wait at most ``LOCK_SECONDS`` for them.

        The lock is theirs, so that they see the files between two writes. A reader needs it for as long as it takes to
        look at sizes; whoever holds it longer cannot hold up what has to be written down.
        """
        atomic_file.take(self.events, LOCK_SECONDS, poll_seconds=_POLL_SECONDS)
        try:
            yield
        except errors.StoreFullError:
            raise
        except BaseException:
            self._failed = True
            raise
        finally:
            fcntl.flock(self.events, fcntl.LOCK_UN)

    def _full(self, message: str, error: OSError) -> errors.StoreFullError:
        where = str(self.at.home / "audit")
        return errors.StoreFullError(
            f"{message}: {error.strerror}", hint="make room on the disk and repeat", where=where
        )

    def _broken(self, message: str) -> NoReturn:
        raise errors.LedgerError(message, hint=_HINT, where=str(self.at.home / "audit"))


def _hear_of_refusals(*fds: int) -> None:
    """Have the kernel tell now that an earlier write was refused: it tells the first sync after an opening.

    The caller then writes again all that such an error can be about, so that a later error is one of its own writes.
    """
    for fd in fds:
        with contextlib.suppress(OSError):
            os.fdatasync(fd)


def last_line(fd: int, end: int) -> bytes:
    """The line that ends, with its newline, at offset ``end``; empty when there is none of sane length."""
    size = 4096
    while True:
        start = max(0, end - size)
        chunk = os.pread(fd, end - start, start)
        if not chunk.endswith(b"\n"):
            return b""
        at = chunk.rfind(b"\n", 0, -1)
        if at >= 0 or not start:
            return chunk[at + 1 : -1]
        if size > events.MAX_LINE_BYTES:
            return b""
        size *= 8


def _lines(fd: int, start: int, end: int) -> Iterator[tuple[int, bytes]]:
    rest, offset = b"", start
    while start < end:
        chunk = os.pread(fd, min(_CHUNK_BYTES, end - start), start)
        if not chunk:
            raise errors.LedgerError("the log became shorter while it was read")
        start += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield offset, line
            offset += len(line) + 1


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done
