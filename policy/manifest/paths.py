"""Paths of a manifest, as text: one spelling for each, settled before anything is compared or mounted.

A path is judged by its components. An ambiguous spelling is refused and the right one named, never repaired in
silence: the signed spelling is compared. That a path exists, is no symlink and is
grantable is for the host (decisions.md, Authority and state).
"""

from __future__ import annotations

import re
import unicodedata

from policy.manifest import text
from policy.package import INVISIBLE

COMPONENT_BYTES = 255  # NAME_MAX
_GLOB = re.compile(r"[*?\[\]{}]")
# Characters that look like a slash or a dot and are neither: a reader of the manifest would see another path.
LOOK_ALIKES = {
    **dict.fromkeys("\u1735\u2044\u2215\u2571\u27cb\u29f8\u2cc6\u3033\uff0f", "/"),
    **dict.fromkeys("\u2024\ufe52\uff0e", "."),
    "\u2025": "..",
    "\u2026": "...",
}
# Letters of these look like each other: in one word of two alphabets a reader sees one (Unicode technical standard 39,
# 5.1). A word that is wholly of one may still look like a word of another: nothing in the text tells which was meant.
ALPHABETS = frozenset({"LATIN", "CYRILLIC", "GREEK", "COPTIC", "ARMENIAN", "CHEROKEE", "LISU", "DESERET"})
# Latin letters in another dress: no file is named by them on purpose.
_DRESSED = frozenset({"FULLWIDTH", "MATHEMATICAL"})
_WORD = re.compile(r"[^\W\d_]+")


def absolute(value: str) -> str:
    """An absolute, normalised host path other than ``/``.

    Raises:
        PydanticCustomError: with the right spelling as hint, where there is one.
    """
    _characters(value)
    if not value.startswith("/"):
        raise text.wrong(f"path {text.quote(value)} is not absolute", _absolute_hint(value))
    if _GLOB.search(value):
        raise text.wrong(
            f"path {text.quote(value)} holds a wildcard", "grant the directory itself: it covers what is below"
        )
    if value.strip("/") == "":
        raise text.wrong(f"path {text.quote(value)} is the whole root", "name the directories that are needed")
    _components(value, value[1:])
    return value


def _absolute_hint(value: str) -> str:
    if value.startswith(("~", "$")):
        return "write the path out: nothing is expanded"
    return "begin it with `/`"


def relative(value: str) -> str:
    """A path inside the package: relative, without ``..``; a leading ``./`` is dropped as Covenant allows it.

    Raises:
        PydanticCustomError: it leaves the package, could be taken for an option, or could be read in two ways.
    """
    _characters(value)
    inside = "the entry lies inside the package: give its path from the directory of agent.toml"
    if value.startswith("/") or re.match(r"[A-Za-z]:", value):
        raise text.wrong(f"entry {text.quote(value)} is absolute", inside)
    if ".." in value.split("/"):
        raise text.wrong(f"entry {text.quote(value)} leaves the package by `..`", inside)
    plain = value.removeprefix("./")
    if plain.startswith("-"):
        raise text.wrong(f"entry {text.quote(value)} begins with `-`", "an interpreter would take it for an option")
    _components(value, plain)
    return plain


def _characters(value: str) -> None:
    text.plain(value)
    for ch in value:
        if ch in LOOK_ALIKES:
            right = "".join(LOOK_ALIKES.get(c, c) for c in value)
            raise text.wrong(
                f"path {text.quote(value)} holds U+{ord(ch):04X}, which looks like `{LOOK_ALIKES[ch]}`",
                f"write `{text.visible(right)}`",
            )
        if ch in INVISIBLE:
            raise text.wrong(f"path {text.quote(value)} holds U+{ord(ch):04X}, which shows nothing", "remove it")
        if ch != " " and unicodedata.category(ch) == "Zs":
            raise text.wrong(f"path {text.quote(value)} holds the space U+{ord(ch):04X}", "use an ordinary space")
    normal = unicodedata.normalize("NFC", value)
    if normal != value:
        raise text.wrong(
            f"path {text.quote(value)} is not in Unicode form NFC",
            f"write {normal!a} (the composed form)",
        )
    if "\\" in value:
        raise text.wrong(f"path {text.quote(value)} holds a backslash", "separate components with `/`")
    if not value.isascii():
        for word in _WORD.findall(value):
            _one_alphabet(value, word)


def _one_alphabet(path: str, word: str) -> None:
    found = {unicodedata.name(ch, "").partition(" ")[0]: ch for ch in word}
    for kind in sorted(_DRESSED & found.keys()):
        raise text.wrong(
            f"path {text.quote(path)} holds U+{ord(found[kind]):04X}, which looks like a plain letter",
            "write the plain letter",
        )
    mixed = sorted(ALPHABETS & found.keys())
    if len(mixed) > 1:
        raise text.wrong(
            f"path {text.quote(path)} has a word with letters of two alphabets,"
            f" U+{ord(found[mixed[0]]):04X} and U+{ord(found[mixed[1]]):04X}",
            "write each word in one alphabet",
        )


def _components(value: str, body: str) -> None:
    parts = body.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise text.wrong(
            f"path {text.quote(value)} is not normalised", _normal_hint(parts, absolute=value.startswith("/"))
        )
    for part in parts:
        if len(part.encode()) > COMPONENT_BYTES:
            raise text.wrong(f"path component {text.quote(part)} is too long", f"at most {COMPONENT_BYTES} bytes")
        if part != part.strip():
            raise text.wrong(f"path {text.quote(value)} has a component with outer spaces", "remove the spaces")


def _normal_hint(parts: list[str], *, absolute: bool) -> str:
    """The spelling without empty and dot components; ``..`` is resolved as text, never below the root."""
    kept: list[str] = []
    for part in parts:
        if part == "..":
            kept = kept[:-1]
        elif part not in ("", "."):
            kept.append(part)
    right = ("/" if absolute else "") + "/".join(kept)
    return f"write `{text.visible(right)}`" if kept else "name a file or directory"
