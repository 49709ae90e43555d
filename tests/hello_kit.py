"""ClientHellos: real ones that OpenSSL makes, and others put together by hand, byte by byte."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

# SHA-256 of "HelloRetryRequest" (RFC 8446, 4.1.3).
RETRY_RANDOM = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
ECH, GREASE = 0xFE0D, 0x0A0A


def real(name: str | None, *, alpn: tuple[str, ...] = (), newest: ssl.TLSVersion | None = None) -> bytes:
    """The first flight of this machine's OpenSSL for a server of that name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if newest is not None:
        context.maximum_version = newest
    if alpn:
        context.set_alpn_protocols(list(alpn))
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(coming, going, server_hostname=name)
    try:
        client.do_handshake()
    except ssl.SSLWantReadError:
        return going.read()
    raise AssertionError("a handshake without a server")


def vector(prefix: int, data: bytes) -> bytes:
    """Data behind its length."""
    return len(data).to_bytes(prefix) + data


def extension(kind: int, data: bytes) -> bytes:
    """One extension."""
    return kind.to_bytes(2) + vector(2, data)


def server_name(name: bytes, *, kind: int = 0) -> bytes:
    """A server_name extension with one entry."""
    return extension(0, vector(2, bytes([kind]) + vector(2, name)))


def body(
    *extensions: bytes,
    version: int = 0x0303,
    session: bytes = b"",
    suites: bytes = b"\x13\x01",
    compression: bytes = b"\x00",
) -> bytes:
    """The body of a ClientHello with these extensions."""
    start = version.to_bytes(2) + b"r" * 32 + vector(1, session) + vector(2, suites) + vector(1, compression)
    return start + vector(2, b"".join(extensions))


def message(data: bytes, *, kind: int = 1) -> bytes:
    """A handshake message."""
    return bytes([kind]) + vector(3, data)


def record(fragment: bytes, *, kind: int = 22, version: int = 0x0301) -> bytes:
    """One record."""
    return bytes([kind]) + version.to_bytes(2) + vector(2, fragment)


def records(data: bytes, sizes: Iterable[int]) -> bytes:
    """A message over records of these sizes; the last takes what is left."""
    out, at = b"", 0
    for size in sizes:
        if at >= len(data):
            break
        out += record(data[at : at + size])
        at += size
    return out + (record(data[at:]) if at < len(data) else b"")


def hello(name: str | None = "api.example.com", *more: bytes) -> bytes:
    """A small ClientHello in one record."""
    first = (server_name(name.encode()),) if name is not None else ()
    return record(message(body(*first, *more)))


def server_hello(*, retry: bool = False) -> bytes:
    """A ServerHello or HelloRetryRequest in one record."""
    random = RETRY_RANDOM if retry else b"s" * 32
    supported = extension(43, b"\x03\x04")
    return record(message(b"\x03\x03" + random + vector(1, b"") + b"\x13\x01\x00" + vector(2, supported), kind=2))
