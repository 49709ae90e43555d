"""Convert rows of version 1's table to records and back: strictly, and with reasons for a bad row."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

import anyio.to_thread
import numpy as np
import pydantic

from covenant.stores.memory import sqlite
from covenant.stores.memory.interface import BadRow
from covenant.wire.types import AgentId, MemoryRecord, Tier
from policy import errors

# The column order of every SELECT and INSERT here; the first nine after `rowid` are version 1's.
COLUMNS: Final = (
    "id",
    "tier",
    "owner_display",
    "owner_pubkey",
    "text",
    "embedding",
    "metadata",
    "created_at",
    "parent",
)
SELECT: Final = f"SELECT rowid, {', '.join(COLUMNS)} FROM memories"  # noqa: S608 - names of columns
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "id": (str,),
    "tier": (str,),
    "owner_display": (str,),
    "owner_pubkey": (str,),
    "text": (str,),
    "embedding": (bytes, type(None)),
    "metadata": (str, type(None)),
    "created_at": (int,),
    "parent": (str, type(None)),
}
_TIERS: Final = {name: Tier(name) for name in (*(tier.value for tier in Tier), "long-term", "long_term")}
FLOAT: Final = np.dtype("<f4")
# The most rows that are parsed on the event loop without a noticeable delay.
_FEW: Final = 32

Row = Sequence[Any]


def encode(record: MemoryRecord) -> tuple[Any, ...]:
    """Return the row of a record.

    Raises:
        errors.MemoryInvalidError: a value would not be read back from the disk unchanged.
    """
    vector = np.asarray(record.embedding, dtype=np.float64)
    if not np.isfinite(vector).all() or (np.abs(vector) > np.finfo(np.float32).max).any():
        raise errors.MemoryInvalidError("embedding holds a number that is not finite", where=record.id)
    if record.created_at >= 2**63:
        raise errors.MemoryInvalidError("created_at is beyond what the store can hold", where=record.id)
    try:
        metadata = json.dumps(record.metadata, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        for text in (record.id, record.text, metadata, record.parent or ""):
            text.encode()
    except (ValueError, TypeError, RecursionError) as e:
        raise errors.MemoryInvalidError(f"record cannot be stored: {e}", where=record.id) from e
    return (
        record.id,
        record.tier.value,
        record.owner.display,
        record.owner.pubkey,
        record.text,
        vector.astype(FLOAT).tobytes(),
        metadata,
        record.created_at,
        record.parent,
    )


def vector(blob: bytes | None) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    """Return the float32 vector of a blob; None if it is empty or truncated, or has a number that is not finite."""
    if not blob or len(blob) % FLOAT.itemsize:
        return None
    found = np.frombuffer(blob, dtype=FLOAT).astype(np.float32, copy=False)
    return found if bool(np.isfinite(found).all()) else None


def parse(row: Row) -> MemoryRecord | BadRow:
    """Return the record of ``(rowid, *COLUMNS)``, or a bad row with its problems."""
    # Every search result passes through here, and bad rows are rare: only those are examined twice.
    found = _record(row)
    if found is not None:
        return found
    bad = bad_row(row)
    assert bad is not None
    return bad


def _record(row: Row) -> MemoryRecord | None:
    """Return the record; None if ``bad_row`` finds a problem."""
    _, record_id, tier, display, pubkey, text, blob, metadata, created_at, parent = row
    for one in (record_id, tier, display, pubkey, text, metadata, parent):
        if type(one) is str:
            if not (one.isascii() or sqlite.sayable(one)):
                return None
        elif one is not None:
            return None
    if tier not in _TIERS or type(created_at) is not int or created_at < 0 or not isinstance(blob, bytes | None):
        return None
    if record_id is None or text is None or display is None or pubkey is None:
        return None
    owner = _owner(display, pubkey)
    found = vector(blob)
    if isinstance(owner, str) or (blob and found is None):
        return None
    try:
        said = None if metadata == "null" else _metadata(metadata)
    except (ValueError, RecursionError):
        return None
    # All values are validated above, and validating the vector would take longest;
    # tests/property/covenant/test_memory.py tests that both agree.
    return MemoryRecord.model_construct(
        id=record_id,
        tier=_TIERS[tier],
        owner=owner,
        text=text,
        embedding=() if found is None else tuple(found.tolist()),
        metadata=said,
        created_at=created_at,
        parent=parent,
    )


def bad_row(row: Row) -> BadRow | None:
    """Return the problems of ``(rowid, *COLUMNS)``, without making the record; None if it is valid."""
    values = dict(zip(COLUMNS, row[1:], strict=True))
    problems = [f"{name} is {_kind(values[name])}" for name in COLUMNS if not isinstance(values[name], _TYPES[name])]
    problems = problems or [
        f"{name} is no UTF-8" for name, value in values.items() if isinstance(value, str) and not sqlite.sayable(value)
    ]
    problems = problems or _broken(values)
    return BadRow(row[0], _shown(values["id"]), tuple(problems)) if problems else None


def _shown(value: Any) -> str:
    return str(value)[:128].encode("utf-8", "replace").decode()


def bad_rows(found: Iterable[Row]) -> list[BadRow]:
    """Return the rows that are not valid records."""
    return [bad for row in found if (bad := bad_row(row)) is not None]


async def parse_all(found: Iterable[Row]) -> list[MemoryRecord | BadRow]:
    """Parse rows, in a worker thread if they are many."""
    listed = list(found)
    if len(listed) <= _FEW:
        return [parse(row) for row in listed]
    return await anyio.to_thread.run_sync(lambda: [parse(row) for row in listed])


def _metadata(text: str | None) -> Any:
    return None if text is None or text == "" else json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _broken(values: dict[str, Any]) -> list[str]:
    problems = []
    if values["tier"] not in _TIERS:
        problems.append("tier is none of working, episodic, longterm")
    if values["created_at"] < 0:
        problems.append("created_at is negative")
    if isinstance(owner := _owner(values["owner_display"], values["owner_pubkey"]), str):
        problems.append(owner)
    blob = values["embedding"] or b""
    if len(blob) % FLOAT.itemsize:
        problems.append("embedding is broken off")
    elif blob and not np.isfinite(np.frombuffer(blob, dtype=FLOAT)).all():
        problems.append("embedding holds a number that is not finite")
    try:
        _metadata(values["metadata"])
    except (ValueError, RecursionError):
        problems.append("metadata is no JSON")
    return problems


@functools.lru_cache(maxsize=1024)
def _owner(display: str, pubkey: str) -> AgentId | str:
    """Return the owner, or the problem with it."""
    try:
        return AgentId(display=display, pubkey=pubkey)
    except pydantic.ValidationError as e:
        one = e.errors(include_input=False)[0]
        return f"owner_{one['loc'][0]}: {one['msg']}"


def _kind(value: Any) -> str:
    names = {bytes: "bytes", str: "text", int: "a number", float: "a broken number", type(None): "missing"}
    return names.get(type(value), "something else")
