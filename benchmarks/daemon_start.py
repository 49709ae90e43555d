#!/usr/bin/env python3
"""The start of covenantd with 100 packages, 100,000 audit rows and grants, and what it holds when it is idle.

    import      a Python that imports what the daemon imports, and ends: what no start can be without
    empty       from exec to READY=1, in a home where it ran before
    full        the same with 100 packages below agents/ and 100,000 rows in the log
    granted     the same as `full` with 100,000 grants as well, each of them another's
    processor   of the last two: what they take on a machine that does nothing else
    idle        resident memory (VmRSS) two seconds after it was ready, and its private part

Goals of the project: a full start of at most 1.5 s, idle memory of at most 120 MiB.

.venv/bin/python benchmarks/daemon_start.py [rounds] [packages] [rows] [grants]
"""

from __future__ import annotations

import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from covenant.keys.identity import Identity
from covenant.stores.audit.durable import DurableAudit
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.capabilities import rows as grants
from covenant.stores.capabilities.interface import Grant
from policy import base58
from policy.capabilities.token import Token

DAEMON = ["-c", "from covenant.start import entry; entry()", "--allow-root"]
MANIFEST = (ROOT / "agents" / "hello" / "agent.toml").read_text()


def packages(home: Path, count: int) -> None:
    """As many agents, each with an id of its own."""
    for number in range(count):
        folder = home / "agents" / f"agent-{number}"
        folder.mkdir(parents=True)
        (folder / "agent.toml").write_text(re.sub(r'(?m)^id = ".*"', f'id = "agent-{number}"', MANIFEST, count=1))
        (folder / "main.py").write_text("print(1)\n")


async def fill(home: Path, count: int) -> None:
    """As many rows in the log."""
    identity = Identity.load(home)
    log = await DurableAudit.open(home, issuer=identity.agent, now_ms=lambda: time.time_ns() // 1_000_000)
    row = AuditEntry("authentication_failed", {"transport": "ipc", "reason": "the token is nobody's"})
    for _ in range(count // 1000):
        await log.append_all([row] * 1000)
    await log.close()


def give(home: Path, count: int) -> None:
    """Write `count` grants to the file of grants.

    The signatures are made up: a signature is verified only at first use.
    """
    root = Identity.load(home).agent
    with (home / "capabilities" / "granted.jsonl").open("ab") as stream:
        for number in range(count):
            token = Token(base58.encode(number.to_bytes(4) + b"k" * 28), "memory.read", {}, root.pubkey, None)
            grant = Grant(token, base58.encode(number.to_bytes(4) + b"s" * 60), f"peer-{number}@local", root.display)
            stream.write(grants.granted(grant) + b"\n")


def start(home: Path) -> tuple[float, float, int, int]:
    """Return the seconds from exec to ready and of processor time, then resident and private memory in KiB, idle."""
    place = str(home.parent / "notify")
    Path(place).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(place)
        told.settimeout(120)
        env = {**os.environ, "COVENANT_HOME": str(home), "COVENANT_HTTP_PORT": "0", "NOTIFY_SOCKET": place}
        began = time.perf_counter()
        with subprocess.Popen([sys.executable, *DAEMON], cwd=ROOT, env=env, stderr=subprocess.DEVNULL) as popen:
            while told.recv(4096) != b"READY=1":
                pass
            seconds = time.perf_counter() - began
            fields = Path(f"/proc/{popen.pid}/stat").read_text().rpartition(")")[2].split()
            used = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            time.sleep(2)
            status = Path(f"/proc/{popen.pid}/smaps_rollup").read_text()
            popen.terminate()
            popen.wait(60)
    found = {name: int(kib) for name, kib in re.findall(r"(?m)^(\w+): +(\d+) kB", status)}
    return seconds, used, found["Rss"], found["Private_Dirty"] + found["Private_Clean"]


def main() -> None:
    """Measure, and print."""
    default = ("5", "100", "100000", "100000")
    rounds, count, rows, held = (int(n) for n in (*sys.argv[1:], *default[len(sys.argv) - 1 :]))
    with tempfile.TemporaryDirectory() as folder:
        empty, full, granted = (Path(folder) / name for name in ("empty", "full", "granted"))
        for home in (empty, full, granted):
            home.mkdir(mode=0o700)
            start(home)
        for home in (full, granted):
            packages(home, count)
            anyio.run(fill, home, rows)
        give(granted, held)
        found: dict[str, list[float]] = {
            "import": [],
            "empty": [],
            "full": [],
            "granted": [],
            "processor": [],
            "and with grants": [],
        }
        memory = []
        for _ in range(rounds):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import covenant.daemon"], cwd=ROOT, check=True)
            found["import"].append(time.perf_counter() - began)
            found["empty"].append(start(empty)[0])
            seconds, used, *_ = start(granted)
            found["granted"].append(seconds)
            found["and with grants"].append(used)
            seconds, used, *kept = start(full)
            found["full"].append(seconds)
            found["processor"].append(used)
            memory.append(kept)
        for name, values in found.items():
            print(f"{name:16} {statistics.median(values):6.2f} s   ({min(values):.2f} to {max(values):.2f})")
        resident, private = (statistics.median(each) / 1024 for each in zip(*memory, strict=True))
        print(f"idle             {resident:6.1f} MiB resident, {private:.1f} MiB private, `full`")
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
