"""A process that writes the log for the daemon while many write at once: chain, signatures and syncs beside its loop.

It is given the open log (``frames.HELLO``) and hands it back (``GONE``); between the two nobody else writes it. Rows
come while the daemon still makes others, and are numbered and chained at once. What stands together when nothing more
is there to be read is one group: one signed head, one sync, one answer.

It ends with the daemon: what was not acknowledged by then is not written. INVARIANT: it holds the log's directory, and
with it the lock that whoever opens the log waits for (``places``), until it is gone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.stores.audit import files, frames, places
from policy import errors, ledger
from sandbox import core_dumps

# A group is written when nobody else is ready, or when it has so much: the daemon makes the next meanwhile.
CROWD: Final = 32
# Less than the daemon sends before it hears of anything: one that holds back always gets an answer.
_GROUP_BYTES: Final = 1 << 19
# Groups under one hold of the lock that readers wait for: some milliseconds.
_SERIES: Final = 16
_AT_ONCE: Final = 256 * 1024

FDS: Final = 6


class Scribe:
    """Serves one daemon."""

    def __init__(self, sock: socket.socket, of: files.Files) -> None:
        self._sock = sock
        self._files = of
        self._incoming = frames.Incoming()
        self._hold = contextlib.ExitStack()
        self._series = 0
        # The group: its lines, its chain, the head behind it and the one a row before.
        self._lines: list[bytes] = []
        self._entries: list[bytes] = []
        self._ahead = self._before = of.head
        self._frames = self._rows = self._bytes = 0
        # Whether nobody else was ready to write behind it.
        self._due = False

    def serve(self) -> None:
        """Write what comes, until the daemon takes the log back or is gone.

        Raises:
            errors.CovenantError, OSError: nobody knows what is on the disk; the daemon was told.
        """
        try:
            # Whichever way it ends, the readers' lock is let go; where it ends well `head.json` is written before that.
            with self._hold:
                while self._step():
                    pass
        except (BrokenPipeError, ConnectionResetError):
            # The daemon is gone: nobody waits for an answer.
            return
        except Exception as e:
            reason = e.message if isinstance(e, errors.CovenantError) else getattr(e, "strerror", "") or str(e)
            with contextlib.suppress(OSError):
                self._sock.sendall(frames.document(frames.FAILED, 0, reason=reason))
            raise

    def _step(self) -> bool:
        frame = self._incoming.take()
        if frame is not None:
            return self._read(*frame)
        try:
            data = self._sock.recv(_AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            if self._frames and (self._due or self._rows >= CROWD or self._bytes >= _GROUP_BYTES):
                self._commit()
                return True
            self._release()
            data = self._sock.recv(_AT_ONCE)
        self._incoming.feed(data)
        return bool(data)

    def _read(self, kind: int, number: int, body: bytes) -> bool:
        if kind in (frames.ROWS, frames.LAST):
            self._frames += 1
            if body:
                self._add(number, body)
            self._due = kind == frames.LAST
            return True
        if kind not in (frames.SHOW, frames.BYE):
            raise frames.garbage()
        if self._frames:
            self._commit()
        self._release()
        if kind == frames.SHOW:
            shown = self._files.snapshot()
            sizes = frames.SIZES.pack(shown.events_bytes, shown.chain_bytes)
            self._sock.sendall(frames.frame(frames.SHOWN, 0, sizes + shown.shown + self._files.hand().head))
            return True
        self._sock.sendall(frames.document(frames.GONE, 0, **told(self._files.hand())))
        return False

    def _add(self, time_ms: int, body: bytes) -> None:
        """Number and chain rows; they are written with their group."""
        rows = frames.read_rows(body)
        anchors = zip(rows.ids, itertools.repeat(time_ms), strict=False)
        entries, self._before, self._ahead = ledger.extend_hashed(
            self._ahead, rows.hashes, anchors, len(rows.lines), rows.last_size
        )
        self._lines.append(rows.lines)
        self._entries.append(entries)
        self._rows += len(rows.ids)
        self._bytes += len(body)

    def _commit(self) -> None:
        if not self._lines:
            # Of whoever waits for what was before.
            self._sock.sendall(frames.frame(frames.DONE, self._frames, self._files.hand().head))
            self._forget()
            return
        if not self._series:
            self._hold.enter_context(self._files.held())
        self._series += 1
        lines, entries = b"".join(self._lines), b"".join(self._entries)
        try:
            signed = self._files.commit(lines, entries, self._before, self._ahead)
        except errors.StoreFullError as e:
            document = frames.document(frames.FULL, self._frames, message=e.message, hint=e.hint, where=e.where)
            self._sock.sendall(document)
        else:
            self._sock.sendall(frames.frame(frames.DONE, self._frames, signed))
        self._forget()
        if self._series >= _SERIES:
            self._release()

    def _forget(self) -> None:
        """Begin a group behind what is acknowledged."""
        self._ahead = self._before = self._files.head
        self._lines, self._entries = [], []
        self._frames = self._rows = self._bytes = 0
        self._due = False

    def _release(self) -> None:
        if self._series:
            self._series = 0
            self._hold.close()


def told(given: files.Handed) -> dict[str, str | int]:
    """The members of a document that say how the log is handed over."""
    return {"head": given.head.decode(), "before": given.before.decode(), "end": given.end}


def main(fd: int) -> None:
    """Serve the daemon at the other end of this socket, for as long as it has the log written here."""
    # The key is in memory: no core dump.
    core_dumps.forbid()
    with socket.socket(fileno=fd) as sock:
        sock.sendall(frames.frame(frames.READY))
        of = _given(sock)
        if of is None:
            return
        status = 0
        try:
            Scribe(sock, of).serve()
        except Exception:
            status = 1
        # Nothing is left that the end of an interpreter would do.
        sys.stderr.flush()
        os._exit(status)


def _given(sock: socket.socket) -> files.Files | None:
    """The log, None where the daemon went away before it gave it."""
    incoming = frames.Incoming()
    fds: list[int] = []
    while (frame := incoming.take()) is None:
        data, more, _, _ = socket.recv_fds(sock, _AT_ONCE, FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return None
        fds += more
        incoming.feed(data)
    kind, _, body = frame
    if kind != frames.HELLO or len(fds) != FDS:
        raise frames.garbage()
    given = frames.members(body, home=str, key=str, head=str, before=str, end=int)
    log, head, events, chain, pending, head_file = fds
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(given["key"]))
    heads = (given["head"].encode(), given["before"].encode())
    handed = files.Handed((events, chain, pending, head_file), *heads, given["end"])
    return files.Files(places.Places(Path(given["home"]), log, head), (handed, key))
