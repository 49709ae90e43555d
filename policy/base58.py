"""Base58 with Bitcoin's alphabet, as Covenant writes keys, signatures and tokens. No checksum."""

from __future__ import annotations

# Without 0, O, I and l, which look like others.
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def encode(data: bytes) -> str:
    """The base58 text of ``data``; each leading zero byte is one ``1``."""
    number = int.from_bytes(data)
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(ALPHABET[digit])
    zeros = len(data) - len(data.lstrip(b"\0"))
    return "1" * zeros + "".join(reversed(digits))


def decode_any(text: str, *, max_length: int) -> bytes:
    """The bytes that ``text`` encodes, however many up to ``max_length``.

    Raises:
        ValueError: a character outside the alphabet, or more bytes. The time grows with the square of the length.
    """
    # Each byte is log 256 / log 58 = 1.366 characters.
    if len(text) > max_length * 137 // 100 + 1:
        raise ValueError("too long")
    number = 0
    for ch in text:
        number = number * 58 + ALPHABET.index(ch)
    zeros = len(text) - len(text.lstrip("1"))
    data = b"\0" * zeros + number.to_bytes((number.bit_length() + 7) // 8)
    if len(data) > max_length:
        raise ValueError("too long")
    return data


def decode(text: str, *, length: int) -> bytes:
    """The ``length`` bytes that ``text`` encodes.

    Raises:
        ValueError: a character outside the alphabet, or another length.
    """
    number = 0
    for ch in text[: 2 * length]:
        number = number * 58 + ALPHABET.index(ch)
    zeros = len(text) - len(text.lstrip("1"))
    body = number.to_bytes((number.bit_length() + 7) // 8)
    data = b"\0" * zeros + body
    if len(data) != length or encode(data) != text:
        raise ValueError("not base58 of that length")
    return data
