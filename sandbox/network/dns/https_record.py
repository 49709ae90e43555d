"""Filter HTTPS records (RFC 9460) for the agent: without ECH and unknown parameters, with hints apart.

A record is passed on only if it is valid without the removed parameters. ECH is removed because it hides the requested
name from the TLS gate. Unknown parameters are removed because their effects have not been reviewed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

_PAIR, _NUMBER = struct.Struct("!HH"), struct.Struct("!H")
_MANDATORY, _ALPN, _NO_DEFAULT_ALPN, _PORT, _IPV4HINT, _IPV6HINT = 0, 1, 2, 3, 4, 6
_HINTS = {_IPV4HINT: 4, _IPV6HINT: 16}
_MOST_BYTES = 1024


class Service(Struct, frozen=True):
    """An HTTPS record. ``target`` is the name that it leads to in lower case, empty for the owner's own.

    ``hints`` are the packed addresses in it.
    """

    priority: int
    target: str
    hints: tuple[bytes, ...]
    _target: bytes
    _kept: Mapping[int, bytes]

    def data(self, hints: Sequence[bytes]) -> bytes:
        """Return the record's bytes with these hints."""
        params = dict(self._kept)
        for key, size in _HINTS.items():
            packed = b"".join(hint for hint in hints if len(hint) == size)
            if packed:
                params[key] = packed
        body = b"".join(_PAIR.pack(key, len(params[key])) + params[key] for key in sorted(params))
        return _NUMBER.pack(self.priority) + self._target + body


def read(priority: int, target: str, target_wire: bytes, rest: bytes) -> Service | None:
    """Build the record from its parts; ``rest`` are its parameters. None if it is malformed or not passed on.

    Aliases (priority 0) are not passed on: their target must be granted and queried by itself.
    """
    found = _params(rest) if priority and len(rest) <= _MOST_BYTES else None
    if found is None:
        return None
    kept = {key: found[key] for key in _KEPT if key in found}
    if not all(_KEPT[key](value) for key, value in kept.items()):
        return None
    if _NO_DEFAULT_ALPN in kept and _ALPN not in kept:
        return None
    # What must be understood is understood by the agent only if it gets there.
    if _MANDATORY in kept and not set(_numbers(kept[_MANDATORY])) <= kept.keys() - {_MANDATORY}:
        return None
    hints: list[bytes] = []
    for key, size in _HINTS.items():
        value = found.get(key, b"")
        if len(value) % size or (key in found and not value):
            return None
        hints += [value[at : at + size] for at in range(0, len(value), size)]
    return Service(priority, target, tuple(hints), target_wire, kept)


def _params(rest: bytes) -> dict[int, bytes] | None:
    """Parse parameters by key; keys must rise strictly. None if they are malformed."""
    found: dict[int, bytes] = {}
    at, before = 0, -1
    while at < len(rest):
        if at + _PAIR.size > len(rest):
            return None
        key, size = _PAIR.unpack_from(rest, at)
        at += _PAIR.size + size
        if key <= before or at > len(rest):
            return None
        found[key], before = rest[at - size : at], key
    return found


def _numbers(value: bytes) -> tuple[int, ...]:
    return struct.unpack(f"!{len(value) // 2}H", value[: len(value) // 2 * 2])


def _is_mandatory(value: bytes) -> bool:
    numbers = _numbers(value)
    rising = all(one < after for one, after in zip((_MANDATORY, *numbers), numbers, strict=False))
    return bool(numbers) and len(value) % 2 == 0 and rising


def _is_alpn(value: bytes) -> bool:
    at = 0
    while at < len(value):
        if not value[at]:
            return False
        at += 1 + value[at]
    return 0 < at == len(value)


# What is passed on beside hints, with what it has to be.
_KEPT: Mapping[int, Callable[[bytes], bool]] = {
    _MANDATORY: _is_mandatory,
    _ALPN: _is_alpn,
    _NO_DEFAULT_ALPN: lambda value: not value,
    _PORT: lambda value: len(value) == 2,
}
