"""``covenant tools``: list and call the daemon's tools; show, verify and pin those of a package's tools.json.

The verbs about a package work offline, and without root.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, terminal
from covenant.cli.daemon import client
from policy import errors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from policy.manifest.agent import Manifest
    from policy.manifest.tools.document import ToolManifest
    from policy.package import Package
    from sandbox.network.tools.guard import ToolGuard

_PACKAGE = click.argument("package", type=click.Path(path_type=Path))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


@click.group()
def tools() -> None:
    """List and call the daemon's tools; list, describe, verify and pin those of a package."""


@tools.command(
    "list",
    epilog=client.examples("covenant tools list", "covenant tools list agents/wordcount", "covenant tools list --json"),
)
@click.argument("package", type=click.Path(path_type=Path), required=False)
@_JSON
def list_tools(package: Path | None, as_json: bool) -> None:
    """List PACKAGE's tools: URI, class of side effect, and whether agent.toml grants it.

    Without PACKAGE, list the tools that the daemon has.
    """
    if package is None:
        _list_daemon(as_json=as_json)
        return
    _, manifest, declared = _read(package)
    rows = _rows(manifest, declared)
    if as_json:
        common.emit({"kind": "tools", "agent_id": manifest.agent.id, "tools": rows})
        return
    width = max((len(row["uri"]) for row in rows), default=0)
    for row in rows:
        granted = "granted" if row["granted"] else f"not granted: {row['reason']}"
        common.say(common.visible(f"{row['uri']:<{width}}  {row['side_effect_class']:<7}  {granted}"))


def _list_daemon(*, as_json: bool) -> None:
    response = client.ask("list_tools")
    tools, cursor = list(response["tools"]), response.pop("next_cursor", None)
    while cursor is not None:
        page = client.ask("list_tools", cursor=cursor)
        tools, cursor = tools + page["tools"], page.get("next_cursor")
    if as_json:
        common.emit(client.envelope("tool_list", {**response, "tools": tools}))
        return
    rows = []
    for tool in tools:
        takes = ", ".join(tool["inputSchema"].get("properties", {}))
        source, state = tool.get("source") or "daemon", tool.get("state") or "ready"
        rows.append((tool["name"], source, state, takes or "-", tool["description"]))
    terminal.print_table(("TOOL", "SOURCE", "STATE", "TAKES", "DOES"), rows, nothing="no tools")


@tools.command(
    epilog=client.examples("covenant tools call clock", """covenant tools call echo --args '{"text": "hi"}' --json""")
)
@click.argument("name")
@click.option("--args", "arguments", metavar="JSON", help="Its arguments; none otherwise.")
@click.option(
    "--package", type=click.Path(path_type=Path), help="Call a tool of this package: NAME is its URI. It needs root."
)
@click.option("--timeout", type=click.IntRange(1, 3600), help="Seconds for a tool of a package, instead of its own.")
@_JSON
@click.pass_context
def call(
    ctx: click.Context, name: str, arguments: str | None, package: Path | None, timeout: int | None, as_json: bool
) -> None:
    """Call the daemon's tool NAME. Status 1 where the tool says that it failed.

    With --package the tool's server runs in a sandbox of its own for this one call. The tool must be granted, the
    arguments must fit its schema, and the server must advertise what tools.json declares.
    """
    given = {} if arguments is None else client.document(arguments, option="--args")
    if package is not None:
        response = _call_of_package(package, name, given, timeout)
    else:
        with client.daemon() as daemon:
            response = daemon.ask("call_tool", name=name, arguments=given, extended=not as_json)
    if as_json:
        common.emit(client.envelope("tool_result", response, name=name))
    else:
        for block in response["content"]:
            shown = block["text"] if block.get("type") == "text" and isinstance(block.get("text"), str) else str(block)
            common.say(common.visible(shown, newlines=True), err=response["is_error"])
    if response["is_error"]:
        ctx.exit(common.EXIT_FAILED)


def _call_of_package(package: Path, uri: str, arguments: dict[str, Any], seconds: int | None) -> dict[str, Any]:
    """Call a tool of a package in a sandbox of its own. Returns content and is_error."""
    from covenant.session import tool_server
    from policy.manifest.tools import checks

    read, manifest, declared = _read(package)
    if findings := checks.verify(read, manifest, declared):
        raise errors.ToolsError(findings[0].message, hint=findings[0].hint, where=findings[0].where)
    guard = _guard(manifest, declared)
    try:
        result = tool_server.call(package, declared, guard, uri, arguments, seconds=seconds)
    finally:
        guard.close()
    return {"content": result.get("content", []), "is_error": result.get("isError") is True}


