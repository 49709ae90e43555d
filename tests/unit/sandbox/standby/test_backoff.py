"""The packages that are not kept ready, as a requester is told: while a supervisor tries, and only future attempts."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import doctor
from sandbox.config import Config
from sandbox.doctor import Status
from sandbox.standby import backoff


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
