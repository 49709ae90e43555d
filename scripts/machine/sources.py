"""The source of a newer runsc, derived from the machine's own apt configuration (pure: text in, text out).

A mirror, a proxy or a key that the machine's owner chose for `bookworm` holds for `bookworm-backports` too,
so the entry is copied from there instead of naming a host here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True)
class Entry:
    """One apt source: where from, which suite, signed by what (empty: apt's own trusted keys)."""

    uri: str
    suite: str
    signed_by: str


def deb822(text: str) -> Iterator[Entry]:
    """Entries of a `.sources` file: stanzas of `Key: value`, comments, continuation lines."""
    for stanza in re.split(r"\n\s*\n", re.sub(r"(?m)^#.*\n?", "", text)):
        fields: dict[str, str] = {}
        key = ""
        for line in stanza.splitlines():
            if line[:1] in " \t" and key:
                fields[key] += "\n" + line
            elif ":" in line:
                key, _, value = line.partition(":")
                key = key.strip().lower()
                fields[key] = value.strip()
        if fields.get("enabled", "yes").lower() in ("no", "false", "0") or "deb" not in fields.get("types", "").split():
            continue
        for uri in fields.get("uris", "").split():
            for suite in fields.get("suites", "").split():
                yield Entry(uri, suite, fields.get("signed-by", ""))


_ONE_LINE = re.compile(r"^deb\s+(?:\[(?P<options>[^\]]*)\]\s+)?(?P<uri>\S+)\s+(?P<suite>\S+)(?:\s|$)")


def one_line(text: str) -> Iterator[Entry]:
    """Entries of a `sources.list` file: `deb [options] uri suite component...`."""
    for line in text.splitlines():
        match = _ONE_LINE.match(line.strip())
        if match is None:
            continue
        options = dict(option.split("=", 1) for option in (match["options"] or "").split() if "=" in option)
        yield Entry(match["uri"], match["suite"], options.get("signed-by", ""))


def entries(files: Mapping[str, str]) -> list[Entry]:
    """All entries of the machine, in the order of the file names; `files` maps names to their text."""
    found: list[Entry] = []
    for name in sorted(files):
        reader = deb822 if name.endswith(".sources") else one_line
        found.extend(reader(files[name]))
    return found


def derive(files: Mapping[str, str], codename: str, suite: str, component: str) -> str | None:
    """The text of a `.sources` file for `suite`, or None when no entry names `codename` to derive it from.

    An embedded key (a multi-line Signed-By) is kept as it stands.
    """
    for entry in entries(files):
        if entry.suite == codename:
            lines = ["Types: deb", f"URIs: {entry.uri}", f"Suites: {suite}", f"Components: {component}"]
            if entry.signed_by:
                lines.append(f"Signed-By: {entry.signed_by}")
            return "\n".join(lines) + "\n"
    return None


def pin(package: str, suite: str) -> str:
    """The text of an apt preferences file: from `suite` comes `package` and nothing else."""
    return (
        f"Package: *\nPin: release n={suite}\nPin-Priority: -1\n\n"
        f"Package: {package}\nPin: release n={suite}\nPin-Priority: 500\n"
    )


def names(files: Mapping[str, str], suite: str) -> bool:
    """Whether the machine already has a source for `suite`."""
    return any(entry.suite == suite for entry in entries(files))
