"""Rows of an audit log as they leave this machine: their place in the log, and the fields that stay behind.

A log holds a few texts that are content or that quote content: an intent, an error's message, a copied line. They never
leave. Each record names the fields that were left out, and its hashes commit to the whole line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from policy import errors
from policy.audit_log import chain, merkle, truncation

# Of every kind: texts of users and of agents, and the beginnings of tokens.
LEFT_OUT: Final = frozenset(
    {"intent_text", "line", "message", "token_prefix", "old_token_prefix", "new_token_prefix", "signature_hex"}
)
# Of one kind: fields that may quote what an agent or a caller sent.
LEFT_OUT_OF: Final[Mapping[str, frozenset[str]]] = {
    "tool_call_schema_rejected": frozenset({"reason"}),
    "request_injected": frozenset({"path"}),
    "hermes_file_written": frozenset({"path"}),
    "a2_a_result_rejected": frozenset({"reason"}),
}
# The kind of the record that stands for rows which were cut before they were exported. No log has it.
GAP: Final = "export_gap"


class LogPlace(NamedTuple):
    """The place of a row: the log, the id of its key, and the row's leaf in the log's Merkle tree.

    The tree had ``tree_size`` leaves when the row was read. A cut changes no leaf; the record of a cut is none.
    """

    log: str
    origin: str
    leaf: int | None
    tree_size: int
    event_hash_hex: str
    leaf_hash_hex: str
    chain_hash_hex: str


_PLACE: Final = ("log", "origin", "index", "tree_size", "event_hash_hex", "leaf_hash_hex", "chain_hash_hex")


class ExportedRow(NamedTuple):
    """One row: its id, its time, who issued it, its kind, and those of its fields that may leave."""

    event_id: str
    timestamp_ms: int
    issuer: str
    kind: str
    fields: Mapping[str, Any]
    left_out: tuple[str, ...]
    place: LogPlace

    @property
    def log_place(self) -> dict[str, Any]:
        """The place, and the names of what was left out, as every record carries them."""
        place = self.place
        about = dict(zip(_PLACE, place, strict=True))
        if place.leaf is None:
            del about["index"]
        return {**about, "left_out": list(self.left_out)} if self.left_out else about


class Log(NamedTuple):
    """The log that rows come from, and its state when they were read."""

    name: str
    origin: str
    tree_size: int


_decode = msgspec.json.Decoder().decode


def rows(lines: Sequence[bytes], log: Log, *, index: int, chain_hash_hex: str) -> Iterator[ExportedRow]:
    """Yield the rows of lines that begin at leaf ``index`` and follow ``chain_hash_hex``.

    Raises:
        errors.LedgerError: a line is no event.
    """
    sha256 = hashlib.sha256
    for line in lines:
        event_hash = sha256(line).hexdigest()
        chain_hash_hex = chain.chain_hash(chain_hash_hex, event_hash)
        is_leaf = truncation.NEEDLE not in line
        place = LogPlace(
            log.name,
            log.origin,
            index if is_leaf else None,
            log.tree_size,
            event_hash,
            merkle.leaf_hash(line).hex(),
            chain_hash_hex,
        )
        index += is_leaf
        yield _row(line, place)


def gap(log: Log, start: int, end: int, now_ms: int) -> ExportedRow:
    """The record that stands for the rows from ``start`` up to ``end``, which were cut before they were exported."""
    event_id = f"gap-{log.origin[:16]}-{start}-{end}"
    fields = {"first_index": start, "rows": end - start}
    return ExportedRow(
        event_id, now_ms, "", GAP, fields, (), LogPlace(log.name, log.origin, None, log.tree_size, "", "", "")
    )


def _row(line: bytes, place: LogPlace) -> ExportedRow:
    try:
        event = _decode(line)
        given = event["kind"]
        kind = given["type"]
        special = LEFT_OUT_OF.get(kind, frozenset())
        left_out = tuple(name for name in given if name in LEFT_OUT or name in special)
        fields = {
            name: value
            for name, value in given.items()
            if name != "type" and name not in left_out and value is not None
        }
        return ExportedRow(
            event["id"], event["timestamp_ms"], event["issuer"]["display"], kind, fields, left_out, place
        )
    except (msgspec.DecodeError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise errors.LedgerError(f"row {place.leaf} of the {place.log} log is no event") from e
