"""Check a package's tools without starting one: grants, digests, pins, programs.

``verify`` asks every question, and no finding is yes; ``notes`` are those that ``manifest check`` asks as well. A tool
may be called when its URI and its class are granted in agent.toml and its class is allowed in tools.json.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import Struct
from pydantic_core import PydanticCustomError

from policy import errors, package, symlinks
from policy.manifest import digests, hosts, lines, text
from policy.manifest.agent import Manifest
from policy.manifest.tools import document as tool_manifests
from policy.manifest.tools import http_relay, server_variables, tool_uri
from policy.manifest.tools import pins as tools_pins
from policy.manifest.tools.document import Server, ToolManifest
from policy.signing import strict_json

# Every answer that is no, and what it means.
CODES = {
    "agent_mismatch": "the DID names another id than agent.toml",
    "filler_digest": "a digest is a placeholder",
    "package_missing": "`tools/<alias>/` is not there",
    "package_changed": "its files are not those of `package_digest`",
    "link_outside": "a link of `tools/<alias>/` leaves it, which runs alone",
    "fetches_code": "the command fetches what it runs",
    "program_outside": "the command is no program of the package",
    "not_pinned": "a server or tool has no pin: `covenant tools pin`",
    "pin_changed": "it is another than when it was pinned",
    "pin_unused": "it was pinned and is declared no longer",
    "tool_unknown": "agent.toml grants a tool that is not declared",
    "class_not_allowed": "`allowed_side_effects` lacks the class of a granted tool",
    "class_not_granted": "agent.toml grants a tool and not its class",
    "credential_not_granted": "agent.toml does not grant a credential of a server",
    "host_not_granted": "agent.toml does not grant the host of an http server by name and port",
    "credential_not_given": "`env` names a credential, and the command is no script of node or python3",
}

GRANT_CODES = frozenset({"credential_not_granted", "host_not_granted"})
"""The findings whose fix is a grant of agent.toml that no tool manifest can say."""

INTERPRETERS = ("node", "python3")
# Programs that fetch what they run, and the words between them and the name of what they fetch.
FETCHERS = frozenset(
    {"npx", "bunx", "pnpx", "npm", "pnpm", "yarn", "bun", "deno"}
    | {"uvx", "uv", "pipx", "pip", "pip3"}
    | {"docker", "podman", "nerdctl", "go", "cargo", "gem", "nix", "curl", "wget"}
)
_PACKAGE_JSON_BYTES = 1024 * 1024
_STEPS = frozenset({"dlx", "exec", "x", "run", "tool", "install", "i", "create"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer that is no."""

    code: str
    message: str
    hint: str
    where: str

    def to_json(self) -> dict[str, Any]:
        """The finding as a document."""
        return {"code": self.code, "message": self.message, "hint": self.hint or None, "where": self.where}


class _Case(Struct, frozen=True):
    read: package.Package
    manifest: Manifest
    tools: ToolManifest

    def no(self, code: str, path: lines.Path, message: str, hint: str) -> Finding:
        return Finding(code, message, hint, self.tools.where(path))

    def starts(self, server: Server, program: str) -> bool:
        return file_of(self.read, server, program) is not None

    def not_granted(self, code: str, dotted: str, message: str, hint: str) -> Finding:
        return Finding(code, message, hint, self.manifest.point(dotted))


def verify(read: package.Package, manifest: Manifest, tools: ToolManifest) -> tuple[Finding, ...]:
    """Check that the tools of a package are as described, pinned, and granted by its manifest.

    1. the agent is the one of agent.toml;
    2. the digests are digests, and those of the files in the package;
    3. the program of a server lies in its package;
    4. the tools and their pins are the same, one to one;
    5. what agent.toml grants exists, with its class allowed and granted;
    6. the credentials that a server is given are granted, and its program can be given them;
    7. the hosts of servers of the transport http are granted.

    Raises:
        errors.ToolsError: the pins cannot be read.
    """
    case = _Case(read, manifest, tools)
    return tuple(
        finding
        for question in (_agent, _digests, _programs, _pins, _grants, _credentials, _endpoints)
        for finding in question(case)
    )


