"""Cosine over a cached float32 matrix, one for each number of dimensions.

The matrix holds normalised rows without gaps, so a single numpy product gives all scores. That product selects the
candidates for the best. These few are scored again, each by itself, because the last bits of a row's BLAS result depend
on its position. So the ranking is exact and independent of a record's position and of the number of BLAS threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from covenant.wire.types import Tier

Floats = npt.NDArray[np.float32]
_TIERS: Final = {tier: number for number, tier in enumerate(Tier)}
_FIRST: Final = 256
# Rows normalised at a time.
_AT_ONCE: Final = 256
# The run length in which products are searched for the best.
_RUN: Final = 256
# Rows scored again at a time: bounds the memory for it.
_CHUNK: Final = 4096
# A part of the rows is multiplied separately if it is at most 1/4 of all: that is cheaper
# (benchmarks/memory_search.py).
_PART: Final = 4
# Rows gathered at a time: they stay in the processor's cache.
_GATHERED: Final = 256
# The most that float32 loses of a cosine; limits are lowered by it.
RESOLUTION: Final = 1e-6


def normalised(vector: Floats) -> Floats | None:
    """Return the vector divided by its norm; None if its norm is 0 or not finite."""
    units, good = units_of(vector[np.newaxis, :])
    return units[0] if good[0] else None


def units_of(rows: Floats, out: Floats | None = None) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Divide each row by its norm. Returns also which rows have a direction. A row's result does not depend on the
    others."""
    units = np.empty(rows.shape, dtype=np.float32) if out is None else out
    good = np.empty(len(rows), dtype=np.bool_)
    # Few rows at a time, so that their float64 values stay in the processor's cache: five times as fast.
    for start in range(0, len(rows), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        wide = rows[part].astype(np.float64)
        norms = np.sqrt(np.sum(wide * wide, axis=1))
        good[part] = np.isfinite(norms) & (norms > 0.0)
        norms[~good[part]] = 1.0
        np.divide(wide, norms[:, np.newaxis], out=units[part], casting="same_kind")
    return units, good


def exact(rows: Floats, query: Floats) -> npt.NDArray[np.float64]:
    """Return each row's product with the query, summed in float64 in an order that is independent of its position."""
    found: npt.NDArray[np.float64] = np.sum(rows.astype(np.float64) * query.astype(np.float64), axis=1)
    return found


@dataclass(frozen=True, slots=True)
class Block:
    """Matrix data of several records with equal dimensions, one row of ``rows`` each."""

    ids: list[str]
    tiers: list[Tier]
    owners: list[str]
    times: list[int]
    rows: Floats


@dataclass(frozen=True, slots=True)
class RecordVectors:
    """Matrix data of one record."""

    id: str
    tier: Tier
    owner: str
    created_at: int
    vector: Floats


class Near(NamedTuple):
    """A record near a query: its cosine and its creation time."""

    id: str
    score: float
    created_at: int


class Matrix:
    """Normalised rows of one number of dimensions, with the tier, owner and time of each."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self.ids: list[str] = []
        self._places: dict[str, int] = {}
        self._owners: dict[str, int] = {}
        self._rows: Floats = np.empty((_FIRST, dimensions), dtype=np.float32)
        # Tier, owner and time of each row, as numbers.
        self._tiers = np.empty(_FIRST, dtype=np.uint8)
        self._whose = np.empty(_FIRST, dtype=np.int32)
        self._times = np.empty(_FIRST, dtype=np.int64)
        # Reused: the kernel clears memory that is allocated anew for each search.
        self._products: Floats = np.empty(_FIRST, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def rows(self) -> Floats:
        """The rows in use, contiguous."""
        return self._rows[: len(self.ids)]

    @property
    def bytes_of_rows(self) -> int:
        """The bytes of the rows, including reserved space."""
        return self._rows.nbytes

    def reserve(self, count: int) -> None:
        """Reserve space for ``count`` rows."""
        if count > len(self._rows):
            self._resize(count)

    def _resize(self, capacity: int) -> None:
        count = len(self.ids)
        rows = np.empty((capacity, self.dimensions), dtype=np.float32)
        rows[:count] = self._rows[:count]
        self._rows = rows
        self._tiers, self._whose, self._times, self._products = (
            np.concatenate((column[:count], np.empty(capacity - count, dtype=column.dtype)))
            for column in (self._tiers, self._whose, self._times, self._products)
        )

    def add_new(self, block: Block) -> None:
        """Add rows of distinct records without a row. Rows without a direction are skipped."""
        start, room = len(self.ids), len(self.ids) + len(block.ids)
        if room > len(self._rows):
            self._resize(max(room, 2 * len(self._rows)))
        units, good = units_of(block.rows, out=self._rows[start:room])
        kept = np.flatnonzero(good).tolist()
        end = start + len(kept)
        if end < room:
            self._rows[start:end] = units[good]
        self._tiers[start:end] = [_TIERS[block.tiers[at]] for at in kept]
        self._whose[start:end] = [self._owners.setdefault(block.owners[at], len(self._owners)) for at in kept]
        self._times[start:end] = [block.times[at] for at in kept]
        ids = [block.ids[at] for at in kept]
        self.ids += ids
        self._places.update(zip(ids, range(start, end), strict=True))

    def put(self, entry: RecordVectors) -> None:
        """Add or replace a row; a row without a direction is removed."""
        unit = normalised(entry.vector)
        if unit is None:
            self.discard(entry.id)
            return
        place = self._places.get(entry.id)
        if place is None:
            place = len(self.ids)
            if place == len(self._rows):
                self._resize(2 * place)
            self.ids.append(entry.id)
            self._places[entry.id] = place
        self._rows[place] = unit
        self._tiers[place] = _TIERS[entry.tier]
        self._whose[place] = self._owners.setdefault(entry.owner, len(self._owners))
        self._times[place] = entry.created_at

    def move(self, record_id: str, tier: Tier) -> None:
        """Set the tier of a row, if it exists."""
        place = self._places.get(record_id)
        if place is not None:
            self._tiers[place] = _TIERS[tier]

    def discard(self, record_id: str) -> None:
        """Remove a row; the last row moves to its place. Half of the space is given back when 3/4 of it are free."""
        place = self._places.pop(record_id, None)
        if place is None:
            return
        last = self.ids.pop()
        if last != record_id:
            end = len(self.ids)
            self.ids[place] = last
            self._places[last] = place
            for column in (self._rows, self._tiers, self._whose, self._times):
                column[place] = column[end]
        if len(self._rows) > _FIRST and 4 * len(self.ids) <= len(self._rows):
            self._resize(max(_FIRST, len(self._rows) // 2))
            self._places = dict(self._places)

    def scores(self, query: Floats, ids: Iterable[str]) -> dict[str, float]:
        """Return the cosines of the records that have a row."""
        known = [record_id for record_id in ids if record_id in self._places]
        if not known:
            return {}
        found = exact(self._rows[[self._places[i] for i in known]], query)
        return dict(zip(known, found.tolist(), strict=True))

    def best(
        self, query: Floats, count: int, *, tier: Tier | None = None, owner: str | None = None, floor: float = 0.0
    ) -> list[Near]:
        """Return the ``count`` best with a cosine above 0 and at least ``floor``: then newest first, then by id."""
        if not len(self) or count <= 0 or (owner is not None and owner not in self._owners):
            return []
        inside = self._inside(tier, owner)
        places = self._near(self._products_of(query, inside), count, floor)
        if inside is not None:
            places = inside[places]
        scored: list[float] = []
        for start in range(0, len(places), _CHUNK):
            scored += exact(self._rows[places[start : start + _CHUNK]], query).tolist()
        times = self._times[places].tolist()
        found = [
            (-score, -time, self.ids[place])
            for score, time, place in zip(scored, times, places.tolist(), strict=True)
            if score > 0.0 and score >= floor - RESOLUTION
        ]
        found.sort()
        return [Near(record_id, -score, -time) for score, time, record_id in found[:count]]

    def _products_of(self, query: Floats, places: npt.NDArray[np.intp] | None) -> Floats:
        """Return the product of these rows, or of all, with the query; valid until the next search."""
        if places is None or _PART * len(places) > len(self):
            products = np.matmul(self.rows, query, out=self._products[: len(self)])
            # Selects the products instead of masking the others: the search for the best is slow with many equal
            # values.
            return products if places is None else products[places]
        products = self._products[: len(places)]
        gathered = np.empty((min(_GATHERED, len(places)), self.dimensions), dtype=np.float32)
        for start in range(0, len(places), _GATHERED):
            part = places[start : start + _GATHERED]
            # Mode "raise" would copy once more; "clip" is safe because every place exists.
            rows = np.take(self._rows, part, axis=0, out=gathered[: len(part)], mode="clip")
            np.vecdot(rows, query, out=products[start : start + len(part)])
        return products

    def _inside(self, tier: Tier | None, owner: str | None) -> npt.NDArray[np.intp] | None:
        """Return the places of the rows of a tier and an owner; None if these are all."""
        if tier is None and owner is None:
            return None
        mine: npt.NDArray[np.bool_] | None = None
        if tier is not None:
            mine = self._tiers[: len(self)] == _TIERS[tier]
        if owner is not None:
            owned = self._whose[: len(self)] == self._owners[owner]
            mine = owned if mine is None else mine & owned
        assert mine is not None
        return np.flatnonzero(mine)

    def _near(self, products: Floats, count: int, floor: float) -> npt.NDArray[np.intp]:
        """Return the places of all rows that may be among the best.

        A product of unit vectors in float32 is off by at most n u / (1 - n u) (Higham, Accuracy and Stability of
        Numerical Algorithms, 3.1). The error counts twice, for a row and for the one it is compared with, and the floor
        is rounded.
        """
        unit = self.dimensions * 2.0**-24
        lost = 2 * unit / (1 - unit) + RESOLUTION if unit < 0.5 else math.inf
        least = max(floor - RESOLUTION, 0.0) - lost
        return best_of(products, count, least, lost)


def best_of(products: Floats, count: int, least: float, lost: float) -> npt.NDArray[np.intp]:
    """Return the places of products of at least ``least`` and at most ``lost`` below the ``count``-th best; may return
    more.

    For many products, one pass takes the maximum of each run of ``_RUN`` neighbours: a value that ``count`` maxima
    reach, at least ``count`` products reach. Code after a matrix product runs in a cold cache, so few steps matter more
    than few comparisons.
    """
    tops = products
    if len(products) >= 4 * count * _RUN:
        tops = np.maximum.reduceat(products, np.arange(0, len(products), _RUN))
    if count < len(tops):
        least = max(least, float(np.partition(tops, len(tops) - count)[len(tops) - count]) - lost)
    return np.flatnonzero(products >= least)


class Matrices:
    """One matrix for each number of dimensions in use."""

    def __init__(self) -> None:
        self._by_dimensions: dict[int, Matrix] = {}
        self._dimensions: dict[str, int] = {}

    def matrix(self, dimensions: int) -> Matrix | None:
        """Return the matrix of a number of dimensions; None if no record has it."""
        return self._by_dimensions.get(dimensions)

    @property
    def bytes_of_rows(self) -> int:
        """The bytes of the rows, including reserved space."""
        return sum(matrix.bytes_of_rows for matrix in self._by_dimensions.values())

    def _of(self, dimensions: int) -> Matrix:
        return self._by_dimensions.setdefault(dimensions, Matrix(dimensions))

    def add_new(self, block: Block, expected: int = 0) -> None:
        """Add rows of distinct records without a row.

        Space for ``expected`` rows is reserved in the first matrix: nearly all vectors of a space have equal
        dimensions.
        """
        dimensions: int = block.rows.shape[1]
        if not self._by_dimensions:
            self._of(dimensions).reserve(expected)
        self._of(dimensions).add_new(block)
        self._dimensions.update(dict.fromkeys(block.ids, dimensions))

    def put(self, entry: RecordVectors) -> None:
        """Add or replace a record's row."""
        dimensions = len(entry.vector)
        if self._dimensions.get(entry.id, dimensions) != dimensions:
            self.discard(entry.id)
        self._dimensions[entry.id] = dimensions
        self._of(dimensions).put(entry)

    def move(self, record_id: str, tier: Tier) -> None:
        """Set the tier of a record's row, if it has one."""
        dimensions = self._dimensions.get(record_id)
        if dimensions is not None:
            self._by_dimensions[dimensions].move(record_id, tier)

    def discard(self, record_id: str) -> None:
        """Remove a record's row, if it has one."""
        dimensions = self._dimensions.pop(record_id, None)
        if dimensions is not None:
            self._by_dimensions[dimensions].discard(record_id)


def query_vector(embedding: Sequence[float]) -> Floats | None:
    """Convert a query to the form of a row: float32 and normalised; None if it has no direction."""
    with np.errstate(over="ignore"):
        narrow = np.asarray(embedding, dtype=np.float64).astype(np.float32)
    if narrow.ndim != 1:
        return None
    # As for a row, but in fewer steps: the last product evicted the code before a product from the processor's cache.
    wide = narrow.astype(np.float64)
    norm = math.sqrt(np.sum(wide * wide))
    return (wide / norm).astype(np.float32) if 0.0 < norm < math.inf else None
