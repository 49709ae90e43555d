"""Skill grants: tool URIs, the classes of side effects that a tool may have, argument rules, and limits of calls."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, Self

from msgspec import Struct, structs

from policy.grants import skill_rules
from policy.grants.sets.domain import ANY, EMPTY, NameSet
from policy.grants.skill_rules import Clause, Rules
from policy.manifest.tools import command

SIDE_EFFECTS = ("chain", "network", "read", "shell", "write")
# The limits of calls, each with its unit. None is no limit, and 0 no call.
LIMITS: Final[Mapping[str, str]] = {
    "calls": "calls a run",
    "calls_per_minute": "calls a minute",
    "call_ms": "ms a call",
    "argument_bytes": "bytes of arguments",
    "answer_bytes": "bytes of an answer",
}

# Behind a line of a tool that is asked about, as for a name (policy.grants.network).
ASKED: Final = " once an operator grants it"


class SkillSet(Struct, frozen=True):
    """``allow`` holds tool URIs with their version, ``side_effects`` classes of ``SIDE_EFFECTS``.

    An empty list of classes allows no side effect (reference: Matrix allows all, which we do not). ``rules`` are about
    tools of ``allow``; a tool without one takes any argument of its schema. A call of a tool of ``asked``, which are
    sorted and of ``allow``, needs a lease of an operator.
    """

    allow: NameSet = EMPTY
    side_effects: NameSet = EMPTY
    rules: Rules = ()
    calls: int | None = 0
    calls_per_minute: int | None = 0
    call_ms: int | None = 0
    argument_bytes: int | None = 0
    answer_bytes: int | None = 0
    asked: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Canonical form: a rule about a tool that may not be called says nothing.
        kept = tuple(one for one in self.rules if self.allow.holds(one.tool))
        if kept != self.rules:
            structs.force_setattr(self, "rules", kept)
        asked = tuple(sorted(uri for uri in set(self.asked) if self.allow.holds(uri)))
        if asked != self.asked:
            structs.force_setattr(self, "asked", asked)

    @classmethod
    def of(
        cls,
        allow: Iterable[str] = (),
        side_effects: Iterable[str] = (),
        rules: Rules = (),
        limits: Mapping[str, int | None] | None = None,
        asked: Iterable[str] = (),
    ) -> Self:
        """The grants of a manifest. Limits without a number of calls are no budget."""
        made = cls(NameSet.of(allow), NameSet.of(side_effects), rules, asked=tuple(asked))
        return structs.replace(made, **({"calls": None, **limits} if limits else {}))

    @classmethod
    def bottom(cls) -> Self:
        """No tool, no side effect."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every tool and class."""
        return cls.ceiling(NameSet.top(), NameSet.top())

    @classmethod
    def ceiling(cls, allow: NameSet, side_effects: NameSet) -> Self:
        """These tools and classes, with any argument and without limits."""
        return structs.replace(cls(allow, side_effects), **dict.fromkeys(LIMITS))

    def limits(self) -> dict[str, int | None]:
        """The limits of calls by their names."""
        return {name: getattr(self, name) for name in LIMITS}

    @property
    def commands(self) -> tuple[tuple[str, str], ...]:
        """The granted commands, each with the agent id of its package, sorted."""
        found = (command.bound(uri) for uri in self.allow.listing())
        return tuple(one for one in found if one is not None)

    @property
    def mcp(self) -> bool:
        """Whether a tool that is no command is granted."""
        return self.allow.any or len(self.allow.names) > len(self.commands)

    def clauses(self, uri: str) -> Rules:
        """The rules about one tool."""
        return tuple(one for one in self.rules if one.tool == uri)

    def meet(self, other: Self, /) -> Self:
        """Tools and classes that both allow, under the rules, the questions and the limits of both."""
        limits = {name: _least(mine, getattr(other, name)) for name, mine in self.limits().items()}
        return type(self)(
            self.allow.meet(other.allow),
            self.side_effects.meet(other.side_effects),
            skill_rules.join((*self.rules, *other.rules)),
            asked=(*self.asked, *other.asked),
            **limits,
        )

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return (
            self.allow.is_subset(other.allow)
            and self.side_effects.is_subset(other.side_effects)
            and not self._looser(other)
            and all(_least(mine, getattr(other, name)) == mine for name, mine in self.limits().items())
        )

    def difference(self, other: Self, /) -> Self:
        """Tools, classes and limits that ``other`` lacks: a tool whole, also where only its rules are wider, or where
        ``other`` asks about it."""
        limits = {
            name: 0 if _least(mine, getattr(other, name)) == mine else mine for name, mine in self.limits().items()
        }
        left = self.allow.difference(other.allow)
        looser = self._looser(other)
        if looser and not left.any:
            left = self.allow if self.allow.any else NameSet(left.names | looser)
        effects = self.side_effects.difference(other.side_effects)
        return type(self)(left, effects, self.rules, asked=self.asked, **limits)

    def _looser(self, other: Self) -> frozenset[str]:
        """The tools that both allow, and this with arguments that ``other`` refuses, or without its question."""
        tools = {one.tool for one in other.rules if self.allow.holds(one.tool)}
        unasked = frozenset(uri for uri in other.asked if self.allow.holds(uri) and uri not in self.asked)
        return unasked | {tool for tool in tools if not skill_rules.within(self.rules, other.rules, tool)}

    def describe(self) -> tuple[str, ...]:
        """A line a tool with its rules, a line a class, a line a limit."""
        effects = (f"side effect {name}" for name in self.side_effects.listing())
        return (*self.describe_tools(), *effects, *self.describe_limits())

    def describe_tools(self) -> tuple[str, ...]:
        """A line a tool with its rules."""
        names = self.allow.listing()
        more = sorted({*(one.tool for one in self.rules), *self.asked} - set(names))
        return tuple(
            f"skill {uri}{_conditions(self.clauses(uri) if uri != ANY else ())}{ASKED if uri in self.asked else ''}"
            for uri in (*names, *more)
        )

    def describe_limits(self) -> tuple[str, ...]:
        """A line a limit that is not 0."""
        return tuple(
            f"tools: {'any number of' if value is None else value} {LIMITS[name]}"
            for name, value in self.limits().items()
            if value != 0
        )

    def canonical(self) -> dict[str, Any]:
        """Tools, classes, and rules and limits where there are any."""
        # Artefacts of a manifest without a budget of calls do not have it, as those of before there was one.
        limits = {name: value for name, value in self.limits().items() if name != "calls" or value is not None}
        return {
            "allow": self.allow.listing(),
            "side_effects": self.side_effects.listing(),
            **({"rules": [one.canonical() for one in self.rules]} if self.rules else {}),
            **({"limits": limits} if any(value != 0 for value in self.limits().values()) else {}),
            **({"asked": list(self.asked)} if self.asked else {}),
        }


def _conditions(clauses: Iterable[Clause]) -> str:
    said = " and ".join(map(str, clauses))
    return f" only with {said}" if said else ""


def _least(mine: int | None, theirs: int | None) -> int | None:
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    return min(mine, theirs)
