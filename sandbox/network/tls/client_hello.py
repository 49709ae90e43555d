"""Read the start of a TLS connection: the client's hello, and whether the server's answer requests another hello.

It is pure: bytes in; a hello, a request for more bytes, or a refusal out. Nothing is repaired. Bytes that two readers
could interpret in two ways are refused, because the server is the second reader.

Sources: RFC 8446 (TLS 1.3), RFC 5246 (TLS 1.2), RFC 6066 section 3 (server_name), RFC 7301 (ALPN),
draft-ietf-tls-esni in its versions (Encrypted ClientHello).
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

# A hello with a post-quantum key share has about 1,800 bytes; the longest that is read, its own header included.
HELLO_BYTES: Final = 16384
# The most bytes between a HelloRetryRequest and the second hello: early data that the server discards.
SKIPPED_BYTES: Final = 131072
# Warnings that a server may send before its hello (unrecognized_name is one that old servers do send).
ANSWER_BYTES: Final = 65536

CODES: Final = frozenset({
    "not_tls", "no_sni", "sni_not_granted", "ech_present", "hello_too_long", "hello_timeout", "malformed",
})  # fmt: skip

_RECORD_HEADER, _HANDSHAKE_HEADER, _FRAGMENT_BYTES = 5, 4, 16384
_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE, _APPLICATION_DATA = 20, 21, 22, 23
# What a client may send between a HelloRetryRequest and its second hello (RFC 8446, 4.2.10 and D.4).
_BETWEEN: Final = frozenset({_CHANGE_CIPHER_SPEC, _ALERT, _APPLICATION_DATA})
_CLIENT_HELLO, _SERVER_HELLO = 1, 2
_SERVER_NAME, _ALPN, _SUPPORTED_VERSIONS = 0, 16, 43
# Every number that has stood for it (a server may still know an old one), ESNI's 0xffce, and ech_outer_extensions,
# which belongs in an inner hello and nowhere else.
_ECH: Final = frozenset({*range(0xFE08, 0xFE0E), 0xFF02, 0xFF03, 0xFFCE, 0xFD00})
# SHA-256 of "HelloRetryRequest", which replaces the random (RFC 8446, section 4.1.3).
_RETRY: Final = bytes.fromhex("cf21ad74e59a6111be1d8c021e65b891c2a211167abb8c5e079e09e2c8a8339c")
_LABEL = re.compile(rb"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(rb"[0-9]+|0x[0-9a-f]*")


class Refused(Exception):
    """This is no hello that the gate lets through; ``code`` is one of ``CODES``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class Hello(Struct, frozen=True):
    """A whole ClientHello.

    ``name`` is the one host_name in lower case without a trailing dot, None without one. ``ech`` says whether it offers
    an encrypted hello, real or not: the two look the same by design.
    """

    name: str | None
    ech: bool
    alpn: tuple[bytes, ...] = ()
    versions: tuple[int, ...] = ()


class HelloReader:
    """Joins a ClientHello over segments and records.

    ``again`` is for the second hello, after a HelloRetryRequest: then a change_cipher_spec, alerts and early data may
    come before it. ``raw`` has all bytes that belong to what was read, ``rest`` what came after it.
    """

    def __init__(self, *, again: bool = False) -> None:
        self._records = _Records(frozenset({_HANDSHAKE, *_BETWEEN}) if again else frozenset({_HANDSHAKE}))
        self._message = bytearray()
        self._limit = HELLO_BYTES * (_RECORD_HEADER + 1) + (SKIPPED_BYTES if again else 0)

    @property
    def raw(self) -> bytes:
        """The unchanged records up to the end of the hello."""
        return self._records.taken

    @property
    def rest(self) -> bytes:
        """The bytes after the hello's last record."""
        return self._records.left

    @property
    def begun(self) -> bool:
        """Whether any byte has arrived."""
        return bool(self._records.size)

    def feed(self, data: bytes) -> Hello | None:
        """Take the next bytes; the hello when it is whole, None while it is not.

        Raises:
            Refused: ``not_tls``, ``hello_too_long`` or ``malformed``; as early as the bytes show it.
        """
        self._records.feed(data)
        if self._records.size > self._limit:
            raise Refused("hello_too_long")
        while (record := self._records.next()) is not None:
            kind, fragment = record
            if kind != _HANDSHAKE:
                if self._message:
                    raise Refused("malformed")
                continue
            # RFC 8446, 5.1: no empty fragment of a handshake; it would only cost time.
            if not fragment:
                raise Refused("malformed")
            self._message += fragment
            if (body := self._whole()) is not None:
                return _hello(body)
        return None

    def _whole(self) -> bytes | None:
        message = self._message
        if message[0] != _CLIENT_HELLO:
            raise Refused("malformed")
        if len(message) < _HANDSHAKE_HEADER:
            return None
        size = _HANDSHAKE_HEADER + int.from_bytes(message[1:4])
        if size > HELLO_BYTES:
            raise Refused("hello_too_long")
        if len(message) > size:
            # A second message in the hello's own record: which of the two would the server take?
            raise Refused("malformed")
        return bytes(message[_HANDSHAKE_HEADER:]) if len(message) == size else None


