"""Rules of other programs on the host that touch the packets of one run: read from what ``nft -j list ruleset`` prints.

A rule touches a run in one of two ways:

    (1) it names the run: its device, or one of its addresses; and it does more than take away (drop, reject)
    (2) it may match a packet of the run, and it changes the packet or its way (DNAT, a mark, a queue, no tracking)

The reader cannot decide every match. A match that it does not know may match, so that a rule is called touching rather
than missed. Only what a match excludes for certain is left out: another device, another address, another mark.
Limits: ``fib daddr type local`` and the addrtype match of iptables exclude the way out, since a gateway sends nothing
to the host itself; a masquerade changes nothing, since every packet of a run is masqueraded.
"""

from __future__ import annotations

import functools
import ipaddress
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from msgspec import Struct

from policy.decompile.documents import dumps
from policy.decompile.network import live_nft
from policy.decompile.network.nft import BASE_V6
from policy.grants.sets import addresses, spans
from policy.grants.sets.spans import Spans

Key = tuple[str, str, str]
# Statements that change a packet or its way. Of `mangle`, `xt` and `masquerade` see ``_changes``.
_CHANGES: Final = frozenset({
    "dnat", "snat", "redirect", "tproxy", "queue", "dup", "fwd", "notrack", "flow", "synproxy", "ct helper",
    "ct timeout", "ct expectation", "mangle", "xt",
})  # fmt: skip
_ENDS: Final = frozenset({"accept", "drop", "reject", "jump", "goto", "return"})
_HARMLESS_XT: Final = frozenset({
    "MASQUERADE", "LOG", "NFLOG", "TCPMSS", "REJECT", "CHECKSUM", "AUDIT", "TRACE", "IDLETIMER", "RATEEST", "LED",
})  # fmt: skip
_HARMLESS_META: Final = frozenset({"priority", "nftrace", "hour", "day", "time"})
_MARKS: Final = ("meta", "ct")
_LOCAL: Final = frozenset({"local"})


class Run(Struct, frozen=True):
    """One run as the host sees it: its device, the operator's interface, its addresses towards the host, and the
    destinations that its grants reach."""

    device: str
    uplink: str
    own: Spans
    reach: Spans


@dataclass(frozen=True, slots=True)
class _Way:
    """Packets of one direction: devices by name, addresses as spans."""

    devices: Mapping[str, str]
    addresses: Mapping[str, Spans]
    out: bool


@dataclass(slots=True)
class _Rules:
    """A listing by chain. ``sets`` has the elements of named sets and maps."""

    chains: dict[Key, dict[str, Any]] = field(default_factory=dict)
    rules: dict[Key, list[list[Any]]] = field(default_factory=dict)
    sets: dict[Key, list[Any]] = field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def touching(raw: bytes, run: Run) -> frozenset[str]:
    """The rules that touch this run, one text each. ``raw`` is a listing without the table of our own.

    Raises:
        errors.ArtefactError: it is no listing.
    """
    found = _read(raw)
    texts: set[str] = set()
    for key, chain in found.chains.items():
        if chain.get("hook", "output") == "output":
            continue  # called by others, or for what the host itself sends
        devices = chain.get("dev", [])
        devices = [devices] if isinstance(devices, str) else devices
        if devices and not {run.device, run.uplink} & set(devices):
            continue
        for way in _ways(run, chain):
            named = any(_same_device(one, run.device) and one != run.uplink for one in devices)
            texts.update(_Walk(found, run, way, f"{key[0]} {key[1]}").chain(key, named=named))
    return frozenset(texts)


@functools.lru_cache(maxsize=4)
def _read(raw: bytes) -> _Rules:
    found = _Rules()
    for kind, body in live_nft.objects(raw):
        key = str(body.get("family")), str(body.get("table")), str(body.get("chain", body.get("name")))
        if kind == "chain":
            found.chains[key] = body
        elif kind == "rule":
            expressions = body.get("expr")
            found.rules.setdefault(key, []).append(expressions if isinstance(expressions, list) else [])
        elif kind in ("set", "map"):
            found.sets[key] = body.get("elem") or []
        elif kind == "element":
            found.sets.setdefault(key, []).extend(body.get("elem") or [])
    return found


def _ways(run: Run, chain: Mapping[str, Any]) -> Iterator[_Way]:
    """The directions that a chain sees. The kernel asks chains of type nat about the first packet alone."""
    yield _Way(
        {"iifname": run.device, "iif": run.device, "oifname": run.uplink, "oif": run.uplink},
        {"saddr": run.own, "daddr": run.reach},
        out=True,
    )
    if chain.get("type") != "nat":
        # An answer comes in under the host's own address.
        yield _Way(
            {"iifname": run.uplink, "iif": run.uplink, "oifname": run.device, "oif": run.device},
            {"saddr": run.reach, "daddr": addresses.ALL},
            out=False,
        )


