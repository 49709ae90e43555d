"""Credential grants: the names of the secrets that the vault gives this agent, and those that the gate adds for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from msgspec import Struct

from policy.grants.sets.domain import ANY, NameSet
from policy.grants.skills import ASKED


@dataclass(frozen=True, slots=True)
class CredentialSet(NameSet):
    """Names of secrets; no pattern, so that a new secret is never granted by an old manifest."""

    def describe(self) -> tuple[str, ...]:
        """A line a secret."""
        return tuple(f"credential {name}" for name in self.listing())

    def canonical(self) -> dict[str, Any]:
        """The names."""
        return {"grants": self.listing()}


class InjectRule(NamedTuple):
    """Requests to a host by one method, to one path or all that begin so, and the header that the gate adds to them."""

    host: str
    secret: str
    header: str
    format: str
    user: str
    method: str
    path: str

    @property
    def added(self) -> tuple[str, ...]:
        """The host, the header and the secret that is added to it."""
        return self[:5]

    def covers(self, other: InjectRule) -> bool:
        """Whether this holds every request that ``other`` holds."""
        return self == EVERY or (self.added == other.added and self.takes(other.method, other.path))

    def takes(self, method: str, path: str) -> bool:
        """Whether a request, or a pattern of requests, is one of these."""
        within = path.startswith(self.path[:-1]) if self.path.endswith(ANY) else path == self.path
        return within and self.method in (ANY, method)

    def meet(self, other: InjectRule) -> InjectRule | None:
        """The requests that both hold, None where there are none."""
        if self == EVERY or other == EVERY:
            return other if self == EVERY else self
        method = other.method if self.method == ANY else self.method
        path = other.path if self.path.endswith(ANY) and other.path.startswith(self.path[:-1]) else self.path
        both = self._replace(method=method, path=path)
        return both if self.covers(both) and other.covers(both) else None

    def describe(self) -> str:
        """One line."""
        value = self.format.replace("{}", f"{{{self.user}:{self.secret}}}" if self.user else f"{{{self.secret}}}")
        return f"inject {self.header}: {value} into {self.method} https://{self.host}{self.path}"


# Only a ceiling has it.
EVERY: Final = InjectRule(*[ANY] * 7)


class InjectSet(Struct, frozen=True):
    """Requests to which the gate adds a secret: sorted rules, none within another.

    A request of ``asked`` needs a lease of an operator. Each of these rules holds more than what is granted.
    """

    rules: tuple[InjectRule, ...] = ()
    asked: tuple[InjectRule, ...] = ()

    @classmethod
    def of(cls, rules: Iterable[InjectRule], asked: Iterable[InjectRule] = ()) -> Self:
        """The set of these rules."""
        granted = _apart(rules)
        return cls(granted, _apart(one for one in asked if not _covered(one, granted)))

    @classmethod
    def bottom(cls) -> Self:
        """No request."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every request to every host, with any secret."""
        return cls((EVERY,))

    def __bool__(self) -> bool:
        return bool(self.rules or self.asked)

    @property
    def hosts(self) -> frozenset[str]:
        """The hosts whose requests the gate reads."""
        return frozenset(one.host for one in (*self.rules, *self.asked) if one != EVERY)

    def at(self, host: str) -> tuple[InjectRule, ...]:
        """The rules of a host that need no lease."""
        return tuple(one for one in self.rules if one.host == host)

    def asked_at(self, host: str) -> tuple[InjectRule, ...]:
        """The rules of a host about which an operator is asked."""
        return tuple(one for one in self.asked if one.host == host)

    def meet(self, other: Self, /) -> Self:
        """The requests that both allow, asked about where one of both asks."""
        both = _met(self.rules, other.rules)
        held = (
            *_met(self.asked, (*other.rules, *other.asked)),
            *_met(self.rules, other.asked),
        )
        return self.of(both, held)

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return not self.difference(other)

    def difference(self, other: Self, /) -> Self:
        """The rules, each whole, that ``other`` does not cover. What it asks about covers no grant."""
        held = (*other.rules, *other.asked)
        return type(self)(
            tuple(one for one in self.rules if not _covered(one, other.rules)),
            tuple(one for one in self.asked if not _covered(one, held)),
        )

    def describe(self) -> tuple[str, ...]:
        """A line a rule."""
        granted = (
            ("inject any secret into any request",)
            if EVERY in self.rules
            else tuple(map(InjectRule.describe, self.rules))
        )
        return (*granted, *(one.describe() + ASKED for one in self.asked))

    def canonical(self) -> dict[str, Any]:
        """The rules, and those that are asked about where there are any."""
        held = {"asked": [one._asdict() for one in self.asked]} if self.asked else {}
        return {"rules": [one._asdict() for one in self.rules], **held}


def _covered(rule: InjectRule, rules: Iterable[InjectRule]) -> bool:
    return any(one.covers(rule) for one in rules)


def _apart(rules: Iterable[InjectRule]) -> tuple[InjectRule, ...]:
    """The rules in order, without those that stand within another."""
    found = sorted(set(rules))
    return tuple(one for one in found if not any(other.covers(one) for other in found if other != one))


def _met(mine: Iterable[InjectRule], theirs: tuple[InjectRule, ...]) -> Iterator[InjectRule]:
    pairs = (one.meet(other) for one in mine for other in theirs)
    return (one for one in pairs if one is not None)
