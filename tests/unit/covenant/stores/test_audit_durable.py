"""Check the audit log on disk: no crash or foreign write to its files loses an acknowledged row unnoticed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.stores.audit import files
from covenant.stores.audit.durable import DurableAudit
from covenant.wire.types import AgentId
from policy import base58, errors
from policy.audit_log import chain as audit_log_chain
from policy.audit_log import note, verify, write_ahead

pytestmark = pytest.mark.anyio

DAEMON = AgentId(display="user@local", pubkey=base58.encode(b"d" * 32))
PEER = AgentId(display="peer@local", pubkey=base58.encode(b"p" * 32))

WRITER = """
import anyio, pathlib, sys
from covenant.stores.audit.durable import DurableAudit
from covenant.wire.types import AgentId

HOME, PURGE = pathlib.Path(sys.argv[1]), "purge" in sys.argv[2]
DAEMON = AgentId(display="user@local", pubkey="8opHzTAnfzRpPEx21XtnrVTX28YQuCpAjcn1PczScKh")

class Clock:
    ms = 1_000
    def __call__(self):
        self.ms += 1
        return self.ms

async def main():
    clock = Clock()
    opening = DurableAudit.open(HOME, issuer=DAEMON, now_ms=clock)
    async with await opening as log, anyio.create_task_group() as group:
        async def write(name):
            for n in range(100_000):
                fields = {"transport": "ipc", "reason": f"{name} {n} " + "x" * 300}
                print(await log.append("authentication_failed", fields), flush=True)
        async def purge():
            while True:
                await anyio.sleep(0.005)
                done = await log.purge(clock.ms - 30)
                print("purged", done.purged, flush=True)
        for name in range(8):
            group.start_soon(write, name)
        if PURGE:
            group.start_soon(purge)

