"""Signed checkpoints of the supervisor's log: how many rows it had, and the Merkle root over them.

``make`` writes one where rows came since the newest: the supervisor by a timer (sandbox.serve.metrics_worker), a cut
before it changes anything, and ``covenant audit checkpoint --log supervisor``. A row of the log tells of each, so that
a checkpoint that is taken away is missed.

A checkpoint is a line of ``audit/checkpoints.jsonl``. ``audit-head/checkpoint.state`` has the position behind its rows,
so that the next one reads what came since. The position is used only where its subtrees have the newest checkpoint's
root; otherwise the log is read from its beginning.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from policy import errors
from policy.audit_log import chain, merkle, note
from sandbox.audit import log_files
from sandbox.audit.log_follow import Follower, Position
from sandbox.storage import atomic_file

FILE: Final = "checkpoints.jsonl"
KEY, PUBLIC_KEY, _STATE = "checkpoint.key", "checkpoint.vkey", "checkpoint.state"
KIND: Final = "audit_checkpoint"
# Quotes within a value are escaped, so that no value holds these bytes.
_NEEDLE: Final = b'"kind":{"type":"audit_checkpoint",'
_OPEN: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_LOCK_SECONDS: Final = 10.0
# Looks while a writer is between its files; the next turn of the timer looks again.
_LOOKS: Final = 20
_MOST_STATE_BYTES: Final = 64 * 1024

Tell = Callable[[Mapping[str, Any]], object]


class _Reached(msgspec.Struct, frozen=True):
    """The position behind the rows of the newest checkpoint, and what stands for them."""

    position: Position
    subtrees: list[bytes]


@dataclass
class _Rows:
    """The rows behind the newest checkpoint, as they are read."""

    tree: merkle.Frontier
    position: Position | None
    others: int = 0  # rows that tell of no checkpoint


def origin(public: Ed25519PublicKey) -> str:
    """Return the name of the supervisor's log whose heads this key signs."""
    return f"covenant.local/supervisor/{chain.key_id(public)[:16]}"


def fields(signed: note.Note) -> dict[str, Any]:
    """Return the fields of the row that tells of a checkpoint."""
    found = note.Checkpoint.parse(signed.text)
    return {"origin": found.origin, "tree_size": found.size, "root_hash_hex": found.root.hex()}


def make(state: Path, tell: Tell | None = None) -> note.Note | None:
    """Sign a checkpoint over all rows, durably, and return the newest. None: there are no rows, or no log.

    No checkpoint is made where all new rows tell of checkpoints. ``tell`` writes the row of a new one.

    Raises:
        errors.LedgerError: the rows do not lead to the signed head or to the newest checkpoint, or a file is unsafe.
        OSError: a disk refused a write.
    """
    with _held(state) as (file, head_folder):
        newest = _newest(file, head_folder, state)
        rows = _read(state, head_folder, newest)
        if rows is None or not rows.others:
            return newest
        key = log_files.key(KEY, head_folder, head=PUBLIC_KEY, log=state / "audit")
        public = chain.read_public_key(log_files.read_private("ledger.pub", head_folder) or b"")
        signed = signed_at(rows.tree, origin(public), key)
        log_files.show_key_text(PUBLIC_KEY, head_folder, _verifier(public, key), log=state / "audit")
        log_files.write_all(file, note.stored_line(signed) + b"\n")
        os.fdatasync(file)
        assert rows.position is not None
        reached = _Reached(rows.position, rows.tree.hashes)
        atomic_file.replace(head_folder, _STATE, msgspec.json.encode(reached))
    if tell is not None:
        tell(fields(signed))
    return signed


def signed_at(tree: merkle.Frontier, name: str, key: Ed25519PrivateKey) -> note.Note:
    """Sign the tree as it is."""
    text = note.Checkpoint(name, tree.size, tree.root()).text
    return note.Note(text, (note.sign(text, name, key),))


def up_to(state: Path, head_folder: int, tree: merkle.Frontier) -> dict[str, bytes]:
    """Return the files of an archive that ends with this tree: its checkpoints, one over all of it, and their key."""
    key = log_files.key(KEY, head_folder, head=PUBLIC_KEY, log=state / "audit")
    public = chain.read_public_key(log_files.read_private("ledger.pub", head_folder) or b"")
    lines = [line for line in (state / "audit" / FILE).read_bytes().splitlines() if _parsed(line)[1].size < tree.size]
    lines.append(note.stored_line(signed_at(tree, origin(public), key)))
    vkey = _verifier(public, key)
    return {f"audit/{FILE}": b"".join(one + b"\n" for one in lines), f"audit-head/{PUBLIC_KEY}": vkey}


def prune(state: Path, rows: Iterable[bytes], cut: int) -> None:
    """Remove the checkpoints of fewer than ``cut`` rows, which no row that is left leads to; the archive has them.

    One that a row in ``rows`` tells of stays: it would be missed.

    Raises:
        errors.LedgerError: another process makes a checkpoint, or a line of the file is none.
        OSError: a disk refused a write. The file is as it was.
    """
    told = {json.loads(row)["kind"]["tree_size"] for row in rows if _NEEDLE in row}
    with contextlib.ExitStack() as stack:
        file, _ = stack.enter_context(_held(state))
        lines = os.pread(file, log_files.size(file), 0).splitlines(keepends=True)
        sizes = [_parsed(line)[1].size for line in lines]
        left = [line for line, size in zip(lines, sizes, strict=True) if size >= cut or size in told]
        if len(left) < len(lines):
            atomic_file.replace(log_files.open_directory(state / "audit", stack), FILE, b"".join(left))


