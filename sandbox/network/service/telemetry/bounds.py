"""How much a request of OTLP may hold, counted on its bytes before protobuf reads them.

A reader of protobuf pays by messages and not by bytes: 4 MiB can be two million empty spans, which take 350 MiB. All
gates of a run share less (sandbox.network.gate.cgroup), and the run ends when one of them is killed for memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from google.protobuf.descriptor import Descriptor

# An attribute is two of them: itself and its value.
MESSAGES: Final = 262_144
FIELDS: Final = 1_048_576
# ``DiscardUnknownFields`` leaves what is deeper than 64 messages as it is.
DEPTH: Final = 60
_VARINT_BYTES: Final = 10

Tree = Mapping[str, Mapping[int, str]]


class ExceededError(Exception):
    """Raised for a request that holds too much. Its text names the bound."""


def tree(roots: Iterable[Descriptor]) -> Tree:
    """Return the fields that are messages, by number, of each message that these have in them."""
    found: dict[str, dict[int, str]] = {}
    waiting = list(roots)
    while waiting:
        one = waiting.pop()
        if one.full_name not in found:
            inner = {field.number: field.message_type for field in one.fields if field.message_type is not None}
            found[one.full_name] = {number: message.full_name for number, message in inner.items()}
            waiting += inner.values()
    return found


def check(raw: bytes, root: str, known: Tree) -> None:
    """Walk a message of type ``root`` without reading its values.

    Raises:
        ExceededError: it has more parts than the bounds.
        ValueError, IndexError: it is no message of protobuf, is nested deeper than ``DEPTH``, or has a group, of which
            OTLP has none.
    """
    messages = fields = 0
    waiting = [(0, len(raw), known[root], 1)]
    while waiting:
        at, end, inner, depth = waiting.pop()
        while at < end:
            fields += 1
            if fields > FIELDS:
                raise ExceededError(f"a request has at most {FIELDS} fields")
            tag = raw[at]
            at += 1
            if tag > 127:
                tag, at = _varint(raw, at - 1)
            form = tag & 7
            if form == 2:
                length, at = _varint(raw, at)
                name = inner.get(tag >> 3)
                if name is not None:
                    messages += 1
                    if messages > MESSAGES:
                        raise ExceededError(f"a request has at most {MESSAGES} messages")
                    if depth >= DEPTH:
                        raise ValueError("nested too deep")
                    waiting.append((at, min(at + length, end), known[name], depth + 1))
                at += length
            elif form == 0:
                at = _varint(raw, at)[1]
            elif form in (1, 5):
                at += 8 if form == 1 else 4
            else:
                raise ValueError("a group")
        if at > end:
            raise ValueError("a field is longer than its message")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Return a number, and where it ends."""
    found = 0
    for index in range(_VARINT_BYTES):
        byte = raw[at + index]
        found |= (byte & 127) << 7 * index
        if byte < 128:
            return found, at + index + 1
    raise ValueError("a number is too long")
