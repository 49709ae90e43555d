"""Write a row's kind as JSON text in one pass: the writer of a value checks it.

A row is written for each request, and almost every row is as its kind says. So each field has one writer that refuses a
value of another type. ``policy.audit_log.events`` then looks at the row the long way: it names the fault, or cleans the
row.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

Writer = Callable[[Any], str]

U64: Final = 2**64
HEX64: Final = re.compile(r"[0-9a-f]{64}\Z")
# What a surrogate looks like, lone or not, in text that is ASCII only; and what stands in every escape.
_SURROGATE: Final = "\\ud"
_ESCAPE: Final = "\\"

quoted: Final[Callable[[str], str]] = json.encoder.encode_basestring_ascii


def _int(value: Any) -> str:
    if type(value) is not int or not 0 <= value < U64:
        raise TypeError(value)
    return str(value)


def _bool(value: Any) -> str:
    if type(value) is not bool:
        raise TypeError(value)
    return "true" if value else "false"


def _digest(value: Any) -> str:
    if type(value) is not str or not HEX64.match(value):
        raise TypeError(value)
    return f'"{value}"'


def _texts(value: Any) -> str:
    if type(value) is not list and type(value) is not tuple:
        raise TypeError(value)
    return f"[{','.join(map(quoted, value))}]" if value else "[]"


def _null(_value: None) -> str:
    return "null"


_SCALARS: Final[Mapping[type, Writer]] = {str: quoted, int: _int, bool: _bool, type(None): _null}


def _object(value: Any) -> str:
    if type(value) is not dict:
        raise TypeError(value)
    members = []
    for name, member in value.items():
        text = quoted(member) if type(member) is str else _SCALARS[type(member)](member)
        members.append(f"{quoted(name)}:{text}")
    return f"{{{','.join(members)}}}"


def _objects(value: Any) -> str:
    if type(value) is not list and type(value) is not tuple:
        raise TypeError(value)
    return f"[{','.join(map(_object, value))}]" if value else "[]"


def _counts(value: Any) -> str:
    if type(value) is not dict:
        raise TypeError(value)
    return f"{{{','.join([f'{quoted(name)}:{_int(count)}' for name, count in value.items()])}}}"


def _or_null(write: Writer) -> Writer:
    return lambda value: "null" if value is None else write(value)


_TYPES: Final[Mapping[str, Writer]] = {
    "text": quoted,
    "int": _int,
    "bool": _bool,
    "digest": _digest,
    "texts": _texts,
    "objects": _objects,
    "counts": _counts,
}
WRITERS: Final[Mapping[str, Writer]] = {**_TYPES, **{f"{name}?": _or_null(write) for name, write in _TYPES.items()}}


class _Shape(NamedTuple):
    """The common part of rows with the same names: the text around their values, and the names with their writers.

    The names are in the order of the table. ``in_order``: they are given in that order.
    """

    template: str
    names: Sequence[str]
    writers: Sequence[Writer]
    in_order: bool


class RowText:
    """The text of one kind's rows, by the table of its fields. Those of ``may_lack`` that a row leaves out are null in
    it."""

    __slots__ = ("_kind", "_may_lack", "_shapes", "_table")

    def __init__(self, kind: str, table: Mapping[str, str], may_lack: Collection[str] = ()) -> None:
        self._kind = kind
        self._table = table
        self._may_lack = may_lack
        # By the names that a row gives. There are as many as places that write rows.
        self._shapes: dict[tuple[str, ...], _Shape] = {}

    def text(self, fields: Mapping[str, Any]) -> str | None:
        """Return the text of the row, or None where it is not plainly as its kind says."""
        names = tuple(fields)
        shape = self._shapes.get(names) or self._learnt(names)
        if shape is None:
            return None
        template, given, writers, in_order = shape
        values: Iterable[Any] = fields.values() if in_order else [fields[name] for name in given]
        try:
            text = template % tuple(map(operator.call, writers, values))
        except (TypeError, KeyError):
            return None
        # One character is looked for several times as fast as three.
        return None if _ESCAPE in text and _SURROGATE in text else text

    def _learnt(self, names: tuple[str, ...]) -> _Shape | None:
        given = tuple(name for name in self._table if name in names)
        lacking = [name for name in self._table if name not in names and name not in self._may_lack]
        if lacking or len(given) != len(names):
            return None
        values = ((name, "%s" if name in names else "null") for name in self._table)
        members = [f'"type":{quoted(self._kind)}', *(f"{quoted(name)}:{value}" for name, value in values)]
        writers = [WRITERS[self._table[name]] for name in given]
        shape = _Shape(f"{{{','.join(members)}}}", given, writers, given == names)
        self._shapes[names] = shape
        return shape
