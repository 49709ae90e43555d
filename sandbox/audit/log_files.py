"""Files of the supervisor's log: open them with owner and mode checked, and read them from their ends."""

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

EVENTS: Final = "events.jsonl"
CHAIN: Final = "events.chain.jsonl"
# The most bytes that a writer leaves beyond the head.
MAX_TAIL_BYTES: Final = events.MAX_LINE_BYTES + 64 * 1024
# The most records of one write.
MOST_RECORDS: Final = 16
_CHUNK_BYTES = 1 << 20
_HINT = "run `covenant audit verify`; keep audit and audit-head aside as evidence before starting a new log"


def broken(message: str, log: Path) -> NoReturn:
    """Refuse the log: an operator must inspect it before the next write.

    Raises:
        errors.LedgerError: Always raised.
    """
    raise errors.LedgerError(message, hint=_HINT, where=str(log))


def open_directory(path: Path, stack: contextlib.ExitStack) -> int:
    """Open a directory of the log. It is made with mode 0700 if it is absent; ``stack`` closes the descriptor.

    Raises:
        errors.LedgerError: Raised when another user owns it or has access to it.
        OSError: Raised when it cannot be opened.
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


def check_private(info: atomic_file.OpenedFile, name: str, folder: int) -> None:
    """Refuse a file of an open directory that is not regular, has a second name, or is another user's or open to one.

    Raises:
        errors.LedgerError: Raised when the file is refused.
    """
    # A second link would be a name of the same bytes outside our directory.
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        raise errors.LedgerError(f"`{name}` of the log is not a regular file with one name", where=name)
    if info.st_uid != os.geteuid() or info.st_mode & 0o077:
        place = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
        raise errors.LedgerError(f"`{place}` of the log is not ours alone", hint=f"chmod 0600 {place}", where=place)


def read_private(name: str, folder: int, *, max_bytes: int = 4096) -> bytes | None:
    """Read the first ``max_bytes`` of a private file. Returns None if it does not exist.

    Raises:
        errors.LedgerError: Raised when ``check_private`` refuses the file.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as stream:
        check_private(atomic_file.opened(fd), name, folder)
        return stream.read(max_bytes)


def key(name: str, folder: int, *, head: str, log: Path) -> Ed25519PrivateKey:
    """Read the log's own key. It is generated if neither the key nor a ``head`` exists.

    Raises:
        errors.LedgerError: Raised when the file is no key, or is missing beside a head.
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
    """Write the public key beside the head, if it is not there.

    Raises:
        errors.LedgerError: Raised when another public key is there.
    """
    # INVARIANT: write it after the first head. A public key without a head then shows that the head was removed.
    show_key_text(name, folder, chain.public_key_file(public), log=log)


def show_key_text(name: str, folder: int, shown: bytes, *, log: Path) -> None:
    """Write a public key as it is written, if it is not there.

    Raises:
        errors.LedgerError: Raised when another public key is there.
    """
    known = read_private(name, folder)
    if known is None:
        atomic_file.replace(folder, name, shown)
    elif known != shown:
        broken("the log's public key is not that of its key", log)


def exists(name: str, folder: int) -> bool:
    """Whether a file of that name exists."""
    try:
        atomic_file.which(folder, name)
    except FileNotFoundError:
        return False
    return True


def write_all(fd: int, content: bytes) -> None:
    """Append all of ``content`` to a file that was opened with O_APPEND."""
    # A short write means a full disk or a limit; the next write raises the error.
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def lines(fd: int, start: int, end: int, log: Path) -> Iterator[bytes]:
    """Yield the lines between two offsets; a line begins at each of them.

    Raises:
        errors.LedgerError: Raised when the file is shorter than ``end``.
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
    """Write ``content`` durably at ``start`` of a file that is at least that long. Bytes behind it stay.

    Returns a description of the difference if there was one. Bytes that are neither part of ``content`` nor zeros of a
    power cut are first kept in a file beside it. ``count`` is the number of records in the log.

    Raises:
        OSError: Raised when the disk refuses a write.
    """
    there = os.pread(fd, len(content), start)
    said = None if there == content else f"`{name}` got {len(content)} acknowledged bytes that it lacked"
    if any(have not in (0, want) for have, want in zip(there, content, strict=False)):
        said = f"`{name}` held other bytes than acknowledged, set aside in `{_beside(name, folder, count, there)}`"
    # Write equal bytes as well: they may be in the page cache only. The disk may have refused them, and the kernel
    # reported that to a process that has ended.
    _write_at(fd, start, content)
    return said


def tails(events_fd: int, chain_fd: int, head: chain.Head, log: Path) -> tuple[bytes, bytes]:
    """Return the bytes of both files beyond the head. A writer that died or whose disk was full leaves them.

    The next opening sets them aside, and ``covenant audit`` reads the files without them. Both refuse the log if this
    function raises.

    Raises:
        errors.LedgerError: Raised when the bytes of a file are not the remains of one write.
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
    """Move the bytes behind ``end`` of a file (``tails``) into a file beside it, and return a description.

    ``count`` is the number of records in the log.

    Raises:
        OSError: Raised when the disk refuses a write.
    """
    aside = _beside(name, folder, count, tail)
    # Blank the bytes before the cut: a kill before the last sync leaves a file that looks cut and may not be on disk.
    # A power cut then brings back zeros, not old bytes, behind rows that a head carries.
    _write_at(fd, end, bytes(len(tail)))
    os.ftruncate(fd, end)
    os.fsync(fd)
    return f"{len(tail)} unacknowledged bytes of `{name}` set aside in `{aside}`"


def _beside(name: str, folder: int, count: int, content: bytes) -> str:
    # The name contains a digest of the content: after a crash the same steps end in the same file.
    aside = f"{name}.aside-{count}-{hashlib.sha256(content).hexdigest()[:16]}"
    atomic_file.replace(folder, aside, content)
    return aside


def _write_at(fd: int, start: int, content: bytes) -> None:
    """Write at an offset of a file, and sync it."""
    # Open it again: with O_APPEND pwrite(2) ignores the offset.
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
    """Return the length of a file in bytes."""
    # fstat(2) would read the times as well (libc.statx_which). No code reads or writes at the file's offset.
    return os.lseek(fd, 0, os.SEEK_END)


def last_line(fd: int, end: int) -> bytes:
    """Return the line whose newline ends at offset ``end``. Empty if there is none within the maximum length."""
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
