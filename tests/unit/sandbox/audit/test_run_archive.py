"""The archive: a closed record for each run that ended, bounded in number and bytes, and nothing of its result."""

from __future__ import annotations

import json
import os
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from policy import errors, lifecycle
from sandbox.audit import run_archive

FIELDS: dict[str, Any] = {
    "agent_id": "probe",
    "package": "/srv/probe",
    "operator": "tester",
    "issuer": "operator@local",
    "parent": None,
    "status": "failed",
    "code": "deadline",
    "message": "still running",
    "policy_digest": "0" * 64,
    "started_ms": 1,
    "ended_ms": 2,
    "exit_status": 137,
    "result_hash_hex": None,
    "denials": 3,
    "stderr": "a line\n",
    "stderr_bytes": 7,
}


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


def record(number: int = 0, **fields: Any) -> run_archive.ArchivedRun:
    return run_archive.ArchivedRun(run_id=f"00000000-0000-4000-8000-{number:012d}", **{**FIELDS, **fields})


def test_record_comes_back_and_is_private(state: Path) -> None:
    run_archive.store(state, record())
    assert run_archive.read(state, record().run_id) == record()
    assert run_archive.ids(state) == [record().run_id]
    place = state / "archive" / f"{record().run_id}.json"
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
    assert run_archive.read(state, record(1).run_id) is None


def test_what_killed_writer_left_goes_with_later_record_and_what_one_is_writing_stays(state: Path) -> None:
    run_archive.store(state, record())
    dead, alive = (state / "archive" / f".{record(number).run_id}.json.new" for number in (1, 2))
    for place in (dead, alive):
        place.write_bytes(b"{")
    os.utime(dead, (0, 0))
    run_archive.store(state, record(3))
    assert sorted(os.listdir(state / "archive")) == sorted(
        [alive.name, f"{record().run_id}.json", f"{record(3).run_id}.json"]
    )


def test_record_says_how_it_ended(state: Path) -> None:
    assert record(status="ok", code=None).error() is None
    error = record().error()
    assert isinstance(error, errors.DeadlineError)
    assert error.message == "still running"
    assert type(record(code="of a later version").error()) is errors.CovenantError


@pytest.mark.parametrize("stderr", ["x" * 300_000, "\x1b" * 300_000, "\ufffd" * 50_000, "line\n" * 60_000])
def test_record_is_bounded_whatever_was_written(state: Path, stderr: str) -> None:
    run_archive.store(state, record(stderr=run_archive.tail(stderr), message=stderr, package="/srv/\udce9"))
    place = state / "archive" / f"{record().run_id}.json"
    assert place.stat().st_size <= lifecycle.ARCHIVE_RECORD_BYTES
    kept = run_archive.read(state, record().run_id)
    assert kept is not None
    assert 0 < len(kept.stderr) <= run_archive.STDERR_BYTES
    assert stderr.encode("utf-8", "backslashreplace").decode().endswith(kept.stderr)


def test_oldest_make_room_and_never_latest(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "ARCHIVE_RECORDS", 5)
    monkeypatch.setattr(run_archive, "SLACK", 3)
    for number in range(20):
        run_archive.store(state, record(number))
        # Of two in one tick of the clock either may be called the older.
        os.utime(state / "archive" / f"{record(number).run_id}.json", (number, number))
        assert len(os.listdir(state / "archive")) <= 5 + 3
        assert run_archive.read(state, record(number).run_id) is not None
    kept = run_archive.ids(state)
    assert kept == [record(number).run_id for number in range(19, 19 - len(kept), -1)]


def test_clock_put_back_makes_no_record_oldest(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the record of each run that ends goes at once, for as long as the clock has to catch up."""
    monkeypatch.setattr(lifecycle, "ARCHIVE_RECORDS", 5)
    monkeypatch.setattr(run_archive, "SLACK", 0)
    in_a_year = int(time.time()) + 365 * 86_400
    for number in range(5):
        run_archive.store(state, record(number))
        os.utime(state / "archive" / f"{record(number).run_id}.json", (in_a_year, in_a_year + number))
    run_archive.store(state, record(5))
    assert run_archive.ids(state) == [record(number).run_id for number in (5, 4, 3, 2, 1)]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'{"kind": "run_record"}',
        json.dumps({**record().model_dump(), "result": "the answer"}).encode(),
        json.dumps({**record().model_dump(), "state": "Running"}).encode(),
        b" " * (lifecycle.ARCHIVE_RECORD_BYTES + 1),
    ],
)
def test_what_is_no_record_is_refused(state: Path, raw: bytes) -> None:
    run_archive.store(state, record())
    (state / "archive" / f"{record().run_id}.json").write_bytes(raw)
    with pytest.raises(errors.StateError):
        run_archive.read(state, record().run_id)


def test_link_that_another_laid_there_is_not_followed(state: Path, tmp_path: Path) -> None:
    run_archive.store(state, record())
    place = state / "archive" / f"{record().run_id}.json"
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    place.unlink()
    place.symlink_to(victim)
    with pytest.raises(errors.StateError, match="symlink"):
        run_archive.read(state, record().run_id)
    run_archive.store(state, record())
    assert victim.read_bytes() == b"mine"
    assert run_archive.read(state, record().run_id) == record()


@pytest.mark.parametrize("run_id", ["", "../audit/events", "x", "../../etc/passwd"])
def test_no_other_name_makes_record(run_id: str) -> None:
    with pytest.raises(ValueError, match="run_id"):
        run_archive.ArchivedRun(run_id=run_id, **FIELDS)


def test_record_without_stdout_is_of_older_version(state: Path) -> None:
    run_archive.store(state, record(stdout="a banner\n", stdout_bytes=9))
    place = state / "archive" / f"{record().run_id}.json"
    written = json.loads(place.read_bytes())
    assert (written.pop("stdout"), written.pop("stdout_bytes")) == ("a banner\n", 9)
    place.write_text(json.dumps(written))
    assert run_archive.read(state, record().run_id) == record()


def test_record_of_escaped_output_fits(state: Path) -> None:
    """Each control character takes six bytes: both outputs are shortened, the longer one first."""
    run_archive.store(state, record(stderr="\x01" * 8000, stdout="\x02" * 8000))
    place = state / "archive" / f"{record().run_id}.json"
    assert place.stat().st_size <= lifecycle.ARCHIVE_RECORD_BYTES
    fitted = run_archive.read(state, record().run_id)
    assert fitted is not None
    assert 1000 < len(fitted.stderr) < 8000
    assert 1000 < len(fitted.stdout) < 8000
