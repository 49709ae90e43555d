"""The files of the supervisor's log: opened with owner and mode checked, and read from their ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NoReturn

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policy import errors
from policy.audit_log import chain, events
from sandbox.storage import atomic_file

# What a writer leaves beyond the head at most.
MAX_TAIL_BYTES: Final = events.MAX_LINE_BYTES + 64 * 1024
# What one write has at most.
MOST_RECORDS: Final = 16
_CHUNK_BYTES = 1 << 20
_HINT = "run `covenant audit verify`; keep audit and audit-head aside as evidence before starting a new log"


def broken(message: str, log: Path) -> NoReturn:
    """Refuse the log, which is to be looked at before anybody writes to it.

    Raises:
        errors.LedgerError: always.
    """
    raise errors.LedgerError(message, hint=_HINT, where=str(log))


def open_directory(path: Path, stack: contextlib.ExitStack) -> int:
    """A descriptor of a directory of the log, made 0700 where there is none and closed with ``stack``.

    Raises:
        errors.LedgerError: it is not ours alone.
        OSError: it cannot be opened.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
        atomic_file.sync_directory(path.parent)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    info = os.fstat(fd)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise errors.LedgerError(
            f"the log's directory `{path}` is not ours alone", hint=f"chown and chmod 0700 {path}", where=str(path)
        )
    return fd


def check_private(info: atomic_file.Opened, name: str) -> None:
    """Refuse what is no plain file of ours alone, by that one name.

    Raises:
        errors.LedgerError: it is not.
    """
    # A second link would be a name of the same bytes outside our directory.
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        raise errors.LedgerError(f"`{name}` of the log is not a regular file with one name", where=name)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise errors.LedgerError(f"`{name}` of the log is not ours alone", hint=f"chmod 0600 {name}", where=name)


