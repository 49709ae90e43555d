"""Read the output of ``nft -j list ruleset`` for a gateway as the text of its one table: firewall.nft again.

Sets, counters and chains come out as policy.decompile.network.nft reads them, so that rules out of the kernel mean what
rules out of an artefact mean. Closed, as that reader is: a key, an expression or an object that is not in the tables
below is refused, since it may be what opens something. Elements that the DNS gate put into the sets of names are no
grant by themselves; they are held to what a name may lead to, and to an end.

What stands in other tables is returned as it is, without what changes by itself (handles, counts, such elements).
"""

from __future__ import annotations

import functools
import ipaddress
import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from msgspec import Struct

from policy.decompile.documents import closed, dumps, listed, refuse, shown
from policy.decompile.network.nft import BASE_V6, FIREWALL, TABLE
from policy.grants.sets import addresses

LIVE: Final = "nft list"
MAX_BYTES: Final = 64 << 20
_OURS: Final = ("inet", "covenant")
_UNITS: Final = {"bytes": 1, "kbytes": 1 << 10, "mbytes": 1 << 20}
_PRIORITIES: Final = {0: "filter", -100: "dstnat"}
# nft takes their names from /etc/protocols, which a machine need not have.
_PROTOCOLS: Final[Mapping[int | str, str]] = {6: "tcp", 17: "udp"}
COUNTER: Final = {"family": str, "name": str, "table": str, "handle": int, "packets": int, "bytes": int}
_TYPES: Final = ("ipv4_addr", "ipv6_addr")
# An answer lasts an hour at most, and its element ten seconds more (docs/adr/0025).
LONGEST_SECONDS: Final = 3610
# What the kernel counts up, or gives out, by itself.
_RESTLESS: Final = frozenset({"handle", "packets", "bytes"})
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class Listing(Struct, frozen=True):
    """``text`` is the table of the policy; ``others`` all other tables of the namespace, in one spelling."""

    text: bytes
    others: bytes


@functools.lru_cache(maxsize=8)
def read(raw: bytes) -> Listing:
    """Read the rules of the kernel. The same bytes are parsed once: a gateway at rest prints the same in every round.

    Raises:
        errors.ArtefactError: something in our table is not understood, or a name led to what no name may lead to.
    """
    items = objects(raw)
    own = [(kind, body) for kind, body in items if _table(kind, body) == _OURS]
    return Listing(_text(own), _others(items))


def others(raw: bytes) -> bytes:
    """As ``read``, for what stands in other tables alone.

    Raises:
        errors.ArtefactError: it is no listing.
    """
    return _others(objects(raw))


def _others(items: list[tuple[str, dict[str, Any]]]) -> bytes:
    """In the order of their tables' names: which of them was made first means nothing."""
    beside = [(kind, body) for kind, body in items if _table(kind, body) != _OURS]
    beside.sort(key=lambda item: str(_table(*item)))
    return dumps([{kind: resting(body)} for kind, body in beside])


def text(raw: bytes) -> bytes:
    """As ``read``, for the table of the policy alone."""
    return read(raw).text


