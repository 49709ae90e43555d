"""Check the default embedder: the texts that it finds alike, and that every machine computes the same bits."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covenant.providers.embed import hashed

DOCUMENTS = {
    "database": "The database connection failed because the password was wrong",
    "pie": "Recipe for apple pie with cinnamon",
    "revenue": "Quarterly revenue report for the finance team",
    "proxy": "Deploy the web server behind an nginx proxy",
    "postgres": "Reconnecting to postgres after the network timed out",
}
# A change here needs a new hashed.NAME, because stored vectors are compared with new ones.
DIGESTS = {
    "hello world": "07079a441fe220e203228d9b75889d7f3d1683f23d5f26b6fbc5cac59e52b14d",
    "Größe und Ähnlichkeit, 漢字": "805f86527a51bfb0930a6aa9256259fa07b8c2d25a1272e0305ad06f8c7d1826",
    "x " * 1000: "c01ea3b79128c17a8e5129be9730627e0c4e3863352057d49f8ebd754f30b70b",
}


def cosine(first: str, second: str) -> float:
    return math.fsum(a * b for a, b in zip(hashed.embed(first), hashed.embed(second), strict=True))


@pytest.mark.parametrize(
    ("query", "nearest"),
    [
        ("errors connecting to databases", "database"),
        ("conection to the databse", "database"),
        ("finance revenues in the quarter", "revenue"),
        ("proxies for web servers", "proxy"),
        ("cinamon apples", "pie"),
        ("network timeouts of Postgres", "postgres"),
    ],
)
def test_forms_of_words_and_slips_of_pen_are_near(query: str, nearest: str) -> None:
    scores = {name: cosine(query, text) for name, text in DOCUMENTS.items()}
    assert max(scores, key=scores.__getitem__) == nearest
    assert scores[nearest] > 0.2


@pytest.mark.parametrize("query", ["会議", "水曜日", "午後の会議", "회의", "금요일"])
def test_word_inside_run_without_spaces_is_near(query: str) -> None:
    texts = ("会議は水曜日の午後三時に行われます", "금요일 회의가 취소되었습니다", "周三下午三点开会讨论预算")
    scores = {text: cosine(query, text) for text in (*texts, "Die Größe des Straßenfests in Zürich")}
    nearest = max(scores, key=scores.__getitem__)
    assert nearest == texts[0] if query[0] in texts[0] else nearest == texts[1]
    assert scores[nearest] > 0.2


def test_words_of_grammar_make_nothing_alike() -> None:
    assert cosine("what is it that you have for them", "they were in there with all of that") < 0.5
    assert abs(cosine("who was there and why", "the engine of the car")) < 0.2


@pytest.mark.parametrize("text", DIGESTS)
def test_this_version_makes_these_bits(text: str) -> None:
    assert hashed.NAME == "covenant-hash-384-v2"
    assert hashlib.sha256(struct.pack("<384f", *hashed.embed(text))).hexdigest() == DIGESTS[text]


def test_only_beginning_of_long_text_counts() -> None:
    text = "word " * (hashed.MAX_CHARACTERS // 5 + 1)
    assert hashed.embed(text + "other") == hashed.embed(text)


@given(st.text())
def test_vector_has_norm_1_or_text_has_no_words(text: str) -> None:
    vector = hashed.embed(text)
    assert vector == hashed.embed(text)
    if vector:
        assert len(vector) == hashed.DIMENSIONS
        assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-6)
    else:
        assert not any(c.isalnum() for c in text)


@pytest.mark.anyio
@pytest.mark.parametrize("text", ["short", "long " * 500, "", "\ud800"])
async def test_embedder_is_function(text: str) -> None:
    embedder = hashed.HashEmbedder()
    assert await embedder.embed(text) == hashed.embed(text)
    assert (embedder.name, embedder.dimensions) == (hashed.NAME, 384)
    await embedder.close()