def notes(read: package.Package, manifest: Manifest) -> list[str]:
    """Return the findings of ``manifest check`` on tools: 1, 5 and 6, or that there is nothing to look at."""
    raw = read.files.get(tool_manifests.FILE)
    if raw is None:
        skills = manifest.permissions.skills.allow
        return [f"skills are granted and the package has no `{tool_manifests.FILE}`"] if skills else []
    try:
        tools = tool_manifests.parse(raw)
    except errors.ToolsError as e:
        return [f"{e}; covenant tools verify refuses that"]
    case = _Case(read, manifest, tools)
    found = [finding for question in (_agent, _grants, _credentials) for finding in question(case)]
    return [f"{finding.message} ({finding.where})" for finding in found]


def why_not(manifest: Manifest, tools: ToolManifest, uri: tool_uri.ToolUri, side_effect: str) -> str:
    """Why a declared tool may not be called, or the empty string."""
    skills = manifest.permissions.skills
    if str(uri) not in skills.allow:
        return "its URI is not in [permissions.skills] allow"
    if side_effect not in skills.side_effects:
        return f"class `{side_effect}` is not in [permissions.skills] side_effects"
    if side_effect not in tools.allowed_side_effects:
        return f"class `{side_effect}` is not in allowed_side_effects"
    return ""


def _agent(case: _Case) -> Iterator[Finding]:
    # (1) identity
    wanted = case.manifest.agent.id
    if case.tools.agent_id != wanted:
        message = f"agent {text.quote(case.tools.agent)} is not agent `{wanted}` of agent.toml"
        yield case.no("agent_mismatch", ("agent",), message, f"write {tool_manifests.DID}{wanted}")


def _digests(case: _Case) -> Iterator[Finding]:
    # (2) digests
    for number, server in enumerate(case.tools.servers):
        if server.package_digest is not None:
            yield from _package(case, number, server, server.package_digest)
    for number, native in enumerate(case.tools.native_tools):
        if reason := digests.filler(native.digest):
            message = f"the digest of `{native.uri}` is a placeholder: {reason}"
            yield case.no("filler_digest", ("native_tools", number, "digest"), message, "give the digest of what runs")


def _package(case: _Case, number: int, server: Server, stated: str) -> Iterator[Finding]:
    path = ("servers", number, "package_digest")
    inside = tools_pins.directory(server.alias)
    present = tools_pins.package_digest(case.read, server.alias)
    if reason := digests.filler(stated):
        message = f"the package digest of server `{server.alias}` is a placeholder: {reason}"
        yield case.no("filler_digest", path, message, f"put the package into {inside} and run covenant tools pin")
    if present is None:
        message = f"the package of server `{server.alias}` does not lie in `{inside}`"
        yield case.no("package_missing", path, message, f"unpack version {server.version} there, then pin")
    elif present != stated and not reason:
        message = f"the files in `{inside}` have the digest {present}"
        yield case.no("package_changed", path, message, "look at what changed, then run covenant tools pin")
    try:
        links = {name.removeprefix(inside): link for name, link in case.read.links.items() if name.startswith(inside)}
        files = [name.removeprefix(inside) for name in case.read.files if name.startswith(inside)]
        symlinks.check_package(links, files)
    except errors.PackageError as e:
        message = f"the package of server `{server.alias}` cannot run alone: {e.message}"
        yield case.no("link_outside", path, message, e.hint)


class Program(Struct, frozen=True):
    """The program that a stdio server starts: its runtime, its name as written, and its arguments."""

    runtime: str
    program: str
    arguments: tuple[str, ...]


def file_of(read: package.Package, server: Server, program: str) -> str | None:
    """Return the file of a server's package that a name in it leads to, below ``tools/ALIAS/``; None for none."""
    inside = tools_pins.directory(server.alias)
    found = read.file_at(inside + program.removeprefix("./"))
    return found.removeprefix(inside) if found is not None and found.startswith(inside) else None


def program_of(server: Server) -> Program | None:
    """Return the program of a server's package that its command starts; None where it is none by its name."""
    if server.command is None:
        return None
    # A name without a slash is looked up in PATH: a file of the package that is named like it is not what runs.
    bare = "/" not in server.command
    if not bare:
        return None if server.command.startswith("-") else Program("rust-bin", server.command, server.args)
    # An interpreter takes `-c` for an option, also where a file has that name; without a script it runs its input.
    if server.command not in INTERPRETERS or not server.args or server.args[0].startswith("-"):
        return None
    return Program(server.command, server.args[0], server.args[1:])


