"""Check the metrics for Prometheus: bounded, without text of an agent, and equal to the log's numbers."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from policy import denials, errors
from policy.signing import expiry
from sandbox.control import metrics
from sandbox.control.metrics import RunSample, Tally
from sandbox.kernel.cgroup.stats import Usage, usage
from sandbox.rundir.registry import Entry
from sandbox.serve import metrics_http, metrics_worker
from sandbox.storage.trust_state import State
from tests import prometheus_text, signing_kit

EMPTY: dict[str, Any] = {
    **dict.fromkeys(("package", "payload_digest", "operator", "parent"), ""),
    **dict.fromkeys(("depth", "started_ms", "memory_mb", "pids_max", "cpu_millis", "host_memory_mb"), 0),
    **dict.fromkeys(("max_depth", "max_descendants"), 0),
    **dict.fromkeys(("ancestors", "signers"), ()),
    "issuer": {"display": "", "pubkey": ""},
    "on_parent_exit": "terminate",
    "self_test": False,
    "label": {},
    "path": Path("/nowhere"),
}


def seen(agent_id: str, memory: int = 1, run_id: str = "r") -> RunSample:
    return RunSample(Entry(run_id=run_id, agent_id=agent_id, **EMPTY), Usage(2_500_000, memory, 3, None, 5))


def tally(tmp_path: Path, *rows: dict[str, Any]) -> Tally:
    log = tmp_path / "events.jsonl"
    with log.open("ab") as file:
        for row in rows:
            event = {"id": "x", "timestamp_ms": 1, "issuer": {}, "kind": row}
            file.write(json.dumps(event, separators=(",", ":")).encode() + b"\n")
    return Tally(log)


def test_series_are_bounded_and_add_up() -> None:
    agents = [seen(f"agent-{number}", memory=number) for number in range(1, 251)]
    numbers = prometheus_text.parse(metrics.text(agents, Tally(Path("/nowhere"))))
    memory = numbers["covenant_agent_memory_bytes"]
    assert len(memory) == metrics.MAX_AGENTS + 1
    assert sum(memory.values()) == sum(range(1, 251))
    # The largest agents have series of their own.
    assert memory['agent_id="agent-250"'] == 250
    assert memory['agent_id=""'] == sum(range(1, 151))
    assert numbers["covenant_agent_cpu_seconds"]['agent_id="agent-250"'] == 2.5
    assert numbers["covenant_runs"]['state="Isolated"'] == 250


def test_first_of_its_kind_is_an_increase(tmp_path: Path) -> None:
    """A series that begins at 1 has no increase, so an alert on it would come with the second run or package."""
    before = prometheus_text.parse(metrics.text([], tally(tmp_path)))
    row = {"type": "run_ended", "run_id": "r", "status": "failed", "code": errors.CutOffError.code}
    counted = tally(tmp_path, row, {"type": "manifest_rejected", "run_id": None, "code": "unsigned"})
    list(counted.read())
    after = prometheus_text.parse(metrics.text([], counted))
    for name, labels in (
        ("covenant_run_ends_total", 'code="cut_off",status="failed"'),
        ("covenant_rejections_total", 'code="unsigned"'),
        ("covenant_self_tests_total", 'result="failed"'),
        ("covenant_drifts_total", ""),
    ):
        assert before[name][labels] == 0
    assert after["covenant_run_ends_total"]['code="cut_off",status="failed"'] == 1
    assert after["covenant_rejections_total"]['code="unsigned"'] == 1


def test_ends_of_trust_root_and_its_keys_are_series(tmp_path: Path) -> None:
    end = signing_kit.NOW + 30 * signing_kit.DAY
    early = end - signing_kit.DAY
    root = signing_kit.root(signing_kit.operator(1), signing_kit.operator(2, expires_at=early), expires_at=end)
    times = metrics.StateTimes(tuple(expiry.of_root(root)))
    numbers = prometheus_text.parse(metrics.text([], tally(tmp_path), times))
    assert numbers["covenant_expiry_timestamp_seconds"] == {
        'name="",what="trust_root"': end / 1000,
        'name="op2",what="key"': early / 1000,
    }
    assert metrics.times(tmp_path / "none", signing_kit.NOW) == metrics.NO_TIMES


def test_clock_behind_the_latest_accepted_time(tmp_path: Path) -> None:
    state_path = tmp_path / "state"
    state_path.mkdir(mode=0o700)
    with State(state_path) as state:
        state.init_root(signing_kit.root_bytes(signing_kit.root_document(), 1), signing_kit.NOW)

    def behind(now_ms: int) -> dict[str, float]:
        shown = metrics.text([], tally(tmp_path), metrics.times(state_path, now_ms))
        return prometheus_text.parse(shown)["covenant_clock_behind_seconds"]

    assert behind(signing_kit.NOW) == {"": 0}
    assert behind(signing_kit.NOW + signing_kit.DAY) == {"": 0}
    assert behind(signing_kit.NOW - 90_000) == {"": 90}
    # An unreadable state has no sample: 0 would say that the clock is right.
    assert prometheus_text.parse(metrics.text([], tally(tmp_path))).get("covenant_clock_behind_seconds", {}) == {}


def test_no_agent_can_write_line_of_its_own() -> None:
    hostile = 'x"} 1\ncovenant_drifts_total 99\\'
    numbers = prometheus_text.parse(metrics.text([seen(hostile)], Tally(Path("/nowhere"))))
    assert numbers["covenant_drifts_total"] == {"": 0}
    assert len(numbers["covenant_agent_runs"]) == 1


def test_what_is_counted_is_what_log_holds(tmp_path: Path) -> None:
    counted = tally(
        tmp_path,
        {"type": "run_started", "run_id": "r"},
        {"type": "denied", "run_id": "r", "layer": "dns", "count": 3},
        {"type": "denied", "run_id": "r", "layer": "of a later version", "count": 2},
        {"type": "run_ended", "run_id": "q", "status": "failed", "code": errors.CutOffError.code},
        {"type": "run_ended", "run_id": "p", "status": "failed", "code": "of a later version"},
        {"type": "manifest_rejected", "run_id": None, "code": "signature"},
        {"type": "self_test", "run_id": None, "passed": True},
        {"type": "capability_check", "run_id": "r"},
    )
    assert len(list(counted.read())) == 7
    assert (counted.starts, counted.rows, counted.by_run) == (1, 8, {"r": 5})
    assert counted.denied == {"dns": 3, metrics.OTHER: 2}
    assert counted.ends == {("failed", "cut_off"): 1, ("failed", metrics.OTHER): 1}
    # It continues where it stopped, and reads an unfinished line once it is complete.
    log = tmp_path / "events.jsonl"
    whole = b'{"id":"x","timestamp_ms":1,"issuer":{},"kind":{"type":"run_started","run_id":"s"}}\n'
    with log.open("ab") as file:
        file.write(whole[:40])
        file.flush()
        assert list(counted.read()) == []
        file.write(whole[40:])
    assert len(list(counted.read())) == 1
    assert counted.starts == 2
    numbers = prometheus_text.parse(metrics.text([], counted))
    assert numbers["covenant_run_starts_total"] == {"": 2}
    assert set(numbers["covenant_denials_total"]) == {f'layer="{one}"' for one in (*denials.LAYERS, metrics.OTHER)}


def test_cgroup_gone_counts_nothing(tmp_path: Path) -> None:
    assert usage({"memory": tmp_path, "cpu": tmp_path, "pids": tmp_path}) == Usage()
    (tmp_path / "memory.current").write_text("7\n")
    (tmp_path / "cpu.stat").write_text("nr 1\nusage_usec 9\n")
    assert usage({"memory": tmp_path, "cpu": tmp_path}) == Usage(cpu_us=9, memory_bytes=7)


def test_line_of_journal_is_one_line_of_ascii_and_says_whose_run_it_is() -> None:
    kind = {
        "type": "run_ended",
        "run_id": "r",
        "agent_id": "a\u202e\n",
        "status": "failed",
        "code": None,
        "target": "t",
    }
    said = metrics_worker.line({"timestamp_ms": 5, "kind": kind})
    assert said.count(b"\n") == 1
    assert said.isascii()
    assert json.loads(said) == {
        "time_ms": 5, "event": "run_ended", "run_id": "r", "agent_id": "a\u202e\n", "status": "failed",
    }  # fmt: skip


def test_only_end_of_long_log_is_read_for_live_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller of the supervisor may call it often."""
    (tmp_path / "audit").mkdir()
    row = {"type": "denied", "run_id": "r", "layer": "dns", "count": 1}
    long = tally(tmp_path / "audit", *[row] * 100)
    size = long.path.stat().st_size
    monkeypatch.setattr(metrics, "MOST_BYTES", size // 10)
    short = metrics.tally(tmp_path, whole=False)
    whole = metrics.tally(tmp_path, whole=True)
    assert len(list(short.read())) in (9, 10)
    assert len(list(whole.read())) == 100
    assert short.by_run["r"] in (9, 10)


def test_answer_too_late_for_who_asked_does_not_end_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine would end the metrics, and after a few failures the same watcher's journal too."""
    monkeypatch.setattr(metrics_http, "SECONDS", 1.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "m"))
    listener.listen()
    # The forked process owns both from here on.
    fds = {"listener": listener.detach(), "numbers": theirs.detach()}
    serving = threading.Thread(target=metrics_http.serve, args=(SimpleNamespace(fds=fds, seal=lambda: None),))
    serving.start()
    with ours:
        ours.settimeout(60)
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as scraper:
                scraper.connect(str(tmp_path / "m"))
                scraper.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
                assert ours.recv(16) == b"?"
                assert scraper.recv(1) == b"", "nobody answered in time"
            ours.send(b"too late\n")
    serving.join(60)
    assert not serving.is_alive(), "the watcher's end is its end"