@dataclass(slots=True)
class _Walk:
    """One way through the rules from one base chain."""

    found: _Rules
    run: Run
    way: _Way
    table: str
    _seen: set[tuple[Key, bool]] = field(default_factory=set)

    def chain(self, key: Key, *, named: bool) -> Iterator[str]:
        if (key, named) in self._seen:
            return
        self._seen.add((key, named))
        for expressions in self.found.rules.get(key, []):
            matches = [one["match"] for one in expressions if isinstance(one, dict) and "match" in one]
            if not all(self._may(one, key) for one in matches) or self._excluded(expressions):
                continue
            says_us = named or any(self._names(one, key) for one in matches)
            if any(_changes(one, expressions) for one in expressions) or (says_us and _accepts(expressions)):
                yield f"{self.table} {key[2]}: {_text(expressions)}"
            for target in self._targets(expressions, key):
                yield from self.chain((key[0], key[1], target), named=says_us)

    def _targets(self, value: Any, key: Key) -> Iterator[str]:
        """Where a rule leads: by jump, by goto, or by those elements of a verdict map that may match."""
        if isinstance(value, list):
            for inner in value:
                yield from self._targets(inner, key)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if name in ("jump", "goto") and isinstance(inner, dict) and isinstance(inner.get("target"), str):
                    yield inner["target"]
                elif name == "vmap" and isinstance(inner, dict):
                    for verdict in self._verdicts(inner, key):
                        yield from self._targets(verdict, key)
                else:
                    yield from self._targets(inner, key)

    def _verdicts(self, verdicts: Mapping[str, Any], key: Key) -> Iterator[Any]:
        """The verdicts of a map whose elements may match."""
        for pair in self._values(verdicts.get("data"), key):
            wanted, verdict = pair if isinstance(pair, list) and len(pair) == 2 else ("*", pair)
            if self._may({"left": verdicts.get("key"), "op": "==", "right": wanted}, key):
                yield verdict

    def _excluded(self, expressions: list[Any]) -> bool:
        """Whether a match of iptables says that the packet is for the host itself, as docker's rules for its published
        ports do.

        nft prints the match's name and not its arguments, and before 1.0.8 no name: then a jump that has one is taken
        for that. A match with ``data`` is of the older iptables, whose reader has decoded the arguments itself.
        """
        kinds = [one["xt"] for one in expressions if isinstance(one, dict) and "xt" in one]
        leads = any(isinstance(one, dict) and one.keys() & {"jump", "goto"} for one in expressions)
        named = [(one.get("type"), one.get("name"), "data" in one) if isinstance(one, dict) else None for one in kinds]
        return self.way.out and (("match", "addrtype", False) in named or (leads and None in named))

    def _may(self, match: Any, key: Key) -> bool:
        if not isinstance(match, dict):
            return True
        left, operator = match.get("left"), match.get("op")
        if operator not in ("==", "!=", "in"):
            return True
        values = list(self._values(match.get("right"), key))
        parts = left["concat"] if isinstance(left, dict) and isinstance(left.get("concat"), list) else [left]
        if len(parts) > 1:
            # For `!=` another component may be another.
            return operator == "!=" or any(
                all(self._one(part, operator, [item]) for part, item in zip(parts, _components(value), strict=False))
                for value in values
            )
        return self._one(left, operator, values)

    def _one(self, left: Any, operator: str, values: list[Any]) -> bool:
        kind, about = next(iter(left.items())) if isinstance(left, dict) and len(left) == 1 else ("", None)
        about = about if isinstance(about, dict) else {}
        equal = operator != "!="
        device = self.way.devices.get(str(about.get("key"))) if kind == "meta" else None
        if device is not None:
            known = all(isinstance(value, str) for value in values)
            return not known or any(_same_device(value, device) for value in values) is equal
        if kind == "payload" and about.get("field") in self.way.addresses and about.get("protocol") in ("ip", "ip6"):
            mine = spans.meet(self.way.addresses[about["field"]], (addresses.ALL[about["protocol"] == "ip6"],))
            understood = [_spans(value) for value in values]
            if None in understood:
                return True
            held = spans.join(span for one in understood for span in one or ())
            return bool(spans.meet(mine, held) if equal else spans.minus(mine, held))
        if kind in _MARKS and about.get("key") == "mark" and all(isinstance(one, int) for one in values):
            return (0 in values) is equal  # a mark that another rule gave is that rule's
        if kind == "fib" and self.way.out and about.get("result") == "type" and "daddr" in str(about.get("flags")):
            return (not _LOCAL.issuperset(map(str, values))) if equal else True
        return True

    def _names(self, match: Any, key: Key) -> bool:
        """Whether a match says the run's device or address, and not every device or address."""
        left = match.get("left") if isinstance(match, dict) else None
        if not isinstance(left, dict) or match.get("op") == "!=":
            return False
        values = list(self._values(match.get("right"), key))
        meta, payload = left.get("meta"), left.get("payload")
        if isinstance(meta, dict) and meta.get("key") in self.way.devices:
            return any(_same_device(value, self.run.device) and value != "*" for value in values)
        if isinstance(payload, dict) and payload.get("field") in ("saddr", "daddr"):
            held = [span for value in values for span in _spans(value) or () if span not in addresses.ALL]
            return bool(spans.meet(spans.join(held), self.run.own))
        return False

    def _values(self, right: Any, key: Key) -> Iterator[Any]:
        """The single values of the right side of a match; elements of a named set by its name."""
        if isinstance(right, str) and right.startswith("@"):
            right = self.found.sets.get((key[0], key[1], right[1:]), [])
        if isinstance(right, dict) and isinstance(right.get("set"), list):
            right = right["set"]
        for value in right if isinstance(right, list) else [right]:
            wrapped = isinstance(value, dict) and isinstance(value.get("elem"), dict)
            yield value["elem"].get("val") if wrapped else value


