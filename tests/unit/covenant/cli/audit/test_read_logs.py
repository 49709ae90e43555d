"""``covenant audit`` over a daemon's files after a power cut, or beside older copies: it sees what a start sees."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import anyio
import pytest
from click.testing import CliRunner, Result
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covenant.cli.audit.commands import audit
from covenant.keys import identity
from covenant.stores.audit import files
from covenant.stores.audit.durable import DurableAudit
from policy import errors
from policy.audit_log import chain, write_ahead
from sandbox.serve.api import paths
from tests import server_kit


def call(*arguments: str) -> Result:
    return CliRunner().invoke(audit, list(arguments))


@pytest.fixture
def home(covenant_home: Path) -> Path:
    covenant_home.mkdir(mode=0o700)
    return covenant_home


async def opened(home: Path, now_ms: Callable[[], int] = lambda: server_kit.NOW_MS) -> DurableAudit:
    agent = identity.Identity.load(home).agent
    return await DurableAudit.open(home, issuer=agent, now_ms=now_ms, origin=None)


FILES = ("audit/events.jsonl", "audit/events.chain.jsonl", "audit-head/head.json", "audit-head/pending")
CUTS = [FILES[:2], (*FILES[:2], FILES[3]), FILES[:3], FILES[3:]]


def copies(home: Path) -> dict[str, bytes]:
    return {name: (home / name).read_bytes() for name in FILES}


def put_back(home: Path, names: tuple[str, ...], *, closed: bool) -> None:
    """Leave a log of five rows, in which some files are copies from when it had two. ``closed``: its daemon ended."""

    async def run() -> tuple[dict[str, bytes], dict[str, bytes]]:
        kept = []
        async with await opened(home) as log:
            for count in (2, 3):
                for n in range(count):
                    await log.append("authentication_failed", {"transport": "ipc", "reason": f"row {n} of {count}"})
                kept.append(copies(home))
        return kept[0], copies(home) if closed else kept[1]

    old, new = anyio.run(run)
    for name in FILES:
        (home / name).write_bytes(old[name] if name in names else new[name])


def opens(home: Path) -> bool:
    async def run() -> bool:
        try:
            async with await opened(home):
                return True
        except errors.LedgerError:
            return False

    return anyio.run(run)


def test_recent_shows_rows_that_only_pending_has(home: Path) -> None:
    """A power cut took the rows out of the files; the next start writes them again."""
    put_back(home, FILES[:3], closed=False)
    shown = [row["id"] for row in json.loads(call("recent", "--extended", "--json").stdout)["events"]]
    assert opens(home)
    assert shown == [json.loads(line)["id"] for line in (home / FILES[0]).read_bytes().splitlines()]
    assert len(shown) == 5


def test_logs_of_installed_service_are_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_back(home, (), closed=True)
    monkeypatch.setattr(paths, "SYSTEM_STATE", str(tmp_path / "none"))
    monkeypatch.setattr(paths, "SYSTEM_HOME", str(home))
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "mine"))
    refused = call("verify").exception
    assert isinstance(refused, errors.LedgerError)
    assert refused.hint == f"export COVENANT_HOME={home}"
    monkeypatch.setenv("COVENANT_HOME", refused.hint.partition("=")[2])
    assert call("verify").exit_code == 0


@pytest.mark.parametrize("closed", [False, True], ids=["killed", "closed"])
@pytest.mark.parametrize("names", CUTS, ids=["files", "files-pending", "files-head", "pending"])
def test_verify_is_red_where_start_refuses(home: Path, names: tuple[str, ...], closed: bool) -> None:
    """Some files of a sound log are replaced by older copies: the verification and the next start agree."""
    put_back(home, names, closed=closed)
    valid = call("verify").exit_code == 0
    assert valid == opens(home)
    if valid:
        assert (home / FILES[0]).read_bytes().count(b"\n") == 5


def test_zeros_in_place_of_rows_hide_no_row(home: Path) -> None:
    """A power cut may leave zeros for blocks of the files; `pending` has their rows."""
    put_back(home, FILES[2:3], closed=False)
    events = home / FILES[0]
    whole = events.read_bytes()
    events.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) - len(whole) // 2))
    assert call("verify").exit_code == 0
    assert len(json.loads(call("recent", "--extended", "--json").stdout)["events"]) == 5
    assert opens(home)
    assert events.read_bytes() == whole


def test_newest_copies_put_back_are_sound_again(home: Path) -> None:
    """The message names the fix; this applies it."""
    put_back(home, (), closed=True)
    newest = copies(home)
    (home / FILES[3]).write_bytes(older_pending(home))
    answer = call("verify")
    assert answer.exit_code == 3
    assert "names rows that `pending` does not hold: put back the newest copies" in answer.stdout
    for name in FILES:
        (home / name).write_bytes(newest[name])
    assert call("verify").exit_code == 0
    assert opens(home)


NEW_FILES = tuple(name + write_ahead.NEW for name in FILES[:2])
KILLED_AT = ["commit", "first rename", "second rename", "head", "first slot", "second slot"]


def cut_log(home: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, bytes]], dict[str, bytes]]:
    """Cut a log of four rows to two, and add three. Returns the files after each step that a kill can follow, and those
    of the end."""
    seen: list[dict[str, bytes]] = []

    def watched(act: Callable[..., None]) -> Callable[..., None]:
        def done(*given: Any, **named: Any) -> None:
            act(*given, **named)
            now = {name: (home / name).read_bytes() for name in (*FILES, *NEW_FILES) if (home / name).exists()}
            if b"\nrebase\n" in now[FILES[3]][: chain.SLOT_BYTES]:  # later it begins anew, and the cut is over
                seen.append(now)

        return done

    async def run() -> dict[str, bytes]:
        times = itertools.count(server_kit.NOW_MS)
        async with await opened(home, lambda: next(times)) as log:
            for n in range(4):
                await log.append("authentication_failed", {"transport": "ipc", "reason": f"row {n}"})
            limit = next(times) - 2
            with monkeypatch.context() as patch:
                patch.setattr(os, "rename", watched(os.rename))
                patch.setattr(files, "write_bytes", watched(files.write_bytes))
                assert (await log.purge(limit)).purged == 2
            for n in range(3):
                await log.append("authentication_failed", {"transport": "ipc", "reason": f"later {n}"})
            return copies(home)

    later = anyio.run(run)
    # A power cut keeps either slot of the heads that were written last.
    old, new, half = seen[-2][FILES[2]], seen[-1][FILES[2]], chain.SLOT_BYTES
    torn = new[:half] + old[half:], old[:half] + new[half:]
    return [*seen, *({**seen[-1], FILES[2]: head} for head in torn)], later


def restore(home: Path, found: Mapping[str, bytes]) -> None:
    for name in (*FILES, *NEW_FILES):
        (home / name).unlink(missing_ok=True)
        if name in found:
            (home / name).write_bytes(found[name])
            (home / name).chmod(0o600)


@pytest.mark.parametrize("step", range(6), ids=KILLED_AT)
def test_killed_cut_is_read_as_start_leaves_it(home: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    states, _ = cut_log(home, monkeypatch)
    assert len(states) == len(KILLED_AT)
    restore(home, states[step])
    assert call("verify").exit_code == 0
    shown = [row["id"] for row in json.loads(call("recent", "--extended", "--json").stdout)["events"]]
    assert opens(home)
    # The record of the cut is the first row and the newest.
    first, *kept = (json.loads(line)["id"] for line in (home / FILES[0]).read_bytes().splitlines())
    assert shown == [*kept, first]
    assert len(shown) == 3


@pytest.mark.parametrize("step", range(4), ids=KILLED_AT[:4])
@pytest.mark.parametrize("with_files", [False, True], ids=["pending", "files-pending"])
def test_pending_of_cut_takes_no_later_row(
    home: Path, monkeypatch: pytest.MonkeyPatch, step: int, with_files: bool
) -> None:
    """The files of a cut are put back beside the log that went on: what came after must not be lost."""
    states, later = cut_log(home, monkeypatch)
    names = (*FILES[:2], *NEW_FILES, FILES[3]) if with_files else (*NEW_FILES, FILES[3])
    mixed = {**later, **{name: states[step][name] for name in names if name in states[step]}}
    restore(home, mixed)
    assert call("verify").exit_code == 3
    assert not opens(home)
    assert (home / FILES[0]).read_bytes() == mixed[FILES[0]]
    assert with_files or "put back the newest copies" in call("verify").stdout
    restore(home, later)
    assert call("verify").exit_code == 0
    assert opens(home)


def older_pending(home: Path) -> bytes:
    """The file as it was after the second row, signed by the log's key."""
    key = Ed25519PrivateKey.from_private_bytes((home / "audit-head" / "ledger.key").read_bytes())
    rows = chain.read_rows(b"".join((home / FILES[0]).read_bytes().splitlines(keepends=True)[:2]))
    assert rows is not None
    _, before, head = chain.extend(chain.Head(), rows)
    return write_ahead.opening(chain.signed_head(before, key), chain.signed_head(head, key))


@given(st.lists(st.tuples(st.sampled_from(FILES[:3]), st.floats(0, 1), st.sampled_from(["cut", "zeros"])), max_size=6))
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_power_cut_is_read_as_start_leaves_it(
    home: Path, losses: list[tuple[str, float, Literal["cut", "zeros"]]]
) -> None:
    """Parts of what has no sync yet are lost; `pending` was synced. No acknowledged row is missing, in no verb."""
    if home.exists():
        shutil.rmtree(home)
    home.mkdir(mode=0o700)
    put_back(home, (), closed=False)
    for name, share, how in losses:
        raw = (home / name).read_bytes()
        begin = int(len(raw) * share)
        (home / name).write_bytes(raw[:begin] + (b"" if how == "cut" else bytes(len(raw) - begin)))
    verified, report = call("verify").exit_code, json.loads(call("verify", "--json").stdout)["report"]
    shown = [row["id"] for row in json.loads(call("recent", "--extended", "--json").stdout)["events"]]
    assert (verified, report["events"], len(shown)) == (0, 5, 5)
    assert opens(home)
    assert shown == [json.loads(line)["id"] for line in (home / FILES[0]).read_bytes().splitlines()]
