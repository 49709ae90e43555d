"""firewall.nft read back: the text of one nft table as sets, chains and rules.

Only the small part of nft's language that a policy needs is understood, one statement a line; everything else is
refused with its line number, because a statement that is skipped may be the one that opens something. What the rules
mean for packets stands in policy.decompile.network.packets (one packet) and policy.decompile.network.flows (all packets
at once).
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from policy import errors
from policy.decompile.documents import shown
from policy.grants.sets import addresses, spans
from policy.grants.sets.spans import Spans

FIREWALL = "firewall.nft"
TABLE: Final = "table inet covenant {"
MAX_BYTES: Final = 4 << 20
MAX_LINES: Final = 1 << 15

Family = Literal[4, 6]
NEIGHBOUR: Final = "neighbour discovery"
# The base chains: name, which is also the hook, to its type and priority. nft takes any name for any hook; a
# name that says something else than its hook is refused, since people read the name.
BASE: Final[Mapping[str, tuple[str, str]]] = {
    "forward": ("filter", "filter"),
    "input": ("filter", "filter"),
    "output": ("filter", "filter"),
    "prerouting": ("nat", "dstnat"),
}


class ReadSet(Struct, frozen=True):
    """A set of addresses. A ``dynamic`` one is filled while the agent runs, from DNS answers; it has no elements here.

    ``spans`` lie on the line of policy.grants.sets.addresses.
    """

    name: str
    family: Family
    dynamic: bool
    spans: Spans


class RuleVerdict(Struct, frozen=True):
    """accept, drop (which a reject is as well), return, jump, goto, redirect; with the chain or port it leads to.

    ``log`` is none: the packet is told of, and goes on with the next rule.
    """

    kind: str
    chain: str = ""
    port: int = 0


class ReadRule(Struct, frozen=True):
    """One rule; a match that it does not have is None or False.

    ``addresses`` names the set that holds the destination, ``limit`` is in bytes a second.
    """

    line: int
    verdict: RuleVerdict
    iif: str | None = None
    oif: str | None = None
    family: Family | None = None
    addresses: str | None = None
    protocol: str | None = None
    ports: Spans | None = None
    established: bool = False
    dnat: bool = False
    uid: int | None = None
    limit: int | None = None
    counter: str | None = None


class ReadChain(Struct, frozen=True):
    """A chain; ``policy`` is accept or drop for a base chain, empty for another."""

    name: str
    rules: tuple[ReadRule, ...]
    policy: str = ""


class Table(Struct, frozen=True):
    """Everything in the text. Names that rules use are there, and sets are of the family that a rule asks for."""

    sets: Mapping[str, ReadSet] = msgspec.field(default_factory=dict)
    chains: Mapping[str, ReadChain] = msgspec.field(default_factory=dict)
    counters: frozenset[str] = frozenset()

    def rules(self) -> Iterator[ReadRule]:
        """Every rule of every chain."""
        for chain in self.chains.values():
            yield from chain.rules


def refuse(line: int, message: str) -> errors.ArtefactError:
    """The error for a line that is not understood."""
    return errors.ArtefactError(message, where=f"{FIREWALL}:{line}")


def parse(raw: bytes) -> Table:
    """The table in these bytes.

    Raises:
        errors.ArtefactError: anything that is not the part of the language described above, with its line.
    """
    if len(raw) > MAX_BYTES or raw.count(b"\n") > MAX_LINES:
        raise refuse(1, "too long to be read")
    try:
        text = raw.decode("ascii")
    except UnicodeDecodeError:
        raise refuse(1, "not ASCII") from None
    if not text.endswith("\n"):
        raise refuse(1, "the last line has no end")
    return _Parser(text[:-1].split("\n")).table()


_HEAD = re.compile(r"\t(set|chain|counter) ([a-z][a-z0-9_]{0,63}) \{")
_POLICY = re.compile(r"\t\ttype ([a-z]+) hook ([a-z]+) priority ([a-z]+); policy (accept|drop);")
_ELEMENTS = re.compile(r"\t\telements = \{ ([^{}]+) \}")
_TYPES: Final[Mapping[str, Family]] = {"\t\ttype ipv4_addr": 4, "\t\ttype ipv6_addr": 6}


class _Parser:
    """The lines of one text and where the reading stands."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self._at = 0
        self._sets: dict[str, ReadSet] = {}
        self._chains: dict[str, ReadChain] = {}
        self._counters: set[str] = set()

    def table(self) -> Table:
        """Read from the first line to the last."""
        self._expect(TABLE)
        objects: Mapping[str, Callable[[str], None]] = {
            "set": self._set,
            "chain": self._chain,
            "counter": self._counter,
        }
        seen: set[tuple[str | Any, ...]] = set()
        while (line := self._next()) != "}":
            head = _HEAD.fullmatch(line)
            if head is None:
                raise self._not_understood()
            kind, name = head.groups()
            if (kind, name) in seen:
                raise refuse(self._at, f"{kind} {shown(name)} stands twice")
            seen.add((kind, name))
            objects[kind](name)
        if self._at != len(self._lines):
            raise refuse(self._at + 1, "there is something after the table")
        for chain in self._chains.values():
            for rule in chain.rules:
                self._names(rule)
        return Table(self._sets, self._chains, frozenset(self._counters))

    def _next(self) -> str:
        if self._at >= len(self._lines):
            raise refuse(self._at, "the text ends in the middle")
        self._at += 1
        return self._lines[self._at - 1]

    def _expect(self, line: str) -> None:
        if self._next() != line:
            raise self._not_understood()

    def _not_understood(self) -> errors.ArtefactError:
        return refuse(self._at, f"{shown(self._lines[self._at - 1].strip())} is not understood")

    def _counter(self, name: str) -> None:
        self._expect("\t}")
        self._counters.add(name)

    def _set(self, name: str) -> None:
        family = _TYPES.get(self._next())
        if family is None:
            raise self._not_understood()
        flags = self._next()
        if flags == "\t\tflags timeout":
            self._expect("\t\tsize 1024")
            self._expect("\t}")
            self._sets[name] = ReadSet(name, family, dynamic=True, spans=())
            return
        if flags != "\t\tflags interval":
            raise self._not_understood()
        elements = _ELEMENTS.fullmatch(self._next())
        if elements is None:
            raise self._not_understood()
        self._sets[name] = ReadSet(name, family, dynamic=False, spans=self._spans(elements[1], family))
        self._expect("\t}")

    def _spans(self, text: str, family: Family) -> Spans:
        found: list[tuple[int, int]] = []
        for item in text.split(", "):
            first, dash, last = item.partition("-")
            low = _point(first, family, self._at)
            high = _point(last, family, self._at) if dash else low
            if high < low or (dash and high == low) or (found and low <= found[-1][1]):
                raise refuse(self._at, f"element {shown(item)} is empty, not in order or overlaps the one before")
            found.append((low, high))
        return spans.join(found)

    def _chain(self, name: str) -> None:
        policy = ""
        rules: list[ReadRule] = []
        base = BASE.get(name)
        if base is not None:
            head = _POLICY.fullmatch(self._next())
            if head is None or (head[1], head[2], head[3]) != (base[0], name, base[1]):
                raise self._not_understood()
            policy = head[4]
        while (line := self._next()) != "\t}":
            if not line.startswith("\t\t"):
                raise self._not_understood()
            rules.append(rule(line[2:], self._at))
        self._chains[name] = ReadChain(name, tuple(rules), policy)

    def _names(self, one: ReadRule) -> None:
        """Hold the names in a rule to things that are there."""
        missing = [
            name
            for name, there in (
                (one.addresses, self._sets),
                (one.verdict.chain or None, self._chains),
                (one.counter, self._counters),
            )
            if name is not None and name not in there
        ]
        if missing:
            raise refuse(one.line, f"{shown(missing[0])} is not there")
        if one.addresses is not None and self._sets[one.addresses].family != one.family:
            raise refuse(one.line, f"set {shown(one.addresses)} holds addresses of the other family")
        if one.verdict.chain in BASE:
            raise refuse(one.line, "a rule cannot lead to a base chain")