def _components(value: Any) -> list[Any]:
    return value["concat"] if isinstance(value, dict) and isinstance(value.get("concat"), list) else [value]


def _same_device(value: Any, device: str) -> bool:
    if not isinstance(value, str):
        return True
    return device.startswith(value[:-1]) if value.endswith("*") else value == device


def _spans(value: Any) -> Spans | None:
    """Return an element as spans of the line, or None where it is not understood."""
    try:
        if isinstance(value, str):
            return (_span(ipaddress.ip_network(value, strict=False)),)
        if isinstance(value, dict) and "prefix" in value:
            prefix = value["prefix"]
            return (_span(ipaddress.ip_network((prefix["addr"], prefix["len"]), strict=False)),)
        if isinstance(value, dict) and "range" in value:
            first, last = (_span(ipaddress.ip_network(one)) for one in value["range"])
            return ((first[0], last[1]),)
    except (ValueError, KeyError, TypeError):
        pass
    return None


def _span(network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> tuple[int, int]:
    base = BASE_V6 if network.version == 6 else 0
    return int(network.network_address) + base, int(network.broadcast_address) + base


def _changes(statement: Any, beside: list[Any]) -> bool:
    if not isinstance(statement, dict) or not statement.keys() & _CHANGES:
        return False
    if "xt" in statement and not isinstance(statement["xt"], dict):
        # It has no name: a match where the rule has a verdict, and else the rule's target.
        return not any(isinstance(one, dict) and one.keys() & _ENDS for one in beside)
    if isinstance(xt := statement.get("xt"), dict):
        return xt.get("type") != "match" and xt.get("name") not in _HARMLESS_XT
    if isinstance(mangle := statement.get("mangle"), dict):
        key, value = mangle.get("key"), mangle.get("value")
        if not isinstance(key, dict):
            return True
        field_name = str((key.get("payload") or {}).get("field"))
        if "tcp option" in key or field_name in ("dscp", "ecn"):
            return False
        copied = isinstance(value, dict) and len(value) == 1 and next(iter(value)) in _MARKS
        about = key.get("meta") or key.get("ct") or {}
        # Packets of a run have no mark, so that there is none to be copied.
        return not (about.get("key") in _HARMLESS_META or (about.get("key") == "mark" and (copied or value == 0)))
    return True


def _accepts(expressions: list[Any]) -> bool:
    return any(isinstance(one, dict) and "accept" in one for one in expressions)


def _text(expressions: list[Any]) -> str:
    return json.dumps(live_nft.resting(expressions), sort_keys=True, separators=(",", ":"))


def split(raw: bytes, family: str, table: str) -> tuple[bytes, bytes]:
    """A listing in two: of this table, and of all others, without what changes by itself.

    Raises:
        errors.ArtefactError: it is no listing.
    """
    mine, others = list[Any](), list[Any]()
    for kind, body in live_nft.objects(raw):
        own = (body.get("family"), body.get("name" if kind == "table" else "table")) == (family, table)
        (mine if own else others).append({kind: body})
    return dumps({"nftables": mine}), dumps({"nftables": others})