def read_private(name: str, folder: int) -> bytes | None:
    """What such a file holds, None where there is none.

    Raises:
        errors.LedgerError: as ``check_private``.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as stream:
        check_private(atomic_file.opened(fd), name)
        return stream.read(4096)


def key(name: str, folder: int, *, head: str, log: Path) -> Ed25519PrivateKey:
    """The log's own key, made where there is neither that nor a ``head``.

    Raises:
        errors.LedgerError: it is none, or was taken away.
    """
    raw = read_private(name, folder)
    if raw is None:
        if exists(head, folder):
            broken("the log's key is missing and its head is there", log)
        raw = Ed25519PrivateKey.generate().private_bytes_raw()
        atomic_file.replace(folder, name, raw)
    if len(raw) != 32:
        broken("the log's key file does not hold 32 bytes", log)
    return Ed25519PrivateKey.from_private_bytes(raw)


def show_key(name: str, folder: int, public: Ed25519PublicKey, *, log: Path) -> None:
    """Have the public key lie beside the head.

    Raises:
        errors.LedgerError: another lies there.
    """
    # INVARIANT: written after the first head, so that where it lies and no head does, the head was taken away.
    shown = chain.public_key_file(public)
    known = read_private(name, folder)
    if known is None:
        atomic_file.replace(folder, name, shown)
    elif known != shown:
        broken("the log's public key is not that of its key", log)


def exists(name: str, folder: int) -> bool:
    """Whether there is a file of that name."""
    try:
        atomic_file.which(folder, name)
    except FileNotFoundError:
        return False
    return True


def write_all(fd: int, content: bytes) -> None:
    """Write at the end of a file that was opened with O_APPEND."""
    # A short write means a full disk or a limit: the next one says which.
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def lines(fd: int, start: int, end: int, log: Path) -> Iterator[bytes]:
    """The lines between two offsets at which lines begin.

    Raises:
        errors.LedgerError: the file is shorter than that.
    """
    rest = b""
    while start < end:
        chunk = os.pread(fd, min(_CHUNK_BYTES, end - start), start)
        start += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
        if not chunk:
            broken("it became shorter while it was read", log)


def put_right(fd: int, name: str, folder: int, start: int, content: bytes, count: int) -> str | None:
    """Have the disk hold ``content`` in a file that reaches to ``start``, whatever stands there; what follows it stays.

    In words what was wrong, when anything was: what was neither of it nor a hole of a power cut is kept beside the file
    (``count`` records are in the log).

    Raises:
        OSError: the disk refused.
    """
    there = os.pread(fd, len(content), start)
    said = None if there == content else f"`{name}` got {len(content)} acknowledged bytes that it lacked"
    if any(have not in (0, want) for have, want in zip(there, content, strict=False)):
        said = f"`{name}` held other bytes than acknowledged, set aside in `{_beside(name, folder, count, there)}`"
    # Also what is there: it may be so for the kernel alone, which was refused and has told somebody who is gone.
    _write_at(fd, start, content)
    return said


def tails(events_fd: int, chain_fd: int, head: chain.Head, log: Path) -> tuple[bytes, bytes]:
    """What stands in both files beyond the head: what a writer left that died or whose disk was full. The next opening
    sets it aside, and ``covenant audit`` reads the files without it; neither where this refuses it.

    Raises:
        errors.LedgerError: in one of them it is not what one write of ours leaves.
    """
    counts = range(head.count, head.count + MOST_RECORDS)
    found = []
    for fd, name, end, openings in (
        (events_fd, "events.jsonl", head.events_bytes, ['{"id":"' for _ in counts]),
        (chain_fd, "events.chain.jsonl", head.chain_bytes, [f'{{"index":{n},"event_id":"' for n in counts]),
    ):
        extra = size(fd) - end
        tail = os.pread(fd, min(extra, MAX_TAIL_BYTES), end) if extra > 0 else b""
        if extra > MAX_TAIL_BYTES or not chain.is_one_write(tail, openings):
            broken(f"`{name}` holds {extra} bytes after the signed head that no writer of ours leaves", log)
        found.append(tail)
    return found[0], found[1]


def set_aside(fd: int, name: str, folder: int, end: int, tail: bytes, count: int) -> str:
    """Move what stands behind ``end`` of a file (``tails``), in words, into one beside it. ``count`` records are in the
    log.

    Raises:
        OSError: the disk refused.
    """
    aside = _beside(name, folder, count, tail)
    # Blanked first: who is killed before the last sync leaves a file that looks cut and may not be. What a power cut
    # then brings back behind rows that a head carries is zeros.
    _write_at(fd, end, bytes(len(tail)))
    os.ftruncate(fd, end)
    os.fsync(fd)
    return f"{len(tail)} unacknowledged bytes of `{name}` set aside in `{aside}`"


def _beside(name: str, folder: int, count: int, content: bytes) -> str:
    # Named by content: a crash in here repeats the same steps and ends in the same file.
    aside = f"{name}.aside-{count}-{hashlib.sha256(content).hexdigest()[:16]}"
    atomic_file.replace(folder, aside, content)
    return aside


def _write_at(fd: int, start: int, content: bytes) -> None:
    """Write in a file, and have the disk hold it."""
    # Not by a descriptor with O_APPEND, which pwrite(2) would append by.
    own = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        view = memoryview(content)
        while view:
            written = os.pwrite(own, view, start)
            view, start = view[written:], start + written
        os.fsync(own)
    finally:
        os.close(own)


def size(fd: int) -> int:
    """How long a file is."""
    # fstat(2) would ask for the times as well (libc.statx_which). Nobody reads or writes at the offset.
    return os.lseek(fd, 0, os.SEEK_END)


def last_line(fd: int, end: int) -> bytes:
    """The line that ends, with its newline, at offset ``end``; empty when there is none of sane length."""
    block, limit = 4096, events.MAX_LINE_BYTES + 2
    while True:
        step = min(block, end)
        chunk = os.pread(fd, step, end - step)
        if not chunk.endswith(b"\n"):
            return b""
        at = chunk.rfind(b"\n", 0, -1)
        if at >= 0 or step == end:
            return chunk[at + 1 : -1]
        if block > limit:
            return b""
        block *= 8
