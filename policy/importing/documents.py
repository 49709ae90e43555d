"""Read the bytes of a source: bounded, UTF-8, and each key once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from policy import errors
from policy.importing.vocabulary import MAX_BYTES, malformed, shown
from policy.manifest import syntax, text
from policy.signing import strict_json

FILE: Final = "source"
# Each item of a list is held against each of another.
MAX_ITEMS: Final = 1000
Document = Mapping[str, Any]
# A text, or a number with a fraction.
_FRACTION: Final = re.compile(r'("(?:[^"\\]|\\.)*+")|(?<![0-9.eE+-])(-?[0-9]++\.[0-9]++)(?![0-9.eE])')


def decoded(raw: bytes) -> str:
    """Return the text of a source.

    Raises:
        errors.ImportSourceError: it is too large, no UTF-8, or holds a NUL.
    """
    if len(raw) > MAX_BYTES:
        raise malformed(
            f"the source has more than {MAX_BYTES} bytes", where=FILE, hint="give one file of one configuration"
        )
    try:
        found = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise malformed("the source is not UTF-8", where=f"{FILE}:{line}", hint="save it as UTF-8") from None
    if "\0" in found:
        line = found.count("\n", 0, found.index("\0")) + 1
        raise malformed("the source holds a NUL", where=f"{FILE}:{line}", hint="give a text file")
    return found


def json_object(raw: bytes, *, decimals: bool = False) -> Document:
    """Return the object of a JSON source. With ``decimals`` a number with a fraction is its own text, else refused.

    Raises:
        errors.ImportSourceError: it is no JSON, too large, or no object.
    """
    document = decoded(raw)
    try:
        if decimals:
            # Only what stands outside of texts is changed: the strict reader takes the rest.
            document = _FRACTION.sub(lambda match: match[1] or f'"{match[2]}"', document)
        found = strict_json.loads(document.encode(), max_bytes=2 * MAX_BYTES)
    except strict_json.MalformedJsonError as e:
        hint = "give strict JSON: without comments, each key once, whole numbers"
        raise malformed(f"the source cannot be read as JSON: {e}", where=FILE, hint=hint) from None
    if not isinstance(found, dict):
        raise malformed(f"the source is {text.kind_of(found)}", where=FILE, hint="give one JSON object")
    return found


def toml_table(raw: bytes) -> Document:
    """Return the table of a TOML source.

    Raises:
        errors.ImportSourceError: it is no TOML.
    """
    decoded(raw)
    try:
        return syntax.load(raw, FILE)[1]
    except errors.ManifestError as e:
        raise malformed(e.message, where=e.where, hint=e.hint or "give the TOML file as the tool reads it") from None


def table(document: Document, key: str, place: str) -> Document:
    """Return a table below a key, empty where the key is absent.

    Raises:
        errors.ImportSourceError: it is something else.
    """
    found = document.get(key)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise _kind(place, found, "an object")
    return found


def strings(document: Document, key: str, place: str) -> list[tuple[str, str]]:
    """Return the strings of a list below a key, each with its place.

    Raises:
        errors.ImportSourceError: it is no list of strings.
    """
    found = document.get(key)
    if found is None:
        return []
    if not isinstance(found, list):
        raise _kind(place, found, "a list")
    if len(found) > MAX_ITEMS:
        hint = "name the directories or domains above them, or import a part at a time"
        raise malformed(f"`{place}` has {len(found)} items, an import takes {MAX_ITEMS}", where=place, hint=hint)
    out = []
    for index, one in enumerate(found):
        at = f"{place}[{index}]"
        if not isinstance(one, str):
            raise _kind(at, one, "a string")
        if not one.strip():
            raise malformed(f"`{at}` is an empty string", where=at, hint="take it out, or write what it means")
        out.append((at, one))
    return out


def flag(document: Document, key: str, place: str, *, absent: bool = False) -> bool:
    """Return a boolean below a key.

    Raises:
        errors.ImportSourceError: it is something else.
    """
    found = document.get(key, absent)
    if not isinstance(found, bool):
        raise _kind(place, found, "true or false")
    return found


def word(document: Document, key: str, place: str, absent: str = "") -> str:
    """Return a string below a key.

    Raises:
        errors.ImportSourceError: it is something else.
    """
    found = document.get(key, absent)
    if not isinstance(found, str):
        raise _kind(place, found, "a string")
    return found


def others(document: Document, known: frozenset[str], prefix: str = "") -> Iterator[str]:
    """Yield the places of the keys that are not known, as they can be shown."""
    for key in document:
        if key not in known:
            yield f"{prefix}{text.visible(key)}"


def _kind(place: str, found: object, wanted: str) -> errors.ImportSourceError:
    message = f"`{place}` is {text.kind_of(found)}, and not {wanted}: {shown(found)}"
    return malformed(message, where=place, hint=f"write {wanted} there, as the tool itself takes it")