anyio.run(main)
"""


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        self.ms += 1
        return self.ms


async def opened(home: Path, clock: Callable[[], int] | None = None) -> DurableAudit:
    return await DurableAudit.open(home, issuer=DAEMON, now_ms=clock or Clock())


def failed(n: object) -> dict[str, Any]:
    return {"transport": "ipc", "reason": f"row {n}"}


async def fill(home: Path, count: int) -> list[str]:
    async with await opened(home) as log:
        return [await log.append("authentication_failed", failed(n)) for n in range(count)]


def offline(home: Path) -> verify.Report:
    """Verify the log as `covenant audit verify` does, by the files alone."""
    key = audit_log_chain.read_public_key((home / "audit-head" / "ledger.pub").read_bytes())
    return verify.verify(
        (home / "audit" / "events.jsonl").read_bytes(),
        (home / "audit" / "events.chain.jsonl").read_bytes(),
        head.read_bytes() if (head := home / "audit-head" / "head.json").exists() else None,
        key,
    )


def snapshot(home: Path, to: Path) -> Path:
    """Copy the home as a power cut would leave it now."""
    shutil.copytree(home, to, ignore=shutil.ignore_patterns("copies"))
    to.chmod(0o700)
    return to


async def ids(log: DurableAudit) -> set[str]:
    return {row.id for row in await log.recent(1_000_000)}


# What is where ---------------------------------------------------------------------------------------------------


async def test_files_are_version_1s(home: Path) -> None:
    made = await fill(home, 3)
    lines = (home / "audit" / "events.jsonl").read_bytes().splitlines()
    entries = [json.loads(line) for line in (home / "audit" / "events.chain.jsonl").read_bytes().splitlines()]
    assert [json.loads(line)["id"] for line in lines] == made
    previous = "0" * 64
    for index, (line, entry) in enumerate(zip(lines, entries, strict=True)):
        event = audit_log_chain.event_hash(line)
        after = audit_log_chain.chain_hash(previous, event)
        assert entry == {
            "index": index,
            "event_id": made[index],
            "timestamp_ms": json.loads(line)["timestamp_ms"],
            "event_hash_hex": event,
            "previous_hash_hex": previous,
            "chain_hash_hex": after,
        }
        previous = after
    report = offline(home)
    assert (report.valid, report.events, report.root_hash_hex, report.notes) == (True, 3, previous, ())


async def test_what_is_kept_is_private(home: Path) -> None:
    await fill(home, 1)
    for folder in ("audit", "audit-head"):
        assert (home / folder).stat().st_mode & 0o777 == 0o700
        for file in (home / folder).iterdir():
            assert file.stat().st_mode & 0o777 == 0o600, file


async def test_it_goes_on_where_it_ended(home: Path) -> None:
    first = await fill(home, 3)
    async with await opened(home) as log:
        assert log.recovered == []
        second = await log.append("authentication_failed", failed("more"), PEER)
        assert [row.id for row in await log.recent(9)] == [second, *reversed(first)]
        assert [row.id for row in await log.recent(9, issuer_pubkey=PEER.pubkey)] == [second]
        assert [row.id for row in await log.recent(9, issuer_pubkey=DAEMON.pubkey)] == first[::-1]
        assert (await log.verify()).events == 4
    assert offline(home).valid


async def test_checkpoints_are_kept_and_key_stays(home: Path) -> None:
    await fill(home, 3)
    async with await opened(home) as log:
        signed, verifier = await log.checkpoint(), log.verifier
        shown = (home / "audit-head" / "checkpoint.vkey").read_text().strip()
        assert note.Verifier.parse(shown).text == verifier.text
    async with await opened(home) as log:
        assert log.verifier.text == verifier.text
        proof = await log.prove((await log.recent(9))[-1].id)
        assert proof is not None
        assert proof.checkpoint == signed


async def test_cosignature_is_kept_before_it_is_answered(home: Path, tmp_path: Path) -> None:
    key = Ed25519PrivateKey.from_private_bytes(b"w" * 32)
    witness = note.Verifier("witness.example/w", note.COSIGNATURE, key.public_key())
    await fill(home, 3)
    async with await opened(home) as log:
        signed = await log.checkpoint()
        cosigned = signed.with_signature(note.cosign(signed.text, witness.name, key, 1_700_000_000))
        kept = await log.cosigned(note.Note.parse(cosigned.raw), [witness])
        # Nothing is closed: a kill would leave this state.
        left = snapshot(home, tmp_path / "left")
    async with await opened(left) as log:
        proof = await log.prove((await log.recent(9))[-1].id)
        assert proof is not None
        assert proof.checkpoint == kept
        assert [one.time_s for one in proof.checkpoint.verified([log.verifier, witness])] == [None, 1_700_000_000]


async def test_checkpoint_that_could_not_be_kept_is_not_given_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await opened(home) as log:
        await log.append("authentication_failed", failed(1))

        async def full(lines: object) -> None:
            raise errors.StoreFullError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(log._kept, "append_all", full)
            for _ in range(2):
                with pytest.raises(errors.StoreFullError):
                    await log.checkpoint()
        await log.checkpoint()
        assert len((home / "audit" / "checkpoints.jsonl").read_bytes().splitlines()) == 1


async def test_group_is_one_sync(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await opened(home) as log:
        syncs: list[int] = []
        real = os.fdatasync

        def sync(fd: int) -> None:
            syncs.append(fd)
            real(fd)

        monkeypatch.setattr(os, "fdatasync", sync)
        async with anyio.create_task_group() as group:
            for n in range(64):
                group.start_soon(log.append, "authentication_failed", failed(n))
        assert len(syncs) <= 3


async def test_nothing_is_acknowledged_before_it_is_synced(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a sync returns, a copy of the durable state contains every acknowledged row."""
    acknowledged: list[str] = []
    copies: list[tuple[Path, int]] = []
    log = await opened(home)
    real = os.fdatasync

    def sync(fd: int) -> None:
        real(fd)
        copies.append((snapshot(home, home / "copies" / str(len(copies))), len(acknowledged)))

    monkeypatch.setattr(os, "fdatasync", sync)
    for n in range(4):
        event_id = await log.append("authentication_failed", failed(n))
        acknowledged.append(event_id)
    copy = snapshot(home, home / "copies" / "last")
    monkeypatch.undo()
    await log.close()
    assert len(copies) >= 4
    for path, count in [*copies, (copy, 4)]:
        async with await opened(path) as again:
            assert set(acknowledged[:count]) <= await ids(again)
            assert (await again.verify()).valid


