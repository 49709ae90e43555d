"""Check memory on disk: version 1's database, rows that are not records, and the state after a kill."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from covenant.stores.memory import schema
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.interface import CompactionCutoffs, ParentDetachment, RecordDeletion
from covenant.wire.types import MemoryRecord, Tier
from policy import errors
from tests.memory_kit import ALICE, BOB, V1_SCHEMA, name, opened, record

pytestmark = pytest.mark.anyio

WRITER = """
import anyio, pathlib, sys
from covenant.stores.memory import schema
from covenant.stores.memory.durable import DurableMemory
from tests.memory_kit import record

async def main():
    store = await DurableMemory.open(pathlib.Path(sys.argv[1]), space="test")
    async def write(first):
        for number in range(int(sys.argv[2]) + first, 10**9, 8):
            await store.put(record(number, f"word{number}", embedding=(1.0, number / 7)))
            print(number, flush=True)
    async with anyio.create_task_group() as group:
        for first in range(8):
            group.start_soon(write, first)

anyio.run(main)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.db"


def vector(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def row(number: int, **other: Any) -> dict[str, Any]:
    """Return a row as version 1 writes it."""
    return {
        "id": name(number),
        "tier": "working",
        "owner_display": ALICE.display,
        "owner_pubkey": ALICE.pubkey,
        "text": f"text {number}",
        "embedding": vector(1.0, 0.0),
        "metadata": "null",
        "created_at": number,
        "parent": None,
        **other,
    }


def insert(path: Path, *rows: dict[str, Any], verb: str = "INSERT") -> None:
    with sqlite3.connect(path) as db:
        for one in rows:
            db.execute(f"{verb} INTO memories ({', '.join(one)}) VALUES ({', '.join('?' * len(one))})", [*one.values()])
    db.close()


def ask(path: Path, statement: str) -> list[Any]:
    db = sqlite3.connect(path)
    try:
        return db.execute(statement).fetchall()
    finally:
        db.close()


@pytest.fixture
def version_1(path: Path) -> Path:
    db = sqlite3.connect(path)
    db.executescript(V1_SCHEMA)
    db.close()
    insert(path, row(1, text="an old fox", metadata='{"agent_id":"x"}'), row(2, tier="longterm", parent=name(1)))
    return path


async def test_database_of_version_1_opens_with_everything_as_it_was(version_1: Path) -> None:
    before = ask(version_1, "SELECT * FROM memories ORDER BY id")
    async with opened("durable", version_1) as store:
        assert [r.id for r in await store.recent(None, 10)] == [name(2), name(1)]
        assert (await store.recent(None, 10))[1].metadata == {"agent_id": "x"}
        assert [h.record.id for h in await store.search((), "FOX", None, 10, None)] == [name(1)]
        # Version 1's embedder is unknown: its vectors are never compared.
        assert await store.search((1.0, 0.0), "", None, 10, None) == []
    after = ask(version_1, "SELECT * FROM memories ORDER BY id")
    assert [one[:9] for one in after] == before
    assert all(one[9:] == (None, None, None) for one in after)
    indexes = {one[0] for one in ask(version_1, "SELECT name FROM sqlite_master WHERE type = 'index'")}
    assert indexes == {"idx_tier", "idx_created", "memories_by_owner", "sqlite_autoindex_memories_1"}
    async with opened("durable", version_1, space="") as store:
        assert len(await store.search((1.0, 0.0), "", None, 10, None)) == 2


async def test_database_of_daemon_before_gets_index_of_owners_and_keeps_rest(path: Path) -> None:
    async with opened("durable", path) as store:
        await store.put(record(1, "an old fox, 会議は水曜日", embedding=(1.0, 0.0)))
    with sqlite3.connect(path) as db:
        db.execute("DROP INDEX memories_by_owner")
        db.execute("UPDATE memory_fts SET text = 'an old fox, 会議は水曜日'")
        db.execute("PRAGMA user_version = 1")
    db.close()
    async with opened("durable", path) as store:
        for word in ("fox", "水曜"):
            assert [h.record.id for h in await store.search((), word, None, 9, None, owner=ALICE.pubkey)] == [name(1)]
    assert ask(path, "PRAGMA user_version") == [(schema.VERSION,)]
    assert ask(path, "SELECT count(*) FROM sqlite_master WHERE name = 'memories_by_owner'") == [(1,)]


async def test_version_1_can_go_on_writing_and_its_words_are_found(version_1: Path) -> None:
    async with opened("durable", version_1) as store:
        await store.put(record(3, "our whale", embedding=(1.0, 0.0)))
    insert(version_1, row(1, text="a wolf now"), verb="INSERT OR REPLACE")
    insert(version_1, row(4, text="a late owl"))
    async with opened("durable", version_1) as store:
        for word, number in (("wolf", 1), ("owl", 4), ("whale", 3)):
            assert [h.record.id for h in await store.search((), word, None, 10, None)] == [name(number)]
        assert await store.search((), "fox", None, 10, None) == []


async def test_new_database_has_version_1s_table_and_is_private(path: Path) -> None:
    async with opened("durable", path) as store:
        await store.put(record(1))
        modes = {stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
        assert modes == {0o600}
    columns = [one[1] for one in ask(path, "PRAGMA table_info(memories)")]
    expected = "id tier owner_display owner_pubkey text embedding metadata created_at parent"
    assert columns[:9] == expected.split()
    assert ask(path, "PRAGMA journal_mode") == [("wal",)]
    assert ask(path, "SELECT embedding, metadata FROM memories") == [(b"", "null")]


async def test_only_vectors_of_one_space_are_compared(path: Path) -> None:
    async with opened("durable", path, space="first") as store:
        await store.put(record(1, "fox", embedding=(1.0, 0.0)))
    async with opened("durable", path, space="second") as store:
        await store.put(record(2, "wolf", embedding=(1.0, 0.0)))
        assert [h.record.id for h in await store.search((1.0, 0.0), "", None, 10, None)] == [name(2)]
        assert [h.record.id for h in await store.search((), "fox", None, 10, None)] == [name(1)]
        # A repair writes no vector, so it moves none into another space.
        await store.promote(name(1), Tier.EPISODIC, at_ms=5)
        assert [h.record.id for h in await store.search((1.0, 0.0), "", None, 10, None)] == [name(2)]
    assert ask(path, "SELECT embedder, promoted_from, promoted_at FROM memories ORDER BY id") == [
        ("first", "working", 5),
        ("second", None, None),
    ]


async def test_newer_database_link_and_what_is_none_are_refused(path: Path, tmp_path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(errors.MemoryStoreError, match="version 99"):
        await DurableMemory.open(path)
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(errors.MemoryStoreError):
        await DurableMemory.open(tmp_path / "link")
    (tmp_path / "text").write_text("not a database" * 100)
    with pytest.raises(errors.MemoryStoreError, match="not a database"):
        await DurableMemory.open(tmp_path / "text")
    with pytest.raises(errors.MemoryStoreError):
        await DurableMemory.open(tmp_path)
    short = sqlite3.connect(tmp_path / "short")
    short.execute("CREATE TABLE memories (id TEXT)")
    short.close()
    with pytest.raises(errors.MemoryStoreError, match="no column `tier`"):
        await DurableMemory.open(tmp_path / "short")


BAD: dict[str, dict[str, Any]] = {
    "tier is none of": {"tier": "eternal"},
    "owner_pubkey: ": {"owner_pubkey": "0OIl"},
    "owner_display: ": {"owner_display": "nobody"},
    "embedding is broken off": {"embedding": b"abc"},
    "embedding holds a number that is not finite": {"embedding": vector(float("nan"), 1.0)},
    "metadata is no JSON": {"metadata": "{"},
    "created_at is text": {"created_at": "yesterday"},
    "created_at is negative": {"created_at": -1},
    "text is bytes": {"text": b"\xff\xfe"},
    "parent is bytes": {"parent": b"x"},
}


@pytest.mark.parametrize("column", ["id", "tier", "owner_display", "owner_pubkey", "text", "metadata", "parent"])
async def test_text_no_utf_8_stops_nothing_either(version_1: Path, column: str) -> None:
    insert(version_1, row(3))
    with sqlite3.connect(version_1) as db:
        db.execute(f"UPDATE memories SET {column} = CAST(X'61FF62' AS TEXT) WHERE created_at = 3")
    db.close()
    async with opened("durable", version_1, space="") as store:
        assert [r.id for r in await store.recent(None, 10)] == [name(2), name(1)]
        assert {h.record.id for h in await store.search((1.0, 0.0), "text", None, 10, None)} == {name(1), name(2)}
        (bad,) = await store.bad_rows(10)
        assert bad.problems == (f"{column} is no UTF-8",)
        policy = CompactionCutoffs(mark_longterm_stale_before_ms=9, detach_stale_parents=True)
        await store.compact(policy, reason="r", now_ms=1, apply=True)
        assert await store.backfill([], apply=True) == ()
        assert await store.purge(None, 9) == 3


async def test_id_that_no_row_can_have_is_not_there(path: Path) -> None:
    async with opened("durable", path) as store:
        assert await store.get("\ud800") is None
        assert await store.existing(["\ud800"]) == set()
        assert await store.repair(RecordDeletion("\ud800"), apply=True) is None
        assert await store.promote("\ud800", Tier.EPISODIC, at_ms=1) is None


@pytest.mark.parametrize("problem", BAD)
async def test_row_no_record_is_told_and_stops_nothing(version_1: Path, problem: str) -> None:
    insert(version_1, row(3, **BAD[problem]))
    async with opened("durable", version_1, space="") as store:
        assert [r.id for r in await store.recent(None, 2)] == [name(2), name(1)]
        assert {h.record.id for h in await store.search((1.0, 0.0), "text", None, 10, None)} == {name(1), name(2)}
        assert await store.get(name(3)) is None
        assert await store.existing([name(3)]) == {name(3)}
        assert await store.repair(RecordDeletion(name(3)), apply=True, owner=ALICE.pubkey) is None
        assert await store.repair(ParentDetachment(name(3)), apply=True) is None
        policy = CompactionCutoffs(mark_longterm_stale_before_ms=9, detach_stale_parents=True)
        plan = await store.compact(policy, reason="r", now_ms=1, apply=True)
        assert plan.stale_marked == (name(2),)
        assert await store.backfill([], apply=True) == ()
        (bad,) = await store.bad_rows(10)
        assert bad.id == name(3)
        assert bad.problems[0].startswith(problem)
        assert await store.bad_rows(0) == []
        done = await store.repair(RecordDeletion(name(3)), apply=True)
        assert done is not None
        assert (done.before, done.after, done.changed) == (bad, None, True)
        assert await store.bad_rows(10) == []


async def test_words_that_went_astray_are_put_right_at_first_search(path: Path) -> None:
    async with opened("durable", path) as store:
        for number in range(1, 5):
            await store.put(record(number, f"word{number}", embedding=(1.0,)))
        await store.repair(RecordDeletion(name(1)), apply=True)
    # VACUUM renumbers the rows, because the table has no integer key.
    db = sqlite3.connect(path)
    db.execute("VACUUM")
    db.close()
    async with opened("durable", path) as store:
        await store.search((1.0,), "", None, 10, None)
        for number in (2, 3, 4):
            assert [h.record.id for h in await store.search((), f"word{number}", None, 10, None)] == [name(number)]


async def test_word_that_stands_everywhere_ranks_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.stores.memory.index.ranking.COMMON", 3)
    async with opened("durable", path) as store:
        for number in range(1, 5):
            await store.put(record(number, "common" + (" rare" if number == 2 else "")))
        assert [h.record.id for h in await store.search((), "common rare", None, 10, None)] == [name(2)]
        assert await store.search((), "common", None, 10, None) == []


@pytest.mark.parametrize("kind", ["durable", "in_memory"])
async def test_how_many_others_have_word_changes_nothing_for_who_searches(
    kind: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("covenant.stores.memory.index.ranking.COMMON", 3)
    async with opened(kind, path) as store:
        await store.put(record(1, "common", owner=ALICE))
        for number in range(2, 7):
            assert [h.record.id for h in await store.search((), "common", None, 9, None, owner=ALICE.pubkey)] == [
                name(1)
            ]
            await store.put(record(number, "common", owner=BOB))
        assert await store.search((), "common", None, 9, None, owner=BOB.pubkey) == []
        assert await store.search((), "common", None, 9, None) == []
        # The word is common to all records, and here beside a rare one.
        await store.put(record(7, "common rare", owner=ALICE))
        for text, numbers in (("common", {1, 7}), ("rare common", {1, 7}), ("rare", {7})):
            hits = await store.search((), text, None, 9, None, owner=ALICE.pubkey)
            assert {hit.record.id for hit in hits} == set(map(name, numbers))
            assert [h.record.id for h in await store.search((), text, Tier.EPISODIC, 9, None, owner=ALICE.pubkey)] == []


async def test_changes_are_taken_in_before_they_are_many(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.stores.memory.index.cache.MOST_PENDING", 3)
    async with opened("durable", path) as store:
        await store.put(record(1, embedding=(1.0, 0.0)))
        assert len(await store.search((1.0, 0.0), "", None, 10, None)) == 1
        for number in range(2, 10):
            await store.put(record(number, embedding=(1.0, 0.0)))
        assert len(await store.search((1.0, 0.0), "", None, 10, None)) == 9


async def test_failed_transaction_changes_nothing_and_next_works(path: Path) -> None:
    async with opened("durable", path) as store:
        assert isinstance(store, DurableMemory)
        for number in (1, 2):
            await store.put(record(number, tier=Tier.LONGTERM, embedding=(1.0,)))
        await store.search((1.0,), "", None, 10, None)
        db = sqlite3.connect(path)
        db.execute(
            f"CREATE TRIGGER no BEFORE UPDATE ON memories WHEN old.id = '{name(2)}' "
            "BEGIN SELECT RAISE(ABORT, 'disk is full'); END"
        )
        db.commit()
        db.close()
        policy = CompactionCutoffs(mark_longterm_stale_before_ms=9)
        with pytest.raises(errors.MemoryStoreError, match="disk is full"):
            await store.compact(policy, reason="r", now_ms=1, apply=True)
        assert await store.get(name(1)) == record(1, tier=Tier.LONGTERM, embedding=(1.0,))
        with pytest.raises(errors.MemoryStoreError, match="disk is full"):
            await store.put(record(2, embedding=(1.0,)))
        await store.put(record(3, embedding=(1.0,)))
        assert len(await store.search((1.0,), "", None, 10, None)) == 3


async def test_whoever_is_cancelled_before_its_turn_wrote_nothing(path: Path) -> None:
    async with opened("durable", path) as store:
        assert isinstance(store, DurableMemory)
        async with store._writer.turn, anyio.create_task_group() as group:
            group.start_soon(store.put, record(1))
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        await store.put(record(2, owner=BOB))
        assert [r.id for r in await store.recent(None, 10)] == [name(2)]


async def test_what_is_closed_says_so(path: Path) -> None:
    store = await DurableMemory.open(path)
    await store.close()
    await store.close()
    with pytest.raises(errors.MemoryStoreError, match="closed"):
        await store.put(record(1))
    with pytest.raises(errors.MemoryStoreError, match="closed"):
        await store.recent(None, 1)


async def test_nothing_acknowledged_is_missing_after_kill_9(path: Path, clone: Path) -> None:
    acknowledged: set[str] = set()
    for start in (0, 10**6, 2 * 10**6):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(start)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=clone,
            env={**os.environ, "PYTHONPATH": str(clone)},
        ) as writer:
            assert writer.stdout is not None
            for _ in range(200):
                acknowledged.add(name(int(writer.stdout.readline())))
            writer.send_signal(signal.SIGKILL)
            # Lines printed before its death count; the last one may be cut.
            rest = writer.stdout.read().split("\n")[:-1]
            acknowledged |= {name(int(line)) for line in rest}
    assert len(acknowledged) >= 600
    async with opened("durable", path) as store:
        assert await store.existing(sorted(acknowledged)) == acknowledged
        assert await store.bad_rows(10) == []
        found: list[MemoryRecord] = await store.recent(None, 10**6)
        assert {r.id for r in found} >= acknowledged
        assert [h.record.text for h in await store.search((), found[0].text, None, 1, None)] == [found[0].text]
    assert ask(path, "PRAGMA integrity_check") == [("ok",)]
