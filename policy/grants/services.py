"""Service grants: the models, searches and pages that an agent may ask its service gate for, the ports that this
host may reach, the ports of this host that it may reach, the keys of SSH that sign for it, the agents that it may ask,
and the telemetry that it may send.

A pattern is a model's whole name, or a beginning of one with ``*`` behind it. Two patterns so written either hold one
another or have nothing in common, which makes the meet exact.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Self

from msgspec import Struct

from policy.grants.resources import least, within
from policy.grants.sets import hostnames
from policy.grants.sets.domain import ANY, NameSet

# Field -> how people read it.
LIMITS: Final[dict[str, str]] = {
    "requests_per_minute": "requests a minute",
    "tokens_per_hour": "tokens an hour",
    "max_output_tokens": "tokens an answer",
}
# (provider, pattern); the pair of two stars is every model of every provider, which only a ceiling has.
Model = tuple[str, str]
EVERY: Final[Model] = (ANY, ANY)
_AT: Final = " at "
# The service gate's refusals of a name, by code. policy.why.services reads the name back.
SENTENCES: Final[dict[str, str]] = {
    "model_not_granted": "the model `{}` is not granted",
    "host_not_granted": "pages of {} are not granted",
    "agent_not_granted": "the agent `{}` is not granted",
    "signal_not_granted": "the signal {} is not granted",
}


def covers(mine: Model, other: Model) -> bool:
    """Whether ``mine`` holds every model that ``other`` holds."""
    if mine == EVERY:
        return True
    if mine[0] != other[0]:
        return False
    if mine[1].endswith(ANY):
        return other[1].startswith(mine[1].removesuffix(ANY))
    return mine[1] == other[1]


class ServiceSet(Struct, frozen=True):
    """``models`` are the granted patterns, sorted, none within another; limits are None where there is none.

    Without a model the limits are 0: every value that allows nothing is ``bottom()``.
    """

    models: tuple[Model, ...] = ()
    requests_per_minute: int | None = 0
    tokens_per_hour: int | None = 0
    max_output_tokens: int | None = 0

    @classmethod
    def of(
        cls,
        models: Iterable[Model] = (),
        requests_per_minute: int | None = None,
        tokens_per_hour: int | None = None,
        max_output_tokens: int | None = None,
    ) -> Self:
        """Return the grants of a manifest."""
        found = _joined(models)
        return cls(found, requests_per_minute, tokens_per_hour, max_output_tokens) if found else cls()

    @classmethod
    def bottom(cls) -> Self:
        """No model."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every model, without a limit."""
        return cls.of((EVERY,))

    def __bool__(self) -> bool:
        return bool(self.models)

    def holds(self, provider: str, model: str) -> bool:
        """Whether a model of a provider is granted."""
        return any(covers(one, (provider, model)) for one in self.models)

    def limits(self) -> tuple[int | None, ...]:
        """The limits in the order of ``LIMITS``."""
        return tuple(getattr(self, name) for name in LIMITS)

    def meet(self, other: Self, /) -> Self:
        """The models that both allow, with the lower limit of each."""
        models = [one for one in self.models if any(covers(theirs, one) for theirs in other.models)]
        models += [one for one in other.models if any(covers(mine, one) for mine in self.models)]
        return self.of(models, *map(least, self.limits(), other.limits()))

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return self.difference(other) == self.bottom()

    def difference(self, other: Self, /) -> Self:
        """The patterns that ``other`` does not hold, and the limits that are above ``other``'s; 0 elsewhere."""
        models = tuple(one for one in self.models if not any(covers(theirs, one) for theirs in other.models))
        pairs = zip(self.limits(), other.limits(), strict=True)
        return type(self)(models, *(0 if within(a, b) else a for a, b in pairs))

    def describe(self) -> tuple[str, ...]:
        """A line a pattern, and a line a limit that is not 0."""
        lines = tuple(f"model {provider}/{pattern}" for provider, pattern in self.models)
        named = zip(LIMITS.items(), self.limits(), strict=True)
        return lines + tuple(
            f"models: {name} not limited" if value is None else f"models: {value} {unit}"
            for (name, unit), value in named
            if value != 0
        )

    def canonical(self) -> dict[str, Any]:
        """Patterns and limits."""
        return {
            "models": [{"provider": provider, "pattern": pattern} for provider, pattern in self.models],
            **dict(zip(LIMITS, self.limits(), strict=True)),
        }


def _joined(models: Iterable[Model]) -> tuple[Model, ...]:
    found = sorted(set(models))
    return tuple(one for one in found if not any(covers(other, one) for other in found if other != one))


# Field -> the key of the manifest, and how people read it.
WEB_LIMITS: Final[dict[str, tuple[str, str]]] = {
    "searches_per_minute": ("services.search.requests_per_minute", "searches a minute"),
    "max_results": ("services.search.max_results", "results a search"),
    "fetches_per_minute": ("services.fetch.requests_per_minute", "pages a minute"),
}


def fetches(mine: str, other: str) -> bool:
    """Whether the pattern ``mine`` holds every host of ``other``."""
    return mine == other or mine in hostnames.above(other)