def objects(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Kind and body of everything that is listed but the program's own version.

    Raises:
        errors.ArtefactError: it is no listing.
    """
    if len(raw) > MAX_BYTES:
        raise refuse(LIVE, "too long to be read")
    try:
        whole = json.loads(raw)
    except (ValueError, RecursionError):
        raise refuse(LIVE, "not a JSON document") from None
    found = []
    for item in listed(closed(whole, LIVE, {"nftables": list})["nftables"], LIVE, dict):
        if len(item) != 1 or type(body := next(iter(item.values()))) is not dict:
            raise refuse(LIVE, f"{shown(item)} is no object of one kind")
        kind = next(iter(item))
        if kind != "metainfo":
            found.append((kind, body))
    return found


def _table(kind: str, body: Mapping[str, Any]) -> tuple[object, object]:
    return body.get("family"), body.get("name" if kind == "table" else "table")


def resting(value: Any) -> Any:
    """The same without what changes by itself: elements of sets with timeouts go as well, being looked at nowhere."""
    if isinstance(value, dict):
        held = {key: resting(item) for key, item in value.items() if key not in _RESTLESS}
        if type(flags := held.get("flags")) is list and "timeout" in flags:
            held.pop("elem", None)
        return held
    return [resting(item) for item in value] if isinstance(value, list) else value


def _text(own: list[tuple[str, dict[str, Any]]]) -> bytes:
    """The table in the order of its text: sets, counters, chains with their rules."""
    sets: list[str] = []
    counters: list[str] = []
    chains: dict[str, list[str]] = {}
    tables = 0
    for kind, body in own:
        if kind == "table":
            closed(body, LIVE, {"family": str, "name": str, "handle": int})
            tables += 1
        elif kind == "set":
            sets += _set(body)
        elif kind == "counter":
            closed(body, LIVE, COUNTER)
            counters += [f"\tcounter {body['name']} {{", "\t}"]
        elif kind == "chain":
            chains[_string(body, "name")] = _chain(body)
        elif kind == "rule":
            own_chain = chains.get(_string(body, "chain"))
            if own_chain is None:
                raise refuse(LIVE, f"a rule of no chain: {shown(body.get('chain'))}")
            own_chain.append(f"\t\t{_rule(body)}")
        else:
            raise refuse(LIVE, f"{shown(kind)} is not understood")
    if tables != 1:
        raise refuse(LIVE, "the table of the policy is not there")
    lines = [TABLE, *sets, *counters]
    for name, rules in chains.items():
        lines += [f"\tchain {name} {{", *rules, "\t}"]
    # A name with a line's end in it, or anything else that is no ASCII, is refused by who reads the text.
    return ("\n".join([*lines, "}"]) + "\n").encode("utf-8", "replace")


def _string(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if type(value) is not str or "\n" in value:
        raise refuse(LIVE, f"{shown(key)} is {shown(value)}")
    return value


# --- sets ----------------------------------------------------------------------------------------------------------


def _set(body: dict[str, Any]) -> list[str]:
    shape: dict[str, type | tuple[type, ...]] = dict.fromkeys(("family", "name", "table", "type"), str)
    shape |= {"handle": int, "flags": list}
    shape |= {key: kind for key, kind in (("size", int), ("elem", list)) if key in body}
    closed(body, LIVE, shape)
    name, kind, flags = _string(body, "name"), body["type"], body["flags"]
    if kind not in _TYPES:
        raise refuse(f"{LIVE}:{shown(name)}", f"a set of {shown(kind)}")
    lines = [f"\tset {name} {{", f"\t\ttype {kind}", f"\t\tflags {','.join(map(str, flags))}"]
    if "size" in body:
        lines.append(f"\t\tsize {body['size']}")
    elements = body.get("elem", [])
    if flags == ["timeout"]:
        for element in elements:
            _answered(element, kind, f"{LIVE}:{shown(name)}")
    elif elements:
        spans = sorted(_span(element, kind, f"{LIVE}:{shown(name)}") for element in elements)
        spelled = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
        lines.append(f"\t\telements = {{ {', '.join(spelled)} }}")
    return [*lines, "\t}"]


def _answered(element: object, kind: str, where: str) -> None:
    """An address that a name led to: public, single, and with an end."""
    if type(element) is not dict or element.keys() != {"elem"}:
        raise refuse(where, f"{shown(element)} is there for ever, and no answer of a name is")
    shape: dict[str, type] = {"val": str, "timeout": int}
    # In its last moment an element has nothing left that nft would print.
    if type(element["elem"]) is dict and "expires" in element["elem"]:
        shape["expires"] = int
    inner = closed(element["elem"], where, shape)
    if inner["timeout"] < 1:
        raise refuse(where, f"{shown(element)} never ends")
    # Before Linux 6.12 the kernel takes what is left for longer than the whole.
    if max(inner["timeout"], inner.get("expires", 0)) > LONGEST_SECONDS:
        raise refuse(where, f"{shown(element)} stays for longer than any answer of a name")
    address = _address(inner["val"], kind, where)
    point = int(address) + (BASE_V6 if address.version == 6 else 0)
    if not _public(point):
        raise refuse(where, f"{address} is no address that a name may lead to")


def _public(point: int) -> bool:
    return any(first <= point <= last for first, last in addresses.PUBLIC)


def _span(element: Any, kind: str, where: str) -> tuple[Any, Any]:
    """First and last address of an element; addresses of one set are of one family, so they can be put in order."""
    if type(element) is str:
        return (address := _address(element, kind, where)), address
    if type(element) is dict and element.keys() == {"range"}:
        ends = listed(element["range"], where, str)
        if len(ends) != 2:
            raise refuse(where, f"{shown(element)} is no range")
        return _address(ends[0], kind, where), _address(ends[1], kind, where)
    if type(element) is dict and element.keys() == {"prefix"}:
        prefix = closed(element["prefix"], where, {"addr": str, "len": int})
        address = _address(prefix["addr"], kind, where)
        try:
            network = ipaddress.ip_network((address, prefix["len"]))
        except ValueError:
            raise refuse(where, f"{shown(element)} is no prefix") from None
        return network.network_address, network.broadcast_address
    raise refuse(where, f"element {shown(element)} is not understood")


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _address(text: object, kind: str, where: str) -> Address:
    address = _parsed(text) if type(text) is str else None
    if address is None or f"ipv{address.version}_addr" != kind:
        raise refuse(where, f"{shown(text)} is no address of this set")
    return address


# --- chains and rules ----------------------------------------------------------------------------------------------


def _chain(body: dict[str, Any]) -> list[str]:
    shape: dict[str, type] = {**dict.fromkeys(("family", "table", "name"), str), "handle": int}
    if "hook" not in body:
        closed(body, LIVE, shape)
        return []
    closed(body, LIVE, {**shape, **dict.fromkeys(("type", "hook", "policy"), str), "prio": int})
    priority = _PRIORITIES.get(body["prio"], str(body["prio"]))
    return [f"\t\ttype {body['type']} hook {body['hook']} priority {priority}; policy {body['policy']};"]


def _rule(body: dict[str, Any]) -> str:
    closed(body, LIVE, {**dict.fromkeys(("family", "table", "chain"), str), "handle": int, "expr": list})
    parts = []
    for expression in body["expr"]:
        if type(expression) is not dict or len(expression) != 1:
            raise refuse(LIVE, f"expression {shown(expression)} is not understood")
        ((name, value),) = expression.items()
        make = _EXPRESSIONS.get(name)
        said = None if make is None else make(value)
        if said is None:
            raise refuse(LIVE, f"expression {shown(expression)} is not understood")
        parts.append(said)
    return " ".join(parts)


def _has(value: object, *keys: str) -> bool:
    return type(value) is dict and value.keys() == set(keys)


def _match(value: Any) -> str | None:
    if not _has(value, "op", "left", "right"):
        return None
    left, right, operator = value["left"], value["right"], value["op"]
    (kind,) = left if type(left) is dict and len(left) == 1 else ("",)
    make = _LEFT.get((kind, operator)) if type(operator) is str else None
    return None if make is None else make(left[kind], right)


def _payload(left: Any, right: Any) -> str | None:
    if not _has(left, "protocol", "field"):
        return None
    field = f"{left['protocol']} {left['field']}"
    if field in ("ip daddr", "ip6 daddr"):
        return f"{field} {right}" if type(right) is str and right.startswith("@") else None
    several = right["set"] if _has(right, "set") else [right]
    items = [_item(one) for one in several] if type(several) is list else [None]
    return None if None in items else f"{field} {{ {', '.join(map(str, items))} }}"


def _item(value: Any) -> str | None:
    if _has(value, "range") and type(value["range"]) is list and len(value["range"]) == 2:
        return f"{value['range'][0]}-{value['range'][1]}"
    return str(value) if type(value) in (int, str) else None


def _conntrack(left: Any, right: Any) -> str | None:
    words = right if type(right) is list else [right]
    return f"ct {left['key']} {','.join(map(str, words))}" if _has(left, "key") else None


def _meta(left: Any, right: Any) -> str | None:
    if not _has(left, "key") or type(right) not in (int, str):
        return None
    key = left["key"]
    if key == "l4proto":
        right = _PROTOCOLS.get(right, right)
    return f'{key} "{right}"' if key in ("iifname", "oifname") else f"meta {key} {right}"


_LEFT: Final[Mapping[tuple[str, str], Callable[[Any, Any], str | None]]] = {
    ("payload", "=="): _payload,
    ("ct", "in"): _conntrack,
    ("meta", "=="): _meta,
}


def _limit(value: Any) -> str | None:
    if _has(value, "rate", "burst", "per") and value["per"] == "second":
        return f"limit rate {value['rate']}/second burst {value['burst']} packets"
    if not _has(value, "rate", "burst", "per", "inv", "rate_unit", "burst_unit"):
        return None
    unit = _UNITS.get(value["rate_unit"])
    if unit is None or (value["per"], value["inv"], value["burst"]) != ("second", True, 0):
        return None
    return f"limit rate over {value['rate'] * unit} bytes/second"


def _reject(value: Any) -> str | None:
    if _has(value, "type"):
        return f"reject with {value['type']}"
    return f"reject with {value['type']} {value['expr']}" if _has(value, "type", "expr") else None


def _one(key: str, form: str) -> Callable[[Any], str | None]:
    return lambda value: form.format(value[key]) if _has(value, key) else None


def _bare(word: str) -> Callable[[Any], str | None]:
    return lambda value: word if value is None else None


_EXPRESSIONS: Final[Mapping[str, Callable[[Any], str | None]]] = {
    "match": _match,
    "limit": _limit,
    "counter": lambda name: f'counter name "{name}"' if type(name) is str else None,
    "log": lambda log: f"log group {log['group']} snaplen {log['snaplen']}" if _has(log, "group", "snaplen") else None,
    "reject": _reject,
    "redirect": _one("port", "redirect to :{}"),
    "goto": _one("target", "goto {}"),
    "jump": _one("target", "jump {}"),
    **{word: _bare(word) for word in ("accept", "drop", "return")},
}

__all__ = ["FIREWALL", "Listing", "objects", "others", "read", "resting", "text"]
