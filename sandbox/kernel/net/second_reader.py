"""Read a network namespace by pyroute2, and compare it with our own reader of netlink.

Attestation reads by messages of our own (``dump``): they are fast, and the supervisor holds no library for them. A
fault in that reader would hide what root changed. So `covenant attest` asks a reader that other people wrote as well.
It reads devices, addresses, permanent neighbours, routes, and how many routing rules there are.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import Any, Final

from policy import errors
from sandbox.kernel.net import dump

_PERMANENT: Final = 0x80  # linux/neighbour.h, NUD_PERMANENT
_UP: Final = 1  # linux/if.h, IFF_UP
_CLONED: Final = 0x200  # linux/rtnetlink.h, RTM_F_CLONED
_KINDS: Final = {1: "unicast", 2: "local", 3: "broadcast", 4: "anycast", 5: "multicast", 6: "blackhole"}
# The kernel makes one for each device once its other end is up (``dump`` leaves it out as well).
_LATE: Final = "route multicast ff00::/8 in table 255 "
_FAMILIES: Final = (2, 10)  # AF_INET, AF_INET6
_ANYWHERE: Final = {2: str(ipaddress.IPv4Address(0)), 10: str(ipaddress.IPv6Address(0))}
_COMPARED: Final = ("device", "address", "neighbour", "route", "rule")
_ATTEMPTS: Final = 20


def lines() -> frozenset[str]:
    """Return the objects in the calling thread's namespace, a line each, in the words of ``dump.lines``.

    A line ``rule`` holds the number of the rules of one family.

    Raises:
        errors.KernelError: the kernel does not answer.
    """
    # It takes 150 ms and 12 MiB to import, and only two commands need it.
    from pyroute2 import IPRoute, NetlinkError  # type: ignore[import-untyped]

    try:
        with IPRoute() as route:
            return frozenset({
                *map(_device, route.get_links()),
                *map(_address, route.get_addr()),
                *(_neighbour(one) for one in route.get_neighbours() if one["state"] & _PERMANENT),
                *(line for family in _FAMILIES for one in route.get_routes(family=family) for line in _route(one)),
                *(f"rule {family}: {len([*route.get_rules(family=family)])}" for family in _FAMILIES),
            })  # fmt: skip
    except (NetlinkError, OSError) as e:
        raise errors.KernelError(f"the network cannot be read by pyroute2: {e}") from e


def differences() -> list[str]:
    """Return the lines that only one of the two readers has, in the calling thread's namespace.

    The namespace may change meanwhile. So it is read by our reader before and after, until both are equal.

    Raises:
        errors.KernelError: the kernel does not answer, or the namespace never stands still.
    """
    for _ in range(_ATTEMPTS):
        before, theirs = dump.lines(), lines()
        if before == dump.lines():
            ours = frozenset(_ours(before))
            return [*(f"only by pyroute2: {one}" for one in sorted(theirs - ours)),
                    *(f"not by pyroute2: {one}" for one in sorted(ours - theirs))]  # fmt: skip
    raise errors.KernelError("the network changes while it is read")


def _ours(found: frozenset[str]) -> Iterator[str]:
    """Yield the part of ``dump.lines`` that both readers have."""
    rules = dict.fromkeys(_FAMILIES, 0)
    for line in found:
        what, _, rest = line.partition(" ")
        if what == "rule":
            # Others are those of multicast routing.
            if (family := int(rest.split()[0])) in rules:
                rules[family] += 1
        elif what == "device":
            yield line.removesuffix(" xdp").partition(" master ")[0]
        elif what in _COMPARED:
            yield line
    yield from (f"rule {family}: {count}" for family, count in rules.items())


def _device(link: Mapping[str, Any]) -> str:
    info = link.get("linkinfo")
    kind = "" if info is None else info.get("kind") or ""
    return (
        f"device {link['index']} {link.get('ifname')} {kind} {link.get('address') or ''} mtu {link.get('mtu')} "
        f"up {link['flags'] & _UP}"
    )


def _address(one: Mapping[str, Any]) -> str:
    return f"address {one.get('local') or one.get('address')}/{one['prefixlen']} at device {one['index']}"


def _neighbour(one: Mapping[str, Any]) -> str:
    return f"neighbour {one.get('dst')} {one.get('lladdr') or ''} at device {one['ifindex']}"


def _route(one: Mapping[str, Any]) -> Iterator[str]:
    kind, length, family = one["type"], one["dst_len"], one["family"]
    to = f"{one.get('dst') or _ANYWHERE[family]}/{length}"
    via = f" via {one.get('gateway')}" if one.get("gateway") else ""
    device = f" by device {one.get('oif')}" if one.get("oif") else ""
    line = f"route {_KINDS.get(kind, str(kind))} {to} in table {one.get('table')}{via}{device}"
    if not one["flags"] & _CLONED and not line.startswith(_LATE):
        yield line
