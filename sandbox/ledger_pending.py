"""One write of the supervisor's log that is acknowledged by one sync: of the file ``pending`` beside the head.

    signed head, signed head, signed head, rows     where the files stood, twice; the head behind the rows, and the rows

It is what the daemon's log has (policy.pending) with one group in it. The files themselves get the rows too, and no
sync: whoever writes next syncs them first (``Ledger``), and after a power cut they are completed from here. There is
one such write at most whose rows the files may lack: the newest.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from policy import ledger, pending
from sandbox import ledger_files
from sandbox.kernel import libc

NAME: Final = "pending"
# Its blocks are there from the start, so that a sync of it writes no metadata; a write that is larger is synced in the
# files, as any other.
BYTES: Final = 64 * 1024
_BLOCK: Final = 512


def fill(fd: int) -> None:
    """Have the blocks of a file that is new, or was cut off while it was made.

    Raises:
        OSError: there is no room for them.
    """
    size = ledger_files.size(fd)
    while size < BYTES:
        size += os.pwrite(fd, bytes(BYTES - size), size)
        os.fsync(fd)


def rouse(fd: int) -> None:
    """Write a block that is never read, since somebody is about to wait for the disk: one that had nothing to do for
    some milliseconds takes twice as long (0.5 ms; 0.22 ms right after another write, 0.37 ms 5 ms after it)."""
    with contextlib.suppress(OSError):
        os.pwritev(fd, [bytes(_BLOCK)], BYTES - _BLOCK, os.RWF_DSYNC)


def fits(fd: int, rows: Sequence[ledger.Row]) -> bool:
    """Whether these rows can be acknowledged here: the file has its blocks, and room for them."""
    room = 3 * ledger.SLOT_BYTES + sum(len(row.line) + 1 for row in rows)
    return ledger_files.size(fd) >= BYTES >= room + _BLOCK


def write(
    fd: int, base: bytes, head: bytes, rows: Sequence[ledger.Row], meanwhile: Callable[[], list[bytes]]
) -> list[bytes]:
    """Acknowledge rows that lead from the signed head ``base`` to the signed ``head``: durable when this returns, with
    what ``meanwhile`` gave, which is called while the disk takes them.

    INVARIANT: what stands there was synced in the files before. Who is killed over it leaves what the kernel has and
    the disk may not, and whoever goes on from it syncs the files.

    Raises:
        OSError: it is not durable, and whoever looks next most probably finds nothing here.
    """
    # The line behind it ends it: nothing that is left of an earlier one is read on from there.
    record = pending.opening(base, base) + pending.group(head, rows) + b"\n"
    try:
        if os.pwrite(fd, record, 0) != len(record):
            raise OSError(errno.EIO, "it was written in part")
        libc.start_writing(fd)
        made = meanwhile()
        os.fdatasync(fd)
    except OSError:
        drop(fd)
        raise
    return made


def drop(fd: int) -> None:
    """Take back a write that is not to count: nobody was told of it."""
    with contextlib.suppress(OSError):
        os.pwritev(fd, [bytes(ledger.SLOT_BYTES)], 0, os.RWF_DSYNC)


def read(fd: int, public: Ed25519PublicKey, newest: ledger.Head | None) -> pending.Replay | None:
    """The write that stands there, unless the log went on after it: ``newest`` is the newest head in ``head.json``."""
    raw = os.pread(fd, min(BYTES, ledger_files.size(fd)), 0)
    lines = raw.split(b"\n", 3)
    # Most often an earlier one stands there, which says so itself: three signatures are not looked at for that.
    if len(lines) < 4 or (newest is not None and newest.count > ledger.said_index(lines[2]) + 1):
        return None
    found = pending.replay(raw, public)
    return None if found is None or (newest is not None and newest.count > found.head.count) else found


def complete(fd: int, lines: bytes, base: int, most_bytes: int) -> str | None:
    """Have a file of the log hold ``lines`` from ``base`` on, where a power cut may have left any part of them and
    zeros for the rest; what follows them stays. What is wrong in words; empty when it was completed, None where it held
    them already.

    Raises:
        OSError: it cannot be read or written.
    """
    size = ledger_files.size(fd)
    if size < base:
        return "is shorter than its signed head says"
    there = os.pread(fd, len(lines), base)
    if there == lines:
        return None
    if any(have not in (0, want) for have, want in zip(there, lines, strict=False)):
        return "holds other rows than `pending` does"
    after = base + len(lines)
    if size - after > most_bytes:
        return f"holds {size - after} bytes after the signed head that no writer of ours leaves"
    rest = os.pread(fd, size - after, after) if size > after else b""
    os.ftruncate(fd, base)
    ledger_files.write_all(fd, lines + rest)
    return ""
