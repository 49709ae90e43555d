"""The lines of ``receipts/working.jsonl``: a SettlementReceipt each, as version 1 writes it."""

from __future__ import annotations

import pydantic

from covenant.wire import types
from policy import errors


def line(receipt: types.SettlementReceipt) -> bytes:
    """The receipt as a line without its newline: of the fields only ``memory_record_id`` is left out when null."""
    absent = {"memory_record_id"} if receipt.memory_record_id is None else None
    return receipt.model_dump_json(exclude=absent).encode()


def read(raw: bytes, where: str) -> types.SettlementReceipt:
    """The receipt of a line.

    Raises:
        errors.StoreError: it is none: what was used cannot be told.
    """
    try:
        return types.SettlementReceipt.model_validate_json(raw)
    except pydantic.ValidationError as e:
        raise errors.StoreError(
            "a line is no receipt", hint="put the file of a backup there, or mend the line", where=where
        ) from e
