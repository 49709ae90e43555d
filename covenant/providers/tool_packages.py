"""The signed packages that entries ``[[mcp.server]]`` name: their directories, and the tools that they pin."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Final

import anyio.to_thread

from covenant.providers import package_files
from policy import errors
from policy.manifest import parse
from policy.manifest.tools import checks, document
from policy.manifest.tools.document import Tool
from policy.package import MANIFEST_BYTES, MANIFEST_NAME

_WANTED: Final = {MANIFEST_NAME: MANIFEST_BYTES, document.FILE: document.MAX_BYTES}


@contextlib.asynccontextmanager
async def opened(path: Path, *, seconds: float) -> AsyncIterator[tuple[int, dict[str, Tool]]]:
    """Open a package: a descriptor of its directory, which the block's end closes, and the granted tools of its
    tools.json, by the name that its endpoint has for each.

    Raises:
        errors.HangingError: its file system did not answer in this time.
        errors.CovenantError: it cannot be read, or has no tools.json.
    """
    async with package_files.opened(path, _WANTED, seconds=seconds) as (directory, files):
        yield directory, await anyio.to_thread.run_sync(pinned, files)


async def pins(path: Path, *, seconds: float) -> dict[str, Tool]:
    """Return the tools of a package, as ``opened``.

    Raises:
        As ``opened``.
    """
    async with opened(path, seconds=seconds) as (_, found):
        return found


def pinned(files: Mapping[str, bytes]) -> dict[str, Tool]:
    """Return the granted tools of a package's tools.json, by the name that its endpoint has for each.

    The daemon's own tools that a package declares are left out: a session would lead back here.

    Raises:
        errors.CovenantError: agent.toml or tools.json is refused, or there is no tools.json.
    """
    manifest, raw = parse.parse(files.get(MANIFEST_NAME, b"")), files.get(document.FILE)
    if raw is None:
        raise errors.PackageError(f"the package has no `{document.FILE}`", hint="docs/tools.md says what it holds")
    tools = document.parse(raw)
    return {
        f"{server.alias}__{tool.name}": tool
        for server in tools.servers
        if server.transport != "daemon"
        for tool in server.tools
        if not checks.why_not(manifest, tools, server.uri(tool), tool.side_effect_class)
    }
