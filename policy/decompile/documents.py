"""The JSON artefacts, read closed: one spelling, known keys, exact types; anything else is no artefact.

A compiled document has one spelling (sorted keys, no spaces, ASCII, a final newline), so bytes that are not that
spelling are refused before their values are looked at. Doubled keys, floats and hidden characters end there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from policy import errors
from policy.grants import paths

# The largest that a compiler of ours writes is provenance.json, about 150 bytes a grant.
MAX_BYTES = 8 << 20
_SHOWN = 64

Files = Mapping[str, bytes]
Shape = Mapping[str, type | tuple[type, ...]]
NoneType = type(None)
# A number that may be absent, as JSON has it.
OPTIONAL_INT = (int, NoneType)


def refuse(where: str, message: str) -> errors.ArtefactError:
    """The error for an artefact that is not understood; ``where`` is its file name, with a place after a colon."""
    return errors.ArtefactError(message, where=where)


def shown(value: object) -> str:
    """A value from an artefact in backticks, printable ASCII, cut short."""
    text = json.dumps(value, sort_keys=True, default=str)
    text = text[1:-1] if isinstance(value, str) else text
    text = text.replace("`", "\\x60")
    return f"`{text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'}`"


def dumps(value: Any) -> bytes:
    """The one spelling of a document. Raises ValueError for a float that JSON has not."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"


def raw(files: Files, name: str) -> bytes:
    """The bytes of an artefact.

    Raises:
        errors.ArtefactError: it is missing or too large.
    """
    found = files.get(name)
    if found is None:
        raise refuse(name, f"artefact `{name}` is missing")
    if len(found) > MAX_BYTES:
        raise refuse(name, f"artefact of {len(found)} bytes is too large")
    return found


def load(files: Files, name: str) -> Any:
    """The value of a JSON artefact.

    Raises:
        errors.ArtefactError: it is missing, too large, not JSON or not in its one spelling.
    """
    found = raw(files, name)
    try:
        value = json.loads(found.decode("ascii"))
        spelled = dumps(value)
    except (ValueError, RecursionError):  # UnicodeError and JSONDecodeError are ValueErrors
        raise refuse(name, "not a JSON document") from None
    if spelled != found:
        raise refuse(name, "not in the one spelling of an artefact")
    return value


def closed(value: object, where: str, shape: Shape) -> dict[str, Any]:
    """``value`` as an object with exactly the keys of ``shape``, each of its type.

    Raises:
        errors.ArtefactError: it is none, a key is unknown or missing, or a value has another type.
    """
    if type(value) is not dict:
        raise refuse(where, "not an object")
    if value.keys() != shape.keys():
        odd = min(value.keys() ^ shape.keys())
        raise refuse(where, f"key {shown(odd)} is {'unknown' if odd in value else 'missing'}")
    for key, kinds in shape.items():
        # `type` and not isinstance: a boolean is an int to Python.
        if type(value[key]) not in (kinds if isinstance(kinds, tuple) else (kinds,)):
            raise refuse(where, f"{shown(key)} is {shown(value[key])}, which has the wrong type")
    return value


def listed(value: object, where: str, kind: type) -> list[Any]:
    """``value`` as a list of items of exactly this type.

    Raises:
        errors.ArtefactError: it is none.
    """
    if type(value) is not list or any(type(item) is not kind for item in value):
        raise refuse(where, f"{shown(value)} is not a list of {kind.__name__}")
    return value


def names(value: object, where: str) -> list[str]:
    """``value`` as a sorted list of different, non-empty strings.

    Raises:
        errors.ArtefactError: it is none.
    """
    found = listed(value, where, str)
    if found != sorted(set(found)) or "" in found:
        raise refuse(where, "the names are not sorted, not different or empty")
    return found


def fixed(value: object, where: str, expected: object) -> None:
    """Hold a part to the only value that it may have.

    Raises:
        errors.ArtefactError: it has another.
    """
    # By spelling: to Python 1 equals True and 1.0.
    if dumps(value) != dumps(expected):
        raise refuse(where, f"it is {shown(value)}, not {shown(expected)}")


def whole(value: object, where: str, *, least: int = 0, most: int = 2**63 - 1) -> int:
    """``value`` as a whole number within its bounds, both included.

    Raises:
        errors.ArtefactError: it is none, or lies outside.
    """
    if type(value) is not int or not least <= value <= most:
        raise refuse(where, f"{shown(value)} is not a whole number from {least} to {most}")
    return value


def one_of(value: object, where: str, known: tuple[str, ...]) -> str:
    """``value`` as one of a closed set of words.

    Raises:
        errors.ArtefactError: it is none of them.
    """
    if type(value) is not str or value not in known:
        raise refuse(where, f"{shown(value)} is none of {', '.join(known)}")
    return value


def normalised(value: str, where: str) -> str:
    """Return an absolute path in its one spelling; any other is refused."""
    try:
        # A lone surrogate is another character to runsc than to the supervisor.
        value.encode()
        return paths.check_normalised(value)
    except (errors.ManifestError, UnicodeEncodeError):
        raise refuse(where, f"{shown(value)} is not absolute and normalised") from None