def _verifier(public: Ed25519PublicKey, key: Ed25519PrivateKey) -> bytes:
    return note.Verifier(origin(public), note.SIGNATURE, key.public_key()).text.encode() + b"\n"


@contextlib.contextmanager
def _held(state: Path) -> Iterator[tuple[int, int]]:
    """Open the file of checkpoints alone, and the head's directory. A line that a kill left in part is cut."""
    with contextlib.ExitStack() as stack:
        folder = log_files.open_directory(state / "audit", stack)
        head_folder = log_files.open_directory(state / "audit-head", stack)
        file = _locked(folder, stack, state)
        end = log_files.size(file)
        if end and os.pread(file, 1, end - 1) != b"\n":
            block = os.pread(file, min(end, note.MAX_BYTES * 2), max(0, end - note.MAX_BYTES * 2))
            os.ftruncate(file, end - len(block) + block.rfind(b"\n") + 1)
            os.fsync(file)
        os.fsync(folder)
        yield file, head_folder


def _locked(folder: int, stack: contextlib.ExitStack, state: Path) -> int:
    """Open the file of checkpoints and lock it. Retry where a cut replaced it while this process waited."""
    while True:
        file = os.open(FILE, _OPEN, 0o600, dir_fd=folder)
        stack.callback(os.close, file)
        log_files.check_private(atomic_file.opened(file), FILE, folder)
        if not atomic_file.take(file, _LOCK_SECONDS):
            raise errors.LedgerError("another process makes a checkpoint", hint="wait for it", where=str(state))
        info = os.fstat(file)
        if atomic_file.which(folder, FILE)[0] == (info.st_dev, info.st_ino):
            return file


def _newest(file: int, head_folder: int, state: Path) -> note.Note | None:
    line = log_files.last_line(file, log_files.size(file))
    if not line:
        return None
    signed, _ = _parsed(line)
    vkey = log_files.read_private(PUBLIC_KEY, head_folder)
    if vkey is None:
        log_files.broken("the log has checkpoints and their key is missing", state / "audit")
    try:
        signed.verified([note.Verifier.parse(vkey.decode("ascii", "replace"))])
    except errors.NoteError as e:
        log_files.broken(f"the newest checkpoint does not verify: {e.message}", state / "audit")
    return signed


def _parsed(line: bytes) -> tuple[note.Note, note.Checkpoint]:
    try:
        signed = note.Note.parse(json.loads(line)["note"].encode())
        return signed, note.Checkpoint.parse(signed.text)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, errors.NoteError) as e:
        raise errors.LedgerError(f"a line of `{FILE}` is no checkpoint", hint="run `covenant audit verify`") from e


def _read(state: Path, head_folder: int, newest: note.Note | None) -> _Rows | None:
    """Read what is behind the newest checkpoint. None: there is no log, or its files are being changed."""
    known = None if newest is None else note.Checkpoint.parse(newest.text)
    begun = _resumed(head_folder, known)
    # A position that the rows do not lead on from is of other files than these.
    tries = [begun, None] if begun is not None else [None]
    follower = Follower("supervisor", state / "audit")
    try:
        found = (_read_on(follower, rows or _Rows(merkle.Frontier(), None), known, state) for rows in tries)
        rows = next((one for one in found if one is not None), None)
    finally:
        follower.close()
    if rows is not None and known is not None and rows.tree.size < known.size:
        log_files.broken(f"a checkpoint of {known.size} rows was signed, the log has {rows.tree.size}", state / "audit")
    return rows


def _read_on(follower: Follower, rows: _Rows, known: note.Checkpoint | None, state: Path) -> _Rows | None:
    looks = 0
    while looks < _LOOKS:
        chunk = follower.read(rows.position)
        if chunk is None:
            return None
        if chunk.subtrees:
            # The record of a cut: what it took is behind this reader, or stands in the record.
            if rows.position is None or chunk.lost:
                rows.tree = merkle.Frontier(chunk.start.cut, chunk.subtrees)
                _compare(rows.tree, known, state)
        else:
            for line in chunk.lines.split(b"\n")[:-1]:
                rows.tree.append(merkle.leaf_hash(line))
                rows.others += _NEEDLE not in line and (known is None or rows.tree.size > known.size)
                _compare(rows.tree, known, state)
        rows.position = chunk.end
        if chunk.whole:
            return rows
        looks = 0 if chunk.lines else looks + 1
    return None


def _resumed(head_folder: int, known: note.Checkpoint | None) -> _Rows | None:
    raw = log_files.read_private(_STATE, head_folder, max_bytes=_MOST_STATE_BYTES)
    if raw is not None and known is not None:
        with contextlib.suppress(msgspec.DecodeError, ValueError):
            found = msgspec.json.decode(raw, type=_Reached)
            tree = merkle.Frontier(found.position.index, found.subtrees)
            if (tree.size, tree.root()) == (known.size, known.root):
                return _Rows(tree, found.position)
    return None


def _compare(tree: merkle.Frontier, known: note.Checkpoint | None, state: Path) -> None:
    if known is not None and tree.size == known.size and tree.root() != known.root:
        log_files.broken(f"the first {known.size} rows do not lead to the root that was signed", state / "audit")