def _guard(manifest: Manifest, declared: ToolManifest) -> ToolGuard:
    """Return the guard of a package's calls, which writes into the supervisor's log.

    Raises:
        errors.PrivilegeError: this process is not root.
    """
    from covenant.keys import identity
    from policy import data
    from policy.rules import nine
    from sandbox.network.tools.guard import ToolGuard
    from sandbox.supervisor import open_ledger

    if os.geteuid() != 0:
        raise errors.PrivilegeError(
            "a call of a package's tool needs root: it starts a sandbox",
            hint="run it with sudo, and give COVENANT_HOME",
        )
    issuer = identity.issuer(common.home())
    state = common.state()

    def log(kind: str, fields: Mapping[str, Any]) -> None:
        with open_ledger(state) as ledger:
            whole = {"run_id": None, "operator": identity.OPERATOR, **fields}
            ledger.append(kind, whole, issuer=issuer, now_ms=int(time.time() * 1000))

    daemons = [one for one in declared.servers if one.transport == "daemon"]
    closed = {str(one.uri(tool)): "no daemon starts this call" for one in daemons for tool in one.tools}
    return ToolGuard(nine.requested(manifest, roles=data.roles()).skills, declared, log, closed=closed)


@tools.command(epilog=client.examples("covenant tools describe ./hello tool://text/count"))
@_PACKAGE
@click.argument("uri")
@_JSON
def describe(package: Path, uri: str, as_json: bool) -> None:
    """Describe the tool URI of PACKAGE. Ends with status 3 when the package has no such tool."""
    from pydantic_core import PydanticCustomError

    from policy.manifest.tools import tool_uri

    try:
        wanted = tool_uri.parse(uri)
    except PydanticCustomError as e:
        context: dict[str, Any] = dict(e.context or {})
        raise errors.UsageError(context["message"], hint=context["hint"]) from None
    _, manifest, declared = _read(package)
    row = next((row for row in _rows(manifest, declared) if row["uri"] == str(wanted)), None)
    more = _details(declared, str(wanted)) if row else {}
    if as_json:
        common.emit({"kind": "tool", "uri": str(wanted), "declared": row is not None, **(row or {}), **more})
    elif row is None:
        common.say(f"{wanted}: not in {manifest.agent.id}'s tools.json")
    else:
        common.say(str(wanted))
        for key, value in {**row, **more}.items():
            if key != "uri" and value not in (None, ""):
                common.say(f"  {key}: {common.visible(_shown(value))}")
    if row is None:
        sys.exit(common.EXIT_NO)


@tools.command(epilog=client.examples("covenant tools verify ./hello", "covenant tools verify ./hello --live"))
@_PACKAGE
@click.option("--live", is_flag=True, help="Start each server in a sandbox of its own, and compare what it says.")
@click.option("--timeout", type=click.IntRange(1, 3600), default=60, show_default=True, help="Seconds for each server.")
@_JSON
def verify(package: Path, live: bool, timeout: int, as_json: bool) -> None:
    """Verify that PACKAGE's tools are pinned, are what was pinned, and are what agent.toml grants.

    With --live a server is started when nothing else is wrong. It needs root.
    """
    from policy.manifest.tools import checks

    read, manifest, declared = _read(package)
    findings = checks.verify(read, manifest, declared)
    if live and not findings:
        from covenant.session import tool_server
        from covenant.wire import mcp_server

        findings = tool_server.verify(package, declared, seconds=timeout, of_daemon=mcp_server.advertised())
    if as_json:
        common.emit(
            {
                "kind": "tools_verified",
                "agent_id": manifest.agent.id,
                "verified": not findings,
                "tools": len(list(declared.tools())),
                "findings": [finding.to_json() for finding in findings],
            }
        )
    elif not findings:
        common.say(f"{manifest.agent.id}: {len(list(declared.tools()))} tools verified")
    for finding in () if as_json else findings:
        common.say(common.visible(f"{finding.where}: {finding.message} [{finding.code}]"))
        common.say(common.visible(f"  fix: {finding.hint}", newlines=True))
    if findings:
        sys.exit(common.EXIT_NO)


