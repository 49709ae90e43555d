"""An observer of a link: the marks of the probes in its packets, and the destination of each packet."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import select
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_MARK = re.compile(rb"mk-([a-z0-9-]+?)(?:-km)", re.IGNORECASE)
# The one probe whose mark is a spelling (agents/hostile/network/names.py).
# So long that a gate, which draws the case of each letter anew, does not draw it by chance.
_SPELLING = b"tHeCaSeOfEaChLeTtErIsOnEbItOfAmEsSaGe"
_SO_RCVBUFFORCE = 33
_ETH_ALL = 3
# Port and group of what agents/hostile/network says to everybody; no group: a broadcast.
_GROUPS = (
    (47_001, ""), (1900, "239.255.255.250"), (5353, "224.0.0.251"), (5355, "224.0.0.252"),
    (1900, "ff02::c"), (47_001, "ff02::1"),
)  # fmt: skip
_PORTS = (6, 17, 132, 136)


@dataclass
class Seen:
    """Counts of one observer: of each probe's mark, and the (protocol, address, port) of every packet."""

    marks: Counter[str] = field(default_factory=Counter)
    targets: set[tuple[int, str, int]] = field(default_factory=set)
    frames: int = 0

    def take(self, frame: bytes) -> None:
        """Count one frame."""
        self.frames += 1
        # Answers carry the question back, so one packet may hold a mark twice; it counts once.
        for mark in {found.group(1).lower() for found in _MARK.finditer(frame)}:
            self.marks[mark.decode().replace("-", "_")] += 1
        if _SPELLING in frame:
            self.marks["dns_letter_case"] += 1
        target = _target(frame)
        if target is not None:
            self.targets.add(target)

    def count(self, probe: str) -> int:
        """Marks of a probe, numbered ones included (`mk-NAME-17-km` and `mk-NAME-km-17`)."""
        return sum(number for mark, number in self.marks.items() if re.fullmatch(rf"{probe}(_\d+)?", mark))


def _target(frame: bytes) -> tuple[int, str, int] | None:
    kind = struct.unpack_from("!H", frame, 12)[0] if len(frame) >= 34 else 0
    if kind == 0x0800:
        head = (frame[14] & 15) * 4
        protocol, address = frame[23], str(ipaddress.IPv4Address(frame[30:34]))
        later = struct.unpack_from("!H", frame, 20)[0] & 0x1FFF
        return protocol, address, 0 if later else _port(protocol, frame[14 + head :])
    if kind == 0x86DD and len(frame) >= 54:
        return frame[20], str(ipaddress.IPv6Address(frame[38:54])), _port(frame[20], frame[54:])
    return None


def _port(protocol: int, payload: bytes) -> int:
    return int(struct.unpack_from("!H", payload, 2)[0]) if protocol in _PORTS and len(payload) >= 4 else 0


@contextlib.contextmanager
def hearing(sockets: list[socket.socket]) -> Iterator[Seen]:
    """Yield counts of the packets that reach sockets of `ears`; they are complete when the block has ended."""
    seen = Seen()
    try:
        yield seen
        for one in sockets:
            with contextlib.suppress(BlockingIOError):
                while True:
                    seen.take(one.recv(65535))
    finally:
        for one in sockets:
            one.close()


def ears() -> list[socket.socket]:
    """Sockets for what is said to everybody on the link, to be made in the gateway's namespace."""
    made = []
    for port, group in _GROUPS:
        six = ":" in group
        one = socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_DGRAM)
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if six:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(("::" if six else "", port))
        index = socket.if_nametoindex("agent0")
        if six:
            member = socket.inet_pton(socket.AF_INET6, group) + struct.pack("@I", index)
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, member)
        elif group:
            member = socket.inet_aton(group) + struct.pack("@4si", bytes(4), index)
            one.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, member)
        made.append(one)
    return made


@contextlib.contextmanager
def watching(tap: socket.socket) -> Iterator[Seen]:
    """Count what arrives by a socket of `listener` (not what leaves there) until the block ends."""
    seen, over = Seen(), threading.Event()
    with tap:
        thread = threading.Thread(target=_listen, args=(tap, seen, over))
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()


def listener(device: str) -> socket.socket:
    """A socket that hears every frame of the device, to be made in its namespace; memory enough for floods."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_ALL))
    made.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    made.bind((device, _ETH_ALL))
    return made


def _listen(tap: socket.socket, seen: Seen, over: threading.Event) -> None:
    while True:
        ready, _, _ = select.select([tap], [], [], 0.1)
        if ready:
            frame, (_, _, direction, *_rest) = tap.recvfrom(65535)
            if direction != socket.PACKET_OUTGOING:
                seen.take(frame)
        elif over.is_set():
            return
