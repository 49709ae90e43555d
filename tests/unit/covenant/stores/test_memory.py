"""Check the contract of both memory stores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

from covenant.stores.memory.interface import (
    CompactionCutoffs,
    Memory,
    MemoryCompaction,
    ParentDetachment,
    ProvenanceBackfill,
    RecordDeletion,
    Room,
)
from covenant.wire.types import AgentId, MemoryRecord, Tier
from policy import errors
from tests.memory_kit import ALICE, BOB, STORES, name, opened, receipt, record

pytestmark = pytest.mark.anyio


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Memory]:
    async with opened(request.param, tmp_path / "memory.db") as made:
        yield made


def numbers(records: list[MemoryRecord]) -> list[int]:
    return [r.created_at for r in records]


async def test_record_comes_back_as_it_was(store: Memory) -> None:
    given = record(
        7,
        "näïve \x00 text\n🙂",
        tier=Tier.EPISODIC,
        embedding=(0.5, -0.25),
        metadata={"a": [1, None, "x"], "big": 2**60},
        parent=name(1),
    )
    await store.put(given)
    assert await store.get(name(7)) == given
    assert await store.get(name(8)) is None
    assert await store.existing([name(8), name(7)]) == {name(7)}


async def test_same_id_is_written_over_and_found_by_its_new_words_and_vector(store: Memory) -> None:
    await store.put(record(1, "apples", embedding=(1.0, 0.0)))
    await store.search((1.0, 0.0), "", None, 5, None)
    await store.put(record(1, "pears", embedding=(0.0, 1.0)))
    assert [h.record.text for h in await store.search((0.0, 1.0), "", None, 5, None)] == ["pears"]
    assert await store.search((1.0, 0.0), "apples", None, 5, None) == []
    assert len(await store.recent(None, 10)) == 1


async def test_recent_is_newest_first_then_by_id_within_tier_and_owner(store: Memory) -> None:
    for number in (3, 1, 2):
        await store.put(record(number, created_at=5))
    await store.put(record(4, tier=Tier.LONGTERM, created_at=9))
    await store.put(record(5, owner=BOB, created_at=7))
    assert [r.id for r in await store.recent(None, 10)] == [name(n) for n in (4, 5, 1, 2, 3)]
    assert [r.id for r in await store.recent(None, 2)] == [name(4), name(5)]
    assert [r.id for r in await store.recent(Tier.LONGTERM, 10)] == [name(4)]
    assert [r.id for r in await store.recent(None, 10, owner=BOB.pubkey)] == [name(5)]
    assert await store.recent(None, 0) == []
    assert await store.counts() == {Tier.WORKING: 4, Tier.EPISODIC: 0, Tier.LONGTERM: 1}


@pytest.mark.parametrize(
    "bad",
    [
        record(1, embedding=(float("nan"),)),
        record(1, embedding=(float("inf"),)),
        record(1, embedding=(1e39,)),
        record(1, metadata={"x": float("nan")}),
        record(1, "\ud800"),
        record(1, created_at=2**63),
    ],
    ids=["nan", "infinite", "beyond float32", "nan in metadata", "half a character", "late"],
)
async def test_what_would_not_come_back_is_refused(store: Memory, bad: MemoryRecord) -> None:
    with pytest.raises(errors.MemoryInvalidError):
        await store.put(bad)
    assert await store.recent(None, 10) == []


async def test_owner_has_so_much_room_and_no_more(store: Memory) -> None:
    room = Room(records=3, bytes=10**6)
    for number in range(1, 4):
        await store.put(record(number, owner=BOB), room=room)
    with pytest.raises(errors.MemoryFullError, match="3 records"):
        await store.put(record(4, owner=BOB), room=room)
    # The limit affects no other owner, and no put without a limit.
    await store.put(record(5), room=room)
    await store.put(record(6, owner=BOB))
    assert {one.created_at for one in await store.recent(None, 9)} == {1, 2, 3, 5, 6}
    # Each kind of deletion makes room.
    await store.repair(RecordDeletion(name(1)), apply=True)
    with pytest.raises(errors.MemoryFullError):
        await store.put(record(7, owner=BOB), room=room)
    assert await store.purge(None, 3, owner=BOB.pubkey) == 1
    await store.put(record(7, owner=BOB), room=room)
    with pytest.raises(errors.MemoryFullError):
        await store.put(record(8, owner=BOB), room=room)


async def test_room_is_in_bytes_of_all_that_record_has(store: Memory) -> None:
    room = Room(records=9, bytes=100)
    with pytest.raises(errors.MemoryFullError, match="100 bytes"):
        await store.put(record(1, "é" * 51), room=room)
    with pytest.raises(errors.MemoryFullError):
        await store.put(record(1, metadata="x" * 99), room=room)
    with pytest.raises(errors.MemoryFullError):
        await store.put(record(1, embedding=(1.0,) * 25), room=room)
    await store.put(record(1, "é" * 24, embedding=(1.0,) * 12), room=room)
    with pytest.raises(errors.MemoryFullError):
        await store.put(record(2, "x"), room=room)
    assert [one.created_at for one in await store.recent(None, 9)] == [1]


async def test_what_repair_adds_takes_room(store: Memory) -> None:
    room = Room(records=9, bytes=1000)
    await store.put(record(1, "x", owner=BOB), room=room)
    more = ProvenanceBackfill(name(1), "y" * 600)
    await store.repair(more, apply=True, room=room)
    # A repair counts towards later puts, and a repair that exceeds the limit is refused.
    with pytest.raises(errors.MemoryFullError):
        await store.put(record(2, "x" * 500, owner=BOB), room=room)
    await store.put(record(2, "x", owner=BOB), room=room)
    with pytest.raises(errors.MemoryFullError, match="1000 bytes"):
        await store.repair(ProvenanceBackfill(name(2), "y" * 600), apply=True, room=room)
    tried = await store.repair(ProvenanceBackfill(name(2), "y" * 600), apply=False, room=room)
    assert tried is not None
    assert not tried.changed
    assert await store.get(name(2)) == record(2, "x", owner=BOB)
    # A repair that shortens a record passes, also above the limit; a repair without `room` has no limit.
    await store.repair(ProvenanceBackfill(name(2), "y" * 600), apply=True)
    shorter = await store.repair(ProvenanceBackfill(name(1), "y"), apply=True, room=room)
    assert shorter is not None
    assert shorter.changed
    await store.put(record(3, "x", owner=BOB), room=room)


async def test_of_many_at_once_as_many_are_kept_as_there_is_room_for(store: Memory) -> None:
    room, refused = Room(records=5, bytes=10**6), []

    async def put(number: int, owner: AgentId) -> None:
        try:
            await store.put(record(number, owner=owner), room=room)
        except errors.MemoryFullError:
            refused.append(number)

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(put, number, BOB)
        group.start_soon(put, 99, ALICE)
    kept = await store.recent(None, 99)
    assert len(kept) == 6
    assert len(refused) == 15
    assert 99 in {one.created_at for one in kept}


# Search -------------------------------------------------------------------------------------------------------


async def test_search_finds_by_cosine_and_leaves_out_what_points_away(store: Memory) -> None:
    vectors = {1: (1.0, 0.0), 2: (1.0, 1.0), 3: (-1.0, 0.0), 4: (0.0, 1.0), 5: (0.0, 0.0), 6: (1.0, 0.0, 0.0), 7: ()}
    for number, vector in vectors.items():
        await store.put(record(number, embedding=vector))
    hits = await store.search((2.0, 0.0), "", None, 10, None)
    assert [h.record.created_at for h in hits] == [1, 2]
    assert [h.score for h in hits] == [pytest.approx(1.0), pytest.approx(0.5**0.5)]
    assert [h.record.created_at for h in await store.search((2.0, 0.0), "", None, 10, 0.9)] == [1]
    assert [h.record.created_at for h in await store.search((2.0, 0.0), "", None, 10, 1.0)] == [1]


@pytest.mark.parametrize("query", [(), (0.0, 0.0), (float("nan"), 1.0), (1e300, 1.0), (1.0,)])
async def test_query_that_cannot_be_compared_finds_nothing(store: Memory, query: tuple[float, ...]) -> None:
    await store.put(record(1, embedding=(1.0, 0.0)))
    assert await store.search(query, "", None, 10, None) == []


async def test_equal_cosines_come_newest_first_then_by_id(store: Memory) -> None:
    for number, when in ((4, 1), (2, 2), (3, 2), (1, 0)):
        await store.put(record(number, embedding=(0.6, 0.8), created_at=when))
    hits = await store.search((0.3, 0.4), "", None, 10, None)
    assert [h.record.id for h in hits] == [name(n) for n in (2, 3, 4, 1)]


async def test_search_stays_within_tier_and_owner(store: Memory) -> None:
    await store.put(record(1, "fox", embedding=(1.0, 0.0), tier=Tier.LONGTERM))
    await store.put(record(2, "fox", embedding=(1.0, 0.1), owner=BOB))
    await store.put(record(3, "fox", embedding=(1.0, 0.2)))
    for query in ((1.0, 0.0), ()):
        assert {h.record.created_at for h in await store.search(query, "fox", Tier.WORKING, 10, None)} == {2, 3}
        hits = await store.search(query, "fox", Tier.WORKING, 10, None, owner=ALICE.pubkey)
        assert [h.record.created_at for h in hits] == [3]
        assert await store.search(query, "fox", None, 10, None, owner="nobody") == []


async def test_of_many_words_rarest_rank(store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("covenant.stores.memory.index.ranking.COMMON", 4)
    monkeypatch.setattr("covenant.stores.memory.index.ranking.MOST_RANKED", 6)
    for number in range(1, 5):
        await store.put(
            record(number, "four" + " three" * (number > 1) + " two" * (number > 2) + " one" * (number > 3))
        )

    async def found(text: str) -> set[int]:
        return {hit.record.created_at for hit in await store.search((), text, None, 10, None)}

    assert await found("four") == {1, 2, 3, 4}
    assert await found("four three") == {2, 3, 4}
    # The rarest words are in one, two and three records; with `four` the sum would be ten.
    assert await found("four three two one") == {2, 3, 4}
    await store.put(record(5, "four"))
    assert await found("four") == set()
    # Deleted records no longer count.
    await store.repair(RecordDeletion(name(5)), apply=True)
    assert await found("four") == {1, 2, 3, 4}


async def test_words_are_found_without_vector_and_both_together_rank_first(store: Memory) -> None:
    await store.put(record(1, "the red fox", embedding=(1.0, 0.0)))
    await store.put(record(2, "the blue whale", embedding=(1.0, 0.05)))
    await store.put(record(3, "Whale songs, recorded at sea"))
    hits = await store.search((1.0, 0.0), "WHALE?", None, 10, None)
    assert [h.record.created_at for h in hits] == [2, 1, 3]
    assert hits[2].score == 0.0
    assert [h.record.created_at for h in await store.search((), "whale", None, 10, None)] == [2, 3]


async def test_min_relevance_is_asked_of_what_words_found(store: Memory) -> None:
    await store.put(record(1, "whale", embedding=(0.0, 1.0)))
    await store.put(record(2, "whale", embedding=(1.0, 0.0)))
    await store.put(record(3, "whale"))
    assert [h.record.created_at for h in await store.search((1.0, 0.0), "whale", None, 10, 0.5)] == [2]
    assert {h.record.created_at for h in await store.search((1.0, 0.0), "whale", None, 10, 0.0)} == {1, 2, 3}


async def test_rarer_words_weigh_more_and_diacritics_nothing(store: Memory) -> None:
    for number in range(1, 6):
        await store.put(record(number, "a common thing of the café"))
    await store.put(record(6, "a rare thing"))
    hits = await store.search((), "rare common", None, 10, None)
    assert hits[0].record.created_at == 6
    assert len(await store.search((), "CAFE", None, 10, None)) == 5


UNSPACED = (
    "会議は水曜日の午後三時に行われます",
    "周三下午三点开会讨论预算",
    "금요일 회의가 취소되었습니다",
    "今年の予算案",
    "テスト計画",
    "𠮷野家で昼食",
    "銀行へ行く",
    "the boats come back at noon",
)


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("会議", 1),
        ("三点", 2),
        ("회의", 3),
        ("予算", 4),
        ("スト", 5),
        ("𠮷野", 6),
        ("PDF 会議", 1),
        ("午後の会議", 1),
        ("銀", 7),
    ],
)
async def test_word_without_spaces_is_found(store: Memory, query: str, first: int) -> None:
    for number, text in enumerate(UNSPACED, 1):
        await store.put(record(number, text, embedding=(1.0, 0.5)))
    for vector in ((), (1.0, 0.5)):
        assert (await store.search(vector, query, None, 10, None))[0].record.created_at == first
    # Another owner's records are not searched.
    assert await store.search((), query, None, 10, None, owner=BOB.pubkey) == []


async def test_word_without_spaces_stays_in_tier(store: Memory) -> None:
    await store.put(record(1, "会議は水曜日", tier=Tier.LONGTERM))
    await store.put(record(2, "次の会議"))
    hits = await store.search((), "会議", Tier.LONGTERM, 10, None)
    assert [h.record.created_at for h in hits] == [1]
    assert await store.search((), "会計", Tier.LONGTERM, 10, None) == []


async def test_word_far_in_long_text_is_found(store: Memory) -> None:
    await store.put(record(1, "山" * 511 + "会議" + "川" * 5000))
    await store.put(record(2, "山" * 5000))
    for query, found in (("会議", [1]), ("山会", [1]), ("議川", [1]), ("山山", [2, 1])):
        assert [h.record.created_at for h in await store.search((), query, None, 10, None)] == found


@pytest.mark.parametrize("text", ['"', "'", "a AND", "NEAR(x)", "text:x", "*", "^x", "-", "{id} : x", "x\x00y", "_"])
async def test_text_is_never_syntax(store: Memory, text: str) -> None:
    await store.put(record(1, "nothing of that", embedding=(1.0,)))
    assert [h.record.created_at for h in await store.search((1.0,), text, None, 10, None)] == [1]


async def test_deleted_and_moved_records_are_searched_as_they_are_now(store: Memory) -> None:
    for number in range(1, 5):
        await store.put(record(number, "fox", embedding=(1.0, number / 10)))
    await store.search((1.0, 0.0), "", None, 10, None)
    await store.repair(RecordDeletion(name(1)), apply=True)
    await store.promote(name(2), Tier.EPISODIC, at_ms=9)
    assert await store.purge(Tier.WORKING, 4) == 1
    assert [h.record.created_at for h in await store.search((1.0, 0.0), "fox", None, 10, None)] == [2, 4]
    assert [h.record.created_at for h in await store.search((1.0, 0.0), "fox", Tier.EPISODIC, 10, None)] == [2]


# Purge, repair, promotion -------------------------------------------------------------------------------------


async def test_purge_takes_what_is_strictly_older(store: Memory) -> None:
    for number in range(1, 5):
        await store.put(record(number, tier=Tier.EPISODIC if number == 2 else Tier.WORKING))
    await store.put(record(9, owner=BOB, created_at=1))
    assert await store.purge(Tier.WORKING, 3, owner=ALICE.pubkey) == 1
    assert numbers(await store.recent(None, 10)) == [4, 3, 2, 1]
    assert await store.purge(None, 2**64 - 1) == 4
    assert await store.recent(None, 10) == []


@pytest.mark.parametrize(
    ("command", "after"),
    [
        (ParentDetachment(name(2)), record(2, parent=None, metadata="old")),
        (ParentDetachment(name(2), name(1)), record(2, parent=None, metadata="old")),
        (
            ProvenanceBackfill(name(2), {"from": "x"}),
            record(2, parent=name(1), metadata={"previous_metadata": "old", "provenance": {"from": "x"}}),
        ),
        (RecordDeletion(name(2)), None),
    ],
)
async def test_dry_repair_shows_what_applied_one_does(
    store: Memory, command: ParentDetachment | ProvenanceBackfill | RecordDeletion, after: MemoryRecord | None
) -> None:
    before = record(2, parent=name(1), metadata="old")
    await store.put(before)
    dry = await store.repair(command, apply=False)
    assert dry is not None
    assert (dry.before, dry.after, dry.would_change, dry.changed) == (before, after, True, False)
    assert await store.get(name(2)) == before
    done = await store.repair(command, apply=True)
    assert done is not None
    assert (done.before, done.after, done.changed) == (before, after, True)
    assert await store.get(name(2)) == after


async def test_repair_that_changes_nothing_says_so_and_another_owners_is_none(store: Memory) -> None:
    await store.put(record(1, metadata={"a": 1}))
    done = await store.repair(ParentDetachment(name(1)), apply=True)
    assert done is not None
    assert (done.would_change, done.changed) == (False, False)
    assert await store.repair(RecordDeletion(name(1)), apply=True, owner=BOB.pubkey) is None
    assert await store.repair(RecordDeletion(name(2)), apply=True) is None
    assert await store.get(name(1)) is not None


async def test_unexpected_parent_is_conflict(store: Memory) -> None:
    await store.put(record(2, parent=name(1)))
    with pytest.raises(errors.MemoryConflictError, match="not `other`"):
        await store.repair(ParentDetachment(name(2), "other"), apply=True)
    found = await store.get(name(2))
    assert found is not None
    assert found.parent == name(1)


async def test_promotion_goes_up_only(store: Memory) -> None:
    await store.put(record(1, embedding=(1.0,)))
    for tier in (Tier.EPISODIC, Tier.LONGTERM):
        done = await store.promote(name(1), tier, at_ms=5)
        assert done is not None
        assert done.changed
        assert await store.get(name(1)) == record(1, tier=tier, embedding=(1.0,))
    again = await store.promote(name(1), Tier.LONGTERM, at_ms=6)
    assert again is not None
    assert not again.changed
    with pytest.raises(errors.MemoryConflictError, match="above `working`"):
        await store.promote(name(1), Tier.WORKING, at_ms=7)
    assert await store.promote(name(2), Tier.LONGTERM, at_ms=7) is None
    assert await store.promote(name(1), Tier.LONGTERM, at_ms=7, owner=BOB.pubkey) is None


# Compaction and backfill --------------------------------------------------------------------------------------


async def test_compaction_does_what_its_dry_run_said(store: Memory) -> None:
    await store.put(record(1))
    await store.put(record(2, tier=Tier.EPISODIC, parent=name(1)))
    await store.put(record(3, tier=Tier.LONGTERM, metadata={"k": 1}))
    await store.put(record(4, tier=Tier.LONGTERM, metadata={"stale_context": {}}))
    await store.put(record(5, parent=name(99)))
    await store.put(record(6, owner=BOB, created_at=1))
    policy = CompactionCutoffs(delete_working_before_ms=2, mark_longterm_stale_before_ms=9, detach_stale_parents=True)
    expected = MemoryCompaction((name(1), name(6)), (name(3),), (name(2), name(5)))
    assert await store.compact(policy, reason="tidy", now_ms=50, apply=False) == expected
    assert len(await store.recent(None, 10)) == 6
    mine = await store.compact(policy, reason="tidy", now_ms=50, apply=False, owner=ALICE.pubkey)
    assert mine.deleted == (name(1),)
    assert await store.compact(policy, reason="tidy", now_ms=50, apply=True) == expected
    assert await store.recent(None, 10) == [
        record(5),
        record(4, tier=Tier.LONGTERM, metadata={"stale_context": {}}),
        record(3, tier=Tier.LONGTERM, metadata={"k": 1, "stale_context": {"marked_at_ms": 50, "reason": "tidy"}}),
        record(2, tier=Tier.EPISODIC),
    ]
    again = await store.compact(policy, reason="tidy", now_ms=60, apply=True)
    assert not again.would_change


async def test_given_moment_is_one_marked(store: Memory) -> None:
    await store.put(record(1, tier=Tier.LONGTERM))
    policy = CompactionCutoffs(mark_longterm_stale_before_ms=2, marked_at_ms=7)
    await store.compact(policy, reason="r", now_ms=50, apply=True)
    found = await store.get(name(1))
    assert found is not None
    assert found.metadata == {"stale_context": {"marked_at_ms": 7, "reason": "r"}}


async def test_receipts_are_correlated_by_name_and_then_with_first_eligible_record(store: Memory) -> None:
    for number in (1, 2, 3):
        await store.put(record(number))
    await store.put(record(4, owner=BOB))
    receipts = [
        receipt(1, memory=2, settled_at=9),
        receipt(2, settled_at=5),
        receipt(3, settled_at=0),
        receipt(4, memory=4, settled_at=9),
    ]
    expected = ((name(1), receipts[1].id), (name(2), receipts[0].id))
    assert await store.backfill(receipts, apply=False) == expected
    assert await store.get(name(1)) == record(1)
    assert await store.backfill(receipts, apply=True) == expected
    assert await store.get(name(1)) == record(1, metadata={"receipt_id": receipts[1].id})
    assert await store.backfill(receipts, apply=True) == ()


async def test_payables_say_of_each_record_who_owns_it_and_what_paid_for_it(store: Memory) -> None:
    await store.put(record(1, metadata={"receipt_id": "r"}))
    await store.put(record(2, owner=BOB, created_at=3))
    found = sorted((p.id, p.owner, p.created_at, p.receipt) for p in await store.payables())
    assert found == [(name(1), ALICE.pubkey, 1, "r"), (name(2), BOB.pubkey, 3, None)]
    assert [p.id for p in await store.payables(owner=BOB.pubkey)] == [name(2)]


async def test_many_at_once_are_all_there(store: Memory) -> None:
    async with anyio.create_task_group() as group:
        for number in range(1, 101):
            group.start_soon(store.put, record(number, f"word{number}", embedding=(1.0, number / 100)))
        group.start_soon(store.search, (1.0, 0.0), "word1", None, 10, None)
    assert numbers(await store.recent(None, 200)) == list(range(100, 0, -1))
    assert len(await store.search((1.0, 0.0), "", None, 200, None)) == 100
