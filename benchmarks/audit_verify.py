#!/usr/bin/env python3
"""Verify an audit log, beside a bare loop that makes the same two SHA-256 calls a line, in the same run.

    bare        for each line: SHA-256 of the line, and of both hashes as text
    verify      what `covenant audit verify` does: also makes every line of the chain file, and compares
    daemon      the same in blocks, as `verify_audit_integrity` does

Processor time, the median of the rounds, which alternate.

.venv/bin/python benchmarks/audit_verify.py [rows] [rounds]
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.audit_append import grown
from covenant.stores.audit import files, paths
from covenant.stores.audit import verify as audit_verify
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import verify


def bare(lines: list[bytes]) -> str:
    """The two hashes a line, and nothing else."""
    previous = audit_log_chain.GENESIS
    for line in lines:
        event = hashlib.sha256(line).hexdigest()
        previous = hashlib.sha256(f"{previous}\n{event}".encode()).hexdigest()
    return previous


def seconds(action: Callable[[], object]) -> float:
    """Processor time of one call."""
    begin = time.process_time()
    action()
    return time.process_time() - begin


async def make(folder: Path, rows: int) -> None:
    await (await grown(folder, rows)).close()


def main(rows: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as base:
        home = Path(base) / "home"
        anyio.run(make, home, rows)
        events = (home / "audit" / "events.jsonl").read_bytes()
        chain = (home / "audit" / "events.chain.jsonl").read_bytes()
        head = (home / "audit-head" / "head.json").read_bytes()
        key = audit_log_chain.read_public_key((home / "audit-head" / "ledger.pub").read_bytes())
        lines = events.split(b"\n")[:-1]
        at = paths.Places.open(home)
        opened = files.Files(at)
        actions: dict[str, Callable[[], object]] = {
            "bare": lambda: bare(lines),
            "verify": lambda: verify.verify(events, chain, head, key),
            "daemon": lambda: audit_verify.verify(opened, opened.snapshot()),
        }
        assert verify.verify(events, chain, head, key).root_hash_hex == bare(lines)
        assert audit_verify.verify(opened, opened.snapshot()).valid
        results: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(rounds):
            for name, action in actions.items():
                results[name].append(seconds(action))
        opened.close()
        at.close()
    median = {name: statistics.median(values) for name, values in results.items()}
    print(f"{rows:,} rows of {len(events) // rows} bytes, {rounds} rounds, load {os.getloadavg()[0]:.1f}")
    for name, value in median.items():
        print(f"{name:8} {value / rows * 1e6:6.2f} us a row, ratio {median['bare'] / value:5.2f}")
    print(json.dumps({name: round(median["bare"] / median[name], 3) for name in ("verify", "daemon")}))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, int(sys.argv[2]) if len(sys.argv) > 2 else 7)
