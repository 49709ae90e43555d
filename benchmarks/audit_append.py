#!/usr/bin/env python3
"""Durable appends to the daemon's audit log under 64 concurrent writers, beside raw writes in the same run.

    raw         64 times a line of the log by one write each, then fdatasync, again and again
    log         64 tasks that each wait for their row, as the daemon's requests do
    flat        the same with 1,000,000 rows in the log, against 1 row

Each round has all three, one behind the other, and the other way about in every second one; what is compared is the
median of the rounds' own ratios, so that a machine that others use as well tells nearly the same. The processor's part
is shown by itself: on a disk whose sync costs a fraction of a millisecond it is most of the time.

The rate is one that lasts: a round is 200 groups of each, some tenths of a second, and the first round does not count.
The goal is 20,000 rows a second, which is 50 us a row.

.venv/bin/python benchmarks/audit_append.py [rounds] [rows of the large log] [groups of a round]
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

from covenant.stores.audit.durable import DurableAudit
from covenant.stores.audit.interface import AuditEntry
from covenant.wire.types import AgentId
from policy import base58

WRITERS = 64
_NUMBERS = [int(one) for one in sys.argv[1:] if one.isdigit()]
ROUNDS, ROWS, GROUPS = (*_NUMBERS, *(7, 1_000_000, 200)[len(_NUMBERS) :])
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


def raw(folder: Path, line: bytes) -> tuple[float, float]:
    """Seconds a line, and of them the processor's: writes of single lines, with a sync behind each group."""
    fd = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(GROUPS):
        for _ in range(WRITERS):
            os.write(fd, line)
        os.fdatasync(fd)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    os.close(fd)
    (folder / "raw").unlink()
    return seconds / (GROUPS * WRITERS), used / (GROUPS * WRITERS)


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
    batch = [AuditEntry("capability_check", FIELDS)] * 1000
    for start in range(0, rows, len(batch)):
        await opened.append_all(batch[: rows - start])
    return opened


async def one_round(
    folder: Path, line: bytes, small: DurableAudit, large: DurableAudit, *, turned: bool
) -> dict[str, tuple[float, float]]:
    """Measure the three once and return their times by name."""
    made = {}
    for name in ("large", "log", "raw") if turned else ("raw", "log", "large"):
        made[name] = raw(folder, line) if name == "raw" else await log(small if name == "log" else large)
    return made


async def main(rounds: int, rows: int) -> None:
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as base:
        folder = Path(base)
        small, large = await grown(folder / "small", 1), await grown(folder / "large", rows)
        # What growing left for the disk to do is not what an append costs.
        os.sync()
        [(_, row)] = small._files.lines()  # noqa: SLF001
        line = row + b"\n"
        await one_round(folder, line, small, large, turned=False)
        rounds_made = [await one_round(folder, line, small, large, turned=bool(n % 2)) for n in range(rounds)]
        begin = time.perf_counter()
        report = await large.verify()
        verified = time.perf_counter() - begin
        await small.close()
        await large.close()
    shown = {name: statistics.median(made[name][0] for made in rounds_made) * 1e6 for name in ("raw", "log", "large")}
    cpu = {name: statistics.median(made[name][1] for made in rounds_made) * 1e6 for name in ("raw", "log", "large")}
    ratios = sorted(made["raw"][0] / made["log"][0] for made in rounds_made)
    ratio = statistics.median(ratios)
    flat = statistics.median(made["large"][0] / made["log"][0] for made in rounds_made)
    load = os.getloadavg()[0]
    print(f"line {len(line)} bytes, {WRITERS} writers, {rounds} rounds of {GROUPS * WRITERS}, load {load:.1f}")
    print(
        f"raw write + fdatasync, groups of {WRITERS}    : {shown['raw']:8.1f} us a line ({cpu['raw']:.1f} of processor)"
    )
    print(f"log                                    : {shown['log']:8.1f} us a row ({cpu['log']:.1f} of processor)")
    print(f"rows a second (goal at least 20,000)   : {1e6 / shown['log']:8,.0f}")
    print(f"ratio of a round                       : {ratio:8.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")
    print(f"log with {rows:,} rows                  : {shown['large']:8.1f} us a row ({cpu['large']:.1f} of processor)")
    print(f"flat (1.0 is flat)                     : {flat:8.2f}")
    print(f"verify of {report.events:,} rows: {verified:.2f} s, valid {report.valid}")
    print(json.dumps({"ratio": round(ratio, 3), "flat": round(flat, 3), "rows_s": round(1e6 / shown["log"])}))


if __name__ == "__main__":
    anyio.run(main, ROUNDS, ROWS)