@tools.command(epilog=client.examples("covenant tools serve ./hello fs"))
@_PACKAGE
@click.argument("alias")
@click.option("--timeout", type=click.IntRange(1, 86_400), default=3600, show_default=True, help="Seconds it may run.")
@click.option("--bare", is_flag=True, help="Connect to the server itself: its calls are not checked.")
def serve(package: Path, alias: str, timeout: int, bare: bool) -> int:
    """Run PACKAGE's server ALIAS in a sandbox of its own, with this command's stdin and stdout.

    It reaches the host of its endpoint alone, and has no file of the host and no credential. An MCP client can be told
    to start this. The client sees the granted tools, and each call is checked and logged. It needs root. With --bare
    the exit status is the server's; 125 is a refusal.
    """
    from covenant.cli.run import run as running
    from covenant.cli.run.how import How
    from policy.manifest.tools import http_relay, server_package
    from sandbox import config

    read, manifest, declared = _read_draft(package) if bare else _read(package)
    started = [one for one in declared.servers if one.transport != "daemon"]
    without = {one.alias: one for one in started if not http_relay.secrets(one)}
    server = without.get(alias)
    if server is None:
        known = ", ".join(without) or "none"
        message = f"`{alias}` is no server of the package that runs without a secret in a header"
        raise errors.UsageError(message, hint=f"those servers: {known}")
    if not bare:
        from covenant.session import tool_server
        from policy.manifest.tools import checks
        from sandbox.network.tools.proxy import ToolProxy

        if findings := checks.verify(read, manifest, declared):
            raise errors.ToolsError(findings[0].message, hint=findings[0].hint, where=findings[0].where)
        proxy = ToolProxy(_guard(manifest, declared), declared, server, clock=time.monotonic)
        return tool_server.serve(package, alias, proxy, seconds=timeout)
    authorities = config.load(common.state()).tls.authorities()
    made = server_package.package_of(read, declared, server, seconds=timeout, authorities=authorities)
    name = f"covenant tools serve {package.resolve()} {alias}"
    return running.connect(made, timeout * 1000, dev=True, how=How(quiet=True), name=name)


@tools.command(epilog=client.examples("covenant tools advertised ./hello fs"))
@_PACKAGE
@click.argument("alias")
@click.option("--timeout", type=click.IntRange(1, 3600), default=60, show_default=True, help="Seconds for the server.")
@_JSON
def advertised(package: Path, alias: str, timeout: int, as_json: bool) -> None:
    """Print what PACKAGE's server ALIAS advertises, as the list `tools` of tools.json. It needs root.

    `side_effect_class` is left empty: a person reads the tool and decides what calling it may do. With --json the
    items lack it. A server of the transport daemon is not started, and needs no root.
    """
    from covenant.session import tool_server
    from policy.manifest.tools import server_package
    from sandbox.network.tools.mcp_session import McpSession

    read, _, declared = _read_draft(package)
    server = next((one for one in declared.servers if one.alias == alias), None)
    if server is None:
        known = ", ".join(one.alias for one in declared.servers) or "none"
        raise errors.UsageError(f"`{alias}` is no server of tools.json", hint=f"its servers: {known}")
    if server.transport == "daemon":
        from covenant.wire import mcp_server

        found = mcp_server.advertised()
    else:
        # The process below refuses this too, but only on the stderr of a server.
        server_package.package_of(read, declared, server, seconds=timeout)
        session = McpSession(over_http=server.transport == "http")
        found = tuple(tool_server.ask(package, alias, session, seconds=timeout).tools)
    items = [one.document() for one in found]
    if as_json:
        common.emit({"kind": "tools_advertised", "alias": alias, "tools": items})
        return
    # The class comes second: the rest of an item is long.
    drafts = [{"name": item["name"], "side_effect_class": "", **item} for item in items]
    common.say(json.dumps(drafts, indent=1))


