"""Verify the files of a log, one part at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

from covenant.stores.audit import files
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify as audit_log_verify

_BATCH: Final = 512


def verify(of: files.Files, now: files.AuditSnapshot) -> audit_log_verify.Report:
    """Verify the files and return the findings. An intact log is never read whole into memory."""
    key = of.key.public_key()
    head = now.head
    as_long = (now.events_bytes, now.chain_bytes) == (head.events_bytes, head.chain_bytes)
    if as_long and audit_log_chain.read_head(now.shown, key) == head and _holds(of, head):
        return audit_log_verify.Report(head.count, head.count, True, head.chain_hash_hex, ())
    log, chain = os.pread(of.events, now.events_bytes, 0), os.pread(of.chain, now.chain_bytes, 0)
    return audit_log_verify.verify(log, chain, now.shown, key)


def _holds(of: files.Files, head: audit_log_chain.Head) -> bool:
    """Whether the events produce the chain file, byte for byte, up to the acknowledged head."""
    index, previous, offset = 0, audit_log_chain.GENESIS, 0
    for lines in _batched(line for _, line in of.lines(0, head.events_bytes)):
        made = audit_log_verify.follow(lines, index, previous)
        if made is None or audit_log_verify.rebase_failures(lines if not index else [b"", *lines], of.key.public_key()):
            return False
        entries, index, previous = made
        if os.pread(of.chain, len(entries), offset) != entries:
            return False
        offset += len(entries)
    return (index, previous, offset) == (head.count, head.chain_hash_hex, head.chain_bytes)


def _batched(lines: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    for line in lines:
        batch.append(line)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch
