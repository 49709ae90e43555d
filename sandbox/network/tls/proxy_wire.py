"""The requests of the TLS gate to its connector: one datagram each, with the end of a pair for the answer.

The answer is one byte, and with the byte 0 the connection. So no answer can be another request's.
"""

from __future__ import annotations

import struct
from typing import Final

from sandbox.network.tls import race

# Port, and the length of the name: the name, if one was granted, and the address follow.
REQUEST: Final = struct.Struct("!HB")
REQUEST_BYTES: Final = REQUEST.size + 255 + 64
MADE: Final = 0
# The codes of a connection that the operator's proxy did not make, by the answer's byte less one.
CODES: Final = (
    "proxy_unreachable", "proxy_timeout", "proxy_auth", "proxy_refused", "proxy_malformed", "proxy_itself",
    "proxy_certificate", "connect_refused", "connect_unreachable", "connect_timeout",
)  # fmt: skip
assert race.codes() <= set(CODES)


def request(name: str, host: str, port: int) -> bytes:
    """The datagram of a request. ``name`` is empty for an address that is granted as such."""
    raw = name.encode("ascii")
    return REQUEST.pack(port, len(raw)) + raw + host.encode("ascii")


def read(data: bytes) -> tuple[str, str, int] | None:
    """The name, the address and the port. None if it is no such datagram."""
    if len(data) < REQUEST.size or (not data.isascii() and not data[REQUEST.size :].isascii()):
        return None
    port, length = REQUEST.unpack_from(data)
    rest = data[REQUEST.size :]
    return (rest[:length].decode("ascii"), rest[length:].decode("ascii"), port) if length <= len(rest) else None
