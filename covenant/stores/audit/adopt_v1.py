"""Adopt version 1's log, which has no signed head, and so no record of where it ends.

Its rows and its chain have this log's format, byte for byte (policy.audit_log.chain). A chain that verifies is signed
as it is, and the log continues from there. A log with rows of kinds that only this version writes is refused: its head
was lost, and nothing signs a new one.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import BinaryIO, Final, NoReturn

from covenant.stores.audit import paths, rows
from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import event_kinds, events
from sandbox.storage import atomic_file

# The names of the copies of its files, unchanged.
BACKUPS: Final = {paths.EVENTS: "events.v1.jsonl", paths.CHAIN: "events.chain.v1.jsonl"}
_OF_BOTH: Final = frozenset({"capability_check", "intent_dispatched"})
_OURS: Final = frozenset(events.KINDS) - frozenset(event_kinds.V1) - _OF_BOTH
_BATCH_BYTES: Final = 4 * 1024 * 1024
# The year 9999.
_LATEST_MS: Final = 253_402_300_799_999
_HINT: Final = (
    "move `audit` aside as evidence (mv audit audit.v1): a new log is begun then, and its first row says when"
)


def adopt(at: paths.Places) -> list[str]:
    """Sign the head of version 1's log if the directory holds only that log. Returns messages for the operator.

    The head is written last and atomically. After an interruption before that, the next start begins anew.

    Raises:
        errors.LedgerError: the log fails verification, or it is not version 1's.
        OSError: it cannot be read, or there is no room for the copies.
    """
    if at.exists(paths.HEAD) or at.exists(paths.PENDING):
        return []
    with contextlib.ExitStack() as stack:
        found = {}
        for name in BACKUPS:
            with contextlib.suppress(FileNotFoundError):
                os.stat(name, dir_fd=at.log, follow_symlinks=False)
                found[name] = stack.enter_context(os.fdopen(at.file(name, folder=at.log), "rb"))
        if not any(os.fstat(one.fileno()).st_size for one in found.values()) or _is_ours(at, found):
            return []
        if set(found) != set(BACKUPS):
            _refuse(at, f"version 1's log has one file of two, `{next(iter(found))}`")
        before, head = _folded(at, found[paths.EVENTS], found[paths.CHAIN])
        for name, stream in found.items():
            _copy(at, stream, BACKUPS[name])
    key = at.signing_key(make=True)
    slots = bytearray(audit_log_chain.HEAD_BYTES)
    for one in (before, head):
        start = audit_log_chain.slot_offset(one)
        slots[start : start + audit_log_chain.SLOT_BYTES] = audit_log_chain.sign_head(one, key)
    atomic_file.replace(at.head, paths.HEAD, bytes(slots))
    kept = " and ".join(f"`{name}`" for name in BACKUPS.values())
    done = f"version 1's log was taken over and its head signed: {head.count} rows, chain hash {head.chain_hash_hex}"
    return [f"{done}; {kept} have its files as they were: delete them when they are not needed"]


def _is_ours(at: paths.Places, found: Mapping[str, BinaryIO]) -> bool:
    """Whether this log had a head before.

    It had one if any head file or key exists. Exception: an adoption that was cut off between the copies and the head.
    """
    if not any(at.exists(name) for name in (paths.KEY, paths.PUBLIC_KEY, paths.NOTE_KEY)):
        return False
    try:
        return any(
            os.stat(BACKUPS[name], dir_fd=at.log, follow_symlinks=False).st_size != os.fstat(one.fileno()).st_size
            for name, one in found.items()
        )
    except FileNotFoundError:
        return True


def _folded(at: paths.Places, rows_of: BinaryIO, chain: BinaryIO) -> tuple[audit_log_chain.Head, audit_log_chain.Head]:
    """Verify the chain against the rows. Returns the head one row before the end, and the last head."""
    before = head = audit_log_chain.Head()
    lines = _lines(at, paths.EVENTS, rows_of)
    while batch := _batch(at, lines, head.count):
        expected, before, head = audit_log_chain.extend(head, batch)
        for index, line in enumerate(expected.splitlines(keepends=True), head.count - len(batch)):
            there = chain.readline(len(line) + 1)
            if there != line:
                _refuse(at, f"record {index} of version 1's log " + ("is not what its chain says" if there else _SHORT))
    if chain.readline(1):
        _refuse(at, f"the chain of version 1's log names more than its {head.count} records")
    return before, head


_SHORT: Final = "is not in its chain, which is shorter"


def _batch(at: paths.Places, lines: Iterator[bytes], first: int) -> list[audit_log_chain.ChainRow]:
    made: list[audit_log_chain.ChainRow] = []
    size = 0
    for index in itertools.count(first):
        line = next(lines, None) if size < _BATCH_BYTES else None
        if line is None:
            break
        opening = rows.opening(line)
        if opening is None or not 0 <= opening.timestamp_ms <= _LATEST_MS:
            # Times never decrease from row to row: after a row at the end of time no later row could be written.
            _refuse(at, f"record {index} of version 1's log is no event of any time")
        if _kind(line) in _OURS:
            raise errors.LedgerError(
                "the log holds records and its head is missing",
                hint="keep audit and audit-head aside as evidence before starting a new log",
                where=str(at.home / "audit"),
            )
        made.append(audit_log_chain.ChainRow(line, opening.event_id, opening.timestamp_ms))
        size += len(line)
    return made


def _kind(line: bytes) -> object:
    try:
        kind = json.loads(line)["kind"]["type"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return kind if isinstance(kind, str) else None


def _lines(at: paths.Places, name: str, stream: BinaryIO) -> Iterator[bytes]:
    for index in itertools.count():
        line = stream.readline(events.MAX_LINE_BYTES + 1)
        if not line:
            return
        if not line.endswith(b"\n"):
            _refuse(at, f"record {index} of version 1's log, in `{name}`, has no end")
        yield line[:-1]


def _copy(at: paths.Places, stream: BinaryIO, name: str) -> None:
    stream.seek(0)
    temporary = atomic_file.temporary_name(name)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    # Left by a crash.
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=at.log)
    try:
        with os.fdopen(os.open(temporary, flags, 0o600, dir_fd=at.log), "wb") as copy:
            shutil.copyfileobj(stream, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.rename(temporary, name, src_dir_fd=at.log, dst_dir_fd=at.log)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=at.log)
        raise
    os.fsync(at.log)


def _refuse(at: paths.Places, message: str) -> NoReturn:
    raise errors.LedgerError(message, hint=_HINT, where=str(at.home / "audit"))
