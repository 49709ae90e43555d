"""Memory, for all inputs: exact search, plans that dry runs and applied ones share, and words that are never syntax."""

from __future__ import annotations

import itertools
import sqlite3
from typing import Any

import anyio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from covenant.stores.memory import plans, rows
from covenant.stores.memory.index import ranking, vectors
from covenant.stores.memory.index.vectors import Block, Matrices, Matrix, RecordVectors
from covenant.stores.memory.interface import CompactionCutoffs
from covenant.wire.types import MemoryRecord, Tier
from tests.doubles.memory import InMemory
from tests.memory_kit import ALICE, BOB, name, receipt, record

TIERS = st.sampled_from(Tier)
OWNERS = st.sampled_from([ALICE, BOB])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[RecordVectors], np.ndarray[Any, Any]]:
    """Rows and a query. Small integers make ties, and products that float32 holds exactly or nearly so."""
    dimensions = draw(st.integers(1, 24))
    numbers = draw(
        st.sampled_from(
            [st.integers(-2, 2).map(float), st.floats(-1, 1, width=32), st.floats(0.5, 0.5009765625, width=32)]
        )
    )
    rows = draw(st.lists(st.lists(numbers, min_size=dimensions, max_size=dimensions), max_size=40))
    entries = [
        RecordVectors(
            name(n), draw(TIERS), draw(OWNERS).pubkey, draw(st.integers(0, 3)), np.array(row, dtype=np.float32)
        )
        for n, row in enumerate(rows)
    ]
    return entries, np.array(draw(st.lists(numbers, min_size=dimensions, max_size=dimensions)), dtype=np.float32)


def block(entries: list[RecordVectors]) -> Block:
    """As many at once."""
    facts = zip(*((one.id, one.tier, one.owner, one.created_at) for one in entries), strict=True)
    ids, tiers, owners, times = (list(column) for column in facts)
    return Block(ids, tiers, owners, times, np.stack([one.vector for one in entries]))


@settings(max_examples=150)
@given(worlds(), st.integers(1, 50), st.none() | TIERS, st.none() | OWNERS, st.sampled_from([0.0, 0.3, 1.0]))
def test_search_is_plain_products_ranking(
    world: tuple[list[RecordVectors], np.ndarray[Any, Any]], count: int, tier: Tier | None, owner: Any, floor: float
) -> None:
    entries, raw = world
    query = vectors.query_vector(raw.tolist())
    if query is None:
        return
    matrix = Matrix(len(query))
    half = len(entries) // 2
    if half:
        matrix.add_new(block(entries[:half]))
    for entry in entries[half:]:
        matrix.put(entry)
    pubkey = None if owner is None else owner.pubkey
    found = matrix.best(query, count, tier=tier, owner=pubkey, floor=floor)

    wanted = []
    for entry in entries:
        unit = vectors.normalised(entry.vector)
        if unit is None or tier not in (None, entry.tier) or pubkey not in (None, entry.owner):
            continue
        score = float(vectors.exact(unit[None, :], query)[0])
        if score > 0.0 and score >= floor - vectors.RESOLUTION:
            wanted.append((-score, -entry.created_at, entry.id))
    assert found == [(i, -s, -when) for s, when, i in sorted(wanted)[:count]]

    # The plain product of numpy ranks alike, as far as float32 can tell rows apart.
    if found and tier is None and pubkey is None:
        plain = dict(zip(matrix.ids, (matrix.rows @ query).tolist(), strict=True))
        lost = 2 * len(query) * 2.0**-23 + 1e-7
        for better, worse in itertools.pairwise(found):
            assert plain[better.id] >= plain[worse.id] - lost
        if len(found) == count:
            ids = {near.id for near in found}
            assert all(plain[i] <= plain[found[-1].id] + lost for i in matrix.ids if i not in ids)


@given(st.lists(st.sampled_from([(1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0, 1.0), (0.0, 0.0), ()]), min_size=1))
def test_matrix_that_was_kept_up_is_one_made_anew(history: list[tuple[float, ...]]) -> None:
    kept, now = Matrices(), {}
    for step, values in enumerate(history):
        record_id = name(step % 5)
        if values:
            entry = RecordVectors(record_id, Tier.WORKING, "o", step, np.array(values, dtype=np.float32))
            kept.put(entry)
            now[record_id] = entry
        else:
            kept.discard(record_id)
            now.pop(record_id, None)
    fresh = Matrices()
    for entry in reversed(now.values()):
        fresh.put(entry)
    for dimensions in (2, 3):
        query = vectors.query_vector([1.0] * dimensions)
        assert query is not None
        answers = [m.best(query, 9) if (m := made.matrix(dimensions)) else [] for made in (kept, fresh)]
        assert answers[0] == answers[1]


