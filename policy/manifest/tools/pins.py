"""``tools.lock.json``: the pinned digests of a server's package and of each of its tools.

The package of server ``fs`` is the directory ``tools/fs/`` of the agent's package, as it is unpacked and runs: its
digest is that of the listing of its files, as ``sha256sum`` prints it. A tool's digest covers its name, description and
input schema, so that words that reach a model cannot change unseen. Both files lie in the package, so both are signed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, ValidationError

from policy import errors, package
from policy.manifest import digests, fields, lines, text
from policy.manifest.tools import json_places, report
from policy.manifest.tools.document import FILE, NESTING, Alias, Digest, Server, Tool, ToolManifest, ToolName, Version
from policy.manifest.tools.document import MAX_BYTES as TOOLS_MAX_BYTES
from policy.signing import strict_json

LOCK = "tools.lock.json"
MAX_BYTES = 4 * 1024 * 1024
_NESTING = 8


def directory(alias: str) -> str:
    """Where the package of a server lies in the agent's package."""
    return f"tools/{alias}/"


def _whole(value: str) -> str:
    if reason := digests.filler(digests.well_formed(value)):
        raise text.wrong(f"digest {text.quote(value)} is a placeholder: {reason}", "let covenant tools pin write it")
    return value


_Pin = Annotated[Digest, AfterValidator(_whole)]


class ServerPins(fields.Section):
    """The pins of one server."""

    version: Version
    package_digest: _Pin | None
    tools: dict[ToolName, _Pin]


class Lock(fields.Section):
    """The document."""

    schema_version: Literal[1]
    servers: dict[Alias, ServerPins]


def parse(raw: bytes) -> Lock:
    """The pins of a package.

    Raises:
        errors.ToolsError: the file is not one that ``pin`` writes.
    """
    document = report.load(raw, LOCK, max_bytes=MAX_BYTES, nesting=_NESTING)
    try:
        return Lock.model_validate(document)
    except ValidationError as e:
        raise report.refusal(e, raw.decode(), LOCK, Lock) from None


def tool_digest(tool: Tool) -> str:
    """The digest of what a server advertises of one tool."""
    advertised = {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
    return digests.of(strict_json.dumps(advertised))


def package_digest(read: package.Package, alias: str) -> str | None:
    """The digest of a server's package, or None when there is none."""
    inside = directory(alias)
    found = {path.removeprefix(inside): value for path, value in read.digests.items() if path.startswith(inside)}
    return f"{digests.PREFIX}{package.listing_digest(found)}" if found else None


def pin(read: package.Package, tools: ToolManifest) -> tuple[bytes, bytes]:
    """The bytes of ``tools.json`` with the digests that it has to state, and those of its lock.

    Nothing else of ``tools.json`` changes, not a space.

    Raises:
        errors.ToolsError: the package of a server does not lie in the package.
    """
    stated: dict[tuple[str | int, ...], str] = {}
    for number, server in enumerate(tools.servers):
        if server.transport == "stdio":
            stated["servers", number, "package_digest"] = _present(read, tools, number, server)
    document = tools.places.replaced({path: json.dumps(value) for path, value in stated.items()})
    servers = {
        server.alias: {
            "version": server.version,
            "package_digest": stated.get(("servers", number, "package_digest")),
            "tools": {tool.name: tool_digest(tool) for tool in server.tools},
        }
        for number, server in enumerate(tools.servers)
    }
    return document.encode(), _text({"schema_version": 1, "servers": servers})


_FILLER = f"{digests.PREFIX}{'0' * 64}"
_UNREAD = '[{"name": "not-read-yet", "side_effect_class": "read"}]'


def drafted(raw: bytes, *, unread: bool = False) -> bytes:
    """Return a tools.json with a placeholder for each ``package_digest`` of a stdio server that it lacks.

    ``pin`` replaces it. With ``unread`` a server without tools has a placeholder too, so that the server can be
    started and asked for them. No line moves, and what cannot be read is returned as it is.
    """
    try:
        document = report.load(raw, FILE, max_bytes=TOOLS_MAX_BYTES, nesting=NESTING)
    except errors.ToolsError:
        return raw
    places = json_places.scan(raw.decode())
    servers = document.get("servers")
    changes: dict[lines.Path, str] = {}
    for number, server in enumerate(servers if isinstance(servers, list) else []):
        if not isinstance(server, dict) or server.get("transport") not in ("stdio", "http"):
            continue
        at = ("servers", number, "transport")
        missing = []
        if server["transport"] == "stdio" and "package_digest" not in server:
            missing.append(f'"package_digest": "{_FILLER}"')
        if unread and server.get("tools", []) == []:
            if "tools" in server:
                changes[(*at[:2], "tools")] = _UNREAD
            else:
                missing.append(f'"tools": {_UNREAD}')
        changes[at] = ", ".join((json.dumps(server["transport"]), *missing))
    return places.replaced(changes).encode()


def _present(read: package.Package, tools: ToolManifest, number: int, server: Server) -> str:
    digest = package_digest(read, server.alias)
    if digest is None:
        raise errors.ToolsError(
            f"the package of server `{server.alias}` does not lie in `{directory(server.alias)}`",
            hint=f"unpack the published package of version {server.version} there, then pin",
            where=tools.where(("servers", number, "alias")),
        )
    return digest


def _text(document: Mapping[str, object]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True, ensure_ascii=True) + "\n").encode()
