"""Tables of the older iptables (xtables), read by getsockopt and said as ``nft -j`` would list them.

No listing of nftables has them. A table exists as soon as a program asks for it, so that its name says nothing: what
counts are its rules. Formats: linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h,
linux/netfilter/x_tables.h.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from policy import errors

_GET_INFO, _GET_ENTRIES = 64, 65
_HOOKS: Final = ("prerouting", "input", "forward", "output", "postrouting")
_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_NAME = 32
# Verdicts of a standard target: -NF_DROP-1, -NF_ACCEPT-1, -NF_QUEUE-1, -NF_REPEAT-1.
_VERDICTS: Final = {-1: "drop", -2: "accept", -4: "queue", -5: "return"}
_ADDRTYPE: Final = {0: struct.Struct("=HHII"), 1: struct.Struct("=HHI")}
_LOCAL_TYPE = 1 << 2  # 1 << RTN_LOCAL
_INV_IN, _INV_OUT, _INV_SOURCE, _INV_DESTINATION = 0x01, 0x02, 0x08, 0x10


class _Form(Struct, frozen=True):
    """One family: how long an address is, where the devices and the offsets of an entry are, its socket level."""

    family: str
    names: str
    domain: int
    level: int
    bytes: int
    inverted: int
    offsets: int
    entry: int


# struct ipt_entry and struct ip6t_entry of a 64-bit kernel.
_FORMS: Final = (
    _Form("ip", "ip_tables_names", socket.AF_INET, socket.IPPROTO_IP, 4, 83, 88, 112),
    _Form("ip6", "ip6_tables_names", socket.AF_INET6, socket.IPPROTO_IPV6, 16, 132, 140, 168),
)


def listed() -> list[dict[str, Any]]:
    """Every rule and chain of these tables in the calling thread's namespace.

    Raises:
        errors.KernelError: the kernel does not say.
    """
    found: list[dict[str, Any]] = []
    for form in _FORMS:
        try:
            names = Path("/proc/thread-self/net", form.names).read_text().split()
        except FileNotFoundError:
            continue
        for name in names:
            try:
                found += _table(form, name)
            except OSError as e:
                raise errors.KernelError(f"table {name} of the older iptables: {e.strerror}") from e
    return found


def _table(form: _Form, name: str) -> Iterator[dict[str, Any]]:
    with socket.socket(form.domain, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        info = _asked(sock, form.level, _GET_INFO, struct.pack("=32s", name.encode()) + bytes(52))
        valid, *numbers = struct.unpack_from("=I12I", info, _NAME)
        size = numbers[11]
        raw = _asked(sock, form.level, _GET_ENTRIES, struct.pack("=32sI4x", name.encode(), size) + bytes(size))
    entries = raw[40 : 40 + size]
    hooks: dict[int, list[str]] = {}
    for number, hook in enumerate(_HOOKS):
        if valid & 1 << number:
            hooks.setdefault(numbers[number], []).append(hook)
    yield from _rules(form, f"{name} (iptables)", entries, hooks)


def _asked(sock: socket.socket, level: int, option: int, request: bytes) -> bytes:
    buffer = ctypes.create_string_buffer(request, len(request))
    size = ctypes.c_uint32(len(request))
    if _LIBC.getsockopt(sock.fileno(), level, option, buffer, ctypes.byref(size)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw


def _rules(form: _Form, table: str, entries: bytes, hooks: dict[int, list[str]]) -> Iterator[dict[str, Any]]:
    """Yield the chains in the order of the table. A hook begins a chain, and so does a target ``ERROR``.

    The name of a user's chain gets the prefix ``chain``: root may name one like a hook. One entry may serve many hooks.

    Raises:
        OSError: EBADMSG: a chain runs on into the next one, or a jump leads into the middle of a chain. The program
            iptables makes neither.
    """
    about, cut = {"family": form.family, "table": table}, list(_cut(form, entries))
    # A jump holds the place of the first rule of its chain.
    names = {at + size: f"chain {_text(data)}" for at, size, _, name, data in cut if name == "ERROR"}
    chains: list[str] = []
    ended = True
    for at, size, target_at, name, data in cut:
        begun = hooks.get(at, [names[at + size]] if name == "ERROR" else [])
        if begun and not ended:
            raise _unknown_form()
        chains = begun or chains
        for chain in begun:
            yield {"chain": {**about, "name": chain, **(_hook(table, chain) if at in hooks else {})}}
        ended = name == "ERROR"
        if not ended:
            matches = [*_head(form, entries[at : at + form.entry]), *_further(form, entries, at, target_at)]
            statement = _statement(name, data, names, at + size)
            ended = not matches and not name and struct.unpack_from("=i", data)[0] < 0
            for chain in chains:
                yield {"rule": {**about, "chain": chain, "expr": [*matches, *statement]}}


def _hook(table: str, hook: str) -> dict[str, Any]:
    return {"type": "nat" if table.startswith("nat") else "filter", "hook": hook, "prio": 0}


def _unknown_form() -> OSError:
    return OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))


def _cut(form: _Form, entries: bytes) -> Iterator[tuple[int, int, int, str, bytes]]:
    """Each entry: its place, its size, where its target is in it, the target's name, and what that holds."""
    at = 0
    while at + form.entry <= len(entries):
        target_at, size = struct.unpack_from("=HH", entries, at + form.offsets)
        if size < form.entry or target_at + 32 > size:
            raise _unknown_form()
        # struct xt_entry_target: u16 size, 29 bytes of name, revision; what it holds is after it.
        name = _text(entries[at + target_at + 2 : at + target_at + 31])
        yield at, size, target_at, name, entries[at + target_at + 32 : at + size]
        at += size


