"""Metrics: the live runs with their use, and the counts of the log; also in the text format of Prometheus.

Numbers and agent ids alone: no intent, no result, no path, no package, no text of an agent's. The number of series is
bounded: codes, layers and states are closed tables, and only so many agent ids have series of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from policy import denials, errors
from policy.lifecycle import State
from policy.signing import expiry
from policy.signing.expiry import Expiry
from sandbox.audit import open_runs
from sandbox.control import prometheus
from sandbox.kernel.cgroup import stats
from sandbox.kernel.cgroup.stats import Usage
from sandbox.network import addresses
from sandbox.rundir import registry
from sandbox.rundir.registry import Entry
from sandbox.storage import trust_state

CONTENT_TYPE = prometheus.CONTENT_TYPE
# Agent ids with series of their own; what the others use is one more, without an id.
MAX_AGENTS = 100
# Codes whose series begin at 0: Prometheus sees no increase in a series that begins at 1, so the first run that is cut
# off, or the first package that is refused for a cause, would raise no alert.
_ENDS = sorted(code for code, kind in errors.TABLE.items() if issubclass(kind, errors.RunError))
_REFUSALS = sorted(
    code
    for code, kind in errors.TABLE.items()
    if issubclass(kind, (errors.AuthorError, errors.RuleViolation, errors.SignatureError))
)
# Any code or layer that this version does not know: a later one wrote the log.
OTHER = "other"
_CHUNK_BYTES = 1 << 20
# So much of the end of the log is read for the denials of live runs.
MOST_BYTES = 16 << 20
# The rows that are counted or told; each as it stands in a line, so that the others are not parsed.
_KINDS = (
    *("run_started", "run_ended", "run_state", "denied", "drift", "manifest_rejected", "self_test"),
    *("runs_revoked", "runs_stopped", "trust_changed"),
)
_NEEDLES = tuple(f'"kind":{{"type":"{kind}"'.encode() for kind in _KINDS)


class RunSample(Struct, frozen=True):
    """One live run and what it uses. ``denied`` counts what was refused to it so far, as far as the log has it."""

    entry: Entry
    usage: Usage
    denied: int = 0

    def to_json(self) -> dict[str, Any]:
        """As one of the runs of ``covenant top --json``. Times in milliseconds, sizes in bytes."""
        one, used = self.entry, self.usage
        return {
            "run_id": one.run_id,
            "agent_id": one.agent_id,
            "intent_id": one.label.get("intent_id") or None,
            "state": one.state or str(State.ISOLATED),
            "parent": one.parent or None,
            "depth": one.depth,
            "started_ms": one.started_ms,
            "cpu_ms": None if used.cpu_us is None else used.cpu_us // 1000,
            "memory_bytes": used.memory_bytes,
            "memory_mb": one.memory_mb,
            "processes": used.processes,
            "received_bytes": used.received_bytes,
            "sent_bytes": used.sent_bytes,
            "denied": self.denied,
        }


class StateTimes(Struct, frozen=True):
    """Times of a supervisor's state: when the trust root and its keys end, and how far the clock is behind.

    ``behind_ms`` compares this machine's clock with the latest time at which something was accepted. None where the
    state cannot be read.
    """

    ends: tuple[Expiry, ...] = ()
    behind_ms: int | None = None


NO_TIMES = StateTimes()


@dataclass
class Tally:
    """The counts of the log, from its first row on. ``read`` goes on where it stopped.

    It follows the file and verifies nothing: ``covenant audit verify`` does.
    """

    path: Path
    starts: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    denied: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    self_tests: Counter[str] = field(default_factory=Counter)
    drifts: int = 0
    rows: int = 0
    by_run: dict[str, int] = field(default_factory=dict)
    _offset: int = 0
    _rest: bytes = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """Take what is new; each of the rows that are counted or told."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        try:
            if os.fstat(fd).st_size < self._offset:
                # A writer's last words that were set aside, or a new log: what was counted stays counted.
                self._offset, self._rest = os.fstat(fd).st_size, b""
            while chunk := os.pread(fd, _CHUNK_BYTES, self._offset):
                self._offset += len(chunk)
                *lines, self._rest = (self._rest + chunk).split(b"\n")
                for line in lines:
                    self.rows += 1
                    if any(needle in line for needle in _NEEDLES):
                        with contextlib.suppress(ValueError, KeyError, TypeError):
                            event = json.loads(line)
                            self._count(event["kind"])
                            yield event
        finally:
            os.close(fd)

    def _count(self, row: Mapping[str, Any]) -> None:
        kind, run_id = row["type"], row.get("run_id") or ""
        if kind == "run_started":
            self.starts += 1
            self.by_run[run_id] = 0
        elif kind == "run_ended":
            self.ends[row["status"], _known(row["code"] or "", errors.TABLE)] += 1
            self.by_run.pop(run_id, None)
        elif kind == "denied":
            self.denied[_known(row["layer"], denials.LAYERS)] += row["count"]
            # Also of a run whose start lies before what is read; its end takes it out again.
            self.by_run[run_id] = self.by_run.get(run_id, 0) + row["count"]
        elif kind == "drift":
            self.drifts += 1
        elif kind == "manifest_rejected":
            self.rejected[_known(row["code"], errors.TABLE)] += 1
        elif kind == "self_test":
            self.self_tests["passed" if row["passed"] else "failed"] += 1


def _known(word: str, table: Mapping[str, object]) -> str:
    return word if not word or word in table else OTHER


