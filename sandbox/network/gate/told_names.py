"""The addresses of a name, told by a run's DNS gate to its TLS gate, one datagram each.

The TLS gate tries them in the place of the agent. It trusts none of them: the firewall restricts its connections.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Final

MESSAGE_BYTES: Final = 1024
# The most names that are remembered, and the most addresses of one.
NAMES: Final = 1024
ADDRESSES: Final = 16
_AT_ONCE: Final = 64
_HEADER: Final = struct.Struct("!IB")  # seconds, length of the name


def message(host: str, packed: Sequence[bytes], seconds: int) -> bytes:
    """The datagram for a name and its packed addresses, which are good for so many seconds."""
    name = host.encode("ascii")
    body = b"".join(bytes([len(one)]) + one for one in packed[:ADDRESSES])
    return _HEADER.pack(seconds, len(name)) + name + body


def read(data: bytes) -> tuple[str, list[str], int] | None:
    """The name, its addresses as text, and the seconds. None if it is no such datagram."""
    if len(data) < _HEADER.size:
        return None
    seconds, length = _HEADER.unpack_from(data)
    at = _HEADER.size + length
    name = data[_HEADER.size : at]
    found: list[str] = []
    if len(name) != length or not name.isascii():
        return None
    while at < len(data):
        size = data[at]
        packed = data[at + 1 : at + 1 + size]
        if size not in (4, 16) or len(packed) != size or len(found) >= ADDRESSES:
            return None
        found.append(socket.inet_ntop(socket.AF_INET if size == 4 else socket.AF_INET6, packed))
        at += 1 + size
    return name.decode("ascii"), found, seconds


class ToldNames:
    """The TLS gate's end. ``line`` does not block. A name's families are told apart, each with its own end."""

    def __init__(self, line: socket.socket | None) -> None:
        self._line = line
        self._known: dict[tuple[str, bool], tuple[list[str], float]] = {}

    def fileno(self) -> int:
        """Readable when names were told. -1 without a DNS gate."""
        return -1 if self._line is None else self._line.fileno()

    def take(self, now: float) -> None:
        """Take what was told, a bounded number."""
        for _ in range(_AT_ONCE if self._line is not None else 0):
            try:
                data = self._line.recv(MESSAGE_BYTES) if self._line is not None else b""
            except OSError:
                return
            if not data:
                self._line = None  # the DNS gate ended, and the run with it
                return
            told = read(data)
            if told is None or not told[1]:
                continue
            name, addresses, seconds = told
            key = name, ":" in addresses[0]
            self._known.pop(key, None)
            self._known[key] = addresses, now + seconds
            while len(self._known) > 2 * NAMES:
                del self._known[next(iter(self._known))]

    def of(self, name: str, now: float) -> list[str]:
        """The addresses of a name that the agent was told lately, IPv6 first."""
        self.take(now)
        found = (self._known.get((name, family)) for family in (True, False))
        return [address for one in found if one is not None and one[1] > now for address in one[0]]
