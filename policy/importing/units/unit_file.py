"""The syntax of systemd's unit files: sections, settings that repeat, continued lines, quoted words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from policy.importing import documents
from policy.importing.vocabulary import malformed, shown

_SECTION: Final = re.compile(r"\[([^\[\]]+)\]")
_SETTINGS: Final = 5_000
_ESCAPES: Final = {"a": "\a", "b": "\b", "n": "\n", "t": "\t", "\\": "\\", '"': '"', "'": "'", "s": " "}


class Setting(Struct, frozen=True):
    """One assignment, with the line that it begins at."""

    section: str
    key: str
    value: str
    line: int

    @property
    def place(self) -> str:
        """The place for a report: the key and its line."""
        return f"{self.key}:{self.line}"


def settings(raw: bytes) -> list[Setting]:
    """Return the assignments in their order.

    Raises:
        errors.ImportSourceError: a line is neither a section, a comment nor an assignment.
    """
    section, found = "", list[Setting]()
    for number, line in _lines(documents.decoded(raw)):
        if match := _SECTION.fullmatch(line):
            section = match[1]
            continue
        key, equals, value = line.partition("=")
        where = f"{documents.FILE}:{number}"
        if not equals or not key.strip():
            raise malformed(f"{shown(line)} is no setting", where=where, hint="write KEY=VALUE, [SECTION] or # comment")
        if not section:
            message = f"the setting {shown(key.strip())} stands above any section"
            raise malformed(message, where=where, hint="put it below [Service]")
        found.append(Setting(section, key.strip(), value.strip(), number))
        if len(found) > _SETTINGS:
            raise malformed(f"the unit has more than {_SETTINGS} settings", where=where, hint="give one unit")
    return found


def _lines(document: str) -> Iterator[tuple[int, str]]:
    """Yield each line with its number: comments left out, continued lines joined by a space (systemd.syntax(7))."""
    held, begun = list[str](), 0
    for number, line in enumerate(re.split(r"\r?\n", document), 1):
        bare = line.strip()
        if bare.startswith(("#", ";")):
            continue
        if not held:
            begun = number
        if bare.endswith("\\"):
            held.append(bare[:-1].rstrip())
            continue
        if whole := " ".join([*held, bare]).strip():
            yield begun, whole
        held = []
    if whole := " ".join(held).strip():
        yield begun, whole


def words(setting: Setting) -> list[str]:
    """Return the words of a value, without their quotes.

    Raises:
        errors.ImportSourceError: a quote is not closed, or an escape is none.
    """
    out, word, quote, begun = list[str](), list[str](), "", False
    characters = iter(setting.value)
    for ch in characters:
        if ch == "\\":
            word.append(_escaped(setting, next(characters, "")))
            begun = True
        elif quote:
            if ch == quote:
                quote = ""
            else:
                word.append(ch)
        elif ch in "\"'" and not word:
            quote, begun = ch, True
        elif ch.isspace():
            if begun:
                out.append("".join(word))
            word, begun = [], False
        else:
            word.append(ch)
            begun = True
    if quote:
        raise malformed(
            f"a quote of {shown(setting.key)} is not closed",
            where=f"{documents.FILE}:{setting.line}",
            hint="close it on the same line",
        )
    if begun:
        out.append("".join(word))
    return out


def _escaped(setting: Setting, ch: str) -> str:
    if ch not in _ESCAPES or ch == "":
        raise malformed(
            f"{shown(setting.key)} has the escape {shown(chr(92) + ch)}",
            where=f"{documents.FILE}:{setting.line}",
            hint='write the character itself, in double quotes: "..."',
        )
    return _ESCAPES[ch]
