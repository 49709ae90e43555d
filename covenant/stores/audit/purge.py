"""Cut the oldest rows: write new files beside the log's that begin with the signed record of the cut."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from covenant.stores.audit import files, paths, rows
from policy import errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import events, merkle, truncation, write_ahead

_BATCH: Final = 512


@dataclass(frozen=True, slots=True)
class Done:
    """The number of rows cut, and the id of the record of the cut."""

    purged: int
    rebase_id: str | None


@dataclass(slots=True)
class _Found:
    """The rows before the first one that is kept. ``offset`` is the start of that first row."""

    offset: int = 0
    count: int = 0
    first: audit_log_chain.ChainRow | None = None
    last: audit_log_chain.ChainRow | None = None
    previous_rebase: bytes | None = None


def cut(of: files.Files, before_ms: int, *, issuer: str, now_ms: int) -> Done:
    """Cut every row up to the last that is older than ``before_ms``.

    Rows behind ``set_clock`` may have earlier times than those before it, which were written earlier all the same.

    Raises:
        errors.LedgerError: the log's first record does not verify, or a line is no event.
        OSError: there is no room for the new files, or the disk failed; the log is unchanged.
    """
    before, cut_tree, whole = _found(of, before_ms)
    if before.first is None or before.last is None:
        return Done(0, None)
    fields = truncation.fields(
        truncation.Cut(
            rows=before.count,
            first=before.first,
            last=before.last,
            root_before_hex=of.head.chain_hash_hex,
            tree_before=whole,
            tree=cut_tree,
            previous_rebase_hex=audit_log_chain.event_hash(before.previous_rebase) if before.previous_rebase else None,
        ),
        of.key,
    )
    event_id = str(uuid.uuid4())
    line = events.assembled(event_id, now_ms, issuer, events.kind_text(truncation.KIND, fields))
    heads = _write(of, audit_log_chain.ChainRow(line, event_id, now_ms), before.offset)
    of.replace(*heads)
    return Done(before.count, event_id)


def _found(of: files.Files, before_ms: int) -> tuple[_Found, merkle.Frontier, merkle.Frontier]:
    """Find the rows to cut. Returns them, the frontier over all rows cut so far, and that over the whole log."""
    found, whole = _Found(), merkle.Frontier()
    cut_tree: merkle.Frontier | None = None
    earliest: audit_log_chain.ChainRow | None = None
    kept = 0
    for offset, line in of.lines():
        if offset == 0:
            begun = truncation.frontier(line, of.key.public_key())
            if begun is None:
                raise errors.LedgerError(
                    "the record that begins the log does not hold", hint="run `covenant audit verify`"
                )
            if begun.size:
                found.previous_rebase, found.offset, whole = line, len(line) + 1, begun
                continue
        row = _row(line)
        earliest = earliest or row
        if row.timestamp_ms >= before_ms:
            if cut_tree is None:
                cut_tree, found.offset = whole.copy(), offset
            kept += 1
        else:
            found.count += 1 + kept
            found.first, found.last, cut_tree, kept = earliest, row, None, 0
        whole.append(merkle.leaf_hash(line))
    if cut_tree is None:
        found.offset = of.head.events_bytes
    return found, cut_tree or whole.copy(), whole


def _write(
    of: files.Files, first: audit_log_chain.ChainRow, kept_from: int
) -> tuple[audit_log_chain.Head, audit_log_chain.Head]:
    """Write and sync the new files. Returns their last head but one and their last."""
    with contextlib.ExitStack() as stack:
        made = []
        for name in (paths.EVENTS, paths.CHAIN):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name + write_ahead.NEW, dir_fd=of.at.log)
            fd = of.at.file(name + write_ahead.NEW, folder=of.at.log)
            made.append(stack.enter_context(os.fdopen(fd, "wb")))
        log, chain = made
        before = head = audit_log_chain.Head()
        for group in _groups(of, first, kept_from):
            entries, before, head = audit_log_chain.extend(head, group)
            log.write(b"".join(row.line + b"\n" for row in group))
            chain.write(entries)
        for stream in made:
            stream.flush()
            os.fsync(stream.fileno())
    os.fsync(of.at.log)
    return before, head


def _groups(
    of: files.Files, first: audit_log_chain.ChainRow, kept_from: int
) -> Iterator[list[audit_log_chain.ChainRow]]:
    group = [first]
    for _, line in of.lines(kept_from):
        group.append(_row(line))
        if len(group) == _BATCH:
            yield group
            group = []
    if group:
        yield group


def _row(line: bytes) -> audit_log_chain.ChainRow:
    found = rows.opening(line)
    if found is None:
        raise errors.LedgerError("a line of the log is no event", hint="run `covenant audit verify`")
    return audit_log_chain.ChainRow(line, found.event_id, found.timestamp_ms)
