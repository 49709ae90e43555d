"""Hosts and ports of a manifest, as text: exact names, ``*.name``, addresses and CIDR blocks, one spelling each.

A name is what DNS and SNI carry: lower-case ASCII labels (A-labels for anything else). An address is written the
way ``ipaddress`` prints it. Other spellings are refused and the right one named, since what was signed is what the
name gate, the firewall and ``why`` compare (RFC 1123 section 2.1, RFC 5890 section 2.3.1, RFC 5952).
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from typing import Literal

from pydantic_core import PydanticCustomError

from policy.manifest import text

HostKind = Literal["name", "wildcard", "address", "cidr"]
NAME_CHARACTERS = 253
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_ADDRESS_LIKE = re.compile(r"[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%.*)?")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9a-fA-F]*")
_RANGE = re.compile(r"([0-9]{1,5})-([0-9]{1,5})")
_KIND_HINT = "write a name (`api.example.com`), `*.example.com`, an address or a CIDR block"
_PORTS_HINT = 'write ports as numbers from 1 to 65535 or ranges such as "8000-8010"'
RANGES = 64


def kind(host: str) -> HostKind:
    """Which of the four an accepted host is."""
    if "/" in host:
        return "cidr"
    if host.startswith("*."):
        return "wildcard"
    return "address" if ":" in host or _NUMBER.fullmatch(host.rpartition(".")[2]) else "name"


def check(value: str) -> str:
    """An accepted host, unchanged.

    Raises:
        PydanticCustomError: with the right spelling as hint, where there is one.
    """
    text.plain(value)
    if "://" in value:
        raise text.wrong(f"host {text.quote(value)} is a URL", "write only the host; ports and protocol are keys")
    if re.fullmatch(r"[^:]*:[0-9]+", value):
        raise text.wrong(f"host {text.quote(value)} has a port", "write the port in ports = [ ]")
    if value.startswith("["):
        raise text.wrong(f"host {text.quote(value)} has brackets", "write the address without brackets")
    if "/" in value:
        return _network(value)
    if _ADDRESS_LIKE.fullmatch(value) or _ends_in_number(value):
        return _address(value)
    return _name(value)


def _ends_in_number(value: str) -> bool:
    # Resolvers and URL parsers read names that end in a number as IPv4, in octal, hex and short forms too.
    return _NUMBER.fullmatch(value.rstrip(".").rpartition(".")[2]) is not None


def _address(value: str) -> str:
    if "%" in value:
        raise text.wrong(f"address {text.quote(value)} has a zone", "write it without `%` and the interface")
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        hint = "write four decimal numbers without leading zeros, or a full IPv6 address"
        raise text.wrong(f"host {text.quote(value)} is not an address", hint) from None
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        raise text.wrong(
            f"address {text.quote(value)} is IPv4 written as IPv6",
            f"write `{mapped}`: packets carry the IPv4 form",
        )
    if address.is_unspecified or address.is_multicast or str(address) == "255.255.255.255":
        raise text.wrong(f"address {text.quote(value)} is no single destination", "write a unicast address")
    return _spelled("address", value, str(address))


def _network(value: str) -> str:
    head, _, tail = value.partition("/")
    try:
        network = ipaddress.ip_network(value, strict=False)
        first = ipaddress.ip_address(head)
    except ValueError:
        raise text.wrong(f"host {text.quote(value)} is not a CIDR block", _KIND_HINT) from None
    if not tail.isdecimal():
        raise text.wrong(f"CIDR block {text.quote(value)} has a netmask", f"write `{network}`")
    if network.prefixlen == 0:
        raise text.wrong(
            f"CIDR block {text.quote(value)} is every address, private ones too",
            'for any public address leave [[permissions.network]] out, with network = "full"',
        )
    if first != network.network_address:
        raise text.wrong(f"CIDR block {text.quote(value)} has bits set outside its prefix", f"write `{network}`")
    mapped = ipaddress.ip_network("::ffff:0:0/96")
    if isinstance(network, ipaddress.IPv6Network) and network.overlaps(mapped):
        raise text.wrong(f"CIDR block {text.quote(value)} holds IPv4 written as IPv6", "write the IPv4 block itself")
    if network.is_multicast:
        raise text.wrong(f"CIDR block {text.quote(value)} is multicast", "write a unicast block")
    if network.prefixlen == network.max_prefixlen:
        raise text.wrong(f"CIDR block {text.quote(value)} is one address", f"write `{network.network_address}`")
    return _spelled("CIDR block", value, str(network))


def _spelled(what: str, value: str, right: str) -> str:
    if value != right:
        raise text.wrong(f"{what} {text.quote(value)} is not in its usual spelling", f"write `{right}`")
    return value


def _name(value: str) -> str:
    wildcard = value.startswith("*.")
    body = value[2:] if wildcard else value
    if "*" in body:
        raise text.wrong(
            f"host {text.quote(value)} has a wildcard that is not its whole first label",
            "only `*.` at the beginning is a wildcard",
        )
    if not value.isascii():
        raise text.wrong(f"host {text.quote(value)} is not ASCII", _ascii_hint(value))
    right = value.lower().rstrip(".")
    if value != right:
        raise text.wrong(f"host {text.quote(value)} is not in its usual spelling", f"write `{right}`")
    labels = body.split(".")
    for label in labels:
        _label(value, label)
    if len(body) > NAME_CHARACTERS:
        raise text.wrong(f"host {text.quote(value)} is too long", f"at most {NAME_CHARACTERS} characters")
    if len(labels) < 2:
        hint = "write at least two labels after `*.`" if wildcard else "write the full name, or an address"
        raise text.wrong(f"host {text.quote(value)} has a single label", hint)
    if labels[-1] == "localhost":
        raise text.wrong(f"host {text.quote(value)} names this machine", "private hosts go by address")
    return value


def _label(value: str, label: str) -> None:
    if not _LABEL.fullmatch(label):
        hint = "a label is 1 to 63 of a-z, 0-9 and `-`, and `-` neither first nor last"
        raise text.wrong(f"host {text.quote(value)} has the bad label {text.quote(label)}", hint)
    if label[2:4] == "--" and not _is_a_label(label):
        raise text.wrong(
            f"host {text.quote(value)} has the label {text.quote(label)}, which encodes nothing",
            "an `xn--` label is the punycode of a lower-case name in Unicode form NFC",
        )


def _is_a_label(label: str) -> bool:
    """Whether an ``xn--`` label decodes to a name that encodes back to it."""
    if not label.startswith("xn--"):
        return False
    try:
        decoded = label[4:].encode("ascii").decode("punycode")
        again = decoded.encode("punycode").decode("ascii")
        text.unhidden(decoded)
    except (UnicodeError, ValueError, OverflowError, PydanticCustomError):
        return False
    return not decoded.isascii() and again == label[4:] and unicodedata.normalize("NFC", decoded.lower()) == decoded


def _ascii_hint(value: str) -> str:
    """The A-labels of a name, label by label: punycode of the lower-case composed form (RFC 5891, 5.3)."""
    labels = []
    # IDNA's other full stops (RFC 3490, 3.1).
    for label in re.split("[.\u3002\uff0e\uff61]", unicodedata.normalize("NFC", value.lower())):
        # Full-width letters and dots and other stand-ins have no A-label of their own.
        if unicodedata.normalize("NFKC", label) != label:
            return "write the name in ASCII"
        labels.append(label if label.isascii() else "xn--" + label.encode("punycode").decode("ascii"))
    return f"write `{text.visible('.'.join(labels))}`"


def port_ranges(value: object) -> tuple[tuple[int, int], ...]:
    """Ports and ``"a-b"`` ranges as sorted pairs (first, last), which do not overlap.

    A tuple of pairs, as this function returns it, is accepted as well: TOML itself never yields one.

    Raises:
        PydanticCustomError: no ports, too many, out of range, overlapping, or of another form; ``at`` is the index.
    """
    if isinstance(value, tuple):
        value = list(value)
    if not isinstance(value, list):
        raise text.wrong(f"ports is {text.kind_of(value)}: {text.quote(value)}", "write an array: ports = [443]")
    if not value:
        raise text.wrong("ports is empty", _PORTS_HINT)
    if len(value) > RANGES:
        raise text.wrong(f"ports has {len(value)} items", f"at most {RANGES}; join neighbours to ranges")
    pairs = [_pair(item, index) for index, item in enumerate(value)]
    for index, (low, high) in enumerate(pairs):
        if any(low <= h and lo <= high for lo, h in pairs[:index]):
            raise text.wrong(f"port {_port_text(low, high)} is listed twice", "keep one", at=index)
    return tuple(sorted(pairs))


def _port_text(low: int, high: int) -> str:
    return f"`{low}`" if low == high else f"`{low}-{high}`"


def _pair(item: object, index: int) -> tuple[int, int]:
    if isinstance(item, tuple) and len(item) == 2 and all(type(v) is int for v in item):
        low, high = item
    elif isinstance(item, int) and not isinstance(item, bool):
        low = high = item
    elif isinstance(item, str) and (match := _RANGE.fullmatch(item)) and item.isascii():
        low, high = int(match[1]), int(match[2])
        if item != f"{low}-{high}" or low >= high:
            raise text.wrong(f"port range {text.quote(item)} is not accepted", _PORTS_HINT, at=index)
    else:
        raise text.wrong(f"port {text.quote(item)} is not accepted", _PORTS_HINT, at=index)
    if not 1 <= low <= high <= 65535:
        raise text.wrong(f"port {text.quote(item)} is not accepted", _PORTS_HINT, at=index)
    return low, high