class AnswerReader:
    """Reads the server's bytes until it is known whether it requests a second, plaintext ClientHello.

    The caller passes every byte of the server on at once. ``rest`` are the bytes after a HelloRetryRequest, where the
    next answer begins.
    """

    def __init__(self) -> None:
        self._records = _Records(frozenset({_CHANGE_CIPHER_SPEC, _ALERT, _HANDSHAKE}))
        self._message = bytearray()

    @property
    def rest(self) -> bytes:
        """The bytes after the answer's last record."""
        return self._records.left

    def feed(self, data: bytes) -> bool | None:
        """Take the next bytes: True for a HelloRetryRequest, False for a ServerHello, None while neither is whole.

        Raises:
            Refused: the server does not answer as one that speaks TLS; what it would take from the client is unknown.
        """
        self._records.feed(data)
        if self._records.size > ANSWER_BYTES:
            raise Refused("malformed")
        while (record := self._records.next()) is not None:
            kind, fragment = record
            if kind != _HANDSHAKE and not self._message:
                continue
            if kind != _HANDSHAKE or not fragment:
                raise Refused("malformed")
            self._message += fragment
            if (retry := self._retry()) is not None:
                return retry
        return None

    def _retry(self) -> bool | None:
        message = self._message
        if message[0] != _SERVER_HELLO:
            raise Refused("malformed")
        # Header, version, random: the rest of a ServerHello is the client's business.
        if len(message) < _HANDSHAKE_HEADER + 2 + 32:
            return None
        if bytes(message[6:38]) != _RETRY:
            return False
        size = _HANDSHAKE_HEADER + int.from_bytes(message[1:4])
        if len(message) > size:
            raise Refused("malformed")
        return True if len(message) == size else None


class _Records:
    """Cuts a stream into records of the allowed ``kinds``. Each byte is read once, in pieces of any size."""

    def __init__(self, kinds: frozenset[int]) -> None:
        self._kinds = kinds
        self._bytes = bytearray()
        self._at = 0

    @property
    def size(self) -> int:
        return len(self._bytes)

    @property
    def taken(self) -> bytes:
        return bytes(self._bytes[: self._at])

    @property
    def left(self) -> bytes:
        return bytes(self._bytes[self._at :])

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def next(self) -> tuple[int, bytes] | None:
        """Return type and fragment of the next whole record. None if there is none yet."""
        start = self._at
        head = self._bytes[start : start + _RECORD_HEADER]
        # Refuse as early as possible: a client of another protocol may wait for an answer that will not come.
        if (head and head[0] not in self._kinds) or (len(head) > 1 and head[1] != 3):
            raise Refused("malformed" if start else "not_tls")
        if len(head) < _RECORD_HEADER:
            return None
        size = int.from_bytes(head[3:5])
        # Ciphertext (early data) may be 256 bytes longer than what it hides.
        if size > _FRAGMENT_BYTES + (256 if head[0] == _APPLICATION_DATA else 0):
            raise Refused("hello_too_long" if head[0] == _HANDSHAKE else "malformed")
        if len(self._bytes) < start + _RECORD_HEADER + size:
            return None
        self._at = start + _RECORD_HEADER + size
        return head[0], bytes(self._bytes[start + _RECORD_HEADER : self._at])


class _Body:
    """A vector whose every byte has to be read."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._data):
            raise Refused("malformed")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def vector(self, prefix: int, least: int, most: int | None = None) -> bytes:
        """Read a vector with a length field of ``prefix`` bytes."""
        size = self.number(prefix)
        if size < least or (most is not None and size > most):
            raise Refused("malformed")
        return self.take(size)

    def last(self, prefix: int, least: int) -> _Body:
        """Read a vector that must be the last."""
        inner = _Body(self.vector(prefix, least))
        if self:
            raise Refused("malformed")
        return inner


def _hello(data: bytes) -> Hello:
    """The body of a ClientHello (RFC 8446, 4.1.2; RFC 5246, 7.4.1.2)."""
    body = _Body(data)
    # TLS 1.0 to 1.2; 1.3 says 1.2 here. SSL 3.0 and what is yet to come would be read by guesses.
    if not 0x0301 <= body.number(2) <= 0x0303:
        raise Refused("malformed")
    body.take(32)
    body.vector(1, 0, 32)
    if len(body.vector(2, 2)) % 2:
        raise Refused("malformed")
    body.vector(1, 1)
    if not body:
        return Hello(None, ech=False)
    extensions = _extensions(body.last(2, 0))
    return Hello(
        name=_server_name(extensions[_SERVER_NAME]) if _SERVER_NAME in extensions else None,
        ech=not _ECH.isdisjoint(extensions),
        alpn=_alpn(extensions[_ALPN]) if _ALPN in extensions else (),
        versions=_versions(extensions[_SUPPORTED_VERSIONS]) if _SUPPORTED_VERSIONS in extensions else (),
    )


def _extensions(body: _Body) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    while body:
        kind, content = body.number(2), body.vector(2, 0)
        if kind in found:
            # RFC 8446, 4.2: not twice. One reader would take the first, another the last.
            raise Refused("malformed")
        found[kind] = content
    return found


def _server_name(data: bytes) -> str:
    """The one host_name of a server_name extension (RFC 6066, section 3)."""
    entries = _Body(data).last(2, 1)
    kind, name = entries.number(1), entries.vector(2, 1)
    if kind != 0 or entries:
        raise Refused("malformed")
    name = name.lower().removesuffix(b".")
    labels = name.split(b".")
    # No control character, no NUL at which a server in C would stop, no address, no U-label.
    if len(name) > 253 or not all(map(_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]):
        raise Refused("malformed")
    return name.decode("ascii")


def _alpn(data: bytes) -> tuple[bytes, ...]:
    entries = _Body(data).last(2, 2)
    found = []
    while entries:
        found.append(entries.vector(1, 1))
    return tuple(found)


def _versions(data: bytes) -> tuple[int, ...]:
    entries = _Body(data).last(1, 2)
    found = []
    while entries:
        found.append(entries.number(2))
    return tuple(found)