def test_row_scores_alike_wherever_it_lies() -> None:
    generator = np.random.default_rng(1)
    rows = generator.standard_normal((999, 384)).astype(np.float32)
    rows[500] = rows[3]
    query = vectors.query_vector(rows[3].tolist())
    assert query is not None
    matrix = Matrix(384)
    for number, row in enumerate(rows):
        matrix.put(RecordVectors(name(number), Tier.WORKING, "o", 0, row))
    assert [near.id for near in matrix.best(query, 2)] == [name(3), name(500)]


@pytest.mark.parametrize("mine", [0, 1, 256, 257, 499, 500, 501, 1999])
def test_part_of_rows_ranks_as_if_nothing_else_were_there(mine: int) -> None:
    generator = np.random.default_rng(mine)
    whole = generator.standard_normal((2000, 24)).astype(np.float32)
    # Some are equal, wherever they lie.
    whole[generator.integers(0, 2000, 400)] = whole[7]
    owned = set(generator.permutation(2000)[:mine].tolist())
    owners = [(BOB if number in owned else ALICE).pubkey for number in range(2000)]
    entries = [RecordVectors(name(n), Tier.WORKING, owners[n], n % 3, row) for n, row in enumerate(whole)]
    among, alone = Matrix(24), Matrix(24)
    among.add_new(block(entries))
    for entry in entries:
        if entry.owner == BOB.pubkey:
            alone.put(entry)
    for row in whole[5:9]:
        query = vectors.query_vector(row.tolist())
        assert query is not None
        found = among.best(query, 40, owner=BOB.pubkey)
        assert found == alone.best(query, 40)
        assert len(found) >= min(mine // 4, 40)


@settings(max_examples=60)
@given(
    st.integers(1, 12_000),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0, 3, 1000]),
    st.sampled_from([0.0, 1e-5, 0.1]),
)
def test_nobody_who_is_among_best_is_passed_over(size: int, count: int, seed: int, different: int, lost: float) -> None:
    generator = np.random.default_rng(seed)
    products = generator.standard_normal(size).astype(np.float32)
    if different:
        # Many are equal, and stand in any order.
        products = np.sort(products[: min(size, different)])[generator.integers(0, min(size, different), size)]
    places = set(vectors.best_of(products, count, -0.5, lost).tolist())
    last = np.sort(products)[-min(count, size)] if count < size else -np.inf
    least = max(-0.5, float(last) - lost)
    assert places >= set(np.flatnonzero(products >= least).tolist())
    assert all(products[place] >= -0.5 for place in places)


def test_of_many_that_differ_few_more_than_asked_for_are_looked_at_again() -> None:
    products = np.random.default_rng(3).standard_normal(100_000).astype(np.float32)
    assert 10 <= len(vectors.best_of(products, 10, 0.0, 0.0)) <= 20
    assert 64 <= len(vectors.best_of(products, 64, 0.0, 0.0)) <= 128


# Plans --------------------------------------------------------------------------------------------------------

RECORDS = st.lists(
    st.builds(
        record,
        st.integers(0, 12),
        tier=TIERS,
        owner=OWNERS,
        created_at=st.integers(0, 10),
        parent=st.none() | st.integers(0, 15).map(name),
        metadata=st.none() | st.just("text") | st.just({"stale_context": {}}) | st.just({"a": 1}),
    ),
    max_size=12,
    unique_by=lambda r: r.id,
)
CUTS = st.none() | st.integers(0, 11)
POLICIES = st.builds(CompactionCutoffs, CUTS, CUTS, CUTS, st.booleans(), st.none() | st.integers(0, 99))


