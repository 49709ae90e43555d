"""The lines of ``budget/ledger.jsonl`` and ``budget/checkpoints.jsonl``.

Version 1's are ``capacity_set``, ``debit`` and ``snapshot``, ``pause_saved`` and ``resume_claimed``. Ours beside them:

    debit      reserved   it was taken before its run, which is not settled yet
               submitter  who asked for the run; also on its rest
               settles    it is the measured rest of the reservation with its ``paired_receipt``; 0 when there is none
    refund                a reservation that came back, since nothing of its run began
    snapshot   owed debt  what version 1 does not count (policy.budget.Bucket)
               open       the reservations that were not settled when it was made

Version 1 reads all of them but ``refund``.
"""

from __future__ import annotations

from typing import Annotated, Literal

import pydantic

from covenant.wire import types
from policy import errors


class CapacitySet(types.Wire):
    """An agent's credits an hour, from now on."""

    type: Literal["capacity_set"] = "capacity_set"
    agent: types.AgentId
    capacity: types.U64 = pydantic.Field(validation_alias=pydantic.AliasChoices("capacity", "credits_per_hour"))
    at_ms: types.U64


class Debit(types.Wire):
    """Credits that were taken."""

    type: Literal["debit"] = "debit"
    agent: types.AgentId
    credits: types.U64
    paired_receipt: str
    at_ms: types.U64
    reserved: bool = False
    settles: bool = False
    submitter: types.AgentId | None = None


class Refund(types.Wire):
    """Credits of a reservation that came back."""

    type: Literal["refund"] = "refund"
    agent: types.AgentId
    credits: types.U64
    paired_receipt: str
    at_ms: types.U64


class Open(types.Wire):
    """A reservation that is not settled yet."""

    credits: types.U64
    paired_receipt: str
    at_ms: types.U64
    submitter: types.AgentId | None = None


class Snapshot(types.Wire):
    """An agent's bucket in the place of all rows before it."""

    type: Literal["snapshot"] = "snapshot"
    agent: types.AgentId
    capacity: types.U64
    tokens_remaining: types.U64
    last_refill_ms: types.U64
    at_ms: types.U64
    owed: types.U64 = 0
    debt: types.U64 = 0
    open: tuple[Open, ...] = ()


class PauseSaved(types.Wire):
    """An intent that waits."""

    type: Literal["pause_saved"] = "pause_saved"
    checkpoint: types.BudgetPauseCheckpoint


class ResumeClaimed(types.Wire):
    """A checkpoint that was used."""

    type: Literal["resume_claimed"] = "resume_claimed"
    intent_id: str
    agent: types.AgentId
    resumed_at_ms: types.U64


LedgerRow = CapacitySet | Debit | Refund | Snapshot
CheckpointRow = PauseSaved | ResumeClaimed

_LEDGER: pydantic.TypeAdapter[LedgerRow] = pydantic.TypeAdapter(
    Annotated[LedgerRow, pydantic.Field(discriminator="type")]
)
_CHECKPOINTS: pydantic.TypeAdapter[CheckpointRow] = pydantic.TypeAdapter(
    Annotated[CheckpointRow, pydantic.Field(discriminator="type")]
)


def line(row: LedgerRow | CheckpointRow) -> bytes:
    """The row as a line without its newline. Our own marks stand only where they say something."""
    ours = {"reserved", "settles", "submitter", "owed", "debt", "open"}
    fields = row.model_dump_json(exclude={name for name in ours if not getattr(row, name, None)})
    return fields.encode()


def ledger_row(raw: bytes, where: str) -> LedgerRow:
    """The row of a line.

    Raises:
        errors.StoreError: it is none: what was spent cannot be told.
    """
    try:
        return _LEDGER.validate_json(raw)
    except pydantic.ValidationError as e:
        raise _damaged(where) from e


def checkpoint_row(raw: bytes, where: str) -> CheckpointRow:
    """The row of a line.

    Raises:
        errors.StoreError: it is none: which checkpoints were used cannot be told.
    """
    try:
        return _CHECKPOINTS.validate_json(raw)
    except pydantic.ValidationError as e:
        raise _damaged(where) from e


def _damaged(where: str) -> errors.StoreError:
    return errors.StoreError(
        "a line is none of this file's rows", hint="put the file of a backup there, or mend the line", where=where
    )
