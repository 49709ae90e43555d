"""Checkpoints of the supervisor's log: over which rows, across cuts and kills, and what a changed file leads to."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import threading
from pathlib import Path

import pytest

from covenant.cli.audit import proofs, read_logs
from policy import errors
from policy.audit_log import merkle, note, truncation
from sandbox.audit import checkpoint_row, checkpoints, log_cut
from sandbox.config import Config
from sandbox.serve import metrics_worker
from tests.cli_kit import call, document
from tests.unit.sandbox.audit.test_log import ISSUER, opened, paths, report, state, write
from tests.unit.sandbox.audit.test_log_cut import killed_at

__all__ = ["state"]


def _filled(place: Path, times: range) -> None:
    with opened(place) as log:
        for now_ms in times:
            write(log, f"row {now_ms}", now_ms=now_ms)


def _signed(place: Path) -> list[note.Checkpoint]:
    key = note.Verifier.parse((place / "audit-head" / "checkpoint.vkey").read_text())
    found = []
    for line in (place / "audit" / "checkpoints.jsonl").read_bytes().splitlines():
        signed = note.Note.parse(json.loads(line)["note"].encode())
        assert signed.verified([key])
        found.append(note.Checkpoint.parse(signed.text))
    return found


def _roots(place: Path) -> dict[int, bytes]:
    tree, found = merkle.Frontier(), dict[int, bytes]()
    for line in paths(place)[0].read_bytes().splitlines():
        tree.append(merkle.leaf_hash(line))
        found[tree.size] = tree.root()
    return found


def _holds(place: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setenv("COVENANT_STATE", str(place))
    monkeypatch.setenv("COVENANT_HOME", str(place.parent / "none"))
    (shown,) = read_logs.read_logs()
    return proofs.report(shown).valid


def test_checkpoint_covers_all_rows_once(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoints.make(state) is None
    _filled(state, range(5))
    first = checkpoint_row.make(state)
    # The row that tells of a checkpoint is no reason for another one.
    assert checkpoint_row.make(state) == first
    _filled(state, range(5, 7))
    checkpoint_row.make(state)
    # Without the position the log is read from its beginning, and leads to the same.
    (state / "audit-head" / "checkpoint.state").write_bytes(b"{")
    _filled(state, range(7, 8))
    checkpoint_row.make(state)
    roots = _roots(state)
    assert [(one.size, one.root) for one in _signed(state)] == [(size, roots[size]) for size in (5, 8, 10)]
    assert report(state).valid
    assert _holds(state, monkeypatch)


def test_cut_keeps_checkpoints_and_its_archive_has_some(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _filled(state, range(4))
    checkpoints.make(state)
    _filled(state, range(4, 10))
    roots = _roots(state)
    log_cut.cut(state, 7, tmp_path / "old", issuer=ISSUER, now_ms=20)
    # That of 4 rows, which no row tells of, is the archive's alone.
    assert [(one.size, one.root) for one in _signed(state)] == [(10, roots[10])]
    # Of the archive's rows each is covered.
    assert [(one.size, one.root) for one in _signed(tmp_path / "old")] == [(size, roots[size]) for size in (4, 7)]
    _filled(state, range(21, 23))
    assert checkpoint_row.make(state) is not None
    assert [one.size for one in _signed(state)] == [10, 13]
    assert _holds(state, monkeypatch)
    assert _holds(tmp_path / "old", monkeypatch)


def test_cut_keeps_checkpoint_that_a_row_tells_of(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(state, range(4))
    checkpoint_row.make(state)
    _filled(state, range(10, 12))
    # The four rows are cut, and the row that tells of their checkpoint stays: its time is the clock's.
    log_cut.cut(state, 4, tmp_path / "old", issuer=ISSUER, now_ms=20)
    assert [one.size for one in _signed(state)] == [4, 7]
    assert _holds(state, monkeypatch)
    # The next cut takes that row, and the checkpoint with it.
    log_cut.cut(state, 2**60, tmp_path / "older", issuer=ISSUER, now_ms=21)
    assert 4 not in [one.size for one in _signed(state)]
    assert _holds(state, monkeypatch)
    assert _holds(tmp_path / "older", monkeypatch)


def test_maker_writes_into_the_file_of_the_name(state: Path, tmp_path: Path) -> None:
    """A cut replaced the file while the maker waited for its lock."""
    _filled(state, range(4))
    checkpoints.make(state)
    _filled(state, range(4, 10))
    old = state / "audit" / checkpoints.FILE
    with old.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        maker = threading.Thread(target=checkpoints.make, args=(state,))
        maker.start()
        # As a cut does while the maker waits.
        lines = old.read_bytes()
        (state / "audit" / "other").write_bytes(lines)
        (state / "audit" / "other").chmod(0o600)
        os.rename(state / "audit" / "other", old)
    maker.join(60)
    assert [one.size for one in _signed(state)] == [4, 10]


def test_kill_at_any_step_leaves_a_log_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = -1
    for step in range(1, 60):
        place = tmp_path / str(step)
        place.mkdir(mode=0o700)
        _filled(place, range(3))
        child = os.fork()
        if child == 0:
            killed_at(step, functools.partial(checkpoint_row.make, place))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert _holds(place, monkeypatch), step
        _filled(place, range(3, 4))
        assert checkpoint_row.make(place) is not None, step
        assert max(one.size for one in _signed(place)) >= 4
        assert _holds(place, monkeypatch), step
        if status == 0:
            assert step > 8
            break
    assert status == 0


def test_line_of_a_killed_writer_is_cut(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(state, range(3))
    checkpoints.make(state)
    file = state / "audit" / "checkpoints.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    _filled(state, range(3, 4))
    assert checkpoints.make(state) is not None
    assert [one.size for one in _signed(state)] == [3, 4]
    assert _holds(state, monkeypatch)


def test_changed_rows_get_no_checkpoint(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows and the head are replaced together by ones that the log's key signed: only the checkpoint shows it."""
    _filled(state, range(3))
    checkpoints.make(state)
    kept = {name: (state / "audit-head" / name).read_bytes() for name in ("ledger.key", "ledger.pub")}
    for path in (*paths(state), *(state / "audit-head" / name for name in kept)):
        path.unlink()
    for name, content in kept.items():
        if name == "ledger.key":
            (state / "audit-head" / name).write_bytes(content)
            (state / "audit-head" / name).chmod(0o600)
    _filled(state, range(10, 14))
    assert report(state).valid
    with pytest.raises(errors.LedgerError, match="first 3 rows do not lead"):
        checkpoints.make(state)
    assert not _holds(state, monkeypatch)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("audit/checkpoints.jsonl", b'{"note":"x"}\n', "is no checkpoint"),
        ("audit-head/checkpoint.vkey", None, "their key is missing"),
        ("audit-head/checkpoint.key", None, "key is missing and its head is there"),
        ("audit-head/checkpoint.key", b"k" * 32, "public key is not that of its key"),
    ],
)
def test_changed_file_is_refused(state: Path, name: str, content: bytes | None, said: str) -> None:
    _filled(state, range(3))
    checkpoints.make(state)
    _filled(state, range(3, 4))
    (state / name).unlink()
    if content is not None:
        (state / name).write_bytes(content)
        (state / name).chmod(0o600)
    with pytest.raises(errors.LedgerError, match=said):
        checkpoints.make(state)


