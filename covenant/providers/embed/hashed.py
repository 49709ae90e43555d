"""Convert texts to vectors without a model: hash words and parts of words.

Shared words make the vectors of two texts similar, and so do shared parts of words. So "connect", "connection" and
"reconnecting" are near each other, and a typing error costs little. It knows no meaning: "car" and "automobile" are
unrelated.

    1. NFKC, lower case; words are runs of letters, digits and marks, of the first ``MAX_CHARACTERS`` characters.
    2. Features: each word, the same without its ending, each pair of neighbours, and each run of 3, 4 and 5 characters
       of a word with markers at its ends. A word with Han, kana or Hangul, which are written without spaces between
       words, has the pairs of its characters instead of an ending and runs.
    3. A feature weighs the square root of its count, times its kind's weight; words of grammar weigh little.
    4. Its hash selects one of 384 places and a sign, so that collisions cancel out on average (Weinberger et al.,
       Feature Hashing for Large Scale Multitask Learning, ICML 2009).
    5. The sum is divided by its norm.

INVARIANT: integers, square roots and correctly rounded sums, so every machine computes the same bits from the same
text. A change of a step requires a change of ``NAME``. ``tests/unit/covenant/providers/embed/test_hashed.py`` has
vectors of this version.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import anyio.to_thread
import numpy as np

from covenant.providers.embed import unspaced

NAME: Final = "covenant-hash-384-v2"
DIMENSIONS: Final = 384
MAX_CHARACTERS: Final = 65_536

_WORD: Final = re.compile(r"\w+")
_GRAMMAR: Final = frozenset(
    (  # noqa: SIM905 - as a list these are sixty lines
        "a an and are as at be been but by can could did do does for from had has have he her him his how i if in into "
        "is it its me my no not of on or our she so some than that the their them then there these they this to was we "
        "were what when where which who will with would you your"
    ).split()
)
# Endings of words: two forms of one word share the rest.
_ENDINGS: Final = ("ings", "ing", "ies", "ed", "es", "s", "e", "y")
_SHORTEST_STEM: Final = 3
_WORD_WEIGHT: Final = 1.0
_STEM_WEIGHT: Final = 0.7
_PAIR_WEIGHT: Final = 0.5
_PART_WEIGHT: Final = 0.35
_GRAMMAR_WEIGHT: Final = 0.1
_SIZES: Final = (3, 4, 5)
# A longer word is cut before its parts are taken.
_LONGEST_WORD: Final = 64
_MASK: Final = 2**64 - 1
# FNV-1a, 64 bits (Fowler, Noll, Vo), and the finaliser of SplitMix64, which mixes the low bits that FNV mixes poorly.
_FNV_OFFSET: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MIX: Final = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


class HashEmbedder:
    """The default embedder."""

    @property
    def name(self) -> str:
        """The space of this version."""
        return NAME

    @property
    def dimensions(self) -> int:
        """384."""
        return DIMENSIONS

    async def embed(self, text: str) -> tuple[float, ...]:
        """Return the vector of a text; empty for a text without words."""
        if len(text) < 512:
            return embed(text)
        return await anyio.to_thread.run_sync(embed, text)

    async def close(self) -> None:
        """Do nothing: this embedder holds no resources."""


def embed(text: str) -> tuple[float, ...]:
    """Return the vector of a text: 384 float32 values with norm 1; empty for a text without words."""
    counts = _features(text)
    if not counts:
        return ()
    features = list(counts)
    hashes = _mixed(np.array([_fnv(f) for f, _ in features], dtype=np.uint64))
    weights = np.array([weight for _, weight in features]) * np.sqrt(np.array(list(counts.values()), dtype=np.float64))
    signs = np.where(hashes >> np.uint64(63), -1.0, 1.0)
    places = (hashes % np.uint64(DIMENSIONS)).astype(np.int64)
    order = np.argsort(hashes, kind="stable")
    # `bincount` adds one by one, in this order.
    total = np.bincount(places[order], weights=(signs * weights)[order], minlength=DIMENSIONS)
    norm = math.sqrt(math.fsum(v * v for v in total.tolist()))
    if norm == 0.0:
        return ()
    return tuple((total / norm).astype(np.float32).tolist())


def _features(text: str) -> Counter[tuple[str, float]]:
    counts: Counter[tuple[str, float]] = Counter()
    words = _WORD.findall(unicodedata.normalize("NFKC", text[:MAX_CHARACTERS]).lower())
    before = ""
    for word, times in Counter(words).items():
        for feature in _of_word(word):
            counts[feature] += times
    for word in words:
        if word in _GRAMMAR:
            continue
        if before:
            counts[f"{before} {word}", _PAIR_WEIGHT] += 1
        before = word
    return counts


def _of_word(word: str) -> Iterator[tuple[str, float]]:
    if word in _GRAMMAR:
        yield word, _GRAMMAR_WEIGHT
        return
    yield word, _WORD_WEIGHT
    if pairs := unspaced.pairs(word):
        yield from ((pair, _WORD_WEIGHT) for pair in pairs if pair != word)
        return
    yield f"{_stem(word)}-", _STEM_WEIGHT
    bounded = f"<{word[:_LONGEST_WORD]}>"
    for size in _SIZES:
        # A run as long as the word with both markers would repeat the word.
        for start in range(len(bounded) - size + 1 if size < len(bounded) else 0):
            yield bounded[start : start + size], _PART_WEIGHT


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if word.endswith(ending) and len(word) >= len(ending) + _SHORTEST_STEM:
            return word[: -len(ending)]
    return word


def _fnv(text: str) -> int:
    value = _FNV_OFFSET
    for byte in text.encode("utf-8", "surrogatepass"):
        value = (value ^ byte) * _FNV_PRIME & _MASK
    return value


def _mixed(values: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    with np.errstate(over="ignore"):
        for shift, factor in _MIX:
            values = (values ^ (values >> np.uint64(shift))) * np.uint64(factor)
    return values ^ (values >> np.uint64(31))
