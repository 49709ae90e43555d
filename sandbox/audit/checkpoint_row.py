"""Sign a checkpoint of the supervisor's log, and tell of it in a row of the log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policy import base58
from policy.audit_log import note
from sandbox.audit import checkpoints
from sandbox.audit.log import Ledger


def make(state: Path) -> note.Note | None:
    """As ``checkpoints.make``; a row by the log's own key tells of a new one.

    Raises:
        errors.LedgerError: as ``checkpoints.make``, or the log cannot be opened.
        OSError: as ``checkpoints.make``.
    """

    def tell(about: Mapping[str, Any]) -> None:
        with Ledger.open(state / "audit", head=state / "audit-head" / "head.json") as log:
            issuer = {"display": "checkpoint@local", "pubkey": base58.encode(log.public_key.public_bytes_raw())}
            log.append(checkpoints.KIND, about, issuer=issuer, now_ms=time.time_ns() // 1_000_000)

    return checkpoints.make(state, tell)