def example(read: package.Package, alias: str) -> str:
    """Return ``command`` and ``args`` for a server's package: what its npm packages call their programs, or a form."""
    inside = tools_pins.directory(alias)
    own = _json_object(read, f"{inside}package.json")
    wanted = own.get("dependencies")
    places = [f"node_modules/{name}/" for name in wanted] if isinstance(wanted, dict) else []
    for place in ("", *places):
        named = _json_object(read, f"{inside}{place}package.json").get("bin")
        for script in sorted(map(str, named.values())) if isinstance(named, dict) else [named]:
            path = f"{place}{script}".replace("/./", "/").removeprefix("./")
            if isinstance(script, str) and f"{inside}{path}" in read.files:
                return f'"command": "node", "args": [{text.toml(path)}]'
    return '"command": "node", "args": ["dist/index.js"] or "command": "./server"'


def _json_object(read: package.Package, path: str) -> dict[str, Any]:
    """Return the JSON object of a file; empty where it is none."""
    try:
        found = strict_json.loads(read.files.get(path, b""), max_bytes=_PACKAGE_JSON_BYTES)
    except strict_json.MalformedJsonError:
        return {}
    return found if isinstance(found, dict) else {}


def _programs(case: _Case) -> Iterator[Finding]:
    # (3) programs
    for number, server in enumerate(case.tools.servers):
        if server.command is None:
            continue
        inside = tools_pins.directory(server.alias)
        name = server.command.rpartition("/")[2]
        hint = f"unpack the package into {inside} and start its own program, such as {example(case.read, server.alias)}"
        bare = name == server.command
        if name in FETCHERS and (bare or not case.starts(server, server.command)):
            what = _fetched(server)
            message = f"command {text.quote(server.command)} fetches what it runs{what}"
            yield case.no("fetches_code", ("servers", number, "command"), message, hint)
            continue
        started = program_of(server)
        if started is None or not case.starts(server, started.program):
            script = bare and name in INTERPRETERS
            program = (server.args[0] if server.args else "") if script else server.command
            message = f"{text.quote(program or name)} is no program of `{inside}`"
            yield case.no("program_outside", ("servers", number, "command"), message, hint)


def _fetched(server: Server) -> str:
    """Return the package that a fetching command fetches, as its arguments name it."""
    word = next((a for a in server.args if not a.startswith("-") and a not in _STEPS), "")
    if not word:
        return ""
    # npm's `@scope/name@1.2.3`, pip's `name==1.2.3`, an image's `name:1.2.3`.
    version = re.split(r"(?<=.)@|==|(?<=[^/]):(?=[^/]*$)", word)[1:]
    try:
        pinned = bool(version) and bool(tool_uri.pinned(version[-1]))
    except PydanticCustomError:
        pinned = False
    if not pinned:
        return f": {text.quote(word)} is unpinned"
    same = version[-1] == server.version
    return f": {text.quote(word)}" + ("" if same else f", another version than `{server.version}`")


def _pins(case: _Case) -> Iterator[Finding]:
    # (4) pins
    raw = case.read.files.get(tools_pins.LOCK)
    if raw is None:
        if case.tools.servers:
            message = f"the package has no `{tools_pins.LOCK}`"
            yield case.no("not_pinned", ("servers",), message, "run covenant tools pin and look at what it writes")
        return
    lock = tools_pins.parse(raw)
    for number, server in enumerate(case.tools.servers):
        pinned = lock.servers.get(server.alias)
        if pinned is None:
            message = f"server `{server.alias}` has no pin"
            yield case.no("not_pinned", ("servers", number), message, "run covenant tools pin")
        else:
            yield from _pinned(case, number, server, pinned)
    declared = {server.alias for server in case.tools.servers}
    for alias in sorted(set(lock.servers) - declared):
        yield case.no("pin_unused", ("servers",), f"server `{alias}` was pinned and is not declared", _LOOK)


_LOOK = "look at what changed, then run covenant tools pin"


