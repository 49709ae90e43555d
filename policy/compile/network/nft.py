"""An nft ruleset as a value: sets, counters and chains with the cause of each rule, and its one spelling as text.

One statement a line, tabs, nothing that the reader of the text would have to guess (docs/adr/0017). Statements with
newlines, since nft does not parse a chain on one line (tests/kernel/test_firewall.py holds that all of it loads).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from policy.compile.artefacts import Cause, Provenance
from policy.compile.network import quoting
from policy.grants.sets.spans import Spans

TABLE = "covenant"
Hook = Literal["forward", "input", "output", "prerouting"]
_HOOKS: dict[Hook, str] = {
    "forward": "type filter hook forward priority filter; policy drop;",
    "input": "type filter hook input priority filter; policy drop;",
    "output": "type filter hook output priority filter; policy drop;",
    "prerouting": "type nat hook prerouting priority dstnat; policy accept;",
}
_FAMILY = {4: "ipv4_addr", 6: "ipv6_addr"}
_DADDR = {4: "ip daddr", 6: "ip6 daddr"}


def to_set(version: int, name: str) -> str:
    """Match: the destination is in a set of this IP version."""
    return f"{_DADDR[version]} @{quoting.name(name)}"


def to_ports(transport: Literal["tcp", "udp"], ports: Spans) -> str:
    """Match: the destination port."""
    return f"{transport} dport {quoting.ports(ports)}"


def comes_by(interface: str) -> str:
    """Match: the interface that it came in by."""
    return f"iifname {quoting.quoted(interface)}"


def leaves_by(interface: str) -> str:
    """Match: the interface that it leaves by."""
    return f"oifname {quoting.quoted(interface)}"


def goto(chain: str) -> str:
    """Verdict: that chain decides."""
    return f"goto {quoting.name(chain)}"


def jump(chain: str) -> str:
    """Verdict: ask that chain, and go on where it does not decide."""
    return f"jump {quoting.name(chain)}"


class Rule(Struct, frozen=True):
    """Matches, a counter, a verdict, and where it comes from."""

    matches: tuple[str, ...]
    verdict: str
    cause: Cause
    counter: str | None = None

    @property
    def text(self) -> str:
        """As it stands in the ruleset."""
        counted = () if self.counter is None else (f"counter name {quoting.quoted(self.counter)}",)
        return " ".join((*self.matches, *counted, self.verdict))


class Set(Struct, frozen=True):
    """A named set: with elements, or filled by the DNS gate up to ``size`` (``elements`` None)."""

    name: str
    version: int
    elements: Spans | None
    cause: Cause
    size: int = 0

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of its block."""
        if self.elements is None:
            return f"type {_FAMILY[self.version]}", "flags timeout", f"size {self.size:d}"
        held = f"elements = {{ {quoting.elements(self.elements)} }}"
        return f"type {_FAMILY[self.version]}", "flags interval", held


@dataclass
class Chain:
    """A chain with its rules; ``hook`` None for one that others jump to."""

    name: str
    hook: Hook | None = None
    cause: Cause | None = None
    rules: list[Rule] = field(default_factory=list)

    def add(self, verdict: str, cause: Cause, *matches: str, counter: str | None = None) -> None:
        """Append a rule."""
        self.rules.append(Rule(matches, verdict, cause, counter))


@dataclass
class Ruleset:
    """Everything of one table, in the order of writing. Sets, counters and chains stand before their use."""

    sets: list[Set] = field(default_factory=list)
    counters: dict[str, Cause] = field(default_factory=dict)
    chains: list[Chain] = field(default_factory=list)

    def text(self, artefact: str, provenance: Provenance) -> bytes:
        """The ruleset as nft reads it; each rule's cause goes to ``provenance`` under ``artefact``."""
        lines = [f"table inet {TABLE} {{"]
        for place, cause, head, body in self._blocks():
            lines += [f"\t{head} {{", *(f"\t\t{line}" for line in body), "\t}"]
            if cause is not None:
                provenance.add(f"{artefact}:{place}", cause)
        for chain in self.chains:
            for index, rule in enumerate(chain.rules):
                provenance.add(f"{artefact}:chain/{chain.name}/{index}", rule.cause)
        return "\n".join([*lines, "}", ""]).encode("ascii")

    def _blocks(self) -> Iterator[tuple[str, Cause | None, str, tuple[str, ...]]]:
        for one in self.sets:
            yield f"set/{one.name}", one.cause, f"set {quoting.name(one.name)}", one.lines
        for counter, cause in self.counters.items():
            yield f"counter/{counter}", cause, f"counter {quoting.name(counter)}", ()
        for chain in self.chains:
            head = () if chain.hook is None else (_HOOKS[chain.hook],)
            body = (*head, *(rule.text for rule in chain.rules))
            yield f"chain/{chain.name}", chain.cause, f"chain {quoting.name(chain.name)}", body
