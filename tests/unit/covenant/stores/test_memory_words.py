"""Check the word counts that a durable store keeps between commits against counts made anew."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from covenant.stores.memory import sqlite
from covenant.stores.memory.durable import DurableMemory
from covenant.stores.memory.index import ranking
from covenant.stores.memory.interface import RecordDeletion
from covenant.stores.memory.search import Asked, WordIndex
from covenant.wire.types import Tier
from tests.memory_kit import ALICE, BOB, name, record

pytestmark = pytest.mark.anyio

WORDS = ("one", "two", "three", "four", "nowhere")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory.db"


def anew(path: Path, asked: Asked) -> list[str]:
    """Search with counts made anew from the database."""
    with contextlib.closing(sqlite.reading(path)) as db:
        return list(WordIndex(db).best(ranking.words(asked.text), asked, ranking.depth(asked.limit)))


def kept(store: DurableMemory, asked: Asked) -> list[str]:
    index = store._searcher._words
    return list(index.best(ranking.words(asked.text), asked, ranking.depth(asked.limit)))


def by_another(path: Path, statement: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute(statement, values)
        db.commit()


async def test_kept_counts_say_what_new_ones_would(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.stores.memory.index.ranking.COMMON", 6)
    monkeypatch.setattr("covenant.stores.memory.index.ranking.MOST_RANKED", 11)
    monkeypatch.setattr("covenant.stores.memory.search.BEYOND", 2)
    chooser = random.Random(11)
    store = await DurableMemory.open(path, space="test")
    try:
        for _ in range(250):
            number, step = chooser.randrange(24), chooser.random()
            words = " ".join(word for word in WORDS[:4] if chooser.random() < 0.4) or "none"
            if step < 0.6:
                await store.put(record(number, words, owner=chooser.choice((ALICE, BOB))))
            elif step < 0.8:
                await store.repair(RecordDeletion(name(number)), apply=True)
            elif step < 0.85:
                await store.promote(name(number), Tier.LONGTERM, at_ms=1)
            elif step < 0.9:
                # This purge writes nothing, so no count changes.
                await store.purge(None, 0)
            elif step < 0.95:
                # Another process changes the database, without a notice to this store.
                by_another(path, "UPDATE memories SET text = ? WHERE id = ?", words, name(number))
            else:
                by_another(path, "DELETE FROM memories WHERE id = ?", name(number))
            for _ in range(2):
                owner = chooser.choice((None, ALICE.pubkey, BOB.pubkey))
                text = " ".join(chooser.sample(WORDS, chooser.randint(1, 5)))
                asked = Asked(text, None, 10, None, owner)
                assert kept(store, asked) == anew(path, asked)
    finally:
        await store.close()


async def test_write_has_no_common_word_counted_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.stores.memory.index.ranking.COMMON", 3)
    monkeypatch.setattr("covenant.stores.memory.search.BEYOND", 4)
    counted: list[str] = []
    count = WordIndex._count

    def told(self: WordIndex, terms: Sequence[str], *others: Any) -> None:
        counted.extend(terms)
        count(self, terms, *others)

    monkeypatch.setattr(WordIndex, "_count", told)
    asked = Asked("common rare", None, 10, None, ALICE.pubkey)
    store = await DurableMemory.open(path, space="test")
    try:
        for number in range(9):
            await store.put(record(number, "common" + " rare" * (number == 0)))
        assert kept(store, asked) == [name(0)]
        assert counted == ["common", "rare"] * 2
        counted.clear()
        for number in range(10, 12):
            await store.put(record(number, "common"))
            await store.promote(name(number), Tier.LONGTERM, at_ms=1)
            assert kept(store, asked) == [name(0)]
        assert counted == []
        # These writes exceed the number after which counts expire: the word may no longer be common.
        for number in range(3):
            await store.repair(RecordDeletion(name(number)), apply=True)
        assert kept(store, asked) == []
        assert "common" in counted
    finally:
        await store.close()


async def test_index_made_anew_is_counted_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await DurableMemory.open(path, space="test")
    try:
        for number in range(3):
            await store.put(record(number, f"word{number}"))
        by_another(path, "DELETE FROM memory_fts WHERE rowid = 1")
        assert await store.search((), "word0", None, 10, None) == []
        # The first search by vector reads the index.
        await store.search((1.0,), "", None, 10, None)
        assert [hit.record.id for hit in await store.search((), "word0", None, 10, None)] == [name(0)]
    finally:
        await store.close()