def _point(text: str, family: Family, line: int) -> int:
    """An address as a point of the line, in the one spelling that it has."""
    try:
        address = ipaddress.IPv4Address(text) if family == 4 else ipaddress.IPv6Address(text)
    except ValueError:
        raise refuse(line, f"{shown(text)} is no IPv{family} address") from None
    if str(address) != text:
        raise refuse(line, f"{shown(text)} is not how {address} is written")
    return int(address) + (BASE_V6 if family == 6 else 0)


# Where IPv6 begins on the line of policy.grants.sets.addresses.
BASE_V6: Final = addresses.ALL[1][0]

# --- rules -------------------------------------------------------------------------------------------------------


def _daddr(match: re.Match[str], line: int) -> dict[str, object]:
    return {"family": 4 if match[1] == "ip" else 6, "addresses": match[2]}


_NAME = r"[a-z][a-z0-9_]{0,63}"
_PORTS = r"\{ ([0-9]{1,5}(?:-[0-9]{1,5})?(?:, [0-9]{1,5}(?:-[0-9]{1,5})?)*) \}"
# Each match with the fields of ``ReadRule`` that it sets; a doubled field is refused.
_MATCHES: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str], int], dict[str, object]]], ...]] = (
    (re.compile(r'iifname "([a-z][a-z0-9]{0,14})" '), lambda m, line: {"iif": m[1]}),
    (re.compile(r'oifname "([a-z][a-z0-9]{0,14})" '), lambda m, line: {"oif": m[1]}),
    (re.compile(rf"(ip|ip6) daddr @({_NAME}) "), _daddr),
    (re.compile(rf"(tcp|udp) dport {_PORTS} "), lambda m, line: {"ports": _ports(m[2], line), "dport": m[1]}),
    (re.compile(r"meta l4proto (tcp|udp) "), lambda m, line: {"protocol": m[1]}),
    # Without these two messages a host on an IPv6 link finds no neighbour (RFC 4861): a protocol of its own here.
    (
        re.compile(r"icmpv6 type \{ nd-neighbor-solicit, nd-neighbor-advert \} "),
        lambda m, line: {"protocol": NEIGHBOUR},
    ),
    (re.compile(r"ct state established,related "), lambda m, line: {"established": True}),
    (re.compile(r"ct status dnat "), lambda m, line: {"dnat": True}),
    (re.compile(r"meta skuid ([0-9]{1,10}) "), lambda m, line: {"uid": _bounded(m[1], line, 2**32 - 2)}),
    (
        re.compile(r"limit rate over ([0-9]{1,15}) bytes/second "),
        lambda m, line: {"limit": _bounded(m[1], line, 10**15, least=1)},
    ),
)
# It tells of a packet and lets it go on. Without its rate an agent could drown the reader, so this is the one
# spelling that there is, and it has no other match.
LOG: Final = "limit rate 64/second burst 128 packets log group 27 snaplen 128"
# nft puts `meta l4proto tcp` before it: any other packet goes on with the next rule.
_TCP_RESET: Final = RuleVerdict("drop")
_COUNTER = re.compile(rf'counter name "({_NAME})" ')
_VERDICTS: Final[tuple[tuple[re.Pattern[str], Callable[[re.Match[str], int], RuleVerdict]], ...]] = (
    (re.compile(r"accept"), lambda m, line: RuleVerdict("accept")),
    (re.compile(r"drop"), lambda m, line: RuleVerdict("drop")),
    (re.compile(r"return"), lambda m, line: RuleVerdict("return")),
    (re.compile(rf"(goto|jump) ({_NAME})"), lambda m, line: RuleVerdict(m[1], chain=m[2])),
    (re.compile(r"reject with tcp reset"), lambda m, line: _TCP_RESET),
    (re.compile(r"reject with icmpx port-unreachable"), lambda m, line: RuleVerdict("drop")),
    (
        re.compile(r"redirect to :([0-9]{1,5})"),
        lambda m, line: RuleVerdict("redirect", port=_bounded(m[1], line, 65535, least=1)),
    ),
)


