"""Samples of both processes on each day, and the checks at the end of the year."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

from tests.crash.campaign import verified
from tests.kernel.conftest import leftovers
from tests.year.acts import Year
from tests.year.machine import DISK_MB

# How much memory may grow between the middle and the end of the life of one process.
GROWTH_MB: Final = 24.0
# In a life of fewer days the first verification of the whole log counts as growth.
LONG_LIFE_DAYS: Final = 30
# How many descriptors more a process may have at the end than in the middle: connections of the pool come and go.
MORE_DESCRIPTORS: Final = 8


@dataclass(frozen=True)
class Sample:
    """One evening: each process by its id, its private memory and its descriptors, and the disks."""

    day: int
    daemon: int
    daemon_mb: float
    daemon_files: int
    supervisor: int
    supervisor_mb: float
    supervisor_files: int
    disks_mb: dict[str, float]

    @classmethod
    def of(cls, made: Year, day: int) -> Sample:
        """Read both processes."""
        daemon, supervisor = made.machine.daemon_pid, made.machine.served.pid
        return cls(
            day, daemon, _memory_mb(daemon), _files(daemon), supervisor, _memory_mb(supervisor), _files(supervisor),
            {name: made.machine.used_mb(name) for name in DISK_MB},
        )  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One invariant, and what was found of it."""

    name: str
    found: str
    holds: bool


def at_end(made: Year, samples: Sequence[Sample]) -> list[Finding]:
    """Check everything that must hold, and stop both processes for what only then can be seen."""
    machine = made.machine
    found = [_chain(made), _stores(made), _answers(made)]
    found += _memory(samples)
    machine.stop_daemon()
    found += [_credits(made), _copied(made)]
    status = machine.served.stop()
    found.append(Finding("the supervisor ends in order", f"status {status}", status == 0))
    complaints = verified(machine.world.state)
    found.append(Finding("the supervisor's log verifies", "; ".join(complaints) or "valid", not complaints))
    open_runs = _open_runs(made)
    found.append(Finding("every run of the log has one end", f"{open_runs} without", open_runs == 0))
    left = [one for one in leftovers(machine.world) if " - tmpfs " not in one]
    found.append(Finding("no cgroup, process, mount or run directory is left", _few(left), not left))
    users = list(_users(machine.world.state))
    found.append(Finding("no user id is held", _few(users), not users))
    files = [str(path) for path in machine.base.rglob("*.new")]
    found.append(Finding("no temporary file is left", _few(files), not files))
    return found


def _chain(made: Year) -> Finding:
    report = made.machine.ask("verify_audit_integrity")["report"]
    found = f"{report['events']} rows, {'; '.join(map(str, report['failures'])) or 'valid'}"
    return Finding("the daemon's log verifies", found, report["valid"] is True)


def _stores(made: Year) -> Finding:
    report = made.machine.ask("verify", window=10_000)
    return Finding("the daemon's stores agree", f"{len(report['drift'])} disagreements", not report["drift"])


def _answers(made: Year) -> Finding:
    before = len(made.wrong)
    made.intents.check(len(made.intents.kept()))
    lost = made.wrong[before:]
    return Finding("every acknowledged answer is there", f"{len(made.intents.kept())} asked for, {len(lost)} wrong",
                   not lost)  # fmt: skip


def _credits(made: Year) -> Finding:
    """Compare the ledger with the receipts of the answers.

    Each reservation is closed, and each answer was charged its receipt's credits. An intent whose first try a kill
    ended was charged for that try too.
    """
    ledger = made.machine.daemon_home / "budget" / "ledger.jsonl"
    charged: dict[str, int] = {}
    open_: set[str] = set()
    cut: set[str] = set()
    for row in map(json.loads, ledger.read_text().splitlines()):
        receipt = row.get("paired_receipt")
        cut |= {one["paired_receipt"] for one in row.get("open", ())}
        if row["type"] in ("debit", "refund"):
            charged[receipt] = charged.get(receipt, 0) + (row["credits"] if row["type"] == "debit" else -row["credits"])
            (open_.add if row.get("reserved") else open_.discard)(receipt)
    wrong = [f"reservation {one} is open" for one in open_]
    for intent_id, one in made.intents.kept().items():
        used = ((one.answer or {}).get("settlement") or {}).get("credits_consumed", 0)
        paid = charged.get(intent_id)
        if paid is not None and intent_id not in cut and paid not in ({used, used + 1} if one.repeated else {used}):
            wrong.append(f"intent {intent_id} was charged {paid} and its receipt says {used}")
    return Finding("the budget's ledger and the receipts agree", f"{len(charged)} charged, wrong: {_few(wrong)}",
                   not wrong)  # fmt: skip


def _copied(made: Year) -> Finding:
    """Compare the rows that the daemon copied with the supervisor's log and its archives."""
    theirs: dict[str, str] = {}
    for place in (*made.archives, made.machine.world.state):
        for line in (place / "audit" / "events.jsonl").read_text().splitlines():
            theirs[json.loads(line)["id"]] = line
    seen: set[str] = set()
    wrong = []
    for line in (made.machine.daemon_home / "audit" / "events.jsonl").read_text().splitlines():
        kind = json.loads(line)["kind"]
        if kind["type"] != "supervisor_row":
            continue
        if kind["event_id"] in seen:
            wrong.append(f"row {kind['event_id']} is there twice")
        if kind["line"] is not None and theirs.get(kind["event_id"]) != kind["line"]:
            wrong.append(f"row {kind['event_id']} is not the supervisor's")
        seen.add(kind["event_id"])
    return Finding("each row copied from the supervisor's log is there once and the same",
                   f"{len(seen)} copied, wrong: {_few(wrong)}", not wrong)  # fmt: skip


def _memory(samples: Sequence[Sample]) -> Iterator[Finding]:
    """Compare the middle of the longest life of each process with its end."""
    for name in ("daemon", "supervisor"):
        lives: dict[int, list[Sample]] = {}
        for one in samples:
            lives.setdefault(getattr(one, name), []).append(one)
        life = max(lives.values(), key=len)
        half = life[len(life) // 3 : 2 * len(life) // 3] or life
        last = life[2 * len(life) // 3 :]
        most_mb = GROWTH_MB if len(life) >= LONG_LIFE_DAYS else 2 * GROWTH_MB
        for what, most in (("mb", most_mb), ("files", MORE_DESCRIPTORS)):
            column = f"{name}_{what}"
            before, after = (median(getattr(one, column) for one in part) for part in (half, last))
            unit = "MB" if what == "mb" else "descriptors"
            text = f"{before:.0f} in the middle and {after:.0f} at the end of its longest life ({len(life)} days)"
            yield Finding(f"the {name}'s {unit} are flat", text, after - before <= most)


def _open_runs(made: Year) -> int:
    started: dict[str, int] = {}
    for row in made.machine.world.rows():
        kind = row["kind"]
        if kind["type"] in ("run_started", "run_ended"):
            started[kind["run_id"]] = started.get(kind["run_id"], 0) + (1 if kind["type"] == "run_started" else -1)
    return sum(1 for count in started.values() if count)


def _users(state: Path) -> Iterator[str]:
    """Yield the claims of user ids below a state."""
    for place in state.glob("uids/*"):
        if subprocess.run(["flock", "-n", str(place), "true"], check=False).returncode:
            yield str(place)


def _memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kib = sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    return kib / 1024


def _files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _few(found: Sequence[str]) -> str:
    return f"{len(found)}: {'; '.join(found[:5])}" if found else "none"