async def test_listeners_hear_of_rows_as_they_stand_in_log_whoever_went_away(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go, real = threading.Event(), threading.Event(), os.fdatasync

    def slow(fd: int) -> None:
        entered.set()
        assert go.wait(60)
        real(fd)

    heard: list[str] = []
    async with await opened(home) as log:
        log.listen(lambda row: heard.append(row.id))
        monkeypatch.setattr(os, "fdatasync", slow)
        async with anyio.create_task_group() as group:
            scope = anyio.CancelScope()

            async def cancelled() -> None:
                with scope:
                    await log.append("authentication_failed", failed("cancelled"))

            group.start_soon(cancelled)
            for n in range(3):
                group.start_soon(log.append, "authentication_failed", failed(n))
            assert await anyio.to_thread.run_sync(entered.wait, 60)
            assert heard == []
            scope.cancel()
            await anyio.lowlevel.checkpoint()
            go.set()
        assert scope.cancelled_caught
        assert heard == [row.id for row in reversed(await log.recent(9))]
        assert len(heard) == 4


async def test_id_is_random_uuid(home: Path) -> None:
    made = await fill(home, 50)
    assert len(set(made)) == 50
    assert all(str(uuid.UUID(one)) == one and uuid.UUID(one).version == 4 for one in made)
    assert {uuid.UUID(one).variant for one in made} == {uuid.RFC_4122}


# A power cut: only `pending` is as it was when it was synced ------------------------------------------------------


@pytest.mark.parametrize("name", ["audit/events.jsonl", "audit/events.chain.jsonl", "audit-head/head.json"])
@pytest.mark.parametrize("damage", ["nothing", "half", "zeros", "noise"])
async def test_what_power_cut_takes_comes_back(home: Path, name: str, damage: str) -> None:
    await fill(home, 3)
    log = await opened(home)
    before = (home / name).read_bytes()
    later = [await log.append("authentication_failed", failed(n)) for n in range(5)]
    copy = snapshot(home, home / "copies" / "cut")
    await log.close()
    file = copy / name
    whole = file.read_bytes()
    kept = before if name.startswith("audit/") else b""
    lost = len(whole) - len(kept)
    tail = {
        "nothing": b"",
        "half": whole[len(kept) :][: lost // 2],
        "zeros": bytes(lost),
        "noise": random.Random(5).randbytes(lost),
    }
    file.write_bytes(kept + tail[damage])
    async with await opened(copy) as again:
        assert set(later) <= await ids(again)
        assert (await again.verify()).valid
        assert [row.kind["reason"] for row in await again.recent(5)] == [f"row {n}" for n in (4, 3, 2, 1, 0)]
    assert offline(copy).valid
    assert file.read_bytes() == whole


async def test_group_that_was_cut_off_in_pending_was_never_acknowledged(home: Path) -> None:
    log = await opened(home)
    await log.append("authentication_failed", failed(0))
    end = log._files._end
    await log.append("authentication_failed", failed(1))
    copy = snapshot(home, home / "copies" / "cut")
    await log.close()
    whole = (copy / "audit-head" / "pending").read_bytes()
    stop = whole.index(b"\0", end)
    for cut in range(end, stop, 7):
        again = snapshot(copy, home / "copies" / f"cut-{cut}")
        (again / "audit-head" / "pending").write_bytes(whole[:cut] + bytes(len(whole) - cut))
        for name, folder in (("events.jsonl", "audit"), ("events.chain.jsonl", "audit")):
            file = again / folder / name
            file.write_bytes(file.read_bytes().split(b"\n", 1)[0] + b"\n")
        (again / "audit-head" / "head.json").write_bytes(b"")
        async with await opened(again) as reopened:
            assert [row.kind["reason"] for row in await reopened.recent(9)] == ["row 0"]
            assert (await reopened.verify()).valid
            await reopened.append("authentication_failed", failed("next"))
        assert offline(again).events == 2


async def test_rows_that_were_on_disk_before_pending_were_never_acknowledged(home: Path) -> None:
    log = await opened(home)
    made = [await log.append("authentication_failed", failed(n)) for n in range(2)]
    before = snapshot(home, home / "copies" / "before")
    await log.append("authentication_failed", failed("lost"))
    copy = snapshot(home, home / "copies" / "cut")
    await log.close()
    # The files get their rows while the disk writes `pending`: a power cut may lose `pending` and keep the files.
    for name in ("pending", "head.json"):
        (copy / "audit-head" / name).write_bytes((before / "audit-head" / name).read_bytes())
    async with await opened(copy) as again:
        assert await ids(again) == set(made)
        assert len(again.recovered) == 2
        assert all("unacknowledged" in told for told in again.recovered)
        made.append(await again.append("authentication_failed", failed("next")))
        assert (await again.verify()).valid
    assert offline(copy).events == 3
    [aside] = (copy / "audit").glob("events.jsonl.aside-*")
    assert b"row lost" in aside.read_bytes()


async def test_pending_begins_anew_and_is_read_no_further_than_it_was_written(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PENDING_BYTES", 16 * 1024)
    made = await fill(home, 200)
    assert (home / "audit-head" / "pending").stat().st_size == 16 * 1024
    async with await opened(home) as log:
        assert await ids(log) == set(made)
        big = {"intent_id": "i", "intent_text": "x" * 100_000, "matched_pattern": "p"}
        made.append(await log.append("intent_ignored", big))
        copy = snapshot(home, home / "copies" / "cut")
        made.append(await log.append("authentication_failed", failed("after")))
    async with await opened(copy) as log:
        assert await ids(log) == set(made[:-1])
    async with await opened(home) as log:
        assert await ids(log) == set(made)
    assert (home / "audit-head" / "pending").stat().st_size == 16 * 1024


async def test_rows_stand_only_behind_opening_on_disk(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut may keep any pages of one sync; behind the old opening, rows of the new use would be unreadable."""
    monkeypatch.setattr(files, "PENDING_BYTES", 16 * 1024)
    steps: list[str] = []
    write, sync = files.write_bytes, os.fdatasync

    async with await opened(home) as log:

        def written(fd: int, data: bytes, at: int) -> None:
            if fd == log._files._pending:
                steps.append("a row" if at else "opening")
            write(fd, data, at)

        def synced(fd: int) -> None:
            sync(fd)
            if fd == log._files._pending:
                steps.append("sync")

        monkeypatch.setattr(files, "write_bytes", written)
        monkeypatch.setattr(os, "fdatasync", synced)
        for n in range(100):
            await log.append("authentication_failed", failed(n))
    begun = [at for at, step in enumerate(steps) if step == "opening"]
    assert len(begun) > 2
    assert {steps[at + 1] for at in begun} == {"sync"}


# kill -9 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["write", "purge"])
async def test_kill_in_loop_loses_nothing_that_was_acknowledged(home: Path, mode: str) -> None:
    told: list[str] = []
    for round_ in range(4):
        with subprocess.Popen([sys.executable, "-c", WRITER, home, mode], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            lines = [writer.stdout.readline() for _ in range(60 + 41 * round_)]
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        told += [line.strip() for line in lines if line.endswith("\n")]
        async with await opened(home, lambda: 10**12) as log:
            rows = await log.recent(10**6)
            there = {row.id for row in rows}
            assert (await log.verify()).valid
            cut = sum(row.kind["cut"] for row in rows if row.kind["type"] == "audit_rebased")
            acknowledged = {line for line in told if not line.startswith("purged")}
            # The missing rows were cut, and the record of the cut counts each one.
            assert len(acknowledged - there) <= cut
            if "purge" not in mode:
                assert acknowledged <= there
                assert cut == 0
        assert offline(home).valid


async def test_cut_that_died_at_any_step_is_done_or_was_not_begun(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    log = await opened(home, clock)
    made = [await log.append("authentication_failed", failed(n)) for n in range(20)]
    middle = (await log.recent(99))[9].timestamp_ms
    copies: list[Path] = []

    def stepping(name: str) -> None:
        real = getattr(os, name)

        def step(*args: Any, **kwargs: Any) -> Any:
            copies.append(snapshot(home, home / "copies" / f"{len(copies)}-{name}"))
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, step)

    for name in ("fsync", "fdatasync", "pwrite", "rename", "ftruncate", "dup2"):
        stepping(name)
    done = await log.purge(middle)
    monkeypatch.undo()
    await log.close()
    assert done.purged == 10
    assert len(copies) > 8
    outcomes = set()
    for copy in copies:
        async with await opened(copy) as again:
            there = await ids(again)
            assert (await again.verify()).valid
            rebased = not set(made) <= there
            outcomes.add(rebased)
            assert there >= set(made[10:] if rebased else made)
            assert len(there) == (11 if rebased else 20)
            await again.append("authentication_failed", failed("next"))
        assert offline(copy).valid
        assert not list((copy / "audit").glob("*.new"))
    assert outcomes == {False, True}


# A full or failing disk ------------------------------------------------------------------------------------------


async def test_full_disk_refuses_row_and_later_takes_it(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await opened(home) as log:
        first = await log.append("authentication_failed", failed(1))
        real = os.pwrite
        for spared in range(3):
            left = [spared]

            def full(fd: int, data: bytes, offset: int, left: list[int] = left) -> int:
                if data[:1] == b"\0":
                    return real(fd, data, offset)
                if not left[0]:
                    raise OSError(errno.ENOSPC, "No space left on device")
                left[0] -= 1
                return real(fd, data, offset)

            with monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full)
                with pytest.raises(errors.StoreFullError, match="No space left"):
                    await log.append("authentication_failed", failed("refused"))
            copy = snapshot(home, home / "copies" / str(spared))
            async with await opened(copy) as again:
                assert "refused" not in str(await again.recent(9))
                assert (await again.verify()).valid
        second = await log.append("authentication_failed", failed(2))
        assert [row.id for row in await log.recent(9)] == [second, first]
        assert (await log.verify()).valid
    assert offline(home).valid


async def test_disk_full_when_pending_begins_anew_loses_nothing_and_ends_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PENDING_BYTES", 8192)
    log = await opened(home)
    # Longer than `pending` may be; it begins anew before the next row.
    kept = [await log.append("authentication_failed", failed("x" * 20_000))]
    whole = files.write_bytes

    def full(fd: int, data: bytes, offset: int) -> None:
        if fd == log._files._pending and offset == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        whole(fd, data, offset)

    with monkeypatch.context() as disk:
        disk.setattr(files, "write_bytes", full)
        for _ in range(2):
            with pytest.raises(errors.StoreFullError):
                await log.append("authentication_failed", failed("small"))
    kept.append(await log.append("authentication_failed", failed("small")))
    # After a kill, and after a clean end.
    copy = snapshot(home, tmp_path / "copy")
    await log.close()
    for place in (copy, home):
        again = await opened(place)
        assert [row.id for row in await again.recent(9)] == kept[::-1]
        await again.close()
        assert offline(place).valid


async def test_failed_sync_ends_log_and_what_was_acknowledged_is_there(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await opened(home)
    first = await log.append("authentication_failed", failed(1))

    def broken(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        with pytest.raises(errors.StoreError, match="Input/output error"):
            await log.append("authentication_failed", failed(2))
    with pytest.raises(errors.StoreError, match="takes no more records"):
        await log.append("authentication_failed", failed(3))
    await log.close()
    async with await opened(home) as again:
        assert first in await ids(again)
        assert (await again.verify()).valid


# Other hands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["events.jsonl", "events.chain.jsonl"])
@pytest.mark.parametrize("tail", [b"torn", b"{}\n", b'{"id":"x"}\n{"id":"y"}\n', b"\0" * 100])
async def test_what_nobody_acknowledged_is_set_aside_and_told(home: Path, name: str, tail: bytes) -> None:
    made = await fill(home, 3)
    file = home / "audit" / name
    with file.open("ab") as stream:
        stream.write(tail)
    async with await opened(home) as log:
        assert await ids(log) == set(made)
        [told] = log.recovered
        assert name in told
        aside = next((home / "audit").glob(f"{name}.aside-*"))
        assert aside.read_bytes() == tail
        assert (await log.verify()).valid


@pytest.mark.parametrize("name", ["events.jsonl", "events.chain.jsonl"])
async def test_file_that_was_cut_is_refused_at_next_start(home: Path, name: str) -> None:
    await fill(home, 3)
    file = home / "audit" / name
    for size in (0, file.stat().st_size - 1, file.stat().st_size // 2):
        again = snapshot(home, home / "copies" / str(size))
        with (again / "audit" / name).open("r+b") as stream:
            stream.truncate(size)
        with pytest.raises(errors.LedgerError, match="shorter than its signed head"):
            await opened(again)
        assert not offline(again).valid


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("name", ["events.jsonl", "events.chain.jsonl"])
async def test_changed_row_is_found_while_it_runs_and_offline(home: Path, name: str, at: int) -> None:
    await fill(home, 3)
    async with await opened(home) as log:
        file = home / "audit" / name
        lines = file.read_bytes().splitlines(keepends=True)
        offset = sum(map(len, lines[:at])) + lines[at].index(b":") + 5
        with file.open("r+b") as stream:
            stream.seek(offset)
            byte = stream.read(1)
            stream.seek(offset)
            stream.write(b"0" if byte != b"0" else b"1")
        report = await log.verify()
        assert not report.valid
        assert at in {failure.index for failure in report.failures}
    assert not offline(home).valid


async def test_changed_row_and_new_chain_are_found_by_head(home: Path) -> None:
    await fill(home, 4)
    file = home / "audit" / "events.jsonl"
    lines = file.read_bytes().replace(b"row 2", b"row 9").splitlines()
    head = audit_log_chain.Head()
    rows = [audit_log_chain.ChainRow(line, json.loads(line)["id"], json.loads(line)["timestamp_ms"]) for line in lines]
    chain, _, _ = audit_log_chain.extend(head, rows)
    file.write_bytes(b"\n".join(lines) + b"\n")
    (home / "audit" / "events.chain.jsonl").write_bytes(chain)
    report = offline(home)
    assert {failure.kind for failure in report.failures} == {"head_mismatch"}
    with pytest.raises(errors.LedgerError, match="last record is not the one"):
        await opened(home)


@pytest.mark.parametrize("name", ["head.json", "pending"])
async def test_one_of_two_witnesses_may_be_lost(home: Path, name: str) -> None:
    made = await fill(home, 3)
    (home / "audit-head" / name).unlink()
    if name == "head.json":
        assert not offline(home).valid
    async with await opened(home) as log:
        assert await ids(log) == set(made)
    assert offline(home).valid


@pytest.mark.parametrize("gone", [("head.json", "pending"), ("ledger.key",), ("head.json", "pending", "ledger.key")])
async def test_without_head_or_key_log_is_not_gone_on_with(home: Path, gone: tuple[str, ...]) -> None:
    await fill(home, 3)
    for name in gone:
        (home / "audit-head" / name).unlink()
    with pytest.raises(errors.LedgerError, match=r"missing|verifies"):
        await opened(home)


async def test_old_head_is_refused_where_pending_is_newer(home: Path) -> None:
    await fill(home, 3)
    old = (home / "audit-head" / "pending").read_bytes()
    await fill(home, 3)
    (home / "audit-head" / "pending").write_bytes(old)
    with pytest.raises(errors.LedgerError, match="names rows that `pending` does not hold"):
        await opened(home)


async def test_head_of_another_key_is_none(home: Path, tmp_path: Path) -> None:
    await fill(home, 3)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    await fill(other, 3)
    for name in ("head.json", "pending"):
        shutil.copy(other / "audit-head" / name, home / "audit-head" / name)
    with pytest.raises(errors.LedgerError, match="no head record verifies"):
        await opened(home)


@pytest.mark.parametrize("name", ["audit/events.jsonl", "audit-head/pending", "audit-head/ledger.key"])
@pytest.mark.parametrize("how", ["symlink", "link", "mode", "fifo"])
async def test_unsafe_files_are_refused(home: Path, name: str, how: str) -> None:
    await fill(home, 1)
    file = home / name
    if how == "symlink":
        file.rename(home / "elsewhere")
        file.symlink_to(home / "elsewhere")
    elif how == "link":
        (home / "elsewhere").hardlink_to(file)
    elif how == "mode":
        file.chmod(0o640)
    else:
        file.unlink()
        os.mkfifo(file, 0o600)
    if how == "link" and name.endswith(".key"):
        return
    with pytest.raises(errors.LedgerError):
        await opened(home)


async def test_whoever_writes_while_it_runs_ends_it(home: Path) -> None:
    log = await opened(home)
    await log.append("authentication_failed", failed(1))
    with (home / "audit" / "events.jsonl").open("ab") as stream:
        stream.write(b"mine\n")
    assert not (await log.verify()).valid
    with pytest.raises(errors.StoreError, match="somebody else wrote"):
        await log.append("authentication_failed", failed(2))
    await log.close()


async def test_reader_that_does_not_let_go_holds_up_nobody(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.01)
    async with await opened(home) as log:
        await log.append("authentication_failed", failed(1))
        with (home / "audit" / "events.jsonl").open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH)
            await log.append("authentication_failed", failed(2))
            assert (await log.purge(1)).purged == 0
        assert (await log.verify()).events == 2
    assert offline(home).valid


async def test_checkpoint_of_another_log_is_not_ours(home: Path) -> None:
    await fill(home, 3)
    async with await opened(home) as log:
        await log.checkpoint()
    file = home / "audit" / "checkpoints.jsonl"
    line = json.loads(file.read_bytes())
    line["note"] = line["note"].replace("\n3\n", "\n2\n")
    file.write_bytes(json.dumps(line).encode() + b"\n")
    with pytest.raises(errors.NoteError, match="does not verify"):
        await opened(home)


def test_pending_reads_nothing_of_stranger() -> None:
    key, other = (Ed25519PrivateKey.from_private_bytes(seed * 32) for seed in (b"a", b"b"))
    rows = [
        audit_log_chain.ChainRow(b'{"id":"x","timestamp_ms":1}', "x", 1),
        audit_log_chain.ChainRow(b'{"id":"y","timestamp_ms":2}', "y", 2),
    ]
    base = audit_log_chain.Head()
    _, _, head = audit_log_chain.extend(base, rows)
    begun = write_ahead.opening(audit_log_chain.signed_head(base, key), audit_log_chain.signed_head(base, key))
    raw = begun + write_ahead.group(audit_log_chain.signed_head(head, key), rows)
    found = write_ahead.replay(raw, key.public_key())
    assert found is not None
    assert (found.head, found.end, found.replaced) == (head, len(raw), ())
    assert write_ahead.replay(raw, other.public_key()) is None
    mixed = begun + write_ahead.group(audit_log_chain.signed_head(head, other), rows)
    found = write_ahead.replay(mixed, key.public_key())
    assert found is not None
    assert found.head == base
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1
        found = write_ahead.replay(bytes(changed), key.public_key())
        assert (found.head if found else base) == base