def rule(text: str, line: int) -> ReadRule:
    """One rule: matches, a counter, a verdict.

    Raises:
        errors.ArtefactError: any other text, or two matches on one thing.
    """
    if text == LOG:
        return ReadRule(line, RuleVerdict("log"))
    fields: dict[str, object] = {}
    at = 0
    while at < len(text):
        for pattern, make in _MATCHES:
            if match := pattern.match(text, at):
                made = make(match, line)
                if "limit" in fields or made.keys() & fields.keys():
                    # A limit counts what the matches before it let by; one after it would be read too late.
                    raise refuse(line, "two matches on one thing, or one after the limit")
                fields |= made
                at = match.end()
                break
        else:
            break
    if match := _COUNTER.match(text, at):
        fields["counter"] = match[1]
        at = match.end()
    for verdict, decide in _VERDICTS:
        if match := verdict.fullmatch(text, at):
            return _rule(fields, decide(match, line), line)
    raise refuse(line, f"{shown(text)} is not understood")


def _rule(fields: dict[str, object], verdict: RuleVerdict, line: int) -> ReadRule:
    """The rule of these fields; a match on ports is one on their protocol as well, and so is a reset."""
    dport = fields.pop("dport", None)
    if dport is not None and fields.setdefault("protocol", dport) != dport:
        raise refuse(line, "ports of another protocol")
    if verdict is _TCP_RESET and fields.setdefault("protocol", "tcp") != "tcp":
        raise refuse(line, "a reset of another protocol")
    if "limit" in fields and verdict.kind != "drop":
        # Each limit counts what comes to it alone, so two are not exceeded at once: it may take, and never give.
        raise refuse(line, "a limit that does anything but drop")
    return ReadRule(line, verdict, **fields)  # type: ignore[arg-type]


def _bounded(text: str, line: int, most: int, *, least: int = 0) -> int:
    number = int(text)
    if str(number) != text or not least <= number <= most:
        raise refuse(line, f"{shown(text)} is out of bounds")
    return number


@functools.lru_cache(maxsize=512)
def _ports_of(text: str) -> Spans | str:
    """The spans in a list of ports, or the item that is wrong. The same few lists stand in many rules."""
    found: list[tuple[int, int]] = []
    before = -1
    for item in text.split(", "):
        first, dash, last = item.partition("-")
        low = int(first)
        high = int(last) if dash else low
        spelled = f"{low}-{high}" if low < high else str(low)
        if item != spelled or not before < low <= high <= 65535:
            return item
        found.append((low, high))
        before = high
    return spans.join(found)


def _ports(text: str, line: int) -> Spans:
    found = _ports_of(text)
    if isinstance(found, str):
        raise refuse(line, f"ports {shown(found)} are empty, out of bounds, not in order or overlap those before")
    return found
