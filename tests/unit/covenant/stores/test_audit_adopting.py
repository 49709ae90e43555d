"""Check that version 1's log (tests/golden/v1/audit: each of its 41 kinds once) is adopted or refused."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from covenant.keys.identity import Identity
from covenant.stores.audit import adopt_v1, paths
from covenant.stores.audit.durable import DurableAudit
from policy import errors
from policy.audit_log import chain
from sandbox.storage import atomic_file
from tests import daemon_kit

pytestmark = pytest.mark.anyio
GOLDEN = Path(__file__).parents[3] / "golden" / "v1" / "audit"
NAMES = (paths.EVENTS, paths.CHAIN)
SEED = bytes(range(1, 33))
TOKEN = "3hmiRZikDbAH9BKnK65RHcR5TtqfUB6aLzeVMaiRdiGW"
ROWS = [json.loads(line) for line in (GOLDEN / paths.EVENTS).read_text().splitlines()]
OWNER = ROWS[0]["issuer"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home as version 1 left it: its identity, its operator's token in clear, its log."""
    home = tmp_path / "home"
    registered = {"type": "registered", "token": TOKEN, "agent_id": OWNER, "registered_at": 1_699_999_999_000}
    files = {
        "identity/local.key": SEED,
        "peers/operator.token": TOKEN.encode(),
        "peers/registry.jsonl": json.dumps(registered).encode() + b"\n",
        **{f"audit/{name}": (GOLDEN / name).read_bytes() for name in NAMES},
    }
    for name, content in files.items():
        (home / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (home / name).write_bytes(content)
        (home / name).chmod(0o600)
    home.chmod(0o700)
    return home


async def _opened(home: Path) -> DurableAudit:
    return await DurableAudit.open(home, issuer=Identity.load(home).agent, now_ms=lambda: 1_800_000_000_000)


def _chain(lines: list[bytes]) -> str:
    """Compute version 1's chain of hashes as its page describes them."""
    return chain.fold([chain.event_hash(line) for line in lines])


async def test_whole_daemon_serves_home_of_version_1(home: Path) -> None:
    async with daemon_kit.running(home) as daemon:
        # The client keeps its token.
        assert (home / "peers" / "operator.token").read_text() == TOKEN
        report = (await daemon.ask("verify_audit_integrity"))["report"]
        assert (report["valid"], report["failures"]) == (True, [])
        events = (await daemon.ask("recent_audit", limit=100))["events"]
        assert events[-len(ROWS) :] == ROWS[::-1]
        (started,) = [one["kind"] for one in events if one["kind"]["type"] == "daemon_started"]
        (told,) = [one for one in started["recovered"] if "version 1's log" in one]
        golden = (GOLDEN / paths.EVENTS).read_bytes().splitlines()
        assert f"{len(ROWS)} rows, chain hash {_chain(golden)}" in told
        assert (await daemon.ask("prove_audit_inclusion", event_id=ROWS[3]["id"]))["proof"]["leaf_index"] == 3
        assert report["events"] >= len(ROWS) + 1
    for name in NAMES:
        assert (home / "audit" / adopt_v1.BACKUPS[name]).read_bytes() == (GOLDEN / name).read_bytes()
        assert (home / "audit" / name).read_bytes().startswith((GOLDEN / name).read_bytes())
    async with daemon_kit.running(home) as daemon:
        (again,) = [
            one["kind"]
            for one in (await daemon.ask("recent_audit", limit=2))["events"]
            if one["kind"]["type"] == "daemon_started"
        ]
        assert again["recovered"] == []
        assert (await daemon.ask("verify_audit_integrity"))["report"]["valid"] is True


@pytest.mark.parametrize("count", [1, 2, 7, 8])
async def test_log_of_any_length_goes_on(count: int, home: Path) -> None:
    for name in NAMES:
        lines = (GOLDEN / name).read_bytes().splitlines(keepends=True)[:count]
        (home / "audit" / name).write_bytes(b"".join(lines))
    async with await _opened(home) as log:
        assert log.count == count
        assert len(log.recovered) == 1
        await log.append("daemon_stopped", {"reason": "test"})
        report = await log.verify()
        assert (report.valid, report.events, report.notes) == (True, count + 1, ())
    async with await _opened(home) as log:
        assert log.recovered == []


async def test_no_log_and_empty_one_are_begun_and_not_taken_over(home: Path) -> None:
    for name in NAMES:
        (home / "audit" / name).write_bytes(b"")
    async with await _opened(home) as log:
        assert (log.count, log.recovered) == (0, [])
    assert sorted(os.listdir(home / "audit")) == ["checkpoints.jsonl", *sorted(NAMES)]


def _lines(home: Path, name: str) -> list[bytes]:
    return (home / "audit" / name).read_bytes().splitlines(keepends=True)


def _put(home: Path, name: str, lines: list[bytes]) -> None:
    (home / "audit" / name).write_bytes(b"".join(lines))


def _changed(home: Path) -> None:
    _put(home, paths.EVENTS, [one.replace(b'"int', b'"int').replace(b"x y", b"x z") for one in _lines(home, NAMES[0])])


def _swapped(home: Path) -> None:
    lines = _lines(home, paths.EVENTS)
    lines[4], lines[5] = lines[5], lines[4]
    _put(home, paths.EVENTS, lines)


def _both_without_one(home: Path) -> None:
    for name in NAMES:
        lines = _lines(home, name)
        _put(home, name, lines[:9] + lines[10:])


def _timed(home: Path, when: bytes) -> None:
    lines = _lines(home, paths.EVENTS)
    opening, rest = lines[0].split(b'"timestamp_ms":', 1)
    _put(home, paths.EVENTS, [opening + b'"timestamp_ms":' + when + rest.lstrip(b"0123456789"), *lines[1:]])


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (_changed, "record 0 of version 1's log is not what its chain says"),
    (_swapped, "record 4 of version 1's log is not what its chain says"),
    (_both_without_one, "record 9 of version 1's log is not what its chain says"),
    (lambda home: _put(home, paths.EVENTS, _lines(home, paths.EVENTS)[:-2]), "names more than its 39 records"),
    (lambda home: _put(home, paths.CHAIN, _lines(home, paths.CHAIN)[:-1]), "record 40 .* is not in its chain"),
    (lambda home: _put(home, paths.EVENTS, [*_lines(home, paths.EVENTS), b'{"id"']), "record 41 .* has no end"),
    (lambda home: _put(home, paths.EVENTS, [*_lines(home, paths.EVENTS), b"{}\n"]), "record 41 .* is no event"),
    (lambda home: _timed(home, b"9" * 5000), "record 0 .* is no event"),
    (lambda home: _timed(home, b"1" + b"0" * 19), "record 0 .* is no event of any time"),
    (lambda home: (home / "audit" / paths.CHAIN).unlink(), "one file of two, `events.jsonl`"),
    (lambda home: (home / "audit" / paths.EVENTS).unlink(), "one file of two, `events.chain.jsonl`"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
async def test_one_that_does_not_hold_together_is_refused_and_left_as_it_is(
    damage: Callable[[Path], Any], words: str, home: Path
) -> None:
    damage(home)
    before = {name: (home / "audit" / name).read_bytes() for name in os.listdir(home / "audit")}
    with pytest.raises(errors.LedgerError, match=words) as raised:
        await _opened(home)
    assert "mv audit audit.v1" in str(raised.value.hint)
    assert {name: (home / "audit" / name).read_bytes() for name in os.listdir(home / "audit")} == before
    assert os.listdir(home / "audit-head") == []
    # Follow the hint.
    (home / "audit").rename(home / "audit.v1")
    async with await _opened(home) as log:
        assert log.count == 0


async def test_log_of_ours_whose_head_is_gone_is_not_signed_anew(home: Path) -> None:
    async with await _opened(home) as log:
        await log.append("daemon_stopped", {"reason": "test"})
    for names in itertools.chain(itertools.combinations(("head.json", "pending"), 2), [()]):
        for name in names:
            (home / "audit-head" / name).unlink()
        if not names:
            for path in (home / "audit-head").iterdir():
                path.unlink()
        with pytest.raises(errors.LedgerError, match=r"its head is missing|no head record verifies"):
            await _opened(home)


async def test_crash_before_head_is_made_good(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash comes after all earlier steps: the copies and the key."""
    real = atomic_file.replace

    def cut_off(directory: int, name: str, data: bytes) -> None:
        if name == paths.HEAD:
            raise OSError(28, "No space left on device")
        real(directory, name, data)

    (home / "audit" / ".events.v1.jsonl.new").write_bytes(b"half")
    monkeypatch.setattr(atomic_file, "replace", cut_off)
    with pytest.raises(errors.LedgerError, match="No space left"):
        await _opened(home)
    monkeypatch.undo()
    assert (home / "audit-head" / paths.KEY).exists()
    async with await _opened(home) as log:
        assert log.count == len(ROWS)
        assert (await log.verify()).valid


@pytest.mark.parametrize("place", NAMES)
async def test_file_that_others_can_read_is_refused_with_command_that_mends_it(place: str, home: Path) -> None:
    (home / "audit" / place).chmod(0o644)
    with pytest.raises(errors.LedgerError) as raised:
        await _opened(home)
    command = raised.value.hint.partition(", or ")[0].split()
    assert command == ["chmod", "0600", str(home / "audit" / place)]
    subprocess.run(command, check=True)
    async with await _opened(home) as log:
        assert log.count == len(ROWS)
