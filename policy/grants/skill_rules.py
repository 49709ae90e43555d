"""Argument rules of tools as a lattice: a conjunction of clauses, each a set of alternatives.

A clause says that an argument has one of its values. Values are compared by meaning where that is cheap: `equals "a"`
is within `matches "a|b"`. Two patterns are compared as text, so that a narrower one may be refused and a wider one
never passes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from policy.manifest.tools import skill_rules


class ToolCondition(NamedTuple):
    """One condition on a value. ``value`` of ``equals`` is JSON text: to Python, true is 1."""

    kind: Literal["equals", "matches"]
    value: str

    def holds(self, value: Any) -> bool:
        """Whether a value fits: a string, number or boolean as it came in the arguments of a call."""
        if self.kind == "matches":
            return isinstance(value, str) and skill_rules.fullmatch(self.value)(value)
        return isinstance(value, str | int | bool) and json.dumps(value) == self.value

    def within(self, other: ToolCondition) -> bool:
        """Whether ``other`` takes each value that this one takes."""
        return self == other or (self.kind == "equals" and other.holds(json.loads(self.value)))

    def __str__(self) -> str:
        return self.value if self.kind == "equals" else f"/{self.value}/"


class Clause(NamedTuple):
    """An argument of a tool must have a value that fits one of the alternatives, which are sorted."""

    tool: str
    argument: str
    alternatives: tuple[ToolCondition, ...]

    @classmethod
    def of(cls, tool: str, argument: str, alternatives: Iterable[ToolCondition]) -> Clause:
        """The clause without an alternative that is within another one."""
        some = sorted(set(alternatives))
        kept = (one for one in some if not any(one != other and one.within(other) for other in some))
        return cls(tool, argument, tuple(kept))

    def holds(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call fits: the argument is there, and it, or each item of a list that is not empty, fits."""
        if self.argument not in arguments:
            return False
        value = arguments[self.argument]
        items = value if isinstance(value, list) else [value]
        return bool(items) and all(self.takes(item) for item in items)

    def takes(self, value: Any) -> bool:
        """Whether one value fits."""
        return any(one.holds(value) for one in self.alternatives)

    def within(self, other: Clause) -> bool:
        """Whether each call that fits this clause fits ``other``."""
        same = (self.tool, self.argument) == (other.tool, other.argument)
        return same and all(any(one.within(wide) for wide in other.alternatives) for one in self.alternatives)

    def __str__(self) -> str:
        return f"{self.argument} = {' or '.join(map(str, self.alternatives)) or 'nothing'}"

    def canonical(self) -> dict[str, Any]:
        """The clause as JSON."""
        return {
            "tool": self.tool,
            "argument": self.argument,
            "alternatives": [{one.kind: one.value} for one in self.alternatives],
        }


Rules = tuple[Clause, ...]


def of(rows: Iterable[tuple[str, str, Iterable[ToolCondition]]]) -> Rules:
    """The rules of a manifest, where those of one tool and argument are alternatives."""
    grouped: dict[tuple[str, str], list[ToolCondition]] = {}
    for tool, argument, alternatives in rows:
        grouped.setdefault((tool, argument), []).extend(alternatives)
    return join(Clause.of(tool, argument, some) for (tool, argument), some in grouped.items())


def join(clauses: Iterable[Clause]) -> Rules:
    """All of the clauses at once, sorted, without one that another implies."""
    some = sorted(set(clauses))
    return tuple(one for one in some if not any(other != one and other.within(one) for other in some))


def within(mine: Rules, theirs: Rules, tool: str) -> bool:
    """Whether each call of a tool that fits ``mine`` fits ``theirs``."""
    own = tuple(one for one in mine if one.tool == tool)
    return all(any(one.within(wide) for one in own) for wide in theirs if wide.tool == tool)


def alternatives(
    *, equals: Any = None, matches: str | None = None, one_of: Iterable[Any] = ()
) -> Iterator[ToolCondition]:
    """The alternatives of one rule of a manifest."""
    if matches is not None:
        yield ToolCondition("matches", matches)
    for value in (*one_of, *(() if equals is None else (equals,))):
        yield ToolCondition("equals", json.dumps(value))


def restore(document: Any) -> Rules:
    """Clauses from their canonical form; what could not have been made is an error.

    Raises:
        ValueError, TypeError, KeyError: it is no canonical form.
    """
    found = []
    for one in document:
        if set(one) != {"tool", "argument", "alternatives"} or not all(
            type(one[k]) is str for k in ("tool", "argument")
        ):
            raise ValueError("a rule has other keys")
        some = []
        for alternative in one["alternatives"]:
            ((kind, value),) = alternative.items()
            if kind == "equals":
                scalar = json.loads(value)
                if not isinstance(scalar, str | int | bool) or json.dumps(scalar) != value:
                    raise ValueError("no value")
            elif kind != "matches":
                raise ValueError("no such condition")
            else:
                skill_rules.fullmatch(value)
            some.append(ToolCondition(kind, value))
        found.append(Clause(one["tool"], one["argument"], tuple(some)))
    if not found or join(Clause.of(*one) for one in found) != tuple(found):
        raise ValueError("the rules are not in canonical form")
    return tuple(found)