@given(RECORDS, POLICIES, st.none() | OWNERS, st.randoms())
def test_plan_is_same_dry_applied_and_in_any_order(
    records: list[MemoryRecord], policy: CompactionCutoffs, owner: Any, random: Any
) -> None:
    pubkey = None if owner is None else owner.pubkey

    async def scenario() -> None:
        store = InMemory()
        for one in records:
            await store.put(one)
        dry = await store.compact(policy, reason="r", now_ms=5, apply=False, owner=pubkey)
        assert sorted(await store.recent(None, 99), key=lambda r: r.id) == sorted(records, key=lambda r: r.id)
        shuffled = random.sample(records, len(records))
        assert plans.compaction(map(plans.line, shuffled), policy, owner=pubkey) == dry
        assert await store.compact(policy, reason="r", now_ms=5, apply=True, owner=pubkey) == dry
        left = {r.id: r for r in await store.recent(None, 99)}
        assert set(left) == {r.id for r in records} - set(dry.deleted)
        for one in records:
            touched = one.id in {*dry.deleted, *dry.stale_marked, *dry.parents_detached}
            assert touched or left[one.id] == one
            assert not touched or pubkey in (None, one.owner.pubkey)
        if policy.detach_stale_parents and pubkey is None:
            assert all(r.parent is None or r.parent in left for r in left.values())
        again = await store.compact(policy, reason="r", now_ms=6, apply=True, owner=pubkey)
        assert not again.would_change

    anyio.run(scenario)


@given(
    RECORDS,
    st.lists(
        st.builds(receipt, st.integers(0, 9), memory=CUTS, payer=OWNERS, settled_at=st.integers(0, 12)),
        unique_by=lambda r: r.id,
        max_size=8,
    ),
    st.randoms(),
)
def test_receipt_pays_for_one_record_of_its_payer_and_is_found_once(
    records: list[MemoryRecord], receipts: list[Any], random: Any
) -> None:
    by_id, paid = {r.id: r for r in records}, {r.id: r for r in receipts}
    found = plans.correlations(map(plans.payable, records), receipts)
    assert found == plans.correlations(
        map(plans.payable, random.sample(records, len(records))), random.sample(receipts, len(receipts))
    )
    assert len({r for _, r in found}) == len(found) == len({i for i, _ in found})
    for record_id, receipt_id in found:
        one, payment = by_id[record_id], paid[receipt_id]
        assert one.owner.pubkey == payment.payer.pubkey
        assert payment.memory_record_id in (None, one.id)
        assert payment.memory_record_id == one.id or one.created_at <= payment.settled_at
    after = [plans.correlated(by_id[i], r) for i, r in found]
    rest = [r for r in records if r.id not in dict(found)]
    assert plans.correlations(map(plans.payable, [*after, *rest]), receipts) == ()


ANYTHING = (
    st.none()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.binary(max_size=9)
    | st.text(max_size=9)
    | st.sampled_from(["working", "a@b", "1" * 32, "{}", "null", "[" * 5000, "1" * 5000, "\udcff", "1e999", "NaN", ""])
)


@given(st.dictionaries(st.sampled_from(rows.COLUMNS), ANYTHING, max_size=3))
def test_any_row_is_record_or_says_why_not(odd: dict[str, Any]) -> None:
    good = dict(zip(rows.COLUMNS, rows.encode(record(1, embedding=(1.0,), parent=name(2))), strict=True))
    row = (1, *{**good, **odd}.values())
    read = rows.parse(row)
    if isinstance(read, MemoryRecord):
        assert rows.bad_row(row) is None
        assert MemoryRecord.model_validate(read.model_dump()) == read
        assert rows.parse((0, *rows.encode(read))) == read
    else:
        assert read == rows.bad_row(row)
        assert read.problems


# Words --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fts() -> Any:
    db = sqlite3.connect(":memory:")
    db.execute('CREATE VIRTUAL TABLE t USING fts5(id UNINDEXED, text, tokenize = "unicode61 remove_diacritics 2")')
    db.execute("INSERT INTO t VALUES ('secret', 'nothing')")
    yield db
    db.close()


SYNTAX = st.text(alphabet="\"'*^:(){}+-,. \x00\nANDORNOTEnearidtx_é漢\ud800\u0301", max_size=40)


@given(SYNTAX | st.text())
def test_no_text_is_syntax(fts: Any, text: str) -> None:
    terms = ranking.words(text)
    expression = ranking.match_expression(terms)
    if expression:
        found = fts.execute("SELECT text FROM t WHERE t MATCH ?", (expression,)).fetchall()
        # No filter on a column, no NOT: only a word of the text finds the row.
        assert found == [] or "nothing" in terms
    assert len(terms) <= ranking.MAX_WORDS


@given(st.lists(st.text(min_size=1, max_size=8), max_size=6))
def test_quotes_in_term_stay_in_it(fts: Any, terms: list[str]) -> None:
    terms = [t.encode("utf-8", "ignore").decode() for t in terms]
    expression = ranking.match_expression([*terms, "nothing"])
    assert fts.execute("SELECT id FROM t WHERE t MATCH ?", (expression,)).fetchall() == [("secret",)]