def tally(state: Path, *, whole: bool) -> Tally:
    """A tally of the supervisor's log in COVENANT_STATE: of all of it, or of its end, from
    where every run before has ended, which does for those that live."""
    path = state / "audit" / "events.jsonl"
    if whole:
        return Tally(path)
    with contextlib.suppress(FileNotFoundError):
        # A client may ask often: a run that has lived through a gigabyte of log is counted in part.
        return Tally(path, _offset=max(open_runs.settled(state), path.stat().st_size - MOST_BYTES))
    return Tally(path)


def live(state: Path, counted: Tally | None = None) -> list[RunSample]:
    """The live runs with an agent, parents before children, and what they use now."""
    return used(list(registry.agents(registry.live(state / "runs"))), counted)


def used(entries: Sequence[Entry], counted: Tally | None = None) -> list[RunSample]:
    """As ``live``, of these runs."""
    ids = {one.run_id for one in entries}
    roots = [one for one in entries if not ids & set(one.ancestors)]
    ordered = [one for root in roots for one in registry.subtree(entries, root.run_id)]
    return [
        RunSample(
            one,
            stats.usage(one.cgroups, keeper=one.keeper, device=addresses.host_device(one.run_id)),
            0 if counted is None else counted.by_run.get(one.run_id, 0),
        )
        for one in ordered
    ]


def text(runs: Sequence[RunSample], counted: Tally, times: StateTimes = NO_TIMES) -> str:
    """Everything in the text format of Prometheus."""
    states = Counter(seen.entry.state or str(State.ISOLATED) for seen in runs)
    ended = {**{("failed", code): 0 for code in _ENDS}, **counted.ends}
    rejected = {**dict.fromkeys(_REFUSALS, 0), **counted.rejected}
    shown = [state for state in State if state not in (State.TERMINATED, State.ARCHIVED, State.REJECTED)]
    agents = _by_agent(runs)
    families: list[tuple[str, str, str, Iterable[tuple[Mapping[str, str], float]]]] = [
        ("covenant_runs", "gauge", "Live runs by state.", [({"state": str(s)}, states[str(s)]) for s in shown]),
        ("covenant_agent_runs", "gauge", "Live runs of an agent.", _each(agents, "runs")),
        ("covenant_agent_cpu_seconds", "gauge", "Processor time of an agent's live runs.", _each(agents, "cpu")),
        ("covenant_agent_memory_bytes", "gauge", "Memory of an agent's live runs.", _each(agents, "memory")),
        ("covenant_agent_processes", "gauge", "Host tasks of an agent's live runs.", _each(agents, "processes")),
        ("covenant_agent_received_bytes", "gauge", "What came to an agent's live runs.", _each(agents, "received")),
        ("covenant_agent_sent_bytes", "gauge", "What an agent's live runs sent.", _each(agents, "sent")),
        ("covenant_run_starts_total", "counter", "Runs that were started.", [({}, counted.starts)]),
        (
            "covenant_run_ends_total",
            "counter",
            "Runs that ended, by status and by the error's code.",
            [({"status": status, "code": code}, n) for (status, code), n in sorted(ended.items())],
        ),
        (
            "covenant_rejections_total",
            "counter",
            "Packages that were refused, by the error's code.",
            [({"code": code}, n) for code, n in sorted(rejected.items())],
        ),
        (
            "covenant_denials_total",
            "counter",
            "What was refused to agents, by who refused it.",
            [({"layer": layer}, counted.denied[layer]) for layer in (*sorted(denials.LAYERS), OTHER)],
        ),
        ("covenant_drifts_total", "counter", "What confined an agent and was changed.", [({}, counted.drifts)]),
        (
            "covenant_self_tests_total",
            "counter",
            "Self-tests that were made.",
            [({"result": result}, counted.self_tests[result]) for result in ("failed", "passed")],
        ),
        (
            "covenant_expiry_timestamp_seconds",
            "gauge",
            "When the trust root and its keys end, as a Unix time.",
            [({"what": one.what, "name": one.name}, one.expires_at_ms / 1000) for one in times.ends],
        ),
        (
            "covenant_clock_behind_seconds",
            "gauge",
            "How far the clock is behind its latest time.",
            [] if times.behind_ms is None else [({}, times.behind_ms / 1000)],
        ),
        ("covenant_audit_rows_total", "counter", "Rows of the audit log.", [({}, counted.rows)]),
    ]
    return prometheus.text(prometheus.family(*family) for family in families)


def times(state: Path, now_ms: int) -> StateTimes:
    """Return the times of a state; none where it cannot be read or has no trust root."""
    with contextlib.suppress(errors.CovenantError), trust_state.State(state) as held:
        ends = tuple(expiry.of_root(held.present_root()))
        return StateTimes(ends, max(0, held.greatest_time_ms() - now_ms))
    return NO_TIMES


def _by_agent(runs: Sequence[RunSample]) -> dict[str, Counter[str]]:
    """Return the total use of each agent, the largest first. Agents beyond ``MAX_AGENTS`` are summed under no id."""
    by_id: dict[str, Counter[str]] = {}
    for seen in runs:
        used = seen.usage
        by_id.setdefault(seen.entry.agent_id, Counter()).update({
            "runs": 1,
            "cpu": used.cpu_us or 0,
            "memory": used.memory_bytes or 0,
            "processes": used.processes or 0,
            "received": used.received_bytes or 0,
            "sent": used.sent_bytes or 0,
        })  # fmt: skip
    ranked = sorted(by_id, key=lambda name: (-by_id[name]["memory"], name))
    named = {name: by_id[name] for name in sorted(ranked[:MAX_AGENTS])}
    for name in ranked[MAX_AGENTS:]:
        named.setdefault("", Counter()).update(by_id[name])
    return named


def _each(agents: Mapping[str, Counter[str]], what: str) -> list[tuple[Mapping[str, str], float]]:
    return [({"agent_id": name}, one[what] / 1e6 if what == "cpu" else one[what]) for name, one in agents.items()]