@tools.command(epilog=client.examples("covenant tools pin ./hello"))
@_PACKAGE
@_JSON
def pin(package: Path, as_json: bool) -> None:
    """Write the digests of PACKAGE's servers into tools.json, and what each tool is now into tools.lock.json."""
    from covenant.keys import signing
    from policy.manifest.tools import document as tools_document
    from policy.manifest.tools import pins
    from sandbox.storage import atomic_file

    with signing.opened(package) as directory:
        for name in (tools_document.FILE, pins.LOCK):
            with contextlib.suppress(OSError):
                os.unlink(atomic_file.temporary_name(name), dir_fd=directory)
        read, manifest, raw = _read_raw(directory)
        document, lock = pins.pin(read, tools_document.parse(pins.drafted(raw)))
        changed = [
            name
            for name, content in ((tools_document.FILE, document), (pins.LOCK, lock))
            if _replace(directory, read, name, content)
        ]
    if as_json:
        common.emit({"kind": "tools_pinned", "agent_id": manifest.agent.id, "changed": changed})
        return
    common.say(f"wrote {' and '.join(changed)}" if changed else "nothing has changed since it was pinned")
    if changed and read.envelope is not None:
        common.say("the package's signature no longer holds: sign it again", err=True)


def _replace(directory: int, read: Package, name: str, content: bytes) -> bool:
    """Replace a file of the package atomically. Returns True if its content changed."""
    from sandbox.storage import atomic_file

    if read.files.get(name) == content:
        return False
    try:
        # The new file belongs to the pinning user, so it inherits neither a set-uid bit nor write permission for
        # others.
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode & 0o664
    except FileNotFoundError:
        mode = 0o644
    try:
        atomic_file.replace(directory, name, content, mode=mode)
    except OSError as e:
        raise errors.PackageError(f"`{name}` cannot be written: {e.strerror}", where=name) from e
    return True


def _read(path: Path | int) -> tuple[Package, Manifest, ToolManifest]:
    from policy.manifest.tools import document as tools_document

    read, manifest, raw = _read_raw(path)
    return read, manifest, tools_document.parse(raw)


def _read_draft(path: Path) -> tuple[Package, Manifest, ToolManifest]:
    """Read a package whose tools.json may lack the tools and the digest of a server, which only its server and
    ``pin`` know. A placeholder of a digest is replaced by the digest of the files.
    """
    from policy.manifest import digests
    from policy.manifest.tools import document as tools_document
    from policy.manifest.tools import pins

    read, manifest, raw = _read_raw(path)
    declared = tools_document.parse(pins.drafted(raw, unread=True))
    if any(one.package_digest is not None and digests.filler(one.package_digest) for one in declared.servers):
        declared = tools_document.parse(pins.pin(read, declared)[0])
    return read, manifest, declared


def _read_raw(path: Path | int) -> tuple[Package, Manifest, bytes]:
    """Read a package, and return it with its manifest and its unread tools.json.

    Raises:
        errors.PackageError: the package has no tools.json.
    """
    from policy.manifest import parse
    from policy.manifest.tools import document as tools_document
    from sandbox.storage import package_reader as reader

    read = reader.read(path)
    manifest = parse.parse(read.manifest)
    raw = read.files.get(tools_document.FILE)
    if raw is None:
        raise errors.PackageError(
            f"the package has no `{tools_document.FILE}`", hint="docs/tools.md says what it holds"
        )
    return read, manifest, raw


def _rows(manifest: Manifest, declared: ToolManifest) -> list[dict[str, Any]]:
    from policy.manifest.tools import checks

    rows = []
    for _, uri, side_effect in declared.tools():
        reason = checks.why_not(manifest, declared, uri, side_effect)
        rows.append(
            {"uri": str(uri), "side_effect_class": side_effect, "granted": not reason, "reason": reason or None}
        )
    return rows


def _details(declared: ToolManifest, uri: str) -> dict[str, Any]:
    """Return the fields of a tool in tools.json that a row of the list lacks."""
    from policy.manifest.tools import pins

    for server in declared.servers:
        for tool in server.tools:
            if str(server.uri(tool)) == uri:
                return {
                    "description": tool.description,
                    "transport": server.transport,
                    "command": [server.command, *server.args] if server.command is not None else None,
                    "endpoint": server.endpoint,
                    "credentials": sorted({name for _, name in server.credentials()}),
                    "timeout_ms": tool.timeout_ms,
                    "package_digest": server.package_digest,
                    "tool_digest": pins.tool_digest(tool),
                }
    native = next(tool for tool in declared.native_tools if str(tool.uri) == uri)
    return {"description": native.description, "digest": native.digest}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
