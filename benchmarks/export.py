#!/usr/bin/env python3
"""Lag of `covenant export` at 10,000 rows a second, and its rate behind an outage, beside raw reading of the file.

    otlp        a collector on the loopback takes logs by OTLP/HTTP and looks at the time of each record
    ocsf        OCSF events in a file, read by another process as they come
    raw         a process that reads the log's file every 50 ms and looks at the time of each line
    behind      rows a second when 200,000 rows wait: OCSF into a file, beside one read of the log's file

A process of its own writes rows of the daemon's kind into a log of this benchmark's, with signed heads, 100 rows each
10 ms. The lag of a row is from the time that the writer gave it to its arrival, so the writer's own delay is in it. The
goal is a p99 of 1 s.

.venv/bin/python benchmarks/export.py [rows a second] [seconds] [rows that wait]
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy.audit_log import chain, events

_NUMBERS = [int(one) for one in sys.argv[1:] if one.isdigit()]
RATE, SECONDS, WAITING = (*_NUMBERS, *(10_000, 20, 200_000)[len(_NUMBERS) :])
GROUP_SECONDS = 0.01
ISSUER = events.issuer_text({"display": "operator@local", "pubkey": "1" * 40})
FIELDS = {
    "run_id": "0c4c1b9e-3a53-4f0c-9d4e-1f6d2f9d4f52",
    "agent_id": "hello",
    "operator": "ann",
    "denial": "network.connect",
    "layer": "network",
    "target": "tcp:192.0.2.1:443",
    "code": "not_granted",
    "grant": "permissions.network",
    "count": 1,
}


class Writer:
    """Write rows as the log's own writers do, without syncs."""

    def __init__(self, home: Path) -> None:
        self.log, self.folder = home / "audit", home / "audit-head"
        for one in (self.log, self.folder):
            one.mkdir(mode=0o700, exist_ok=True)
        self.key = Ed25519PrivateKey.generate()
        (self.folder / "ledger.pub").write_bytes(chain.public_key_file(self.key.public_key()))
        self.events = os.open(self.log / "events.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.chain = os.open(self.log / "events.chain.jsonl", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.head_fd = os.open(self.folder / "head.json", os.O_RDWR | os.O_CREAT, 0o600)
        self.head, self.count = chain.Head(), 0
        os.pwrite(self.head_fd, (b" " * (chain.SLOT_BYTES - 1) + b"\n") * 2, 0)

    def write(self, count: int) -> None:
        """Write so many rows with the time of now."""
        now_ms, text = time.time_ns() // 1_000_000, events.kind_text("denied", FIELDS)
        ids = [f"00000000-0000-8000-8000-{n:012x}" for n in range(self.count, self.count + count)]
        rows = [chain.ChainRow(events.assembled(one, now_ms, ISSUER, text), one, now_ms) for one in ids]
        entries, _, head = chain.extend(self.head, rows)
        os.write(self.events, b"".join(row.line + b"\n" for row in rows))
        os.write(self.chain, entries)
        at = 0 if chain.slot_offset(self.head) else chain.SLOT_BYTES
        os.pwrite(self.head_fd, chain.sign_head(head, self.key), at)
        self.head, self.count = head, self.count + count


def writing(home: Path) -> None:
    """The writer's process."""
    writer, group = Writer(home), max(1, int(RATE * GROUP_SECONDS))
    # The rows that count come once the first one has arrived: the export has started by then.
    writer.write(1)
    while not (home / "go").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    for n in range(int(SECONDS / GROUP_SECONDS)):
        writer.write(group)
        time.sleep(max(0.0, begin + (n + 1) * GROUP_SECONDS - time.monotonic()))
    print(f"writer: {writer.count / (time.monotonic() - begin):,.0f} rows a second", flush=True)


class Lags:
    """The lags of records in milliseconds, by the times in their text."""

    def __init__(self, pattern: bytes) -> None:
        self._pattern = re.compile(pattern)
        self.all = list[float]()

    def take(self, raw: bytes) -> None:
        now_ms = time.time_ns() / 1e6
        self.all += [now_ms - int(one) for one in self._pattern.findall(raw)]

    def say(self, name: str, used: float) -> None:
        ordered = sorted(self.all[1:])
        p50, p99 = (ordered[int(len(ordered) * part)] for part in (0.5, 0.99))
        print(
            f"{name}: {len(ordered):,} rows, lag p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {ordered[-1]:.0f} ms; "
            f"processor {100 * used / SECONDS:.0f} % of a core",
            flush=True,
        )


def followed(path: Path, lags: Lags, count: int) -> None:
    """Read a file as it grows, every 50 ms."""
    offset, rest = 0, b""
    while len(lags.all) < count:
        time.sleep(0.05)
        if path.exists():
            with path.open("rb") as stream:
                stream.seek(offset)
                raw = stream.read()
            offset += len(raw)
            whole, _, rest = (rest + raw).rpartition(b"\n")
            lags.take(whole)
            if whole:
                (path.parents[1] / "go").touch()


def _export(home: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {"PATH": "/usr/bin:/bin", "COVENANT_HOME": str(home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "export", "--log", "daemon", *words]
    return subprocess.Popen(command, env=environment)


def _used(process: subprocess.Popen[bytes]) -> float:
    """End the export; the processor time of both its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process.terminate()
    process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


async def _collected(home: Path, count: int) -> None:
    lags, done = Lags(rb'"timeUnixNano":"(\d+)\d{6}"'), asyncio.Event()

    async def take(request: web.Request) -> web.Response:
        raw = await request.read()
        if request.path.endswith("logs"):
            lags.take(raw)
            (home / "go").touch()
            if len(lags.all) >= count:
                done.set()
        return web.json_response({})

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/{signal}", take)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    process = _export(home, "--otlp", f"http://127.0.0.1:{runner.addresses[0][1]}")
    await asyncio.to_thread(_while_writing, home)
    await asyncio.wait_for(done.wait(), 300)
    lags.say("otlp", await asyncio.to_thread(_used, process))
    await runner.cleanup()


def _while_writing(home: Path) -> None:
    subprocess.run([sys.executable, __file__, *map(str, (RATE, SECONDS, WAITING)), "writer", home], check=True)


def _beside(home: Path, work: Callable[[], None]) -> None:
    writer = subprocess.Popen([sys.executable, __file__, *map(str, (RATE, SECONDS, WAITING)), "writer", home])
    work()
    writer.wait()


def _behind(home: Path) -> None:
    writer = Writer(home)
    while writer.count < WAITING:
        writer.write(1000)
    begin = time.perf_counter()
    _export(home, "--ocsf", str(home / "export/out"), "--once").wait()
    took = time.perf_counter() - begin
    begin = time.perf_counter()
    read = (home / "audit/events.jsonl").read_bytes().count(b"\n")
    raw = time.perf_counter() - begin
    assert (home / "export/out").read_bytes().count(b"\n") == read == WAITING
    print(f"behind: {WAITING / took:,.0f} rows a second, its start included; raw read {read / raw:,.0f} rows a second")


def main() -> None:
    """Measure all four."""
    count = max(1, int(RATE * GROUP_SECONDS)) * int(SECONDS / GROUP_SECONDS) + 1
    with tempfile.TemporaryDirectory() as place:
        homes = [Path(place) / name for name in ("otlp", "ocsf", "raw", "behind")]
        for home in homes:
            home.mkdir(mode=0o700)
            (home / "audit").mkdir(mode=0o700)
        asyncio.run(_collected(homes[0], count))
        process = _export(homes[1], "--ocsf", str(homes[1] / "export/out"))
        lags = Lags(rb'\{"time":(\d+),')
        _beside(homes[1], lambda: followed(homes[1] / "export/out", lags, count))
        lags.say("ocsf", _used(process))
        lags = Lags(rb'"timestamp_ms":(\d+),')
        begin = time.process_time()
        _beside(homes[2], lambda: followed(homes[2] / "audit/events.jsonl", lags, count))
        lags.say("raw", time.process_time() - begin)
        _behind(homes[3])


if __name__ == "__main__":
    if "writer" in sys.argv:
        writing(Path(sys.argv[-1]))
    else:
        main()
