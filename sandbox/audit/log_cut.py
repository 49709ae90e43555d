"""Cut the oldest rows of the supervisor's log and archive them: the log begins anew with a signed record of the cut.

Every open log holds a shared lock of its head's directory, and so does every process that was forked from its owner. A
cut takes the lock alone: it is refused while a supervisor or a run lives.

The new files are written beside the old ones (``*.new``). The new head is the commit: a start finishes a cut whose head
is there, and removes the files of a cut whose head is not.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policy import errors
from policy.audit_log import chain, events, merkle, truncation, verify, write_ahead
from sandbox.audit import log_files
from sandbox.storage import atomic_file

EVENTS, CHAIN = log_files.EVENTS, log_files.CHAIN
_NEW: Final = tuple(name + write_ahead.NEW for name in (EVENTS, CHAIN))
_PARTS: Final = tuple(atomic_file.temporary_name(name) for name in _NEW)
_HEAD, _PUBLIC, _KEY = "head.json", "ledger.pub", "ledger.key"
LOCK_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Done:
    """The number of rows cut and of rows left, and the time of the last row cut (Unix milliseconds)."""

    cut: int
    left: int
    last_ms: int | None


def share(folder: int, head_folder: int, log: Path) -> None:
    """Finish or remove what a killed cut left, and keep cuts away while this descriptor or a copy of it is open.

    Call it before the files are opened.

    Raises:
        errors.LedgerError: a cut held the log for ``LOCK_SECONDS``.
    """
    while True:
        if _remains(folder):
            _take(head_folder, log, shared=False)
            _settle(folder, head_folder)
            fcntl.flock(head_folder, fcntl.LOCK_UN)
        _take(head_folder, log, shared=True)
        if not _remains(folder):
            return
        # A cut was killed between the two locks.
        fcntl.flock(head_folder, fcntl.LOCK_UN)


def is_of(head: chain.Head, events_fd: int, chain_fd: int) -> bool:
    """Whether both files end exactly where the head says, in the records that it signs."""
    ends = head.events_bytes, head.chain_bytes
    if (log_files.size(events_fd), log_files.size(chain_fd)) != ends:
        return False
    last = log_files.last_line(events_fd, ends[0]), log_files.last_line(chain_fd, ends[1])
    return chain.is_last(*last, head.chain_hash_hex, head.count)


def _remains(folder: int) -> bool:
    return any(log_files.exists(name, folder) for name in (*_NEW, *_PARTS))


def _take(head_folder: int, log: Path, *, shared: bool) -> None:
    if not atomic_file.take(head_folder, LOCK_SECONDS, shared=shared):
        raise errors.LedgerError("the log is being cut", hint="wait for it, then repeat", where=str(log))


def cut(
    state: Path,
    before_ms: int,
    archive: Path,
    *,
    issuer: Mapping[str, str],
    now_ms: int,
    before: Callable[[], None] = lambda: None,
) -> Done:
    """Cut every row up to the last that is older than ``before_ms``, and keep the cut rows in ``archive``.

    The archive is a log of its own, with a head signed by the log's key. A run that the log shows as started and not as
    ended keeps all rows from its start on. ``before`` is called under the lock, before anything is changed.

    Raises:
        errors.LedgerError: a supervisor or a run has the log open, or it does not verify. Nothing is changed.
        errors.UsageError: the archive exists.
        OSError: a disk refused a write. The log is unchanged.
    """
    # Imported only here: every run opens the log, and none cuts it.
    from sandbox.audit import checkpoints

    with contextlib.ExitStack() as stack:
        log = state / "audit"
        folder = log_files.open_directory(log, stack)
        head_folder = log_files.open_directory(state / "audit-head", stack)
        if not atomic_file.take(head_folder, 0):
            raise errors.LedgerError(
                "the log is open: a supervisor or a run lives",
                hint="stop them first: covenant ps; systemctl stop covenant-supervisor",
                where=str(log),
            )
        key = log_files.key(_KEY, head_folder, head=_HEAD, log=log)
        lines, head = _verified(log, head_folder, key.public_key())
        taken = _first_kept(lines, before_ms)
        begun = truncation.frontier(lines[0], key.public_key()) if lines else None
        had_rebase = begun is not None and begun.size > 0
        if taken <= had_rebase:
            return Done(0, len(lines), None)
        rows = [_row(line) for line in lines]
        before()
        signed = checkpoints.make(state)
        assert signed is not None
        tree = merkle.Frontier() if begun is None else begun.copy()
        for row in rows[had_rebase:taken]:
            tree.append(merkle.leaf_hash(row.line))
        _archive(archive, rows[:taken], key, checkpoints.up_to(state, head_folder, tree))
        record = _rebase(rows, taken, tree, head, key)
        first = _written(truncation.KIND, record, issuer, now_ms)
        # The cut may have taken the row of the newest checkpoint: without a row a checkpoint that is taken away is not
        # missed.
        told = _written(checkpoints.KIND, checkpoints.fields(signed), issuer, now_ms)
        left = [first, *rows[taken:], told]
        _replace(
            folder, head_folder, left, key, lambda: checkpoints.prune(state, (row.line for row in left), tree.size)
        )
        return Done(taken - had_rebase, len(rows) - taken, rows[taken - 1].timestamp_ms)


def _verified(log: Path, head_folder: int, public: Ed25519PublicKey) -> tuple[list[bytes], chain.Head]:
    """Return the lines of a log that verifies, and its head."""
    raw = [(log / name).read_bytes() for name in (EVENTS, CHAIN)]
    head_bytes = log_files.read_private(_HEAD, head_folder, max_bytes=chain.HEAD_BYTES) or b""
    head = chain.read_head(head_bytes, public)
    # INVARIANT: a log that does not verify is never cut. The cut would sign what is left of it.
    if head is None or not verify.verify(raw[0], raw[1], head_bytes, public).valid:
        log_files.broken("the log does not verify", log)
    return raw[0].splitlines(), head


def _first_kept(lines: Sequence[bytes], before_ms: int) -> int:
    """Return the index of the first row that stays."""
    taken, open_starts = 0, dict[str, int]()
    for index, line in enumerate(lines):
        event = json.loads(line)
        kind = event["kind"]
        if kind["type"] == "run_started":
            open_starts[kind["run_id"]] = index
        elif kind["type"] == "run_ended":
            open_starts.pop(kind["run_id"], None)
        if event["timestamp_ms"] < before_ms:
            taken = index + 1
    return min([taken, *open_starts.values()])


def _row(line: bytes) -> chain.ChainRow:
    event = json.loads(line)
    return chain.ChainRow(line, event["id"], event["timestamp_ms"])


def _written(kind: str, fields: Mapping[str, Any], issuer: Mapping[str, str], now_ms: int) -> chain.ChainRow:
    event_id = str(uuid.uuid4())
    line = events.assembled(event_id, now_ms, events.issuer_text(issuer), events.kind_text(kind, fields))
    return chain.ChainRow(line, event_id, now_ms)


def _rebase(
    rows: Sequence[chain.ChainRow], taken: int, tree: merkle.Frontier, head: chain.Head, key: Ed25519PrivateKey
) -> dict[str, object]:
    """Return the fields of the record; ``tree`` covers all that was ever cut, this included."""
    skipped = 1 if truncation.NEEDLE in rows[0].line else 0
    whole = tree.copy()
    for row in rows[taken:]:
        whole.append(merkle.leaf_hash(row.line))
    return truncation.fields(
        truncation.Cut(
            rows=taken - skipped,
            first=rows[skipped],
            last=rows[taken - 1],
            root_before_hex=head.chain_hash_hex,
            tree_before=whole,
            tree=tree,
            previous_rebase_hex=chain.event_hash(rows[0].line) if skipped else None,
        ),
        key,
    )


def _heads(head: chain.Head, before: chain.Head, key: Ed25519PrivateKey) -> bytes:
    """Return the content of a head file: the newest head in its slot, and the one before it in the other."""
    slots = [chain.sign_head(head, key), chain.sign_head(before, key)]
    return b"".join(slots if chain.slot_offset(head) == 0 else reversed(slots))


def _archive(place: Path, rows: Sequence[chain.ChainRow], key: Ed25519PrivateKey, further: Mapping[str, bytes]) -> None:
    """Write the rows as a log of its own, durably. COVENANT_STATE names it for ``covenant audit``."""
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        raise errors.UsageError(f"the archive `{place}` exists", hint="name a directory that does not exist") from None
    entries, before, head = chain.extend(chain.Head(), rows)
    contents = {
        f"audit/{EVENTS}": b"".join(row.line + b"\n" for row in rows),
        f"audit/{CHAIN}": entries,
        f"audit-head/{_HEAD}": _heads(head, before, key),
        f"audit-head/{_PUBLIC}": chain.public_key_file(key.public_key()),
        **further,
    }
    for name in ("audit", "audit-head"):
        (place / name).mkdir(mode=0o700)
    for name, content in contents.items():
        folder = os.open((place / name).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            atomic_file.replace(folder, (place / name).name, content)
        finally:
            os.close(folder)
    for path in (place, place.parent):
        atomic_file.sync_directory(path)


def _replace(
    folder: int,
    head_folder: int,
    rows: Sequence[chain.ChainRow],
    key: Ed25519PrivateKey,
    settled: Callable[[], None],
) -> None:
    """Replace the files; ``settled`` is called while readers of the old ones wait."""
    entries, before, head = chain.extend(chain.Head(), rows)
    for name, content in zip(_NEW, (b"".join(row.line + b"\n" for row in rows), entries), strict=True):
        atomic_file.replace(folder, name, content)
    # A reader of the old file waits, and then looks again which file has the name.
    with contextlib.ExitStack() as stack:
        held = os.open(EVENTS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        stack.callback(os.close, held)
        fcntl.flock(held, fcntl.LOCK_EX)
        # INVARIANT: both new files are durable before the new head, and the new head before the old files go.
        atomic_file.replace(head_folder, _HEAD, _heads(head, before, key))
        _settle(folder, head_folder)
        settled()


def _settle(folder: int, head_folder: int) -> None:
    """Rename the new files if the head is theirs, and remove them otherwise. The caller holds the lock alone."""
    raw_key = log_files.read_private(_PUBLIC, head_folder)
    raw_head = log_files.read_private(_HEAD, head_folder, max_bytes=chain.HEAD_BYTES)
    with contextlib.ExitStack() as stack:
        new = [_opened(name, folder, stack) for name in _NEW]
        # One of them may have its name already.
        present = [
            fd if fd is not None else _opened(name, folder, stack)
            for fd, name in zip(new, (EVENTS, CHAIN), strict=True)
        ]
        head = None
        if raw_key is not None and raw_head is not None:
            head = chain.read_head(raw_head, chain.read_public_key(raw_key))
        whole = head is not None and None not in present and is_of(head, *(fd for fd in present if fd is not None))
        for fd, name, old in zip(new, _NEW, (EVENTS, CHAIN), strict=True):
            if fd is not None and whole:
                # INVARIANT: a reader that opens the new events by their name waits until the chain has its own.
                fcntl.flock(fd, fcntl.LOCK_EX)
                os.rename(name, old, src_dir_fd=folder, dst_dir_fd=folder)
            elif fd is not None:
                os.unlink(name, dir_fd=folder)
        for name in _PARTS:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
        os.fsync(folder)


def _opened(name: str, folder: int, stack: contextlib.ExitStack) -> int | None:
    try:
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return None
    stack.callback(os.close, fd)
    return fd