class WebSet(Struct, frozen=True):
    """``search`` are the providers that may be asked, ``fetch`` the patterns of hosts whose pages may be read.

    Both are sorted, none within another; ``*`` is each of them, which only a ceiling has. The limits of what is not
    granted are 0: every value that allows nothing is ``bottom()``.
    """

    search: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()
    searches_per_minute: int | None = 0
    max_results: int | None = 0
    fetches_per_minute: int | None = 0

    @classmethod
    def of(
        cls,
        search: Iterable[str] = (),
        fetch: Iterable[str] = (),
        searches_per_minute: int | None = None,
        max_results: int | None = None,
        fetches_per_minute: int | None = None,
    ) -> Self:
        """Return the grants of a manifest."""
        providers, hosts = tuple(sorted(set(search))), sorted(set(fetch))
        providers = (ANY,) if ANY in providers else providers
        held = tuple(one for one in hosts if not any(fetches(other, one) for other in hosts if other != one))
        searched = (searches_per_minute, max_results) if providers else (0, 0)
        return cls(providers, held, *searched, fetches_per_minute if held else 0)

    @classmethod
    def bottom(cls) -> Self:
        """No search and no page."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every provider and every host, without a limit."""
        return cls.of((ANY,), (hostnames.EVERY,))

    def __bool__(self) -> bool:
        return bool(self.search or self.fetch)

    def searches(self, provider: str) -> bool:
        """Whether a provider may be asked."""
        return ANY in self.search or provider in self.search

    def holds(self, host: str) -> bool:
        """Whether the pages of a host may be read."""
        return any(fetches(one, host) for one in self.fetch)

    def limits(self) -> tuple[int | None, ...]:
        """The limits in the order of ``WEB_LIMITS``."""
        return tuple(getattr(self, name) for name in WEB_LIMITS)

    def meet(self, other: Self, /) -> Self:
        """Return the providers and hosts that both allow, with the lower limit of each."""
        search = [one for one in self.search if other.searches(one)]
        search += [one for one in other.search if self.searches(one)]
        fetch = [one for one in self.fetch if other.holds(one)] + [one for one in other.fetch if self.holds(one)]
        return self.of(search, fetch, *map(least, self.limits(), other.limits()))

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return self.difference(other) == self.bottom()

    def difference(self, other: Self, /) -> Self:
        """The providers and hosts that ``other`` does not hold, and the limits above ``other``'s; 0 elsewhere."""
        pairs = zip(self.limits(), other.limits(), strict=True)
        return type(self)(
            tuple(one for one in self.search if not other.searches(one)),
            tuple(one for one in self.fetch if not other.holds(one)),
            *(0 if within(a, b) else a for a, b in pairs),
        )

    def describe(self) -> tuple[str, ...]:
        """A line a provider and a host, and a line a limit that is not 0."""
        lines = (*(f"search by {one}" for one in self.search), *(f"fetch from {one}" for one in self.fetch))
        named = zip(WEB_LIMITS.values(), self.limits(), strict=True)
        return lines + tuple(
            f"web: {unit} not limited" if value is None else f"web: {value} {unit}"
            for (_, unit), value in named
            if value != 0
        )

    def canonical(self) -> dict[str, Any]:
        """Providers, hosts and limits."""
        lists = {"search": list(self.search), "fetch": list(self.fetch)}
        return {**lists, **dict(zip(WEB_LIMITS, self.limits(), strict=True))}


@dataclass(frozen=True, slots=True)
class PublishSet(NameSet):
    """Pairs of a port and a place, each one name: a parent that publishes one allows a child no other place."""

    @classmethod
    def ports(cls, pairs: Iterable[tuple[int, str]]) -> Self:
        """The set of these pairs."""
        return cls.of(f"{port}{_AT}{to}" for port, to in pairs)

    def __bool__(self) -> bool:
        return self.any or bool(self.names)

    def pairs(self) -> list[tuple[int, str]]:
        """The pairs, by port. A ceiling that is open has none."""
        split = (name.partition(_AT) for name in self.names)
        return sorted((int(port), to) for port, _, to in split)

    def describe(self) -> tuple[str, ...]:
        """A line a port."""
        return (
            ("publish any port",) if self.any else tuple(f"publish port {port}{_AT}{to}" for port, to in self.pairs())
        )

    def canonical(self) -> dict[str, Any]:
        """The pairs, or ``*``."""
        return {"ports": [ANY] if self.any else [{"port": port, "to": to} for port, to in self.pairs()]}


@dataclass(frozen=True, slots=True)
class HostPorts(NameSet):
    """Ports of this host's loopback that the agent reaches by the name host.covenant, each one name."""

    @classmethod
    def ports(cls, ports: Iterable[int]) -> Self:
        """The set of these ports."""
        return cls.of(f"{port}" for port in ports)

    def __bool__(self) -> bool:
        return self.any or bool(self.names)

    def numbers(self) -> list[int]:
        """The ports, sorted. A ceiling that is open has none."""
        return sorted(map(int, self.names))

    def describe(self) -> tuple[str, ...]:
        """A line a port."""
        return ("any port of this host",) if self.any else tuple(f"port {one} of this host" for one in self.numbers())

    def canonical(self) -> dict[str, Any]:
        """The ports, or ``*``."""
        return {"ports": [ANY] if self.any else self.numbers()}


