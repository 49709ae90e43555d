"""The entries ``[[mcp.server]]`` of secrets.toml: signed packages whose tools the daemon lists and calls.

    [[mcp.server]]
    name = "files"
    package = "files"        # of $COVENANT_HOME/agents, or an absolute path
    enabled = true
    tool_prefix = "fs"       # its tool `read` is `mcp_fs_read`
    include = ["read*"]      # exact names, `*`, or a `*` at the end
    exclude = []

An entry that cannot be used is left out with a warning, as in version 1: the daemon starts without it. No warning
contains a value of the file besides the name of an entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from covenant.providers import secrets_file

MOST: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_PACKAGE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}\Z")
_NOT_PREFIX: Final = re.compile(r"[^A-Za-z0-9_]")
_PATTERN: Final = re.compile(r"[A-Za-z0-9_.-]{0,128}\*?\Z")
# The form of version 1: a program of this host, without a sandbox.
_UNCONFINED: Final = ("command", "args", "env")
_KEYS: Final = frozenset({"name", "package", "enabled", "tool_prefix", "include", "exclude"})
UNCONFINED_FIX: Final = (
    "sign a package that has the server in its tools.json, and name it by `package`: "
    "docs/tool-calls.md, Tools of the daemon"
)


@dataclass(frozen=True, slots=True)
class McpServer:
    """One usable entry. ``package`` is the directory of the package."""

    name: str
    package: Path
    tool_prefix: str = ""
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def listed_as(self, tool: str) -> str | None:
        """Return the name under which the daemon lists a tool of this server; None if the entry leaves it out."""
        if self.include and not _matches(self.include, tool):
            return None
        if _matches(self.exclude, tool):
            return None
        return f"mcp_{_NOT_PREFIX.sub('_', self.tool_prefix)}_{tool}" if self.tool_prefix else tool


def _matches(patterns: Sequence[str], tool: str) -> bool:
    return any(tool.startswith(one[:-1]) if one.endswith("*") else tool == one for one in patterns)


def read(home: Path) -> tuple[tuple[McpServer, ...], tuple[str, ...]]:
    """Read the entries of a home's secrets.toml, as ``entries``.

    Raises:
        errors.SettingError: as ``secrets_file.read`` and ``secrets_file.document``.
    """
    return entries(secrets_file.document(secrets_file.read(home), where=str(home / secrets_file.NAME)), home)


def entries(sections: Mapping[str, Any], home: Path) -> tuple[tuple[McpServer, ...], tuple[str, ...]]:
    """Return the enabled, usable entries of the file's sections, and a warning for each other one."""
    section = sections.get("mcp", {})
    found = section.get("server", []) if isinstance(section, dict) else None
    if not isinstance(found, list):
        return (), ("[mcp] has no list [[mcp.server]], and was left out",)
    usable: dict[str, McpServer] = {}
    warnings: list[str] = []
    for number, raw in enumerate(found, start=1):
        if isinstance(raw, dict) and raw.get("enabled") is False:
            continue
        shown = f"[[mcp.server]] {_shown(raw, number)}"
        if wrong := next(_wrong(raw), None):
            warnings.append(f"{shown} was left out: {wrong}")
        elif raw["name"] in usable:
            warnings.append(f"{shown} was left out: an earlier entry has its name")
        elif len(usable) >= MOST:
            warnings.append(f"{shown} was left out: {MOST} servers are the most")
        else:
            usable[raw["name"]] = _entry(raw, home)
    return tuple(usable.values()), tuple(warnings)


def _shown(raw: Any, number: int) -> str:
    name = raw.get("name") if isinstance(raw, dict) else None
    return f"`{name}`" if isinstance(name, str) and _NAME.match(name) else f"number {number}"


def _wrong(raw: Any) -> Iterator[str]:
    """Yield what makes an entry unusable, with its fix."""
    if not isinstance(raw, dict):
        yield "it is no table"
        return
    if any(key in raw for key in _UNCONFINED):
        yield f"`command`, `args` and `env` start a program that nobody signed, without a sandbox; {UNCONFINED_FIX}"
    if raw.keys() - _KEYS:
        # A word that is misspelt may be one that narrows the entry.
        yield f"it has a key that is none of {', '.join(sorted(_KEYS))}"
    if not isinstance(raw.get("name"), str) or not _NAME.match(raw["name"]):
        yield "`name` is 1 to 64 of A-Z a-z 0-9 _ . -"
    package = raw.get("package")
    if not isinstance(package, str) or not (_PACKAGE.match(package) or (package[:1] == "/" and "\0" not in package)):
        yield "`package` is the name of a directory of $COVENANT_HOME/agents, or an absolute path"
    if not isinstance(raw.get("enabled", True), bool):
        yield "`enabled` is true or false"
    prefix = raw.get("tool_prefix", "")
    if not isinstance(prefix, str) or len(prefix) > 64:
        yield "`tool_prefix` is a text of at most 64 characters"
    for key in ("include", "exclude"):
        value = raw.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, str) and _PATTERN.match(one) for one in value):
            yield f"`{key}` is a list of tool names, each of which may end in `*`"


def _entry(raw: Mapping[str, Any], home: Path) -> McpServer:
    # An absolute path replaces the directory of the packages.
    return McpServer(
        raw["name"],
        home / "agents" / raw["package"],
        raw.get("tool_prefix", ""),
        tuple(raw.get("include", ())),
        tuple(raw.get("exclude", ())),
    )
