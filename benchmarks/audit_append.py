#!/usr/bin/env python3
"""Durable appends to the daemon's audit log under 64 concurrent writers, beside raw writes in the same run.

    raw         64 lines of the same length by one write each, then fdatasync, again and again
    log         64 tasks that each wait for their row, as the daemon's requests do
    flat        the same with 1,000,000 rows in the log, against 1 row

The rounds alternate, and the medians are compared. The processor's part is shown by itself: on a disk whose sync costs
a fraction of a millisecond it is most of the time.

.venv/bin/python benchmarks/audit_append.py [rounds] [rows of the large log]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from covenant.stores.audit.durable import DurableAudit  # noqa: E402
from covenant.stores.audit.interface import Entry  # noqa: E402
from covenant.wire.types import AgentId  # noqa: E402
from policy import base58  # noqa: E402

WRITERS = 64
GROUPS = 40
AGENT = AgentId(display="user@local", pubkey=base58.encode(b"d" * 32))
FIELDS = {
    "agent_id": "memory:write",
    "required_actions": ["memory.write"],
    "missing_actions": [],
    "passed": True,
    "authorized_by": [{"action": "memory.write", "granted_by_display": "user@local", "signature_b58": "5" * 88}],
}


def now_ms() -> int:
    """The daemon's clock."""
    return time.time_ns() // 1_000_000


def raw(folder: Path, line: bytes) -> float:
    """Seconds a line: writes of single lines, with a sync behind each group."""
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    begin = time.perf_counter()
    for _ in range(GROUPS):
        for _ in range(WRITERS):
            os.write(fd, line)
        os.fdatasync(fd)
    seconds = time.perf_counter() - begin
    os.close(fd)
    (folder / "raw").unlink()
    return seconds / (GROUPS * WRITERS)


async def log(opened: DurableAudit) -> tuple[float, float]:
    """Seconds a row, and of them the processor's."""

    async def writer() -> None:
        for _ in range(GROUPS):
            await opened.append("capability_check", FIELDS)

    begin, used = time.perf_counter(), time.process_time()
    async with anyio.create_task_group() as group:
        for _ in range(WRITERS):
            group.start_soon(writer)
    rows = GROUPS * WRITERS
    return (time.perf_counter() - begin) / rows, (time.process_time() - used) / rows


async def grown(folder: Path, rows: int) -> DurableAudit:
    """A log with this many rows."""
    await anyio.Path(folder).mkdir(mode=0o700)
    opened = await DurableAudit.open(folder, issuer=AGENT, now_ms=now_ms)
    batch = [Entry("capability_check", FIELDS)] * 1000
    for start in range(0, rows, len(batch)):
        await opened.append_all(batch[: rows - start])
    return opened


async def main(rounds: int, rows: int) -> None:
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as base:
        folder = Path(base)
        small, large = await grown(folder / "small", 1), await grown(folder / "large", rows)
        # What growing left for the disk to do is not what an append costs.
        os.sync()
        size = small._files.head.events_bytes  # noqa: SLF001
        line = b"x" * (size - 1) + b"\n"
        results: dict[str, list[float]] = {"raw": [], "log": [], "cpu": [], "large": []}
        for _ in range(rounds):
            results["raw"].append(raw(folder, line))
            seconds, used = await log(small)
            results["log"].append(seconds)
            results["cpu"].append(used)
            results["large"].append((await log(large))[0])
        begin = time.perf_counter()
        report = await large.verify()
        verified = time.perf_counter() - begin
        await small.close()
        await large.close()
    median = {name: statistics.median(values) * 1e6 for name, values in results.items()}
    print(f"line {size} bytes, {WRITERS} writers, {rounds} rounds of {GROUPS * WRITERS}, load {os.getloadavg()[0]:.1f}")
    print(f"raw write + fdatasync in groups of {WRITERS}: {median['raw']:8.1f} us a line")
    print(f"log                                    : {median['log']:8.1f} us a row ({median['cpu']:.1f} of processor)")
    print(f"ratio (goal at least 0.5)              : {median['raw'] / median['log']:8.2f}")
    print(f"log with {rows:,} rows                  : {median['large']:8.1f} us a row")
    print(f"flat (1.0 is flat)                     : {median['large'] / median['log']:8.2f}")
    print(f"verify of {report.events:,} rows: {verified:.2f} s, valid {report.valid}")
    print(
        json.dumps(
            {"ratio": round(median["raw"] / median["log"], 3), "flat": round(median["large"] / median["log"], 3)}
        )
    )


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]) if len(sys.argv) > 1 else 7, int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000)