def test_checkpoint_that_is_taken_away_is_missed(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _filled(state, range(3))
    checkpoint_row.make(state)
    assert _holds(state, monkeypatch)
    (state / "audit" / "checkpoints.jsonl").unlink()
    assert not _holds(state, monkeypatch)


def test_verb_makes_one_and_shows_how_the_log_grew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "supervisor"
    place.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    _filled(place, range(3))
    shown = call("audit", "checkpoint", "--log", "supervisor")
    assert note.Checkpoint.parse(note.Note.parse(shown.output.encode()).text).size == 3
    _filled(place, range(3, 6))
    assert call("audit", "checkpoint", "--log", "supervisor", "--old", "3").output.startswith("old 3\n")
    assert document("audit", "verify")["report"]["valid"]


def test_each_row_is_proved_by_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "supervisor"
    place.mkdir(mode=0o700)
    tmp_path.chmod(0o700)
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path))
    monkeypatch.setenv("COVENANT_STATE", str(place))
    _filled(place, range(4))
    checkpoints.make(place)
    _filled(place, range(4, 10))
    log_cut.cut(place, 5, tmp_path / "old", issuer=ISSUER, now_ms=20)
    _filled(place, range(21, 23))
    ids = list[str]()
    for where, first in ((place, 5), (tmp_path / "old", 0)):
        monkeypatch.setenv("COVENANT_STATE", str(where))
        rows = [json.loads(line) for line in paths(where)[0].read_bytes().splitlines()]
        ids = [row["id"] for row in rows if row["kind"]["type"] != truncation.KIND]
        for at, event_id in enumerate(ids):
            proof = document("audit", "prove", "--log", "supervisor", event_id)["proof"]
            assert proof["leaf_index"] == first + at
    # Of the last rows none was covered: the verb made one. Rows that were cut are in the archive alone.
    assert [one.size for one in _signed(place)] == [10, 13]
    monkeypatch.setenv("COVENANT_STATE", str(place))
    assert call("audit", "prove", "--log", "supervisor", ids[0]).exit_code == 3
    # A row that was changed has no proof that leads to the checkpoint.
    events = paths(place)[0]
    changed = json.loads(events.read_bytes().splitlines()[1])["id"]
    events.write_bytes(events.read_bytes().replace(b"row 5", b"row x"))
    refused = call("audit", "prove", "--log", "supervisor", changed)
    assert "does not lead to the checkpoint's root" in str(refused.exception), refused.output


def test_worker_signs_by_its_clock(state: Path) -> None:
    _filled(state, range(3))
    seconds = Config().checkpoint_seconds
    signing = metrics_worker.Signing(state, seconds, now=0.0)
    metrics_worker.Signing(state, 0, now=0.0).tick(1e9)
    signing.tick(seconds - 1.0)
    assert not (state / "audit" / "checkpoints.jsonl").exists()
    signing.tick(seconds)
    assert [one.size for one in _signed(state)] == [3]