def _pinned(case: _Case, number: int, server: Server, pins: tools_pins.ServerPins) -> Iterator[Finding]:
    for key in ("version", "package_digest"):
        if getattr(pins, key) != getattr(server, key):
            message = f"the {key} of server `{server.alias}` is another than when it was pinned"
            yield case.no("pin_changed", ("servers", number, key), message, _LOOK)
    for index, tool in enumerate(server.tools):
        at = ("servers", number, "tools", index)
        if tool.name not in pins.tools:
            yield case.no("not_pinned", at, f"tool `{server.uri(tool)}` has no pin", _LOOK)
        elif pins.tools[tool.name] != tools_pins.tool_digest(tool):
            message = f"the description or input schema of `{server.uri(tool)}` is another than when it was pinned"
            yield case.no("pin_changed", at, message, _LOOK)
    for name in sorted(set(pins.tools) - {tool.name for tool in server.tools}):
        message = f"tool `{name}` of server `{server.alias}` was pinned and is not declared"
        yield case.no("pin_unused", ("servers", number, "tools"), message, _LOOK)


def _grants(case: _Case) -> Iterator[Finding]:
    # (5) grants
    skills = case.manifest.permissions.skills
    declared = {str(uri): side_effect for _, uri, side_effect in case.tools.tools()}
    for index, uri in enumerate(skills.allow):
        dotted = f"permissions.skills.allow[{index}]"
        if uri not in declared:
            near = text.nearest(uri, tuple(declared))
            hint = f"did you mean {near}?" if near else "covenant tools list shows what it has"
            yield case.not_granted("tool_unknown", dotted, f"tool {text.quote(uri)} is not in tools.json", hint)
            continue
        side_effect = declared[uri]
        if side_effect not in case.tools.allowed_side_effects:
            message = f"tool `{uri}` is of class `{side_effect}`, which allowed_side_effects leaves out"
            yield case.not_granted("class_not_allowed", dotted, message, "absent or empty allows nothing")
        if side_effect not in skills.side_effects:
            message = f"tool `{uri}` is granted without its class `{side_effect}`"
            hint = f'add "{side_effect}" to side_effects of [permissions.skills]'
            yield case.not_granted("class_not_granted", dotted, message, hint)


def _credentials(case: _Case) -> Iterator[Finding]:
    # (6) credentials
    granted = case.manifest.permissions.credentials.grants
    for number, server in enumerate(case.tools.servers):
        for path, name in server.credentials():
            if name not in granted:
                message = f"server `{server.alias}` is given credential `{name}`, which agent.toml does not grant"
                hint = f'add "{name}" to grants of [permissions.credentials]'
                yield case.no("credential_not_granted", ("servers", number, *path), message, hint)
        yield from _not_given(case, number, server)


def _endpoints(case: _Case) -> Iterator[Finding]:
    # (7) endpoints
    for number, server in enumerate(case.tools.servers):
        if server.transport != "http":
            continue
        host, port, _ = http_relay.address(server)
        if not _is_granted(case.manifest, host, port):
            message = f"server `{server.alias}` is at {host} port {port}, which agent.toml does not grant"
            hint = f'write [[permissions.network]] with host = "{host}", ports = [{port}], protocol = "tls"'
            yield case.no("host_not_granted", ("servers", number, "endpoint"), message, hint)


def _is_granted(manifest: Manifest, host: str, port: int) -> bool:
    """Whether the manifest grants an exact name by TLS. What a role leaves of it is asked when the run starts."""
    if hosts.kind(host) != "name":
        return False
    entries = [one for one in manifest.permissions.network if not one.asked and one.protocol in ("tls", "tcp")]
    if not manifest.permissions.network:
        return manifest.resources.network == "full" or (manifest.resources.network != "off" and port == 443)
    names = (host, *(f"*.{host.split('.', n)[-1]}" for n in range(1, host.count(".") + 1)))
    return any(one.host in names and any(a <= port <= b for a, b in one.ports) for one in entries)


def _not_given(case: _Case, number: int, server: Server) -> Iterator[Finding]:
    started = program_of(server)
    if started is None or started.runtime in server_variables.STARTERS:
        return
    if case.starts(server, started.program):  # else it is no program at all
        for path, _ in server.credentials():
            message = server_variables.message(server)
            yield case.no("credential_not_given", ("servers", number, *path), message, server_variables.HINT)
