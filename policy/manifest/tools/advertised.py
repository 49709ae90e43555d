"""Compare what a tool server advertises with what tools.json declares of it: names, descriptions, input schemas (Q21).

What a server advertises reaches a model. An unsigned word of it is drift.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from policy.manifest import text
from policy.manifest.tools.checks import Finding
from policy.manifest.tools.document import Server, Tool, ToolManifest

# Every answer that is no, and what it means.
CODES: Final = {
    "server_failed": "it did not start or answer, or does not speak MCP",
    "not_asked": "a header of the server is a secret, which a signed run alone is given",
    "tool_undeclared": "a server advertises a tool that is not declared",
    "tool_not_advertised": "a declared tool is not advertised",
    "tool_changed": "its description or input schema is another than declared",
}
_DIFF_LINES = 60


class AdvertisedTool(Struct, frozen=True):
    """A tool as its server advertises it."""

    name: str
    description: str
    input_schema: dict[str, Any] | None

    def document(self) -> dict[str, Any]:
        """Return it as tools.json would declare it, but for its class of side effect."""
        return {"name": self.name, "description": self.description, "input_schema": self.input_schema}


def compare(tools: ToolManifest, server: Server, found: Sequence[AdvertisedTool]) -> Iterator[Finding]:
    """Yield a finding for each tool that is not one to one, or is described otherwise.

    The daemon has more tools than an agent declares: the rest is not its agent's, and no finding.
    """
    number = tools.servers.index(server)
    declared = {tool.name: (index, tool) for index, tool in enumerate(server.tools)}
    for one in found:
        if one.name not in declared and server.transport == "daemon":
            continue
        if one.name not in declared:
            message = f"server `{server.alias}` advertises {text.quote(one.name)}, which tools.json does not have"
            hint = f"after looking at it, add it with its class of side effect: {_shown(one.document())}"
            yield Finding("tool_undeclared", message, hint, tools.where(("servers", number, "tools")))
            continue
        index, tool = declared[one.name]
        yield from _same(tools, (number, index), tool, one)
    names = {one.name for one in found}
    for name, (index, tool) in declared.items():
        if name not in names:
            message = f"server `{server.alias}` does not advertise `{server.uri(tool)}`"
            where = tools.where(("servers", number, "tools", index))
            yield Finding("tool_not_advertised", message, "take it out of tools.json, and of every grant", where)


def _same(tools: ToolManifest, at: tuple[int, int], tool: Tool, one: AdvertisedTool) -> Iterator[Finding]:
    path = ("servers", at[0], "tools", at[1])
    changed = []
    if tool.description != one.description:
        changed.append("description")
    if tool.input_schema != one.input_schema:
        changed.append("input_schema")
    if changed:
        words = " and ".join(changed)
        message = f"the {words} of `{tools.servers[at[0]].uri(tool)}` is not what the server advertises"
        before = {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
        hint = f"after looking at it, write it into tools.json, run covenant tools pin and sign:\n{_diff(before, one)}"
        yield Finding("tool_changed", message, hint, tools.where(path))


def _diff(before: dict[str, Any], one: AdvertisedTool) -> str:
    old, new = (json.dumps(side, indent=2, sort_keys=True).splitlines() for side in (before, one.document()))
    lines = list(difflib.unified_diff(old, new, "tools.json", "advertised", lineterm=""))
    cut = [f"... {len(lines) - _DIFF_LINES} more lines"] if len(lines) > _DIFF_LINES else []
    return "\n".join((*lines[:_DIFF_LINES], *cut))


def _shown(document: dict[str, Any]) -> str:
    return json.dumps(document, sort_keys=True)
