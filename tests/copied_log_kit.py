"""A home whose supervisor's log is another user's: the daemon's log has copies of its rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from sandbox.audit.log import Ledger

ISSUER: Final = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}


def leave_copies(home: Path, *, run_id: str, row_type: str) -> None:
    """Copy each row of the supervisor's log into the daemon's, and remove the supervisor's log."""
    lines = (home / "supervisor/audit/events.jsonl").read_bytes().splitlines()
    shutil.rmtree(home / "supervisor")
    with Ledger.open(home / "audit", head=home / "audit-head" / "head.json") as ours:
        for index, line in enumerate(lines):
            about = {"intent_id": "i", "run_id": run_id, "origin": "ab" * 32, "index": index, "event_id": f"e{index}"}
            hashes = {"event_hash_hex": "1" * 64, "chain_hash_hex": "2" * 64, "row_type": row_type}
            copy = {**about, **hashes, "line": line.decode()}
            ours.append("supervisor_row", copy, issuer=ISSUER, now_ms=1_700_000_000_000)
