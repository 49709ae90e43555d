"""The packages that are not kept ready, as a requester is told: while a supervisor tries, and only future attempts."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from policy.package import Package
from sandbox import doctor
from sandbox.config import Config
from sandbox.doctor import Status
from sandbox.standby import backoff, wanted


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """That of a supervisor that lives."""
    fd = os.open(tmp_path / "supervisor.lock", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    yield tmp_path
    os.close(fd)


def now_ms() -> int:
    return int(time.time() * 1000)


def test_what_was_noted_is_told_until_it_is_over(state: Path) -> None:
    assert backoff.waiting(state, now_ms=now_ms()) == []
    backoff.note(state, "restless", count=3, restless=True, wait_seconds=600)
    backoff.note(state, "dies", count=2, restless=False, wait_seconds=600)
    backoff.note(state, "done", count=1, restless=False, wait_seconds=-1)
    told = {one.agent_id: one for one in backoff.waiting(state, now_ms=now_ms())}
    assert set(told) == {"restless", "dies"}
    at = told["restless"].until_ms
    assert told["restless"].line(at - 42_000) == "`restless` did not wait for its intent: next try in 42 s"
    assert told["dies"].line(at + 9_999_999) == "`dies` 2 instances ended before their intent: next try in 0 s"
    backoff.over(state, "dies")
    backoff.over(state, "never-noted")
    assert [one.agent_id for one in backoff.waiting(state, now_ms=now_ms())] == ["restless"]
    backoff.forget(state)
    assert backoff.waiting(state, now_ms=now_ms()) == []


def test_what_cannot_be_read_is_none(state: Path) -> None:
    backoff.note(state, "a", count=1, restless=False, wait_seconds=600)
    (path,) = (state / "standby-retries").iterdir()
    for text in ("", "{}", '{"agent_id": "a"}', '{"agent_id": "a", "more": 1}'):
        path.write_text(text)
        assert backoff.waiting(state, now_ms=now_ms()) == []


def test_without_supervisor_nothing_is_tried(tmp_path: Path) -> None:
    backoff.note(tmp_path, "a", count=1, restless=False, wait_seconds=600)
    assert backoff.waiting(tmp_path, now_ms=now_ms()) == []


def test_doctor_says_it(state: Path) -> None:
    config = Config(state=state)
    assert doctor.standby(config, 0.0).status is Status.OK
    backoff.note(state, "restless", count=1, restless=True, wait_seconds=600)
    found = doctor.standby(config, 0.0)
    assert found.status is Status.DEGRADED
    assert found.found.startswith("`restless` did not wait for its intent: next try in ")
    assert found.mend


def test_doctor_says_that_machine_has_no_room(state: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control is the same machine without a stall, and one that keeps no agent ready."""
    proc = tmp_path / "proc"
    (proc / "pressure").mkdir(parents=True)
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(proc))
    # Buffers to Slab are lines that psutil reads.
    names = ("Buffers", "Cached", "Shmem", "SReclaimable", "Active", "Inactive", "Slab")
    others = "".join(f"{name}: 1 kB\n" for name in names)
    (proc / "meminfo").write_text(f"MemTotal: 24000000 kB\nMemFree: 1 kB\nMemAvailable: 20000000 kB\n{others}")
    stalled = "some avg10=43.20 avg60=0.00 avg300=0.00 total=1\n"
    (proc / "pressure" / "memory").write_text(stalled)
    assert doctor.standby(Config(state=state), 0.0).status is Status.OK
    wanted.want(state, Package({"agent.toml": b"[agent]"}, b"e"), agent_id="ready", count=1, package_name="/p")
    backoff.note(state, "dies", count=2, restless=False, wait_seconds=600)
    found = doctor.standby(Config(state=state), 0.0)
    assert found.status is Status.DEGRADED
    assert found.found.startswith(
        "no more instances are made now: programs wait for memory 43.2 % of the time, 10 % at most; `dies` 2 instances "
    )
    (proc / "pressure" / "memory").write_text(stalled.replace("43.20", "9.00"))
    backoff.over(state, "dies")
    assert doctor.standby(Config(state=state), 0.0).status is Status.OK
