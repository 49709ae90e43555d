"""Bytes of the SSH protocol: strings, numbers, and the public keys made of them (RFC 4251, 4253, 5656 and 8709).

A key is compared as its bytes. So a key that could be written in two ways is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from collections.abc import Mapping
from typing import Final

ED25519: Final = "ssh-ed25519"
RSA: Final = "ssh-rsa"
# Type of an ECDSA key -> the name of its curve, and the bytes of one coordinate.
CURVES: Final[Mapping[str, tuple[str, int]]] = {
    "ecdsa-sha2-nistp256": ("nistp256", 32),
    "ecdsa-sha2-nistp384": ("nistp384", 48),
    "ecdsa-sha2-nistp521": ("nistp521", 66),
}
TYPES: Final = (ED25519, *CURVES, RSA)
RSA_BITS: Final = (2048, 8192)
# The base64 of an RSA key of 8192 bits has 1,400 characters.
LINE_CHARACTERS: Final = 1_600


class WireError(ValueError):
    """Raised when bytes are not of their form."""


class Reader:
    """Reads the fields of a message in their order."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> bytes:
        """Return the next bytes.

        Raises:
            WireError: there are fewer.
        """
        if size > self.left:
            raise WireError("the message is too short")
        self._at += size
        return self._data[self._at - size : self._at]

    def number(self) -> int:
        """Return a uint32."""
        return int.from_bytes(self.take(4), "big")

    def string(self) -> bytes:
        """Return a string of bytes."""
        return self.take(self.number())

    def word(self) -> str:
        """Return a string of printable ASCII without blanks.

        Raises:
            WireError: it holds another character.
        """
        found = self.string()
        if any(not 0x21 <= one <= 0x7E for one in found):
            raise WireError("a word holds other characters than printable ASCII")
        return found.decode("ascii")

    def flag(self) -> bool:
        """Return a boolean, which is written as 0 or 1 alone."""
        (found,) = self.take(1)
        if found > 1:
            raise WireError("a boolean is neither 0 nor 1")
        return bool(found)

    def integer(self) -> int:
        """Return an mpint that is positive and written in the shortest form."""
        raw = self.string()
        if not raw or raw[0] > 0x7F or (raw[0] == 0 and (len(raw) == 1 or raw[1] <= 0x7F)):
            raise WireError("an integer is not positive, or not in its shortest form")
        return int.from_bytes(raw, "big")

    @property
    def left(self) -> int:
        """The number of bytes that are not read yet."""
        return len(self._data) - self._at

    def end(self) -> None:
        """Check that all bytes are read.

        Raises:
            WireError: more follow.
        """
        if self.left:
            raise WireError("the message is too long")


def string(value: bytes | str) -> bytes:
    """Return a string of bytes with its length."""
    raw = value.encode("ascii") if isinstance(value, str) else value
    return struct.pack("!I", len(raw)) + raw


def integer(value: int) -> bytes:
    """Return an mpint. ``value`` is positive."""
    return string(value.to_bytes(value.bit_length() // 8 + 1, "big"))


def key_type(blob: bytes) -> str:
    """Return the type of a public key, which is of the form of its type. Whether a point is on its curve is not read.

    Raises:
        WireError: it is of no type that is supported, or malformed.
    """
    fields = Reader(blob)
    kind = fields.word()
    if kind == ED25519:
        if len(fields.string()) != 32:
            raise WireError("an Ed25519 key has 32 bytes")
    elif kind in CURVES:
        curve, size = CURVES[kind]
        if fields.word() != curve or len(point := fields.string()) != 2 * size + 1 or point[0] != 4:
            raise WireError("the point is not an uncompressed one of its curve")
    elif kind == RSA:
        exponent, modulus = fields.integer(), fields.integer()
        if exponent < 3 or not RSA_BITS[0] <= modulus.bit_length() <= RSA_BITS[1]:
            raise WireError("an RSA key has from 2048 to 8192 bits")
    else:
        raise WireError("the type of the key is not supported")
    fields.end()
    return kind


def read_line(line: str) -> bytes:
    """Return the key of ``TYPE BASE64``.

    Raises:
        WireError: the line is not of that form.
    """
    kind, _, text = line.partition(" ")
    if len(line) > LINE_CHARACTERS:
        raise WireError("the line is too long")
    try:
        blob = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as e:
        raise WireError("the key is not base64") from e
    if key_type(blob) != kind or write_line(blob) != line:
        raise WireError("the type and the key differ, or the base64 is not canonical")
    return blob


def write_line(blob: bytes) -> str:
    """Return a key as ``TYPE BASE64``."""
    return f"{Reader(blob).word()} {base64.b64encode(blob).decode('ascii')}"


def fingerprint(blob: bytes) -> str:
    """Return the fingerprint of a key, as ``ssh-keygen -l`` shows it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii").rstrip("=")
