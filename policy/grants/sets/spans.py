"""Sets of integers as sorted, disjoint, maximal spans ``(first, last)``: ports, and the building block of addresses.

Two sets that hold the same integers are the same tuple, so equality is equality of meaning.
"""

from __future__ import annotations

from collections.abc import Iterable

Spans = tuple[tuple[int, int], ...]


def join(spans: Iterable[tuple[int, int]]) -> Spans:
    """The union of any spans; neighbours become one."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if out and first <= out[-1][1] + 1:
            if last > out[-1][1]:
                out[-1] = (out[-1][0], last)
        elif first <= last:
            out.append((first, last))
    return tuple(out)


def union(a: Spans, b: Spans) -> Spans:
    """The integers in either."""
    if not b or a == b:
        return a
    return join(a + b) if a else b


def meet(a: Spans, b: Spans) -> Spans:
    """The integers in both, by one merge."""
    if a == b or not a:
        return a
    out: list[tuple[int, int]] = []
    i = j = 0
    while i < len(a) and j < len(b):
        first, last = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if first <= last:
            out.append((first, last))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def minus(a: Spans, b: Spans) -> Spans:
    """The integers of ``a`` that are not in ``b``, by one merge."""
    if not a or not b:
        return a
    out: list[tuple[int, int]] = []
    j = 0
    for whole_first, last in a:
        first = whole_first
        while j < len(b) and b[j][1] < first:
            j += 1
        k = j
        while k < len(b) and b[k][0] <= last:
            if first < b[k][0]:
                out.append((first, b[k][0] - 1))
            first = max(first, b[k][1] + 1)
            k += 1
        if first <= last:
            out.append((first, last))
    return tuple(out)
