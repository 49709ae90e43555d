"""Make a package from one tool manifest of Matrix: its agent.toml, the operator's program, and the servers beside it.

The file says which tools its agent may call, and nothing about its program, network or secrets. So the package has the
tools of the file alone: what needs more is refused, and the error names the lines of an agent.toml that grant it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from policy import errors
from policy.importing import formats
from policy.importing.vocabulary import Context, ImportLoss, shown
from policy.manifest import digests, parse
from policy.manifest.tools import checks, document, pins
from policy.manifest.tools.document import ToolManifest
from policy.package import MANIFEST_NAME, Package

FORMAT: Final = "tools-json"
_RUNTIMES: Final = {"py": "python3", "js": "node", "mjs": "node", "cjs": "node"}
_NO_LINKS: Final[Mapping[str, str]] = MappingProxyType({})
_OURS: Final = frozenset({MANIFEST_NAME, document.FILE, pins.LOCK})


class SingleFile(Struct, frozen=True):
    """The package, unsigned, and what the file allows and the package does not grant."""

    package: Package
    losses: tuple[ImportLoss, ...]


def package_of(
    raw: bytes, entry: str, program: bytes, beside: Mapping[str, bytes], links: Mapping[str, str] = _NO_LINKS
) -> SingleFile:
    """Return the package of a tool manifest.

    ``entry`` is the name of the program, whose ending says its runtime; without one of a script it is a native program.
    ``beside`` and ``links`` are the files and symbolic links at the file's side: those below ``tools/ALIAS/``, and its
    lock if there is one. Without a lock the package has one of what the file declares.

    Raises:
        errors.CovenantError: the file is malformed, a server is not what it declares, or needs more than tools.
    """
    if entry in _OURS:
        raise errors.UsageError(f"the program is named {shown(entry)} as a file of its package", hint="rename it")
    runtime = _RUNTIMES.get(entry.rpartition(".")[2] if "." in entry else "", "rust-bin")
    tools = document.parse(raw)
    imported = formats.read(FORMAT, raw, Context(tools.agent_id, entry, runtime=runtime))
    files = {**beside, entry: program, document.FILE: raw, MANIFEST_NAME: imported.manifest_text.encode()}
    package = Package(files, None, links)
    _check_digests(package, tools)
    if pins.LOCK not in beside:
        package = Package({**files, pins.LOCK: pins.pin(package, tools)[1]}, None, links)
    for one in checks.verify(package, parse.parse(package.manifest), tools):
        more = f"{one.hint} into the agent.toml that `covenant manifest import --from {FORMAT} --out DIR` writes"
        hint = more if one.code in checks.GRANT_CODES else one.hint
        raise errors.ToolsError(one.message, hint=hint, where=one.where)
    # The file and its servers are in the package, and so is the program.
    losses = tuple(one for one in imported.losses if one.kind == "narrower" and one.place)
    return SingleFile(package, losses)


def _check_digests(package: Package, tools: ToolManifest) -> None:
    """Check that each server's package is beside the file, and is the one that the file states."""
    for number, server in enumerate(tools.servers):
        if server.transport != "stdio":
            continue
        inside, present = pins.directory(server.alias), pins.package_digest(package, server.alias)
        if present is None:
            raise errors.ToolsError(
                f"the package of server `{server.alias}` does not lie in `{inside}` beside the file",
                hint=f"unpack the published package of version {server.version} there",
                where=tools.where(("servers", number, "alias")),
            )
        if present != server.package_digest:
            reason = digests.filler(server.package_digest or "")
            said = f"is a placeholder: {reason}" if reason else f"is not that of the files in `{inside}`"
            raise errors.ToolsError(
                f"the package digest of server `{server.alias}` {said}",
                hint=f'look at what is there, and write "package_digest": "{present}"',
                where=tools.where(("servers", number, "package_digest")),
            )