def _text(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode("ascii", "replace")


def _statement(name: str, data: bytes, names: dict[int, str], after: int) -> list[dict[str, Any]]:
    """Return the statement of a rule: none where the rule only counts, and its verdict leads to the rule ``after`` it.

    Raises:
        OSError: EBADMSG: a jump leads into the middle of a chain.
    """
    if name:
        return [{"xt": {"type": "target", "name": name, "data": data.hex()}}]
    (verdict,) = struct.unpack_from("=i", data)
    if verdict >= 0 and verdict in names:
        return [{"jump": {"target": names[verdict]}}]
    if verdict >= 0 and verdict != after:
        raise _unknown_form()
    return [] if verdict >= 0 else [{_VERDICTS.get(verdict, "queue"): None}]


def _head(form: _Form, entry: bytes) -> Iterator[dict[str, Any]]:
    """Yield the matches that every rule may have: addresses with masks, and devices."""
    flags, size = entry[form.inverted], form.bytes
    source, destination, source_mask, destination_mask = (entry[n * size : (n + 1) * size] for n in range(4))
    for field, address, mask, inverted in (
        ("saddr", source, source_mask, _INV_SOURCE),
        ("daddr", destination, destination_mask, _INV_DESTINATION),
    ):
        if any(mask):
            left = {"payload": {"protocol": form.family, "field": field}}
            yield _match(left, _prefix(address, mask), inverted=bool(flags & inverted))
    base = 4 * size
    for key, at, inverted in (("iifname", base, _INV_IN), ("oifname", base + 16, _INV_OUT)):
        name, mask = entry[at : at + 16], entry[at + 32 : at + 48]
        if any(mask):
            yield _match({"meta": {"key": key}}, _device(name, mask), inverted=bool(flags & inverted))


def _device(name: bytes, mask: bytes) -> Any:
    """Return a device as nft prints it. The mask says which bytes count; behind them the name may be anything."""
    counted = len(mask) - len(mask.lstrip(b"\xff"))
    if any(mask[counted:]) or b"\0" in name[: counted - 1]:
        # A mask with holes is not understood, and so may match every device.
        return {"mask": [name.hex(), mask.hex()]}
    held = name[:counted].rstrip(b"\0").decode("ascii", "replace")
    return held if len(held) < counted else f"{held}*"


def _prefix(address: bytes, mask: bytes) -> Any:
    bits = int.from_bytes(mask).bit_count()
    straight = int.from_bytes(mask) == ((1 << bits) - 1) << (8 * len(mask) - bits)
    text = str(ipaddress.ip_address(address))
    # A mask with holes is not understood, and so may match everything.
    return {"prefix": {"addr": text, "len": bits}} if straight else {"mask": [text, mask.hex()]}


def _match(left: Any, right: Any, *, inverted: bool) -> dict[str, Any]:
    return {"match": {"op": "!=" if inverted else "==", "left": left, "right": right}}


def _further(form: _Form, entries: bytes, at: int, target_at: int) -> Iterator[dict[str, Any]]:
    """The rule's other matches by name, each with what it holds."""
    inner = at + form.entry
    while inner + 32 <= at + target_at:
        (size,) = struct.unpack_from("=H", entries, inner)
        if size < 32:
            return
        name, revision = _text(entries[inner + 2 : inner + 31]), entries[inner + 31]
        data = entries[inner + 32 : inner + size]
        if name == "addrtype" and _to_the_host(revision, data):
            yield _match({"fib": {"result": "type", "flags": ["daddr"]}}, "local", inverted=False)
        else:
            yield {"xt": {"type": "match", "name": name, "data": data.hex()}}
        inner += size


def _to_the_host(revision: int, data: bytes) -> bool:
    """Return whether a match addrtype says ``--dst-type LOCAL`` and no inversion (linux/netfilter/xt_addrtype.h)."""
    form = _ADDRTYPE.get(revision)
    if form is None or len(data) < form.size:
        return False
    _, destination, *inverted = form.unpack_from(data)
    # Revision 0 has a word for each inversion; of revision 1 the flag 2 inverts the destination.
    return destination == _LOCAL_TYPE and not (inverted[1] if revision == 0 else inverted[0] & 2)
