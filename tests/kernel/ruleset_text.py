"""The output of ``nft -j list ruleset``, written in the words of firewall.nft, so that the two can be compared."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from typing import Any

_UNITS = {"bytes": 1, "kbytes": 1024, "mbytes": 1024 * 1024}
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def span(element: Any) -> tuple[Address, Address]:
    """First and last address of one element."""
    if isinstance(element, str):
        return ipaddress.ip_address(element), ipaddress.ip_address(element)
    if "range" in element:
        first, last = element["range"]
        return ipaddress.ip_address(first), ipaddress.ip_address(last)
    network = ipaddress.ip_network(f"{element['prefix']['addr']}/{element['prefix']['len']}")
    return network.network_address, network.broadcast_address


def _set(document: dict[str, Any]) -> tuple[str, ...]:
    lines = [f"type {document['type']}", f"flags {','.join(document['flags'])}"]
    if "size" in document:
        lines.append(f"size {document['size']}")
    if "elem" in document:
        spans = sorted(map(span, document["elem"]))
        texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
        lines.append("elements = { " + ", ".join(texts) + " }")
    return tuple(lines)


def _right(right: Any) -> list[Any]:
    if isinstance(right, dict):
        return list(right.get("set", [right]))
    return right if isinstance(right, list) else [right]


def _one(value: Any) -> str:
    return f"{value['range'][0]}-{value['range'][1]}" if isinstance(value, dict) else str(value)


def _match(document: dict[str, Any]) -> str:
    left, right = document["left"], document["right"]
    assert document["op"] in ("==", "in"), document
    if "payload" in left:
        field = f"{left['payload']['protocol']} {left['payload']['field']}"
        if field in ("ip daddr", "ip6 daddr"):
            return f"{field} {right}"
        return f"{field} {{ {', '.join(map(_one, _right(right)))} }}"
    if "ct" in left:
        return f"ct {left['ct']['key']} {','.join(_right(right))}"
    key = left["meta"]["key"]
    return f'{key} "{right}"' if key in ("iifname", "oifname") else f"meta {key} {right}"


def _limit(document: dict[str, Any]) -> str:
    assert document["per"] == "second"
    if not document.get("inv"):
        return f"limit rate {document['rate']}/second burst {document['burst']} packets"
    return f"limit rate over {document['rate'] * _UNITS[document['rate_unit']]} bytes/second"


def _reject(document: dict[str, Any]) -> str:
    return f"reject with {' '.join(document.values())}"


_EXPRESSIONS: dict[str, Callable[[Any], str]] = {
    "match": _match,
    "limit": _limit,
    "counter": lambda name: f'counter name "{name}"',
    "log": lambda log: f"log group {log['group']} snaplen {log['snaplen']}",
    "reject": _reject,
    "redirect": lambda to: f"redirect to :{to['port']}",
    "goto": lambda to: f"goto {to['target']}",
    "jump": lambda to: f"jump {to['target']}",
    "accept": lambda _: "accept",
    "drop": lambda _: "drop",
    "return": lambda _: "return",
}
_PRIORITIES = {0: "filter", -100: "dstnat"}


def listed(raw: bytes) -> dict[str, tuple[str, ...]]:
    """``kind name`` -> its lines, of the one table that there is."""
    out: dict[str, tuple[str, ...]] = {}
    for item in json.loads(raw)["nftables"]:
        ((kind, document),) = item.items()
        if kind == "set":
            out[f"set {document['name']}"] = _set(document)
        elif kind == "counter":
            out[f"counter {document['name']}"] = ()
        elif kind == "chain":
            out[f"chain {document['name']}"] = ()
            if "hook" in document:
                hook = f"type {document['type']} hook {document['hook']} priority {_PRIORITIES[document['prio']]};"
                out[f"chain {document['name']}"] = (f"{hook} policy {document['policy']};",)
        elif kind == "rule":
            parts = [next(iter(expression.items())) for expression in document["expr"]]
            text = " ".join(_EXPRESSIONS[name](value) for name, value in parts)
            out[f"chain {document['chain']}"] += (text,)
        else:
            assert kind in ("metainfo", "table"), kind
    return out


def written(text: str) -> dict[str, tuple[str, ...]]:
    """The same of a ruleset as it was written."""
    head, *lines, last, empty = text.split("\n")
    assert (head, last, empty) == ("table inet covenant {", "}", "")
    out: dict[str, tuple[str, ...]] = {}
    block = ""
    for line in lines:
        if line.endswith(" {"):
            block = line[1:-2]
            assert block not in out
            out[block] = ()
        elif line != "\t}":
            assert line.startswith("\t\t")
            out[block] += (line[2:],)
    return out