@dataclass(frozen=True, slots=True)
class SshSet(NameSet):
    """Keys of SSH that sign logins at hosts, each one name of three words: the secret, the host, and the host's key."""

    @classmethod
    def rows(cls, rows: Iterable[tuple[str, str, str]]) -> Self:
        """The set of these secrets, hosts and keys of hosts."""
        return cls.of(f"{secret}{_AT}{host} {key}" for secret, host, key in rows)

    def __bool__(self) -> bool:
        return self.any or bool(self.names)

    def triples(self) -> list[tuple[str, str, str]]:
        """The secrets, hosts and keys of hosts, sorted. A ceiling that is open has none."""
        split = ((*name.partition(_AT)[::2],) for name in self.names)
        return sorted((secret, *rest.split(" ", 1)) for secret, rest in split)  # type: ignore[misc]

    def describe(self) -> tuple[str, ...]:
        """A line a key of a host."""
        if self.any:
            return ("sign logins at any host",)
        return tuple(f"sign logins by {secret}{_AT}{host} ({key})" for secret, host, key in self.triples())

    def canonical(self) -> dict[str, Any]:
        """The keys, or ``*``."""
        rows = [{"host": host, "key": key, "secret": secret} for secret, host, key in self.triples()]
        return {"keys": [ANY] if self.any else rows}


@dataclass(frozen=True, slots=True)
class AgentSet(NameSet):
    """Ids of the agents that the agent may send messages to over A2A."""

    def __bool__(self) -> bool:
        return self.any or bool(self.names)

    def describe(self) -> tuple[str, ...]:
        """A line an agent."""
        return ("ask any agent",) if self.any else tuple(f"ask agent {one}" for one in self.listing())

    def canonical(self) -> dict[str, Any]:
        """The ids, or ``*``."""
        return {"allow": self.listing()}


# The signals of OTLP, sorted.
SIGNALS: Final = ("logs", "metrics", "traces")
# Field -> how people read it.
TELEMETRY_LIMITS: Final[dict[str, str]] = {
    "bytes_per_minute": "bytes a minute",
    "requests_per_minute": "requests a minute",
}


class TelemetrySet(Struct, frozen=True):
    """``signals`` are those of OTLP that the agent may send to the operator's collector, sorted.

    Limits are None where there is none. Without a signal they are 0: every value that allows nothing is ``bottom()``.
    """

    signals: tuple[str, ...] = ()
    bytes_per_minute: int | None = 0
    requests_per_minute: int | None = 0

    @classmethod
    def of(
        cls,
        signals: Iterable[str] = (),
        bytes_per_minute: int | None = None,
        requests_per_minute: int | None = None,
    ) -> Self:
        """Return the grants of a manifest."""
        found = tuple(sorted(set(signals)))
        return cls(found, bytes_per_minute, requests_per_minute) if found else cls()

    @classmethod
    def bottom(cls) -> Self:
        """No signal."""
        return cls()

    @classmethod
    def top(cls) -> Self:
        """Every signal, without a limit."""
        return cls.of(SIGNALS)

    def __bool__(self) -> bool:
        return bool(self.signals)

    def limits(self) -> tuple[int | None, ...]:
        """The limits in the order of ``TELEMETRY_LIMITS``."""
        return tuple(getattr(self, name) for name in TELEMETRY_LIMITS)

    def meet(self, other: Self, /) -> Self:
        """The signals that both allow, with the lower limit of each."""
        return self.of(set(self.signals) & set(other.signals), *map(least, self.limits(), other.limits()))

    def is_subset(self, other: Self, /) -> bool:
        """Whether ``other`` allows all of this."""
        return self.difference(other) == self.bottom()

    def difference(self, other: Self, /) -> Self:
        """The signals that ``other`` does not hold, and the limits that are above ``other``'s; 0 elsewhere."""
        pairs = zip(self.limits(), other.limits(), strict=True)
        signals = tuple(one for one in self.signals if one not in other.signals)
        return type(self)(signals, *(0 if within(a, b) else a for a, b in pairs))

    def describe(self) -> tuple[str, ...]:
        """A line a signal, and a line a limit that is not 0."""
        lines = tuple(f"send {one} to the operator's collector" for one in self.signals)
        named = zip(TELEMETRY_LIMITS.values(), self.limits(), strict=True)
        return lines + tuple(
            f"telemetry: {unit} not limited" if value is None else f"telemetry: {value} {unit}"
            for unit, value in named
            if value != 0
        )

    def canonical(self) -> dict[str, Any]:
        """Signals and limits."""
        return {"signals": list(self.signals), **dict(zip(TELEMETRY_LIMITS, self.limits(), strict=True))}
