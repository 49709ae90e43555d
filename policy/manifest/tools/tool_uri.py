"""Tool URIs: one table from which they are parsed, printed, described in errors and in the schema.

    matrix://tool/mcp/<alias>/<name>@<version>         a tool of an MCP server, by its alias in tools.json
    matrix://tool/<namespace>/<name>@<version>         a native tool

The version is a pin: a URI without one, or with a word for the newest one, names no tool
(seeds/matrix-agent-manifests.txt, Q17; reference/octantos-and-matrix.md, Matrix tool manifests).
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from policy.manifest import text

Kind = Literal["mcp", "native"]

# The parts, each with its characters in words.
PARTS = {
    "space": (r"[a-z0-9_-]{1,64}", "1 to 64 of a-z 0-9 _ -"),
    # Clients make paths and names of it: no `.`, `..` or `a..b`.
    "name": (
        r"(?:[A-Za-z0-9_-]|\.(?![.@]|$)){1,128}",
        "1 to 128 of A-Z a-z 0-9 _ . -, and no dot at its end or before another",
    ),
    "version": (r"[A-Za-z0-9._+:-]{1,64}", "1 to 64 of A-Z a-z 0-9 . _ + : -"),
}
# The forms in the order in which they are tried: what stands before the parts, and what `space` is called there.
FORMS: dict[Kind, tuple[str, str]] = {
    "mcp": ("matrix://tool/mcp/", "alias"),
    "native": ("matrix://tool/", "namespace"),
}
RESERVED = "mcp"  # as a namespace it would read as the other form
_TAIL = "{space}/{name}@{version}"
RULE = "write " + " or ".join(f"{prefix}<{what}>/<name>@<version>" for prefix, what in FORMS.values())

# Tags of registries and branches of repositories: they name other code tomorrow.
MOVING = (
    "latest",
    "next",
    "stable",
    "current",
    "beta",
    "alpha",
    "canary",
    "nightly",
    "edge",
    "dev",
    "main",
    "master",
    "head",
)


def _pattern(kind: Kind, *, named: bool = False) -> str:
    parts = {name: f"(?P<{name}>{chars})" if named else chars for name, (chars, _) in PARTS.items()}
    not_reserved = f"(?!{RESERVED}/)" if kind == "native" else ""
    return f"{FORMS[kind][0]}{not_reserved}{_TAIL.format(**parts)}"


PATTERN = "|".join(_pattern(kind) for kind in FORMS)
_READ = {kind: re.compile(_pattern(kind, named=True)) for kind in FORMS}


class ToolUri(Struct, frozen=True, order=True):
    """One tool at one version. ``space`` is a server's alias, or a native tool's namespace."""

    kind: Kind
    space: str
    name: str
    version: str

    def __str__(self) -> str:
        tail = _TAIL.format(space=self.space, name=self.name, version=self.version)
        return f"{FORMS[self.kind][0]}{tail}"


well_formed = text.Matching("tool URI", PATTERN, RULE)
"""A validator: the text has one of the forms."""


def parse(value: str) -> ToolUri:
    """The URI in a text.

    Raises:
        PydanticCustomError: it has none of the forms, or its version is no pin.
    """
    well_formed(value)
    for kind, pattern in _READ.items():
        if match := pattern.fullmatch(value):
            pinned(match["version"])
            return ToolUri(kind, match["space"], match["name"], match["version"])
    raise AssertionError("the table of forms is what the pattern was made of")


def check(value: str) -> str:
    """A validator for a manifest's list: the text as it is, once it has been parsed."""
    parse(value)
    return value


def pinned(version: str) -> str:
    """A validator: a version that stands for one release.

    Raises:
        PydanticCustomError: a word that moves, no digit at all, or a range.
    """
    hint = "write the exact version, such as 1.4.2: what has no version is not pinned"
    if not re.fullmatch(PARTS["version"][0], version):
        raise text.wrong(f"version {text.quote(version)} is not accepted", f"{PARTS['version'][1]}; {hint}")
    if version.casefold() in MOVING or not re.search("[0-9]", version):
        raise text.wrong(f"version {text.quote(version)} is unpinned", hint)
    if re.search(r"(?:^|[.])[xX](?:[.+-]|$)", version):
        raise text.wrong(f"version {text.quote(version)} is a range", hint)
    return version
