"""``tools.json``: the tools of an agent, in the format of Matrix, read strictly.

Fields and locked rules are those of seeds/matrix-agent-manifests.txt and reference/octantos-and-matrix.md, so that a
manifest of Matrix parses unchanged; where its readers let a thing pass, this one refuses: unknown and duplicate keys,
literals that look like secrets, versions that pin nothing. The digest of a package may still be a placeholder here,
which ``tools pin`` replaces and ``tools verify`` refuses (``tool_checks``).

1. bytes: size, UTF-8, JSON without duplicate keys (``policy.signing.strict_json``), nesting;
2. the document against its models;
3. the rules between keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from policy.manifest import digests, fields, hosts, lines, report, text
from policy.manifest.agent import AGENT_ID
from policy.manifest.permissions import SideEffect
from policy.manifest.tools import json_places, secret_scan, tool_uri
from policy.manifest.tools import report as tools_report

FILE = "tools.json"
MAX_BYTES = 1024 * 1024
NESTING = 32
TIMEOUT_MS = 30_000
Transport = Literal["stdio", "http", "daemon"]
# What each transport cannot do without, and what else goes with it; the rest of these keys goes with the others.
# The server of the transport `daemon` is the daemon that started the run: it has no package and no address.
TRANSPORTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stdio": (("command", "package_digest"), ("args", "env")),
    "http": (("endpoint",), ("headers",)),
    "daemon": ((), ()),
}
DID = "matrix://agent/"
NATIVE_CLASS = "chain"
"""The class of every native tool: the slot is for chain tools (Q19)."""

DESCRIPTION_CHARACTERS = 16 * 1024
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
# Variables that choose which code an interpreter or the loader runs, which is what the package's digest is for.
_STEERING = re.compile(
    r"LD_.*|DYLD_.*|GCONV_PATH|GLIBC_TUNABLES|OPENSSL_(?:CONF|ENGINES|MODULES)|NODE_OPTIONS|NODE_PATH"
    r"|NODE_REPL_EXTERNAL_MODULE|PYTHON.*|PATH|IFS|BASH_ENV|ENV|PERL5.*|RUBY.*|LUA_.*|CLASSPATH|DOTNET_STARTUP_HOOKS"
    r"|_JAVA_OPTIONS|JDK_JAVA_OPTIONS|JAVA_TOOL_OPTIONS"
)
# Headers that belong to the transport itself.
_OWN_HEADERS = frozenset({"connection", "content-length", "host", "te", "trailer", "transfer-encoding", "upgrade"})

_says = fields.says
_LIST = fields.LIST


def _prose(value: str) -> str:
    """Text of several lines that a model reads: nothing in it may be hidden from a person."""
    if len(value) > DESCRIPTION_CHARACTERS:
        raise text.wrong(
            f"the description has {len(value)} characters", f"at most {DESCRIPTION_CHARACTERS} are accepted"
        )
    text.unhidden(value.replace("\n", " ").replace("\t", " "))
    return secret_scan.prose(value)


def _schema(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """An input schema, which a model reads as well: its names and texts are held to what a description is."""
    todo: list[Any] = [value]
    while todo:
        one = todo.pop()
        if isinstance(one, dict):
            todo += [*one, *one.values()]
        elif isinstance(one, list):
            todo += one
        elif isinstance(one, str):
            _prose(one)
    return value


def _words(value: tuple[str, ...]) -> tuple[str, ...]:
    secret_scan.command_line(value)
    return value


def _word(value: str) -> str:
    """A word of a command line: no reference (others see it) and nothing that looks like a secret."""
    text.unhidden(value)
    if secret_scan.referenced(value) is not None:
        raise text.wrong(f"{text.quote(value)} is a reference in a command line", "give it to the server in env")
    return secret_scan.literal(value)


def _variable(value: str) -> str:
    """``NAME=value`` or ``$env:NAME``, which is short for ``NAME=$env:NAME``."""
    name, content = split_variable(value)
    if not _VARIABLE.fullmatch(name):
        raise text.wrong(f"{text.quote(name)} is no variable", "write NAME=$env:NAME, $env:NAME or NAME=value")
    if _STEERING.fullmatch(name):
        raise text.wrong(
            f"variable {text.quote(name)} chooses the code that runs", "leave it out: the package is pinned"
        )
    text.unhidden(content)
    if secret_scan.referenced(content) is None:
        secret_scan.literal(content, name=name)
    return value


def split_variable(value: str) -> tuple[str, str]:
    """Name and content of an item of ``env``."""
    if match := secret_scan.ENV.fullmatch(value):
        return match[1], value
    name, _, content = value.partition("=")
    return name, content


def _headers(value: dict[str, str]) -> dict[str, str]:
    seen: set[str] = set()
    for name, content in value.items():
        if not _HEADER.fullmatch(name) or name.lower() in _OWN_HEADERS:
            raise text.wrong(
                f"header {text.quote(name)} is not accepted",
                "it belongs to the transport itself, or is no name of a header",
                at=name,
            )
        if name.lower() in seen:
            raise text.wrong(f"header {text.quote(name)} is listed twice", "upper and lower case are one", at=name)
        seen.add(name.lower())
        try:
            text.unhidden(content)
            if secret_scan.referenced(content) is None:
                secret_scan.literal(content, name=name)
        except PydanticCustomError as e:
            context = e.context or {}
            raise text.wrong(str(context["message"]), str(context["hint"]), at=name) from None
    return value


def _endpoint(value: str) -> str:
    """An https URL of a host, a port and a path, and nothing else."""
    text.plain(value)
    hint = "write https://host/path or https://host:port/path"
    scheme, slashes, rest = value.partition("://")
    authority, slash, path = rest.partition("/")
    if scheme != "https" or not slashes:
        raise text.wrong(f"endpoint {text.quote(value)} is not https", hint)
    # Clients read %2e as a dot before they resolve a path.
    parts = re.sub("%2[eE]", ".", path).split("/")
    extra = not value.isascii() or set(value) & set("?#@\\ ") or "//" in f"{slash}{path}"
    if extra or {".", ".."} & set(parts):
        raise text.wrong(f"endpoint {text.quote(value)} is more than a host, a port and a path", hint)
    host, port = _authority(authority)
    if port and (not _PORT.fullmatch(port) or not 1 <= int(port) <= 65535 or int(port) == 443):
        raise text.wrong(f"port {text.quote(port)} is not accepted", "a number from 1 to 65535; leave 443 out")
    if hosts.kind(hosts.check(host)) not in ("name", "address"):
        raise text.wrong(f"endpoint {text.quote(value)} is no single host", hint)
    return secret_scan.literal(value)


def _authority(authority: str) -> tuple[str, str]:
    """Host and port; an IPv6 address stands in brackets."""
    if match := re.fullmatch(r"\[([^\[\]]*)\](?::(.*))?", authority):
        return match[1], match[2] or ("" if match[2] is None else "0")
    if authority.startswith("["):
        return authority, ""
    host, colon, port = authority.partition(":")
    return host, port or ("0" if colon else "")


_part = {
    name: text.Matching(what, tool_uri.PARTS[name][0], tool_uri.PARTS[name][1])
    for name, what in (("space", "alias"), ("name", "tool name"))
}
Alias = Annotated[str, AfterValidator(_part["space"])]
ToolName = Annotated[str, AfterValidator(_part["name"])]
Version = Annotated[str, AfterValidator(tool_uri.pinned)]
Digest = Annotated[str, AfterValidator(digests.well_formed)]
Prose = Annotated[str, AfterValidator(_prose)]
Did = Annotated[
    str,
    AfterValidator(text.Matching("agent", rf"{DID}{AGENT_ID}", f"write {DID}<id> with the id of agent.toml")),
]


class Tool(fields.Section):
    """``servers[].tools[]``: one tool that the server advertises."""

    name: Annotated[ToolName, _says("as the server advertises it")]
    description: Annotated[Prose, _says("as the server advertises it; pinned")] = ""
    side_effect_class: Annotated[SideEffect, _says("what calling it may do")]
    timeout_ms: Annotated[int, fields.whole(1, 600_000, "milliseconds for one call")] = TIMEOUT_MS
    input_schema: Annotated[
        dict[str, Any] | None, AfterValidator(_schema), _says("as the server advertises it; pinned")
    ] = None


class Server(fields.Section):
    """``servers[]``: an MCP server. The package of a stdio server lies in ``tools/<alias>/``."""

    alias: Annotated[Alias, _says("short name in tool URIs, and of the directory of its package")]
    transport: Annotated[Transport, _says("how it is spoken to")]
    version: Annotated[Version, _says("the pin in tool URIs: one release, never a tag or range")]
    tools: Annotated[
        tuple[Tool, ...], _LIST, _says("every tool that the server advertises; daemon: those that the agent is to have")
    ]
    command: Annotated[
        Annotated[str, AfterValidator(_word)] | None,
        _says("stdio: `node` or `python3` with a script of the package as first argument, or a program of it"),
    ] = None
    args: Annotated[
        tuple[Annotated[str, AfterValidator(_word)], ...],
        _LIST,
        AfterValidator(_words),
        _says("stdio: its arguments"),
    ] = ()
    env: Annotated[
        tuple[Annotated[str, AfterValidator(_variable)], ...],
        _LIST,
        _says("stdio: `NAME=$env:NAME`, `$env:NAME`, `NAME=$credential:NAME` or `NAME=value`; nothing is inherited"),
    ] = ()
    package_digest: Annotated[Digest | None, _says("stdio: digest of `tools/<alias>/`; `tools pin` writes it")] = None
    endpoint: Annotated[Annotated[str, AfterValidator(_endpoint)] | None, _says("http: an https URL")] = None
    headers: Annotated[
        dict[str, str], AfterValidator(_headers), _says("http: values are literals or whole references")
    ] = Field(default_factory=dict)

    def uri(self, tool: Tool) -> tool_uri.ToolUri:
        """The URI of one of its tools."""
        return tool_uri.ToolUri("mcp", self.alias, tool.name, self.version)

    def credentials(self) -> Iterator[tuple[lines.Path, str]]:
        """The credentials that it is given, each with its place below the server."""
        for index, item in enumerate(self.env):
            if name := secret_scan.referenced(split_variable(item)[1]):
                yield ("env", index), name
        for header, content in self.headers.items():
            if name := secret_scan.referenced(content):
                yield ("headers", header), name


class NativeTool(fields.Section):
    """``native_tools[]``: a tool of the host itself, the slot for chain tools; its class is ``chain``."""

    namespace: Annotated[Alias, _says("namespace in its URI; not `mcp`")]
    name: Annotated[ToolName, _says("name in its URI")]
    version: Annotated[Version, _says("the pin in its URI")]
    digest: Annotated[Digest, _says("digest of what the host runs for it")]
    description: Annotated[Prose, _says("for people and models")] = ""

    @property
    def uri(self) -> tool_uri.ToolUri:
        """Its URI."""
        return tool_uri.ToolUri("native", self.namespace, self.name, self.version)


class ToolManifest(fields.Section):
    """The document: the tools of one agent, made by ``parse``."""

    schema_version: Annotated[Literal[1], _says("version of this format")]
    agent: Annotated[Did, _says("`matrix://agent/<id>`: the id of agent.toml in the same package")]
    description: Annotated[Prose, _says("for people")] = ""
    allowed_side_effects: Annotated[
        tuple[SideEffect, ...],
        _LIST,
        AfterValidator(fields.unique),
        _says("the classes that any of its tools may have; absent or empty allows none"),
    ] = ()
    servers: Annotated[tuple[Server, ...], _LIST, _says("MCP servers")] = ()
    native_tools: Annotated[tuple[NativeTool, ...], _LIST, _says("tools of the host")] = ()

    _document: str = PrivateAttr(default="")

    @model_validator(mode="after")
    def _rules(self) -> ToolManifest:
        # INVARIANT: no ToolManifest exists that breaks a rule between keys, however it was made.
        found = tuple(problem for rule in RULES for problem in rule(self))
        if found:
            raise PydanticCustomError("rules", "keys contradict each other", {"problems": found})
        return self

    @property
    def agent_id(self) -> str:
        """The id that the agent's DID names."""
        return self.agent.removeprefix(DID)

    @cached_property
    def places(self) -> json_places.JsonScan:
        """Where things stand in the file; scanned when first asked for."""
        return json_places.scan(self._document)

    def where(self, path: lines.Path) -> str:
        """``tools.json:LINE:COLUMN`` of a value, or of the nearest around it that the file wrote."""
        return tools_report.point(self.places, path, key=False, file=FILE)

    def tools(self) -> Iterator[tuple[lines.Path, tool_uri.ToolUri, str]]:
        """Every tool: its place, its URI, its class."""
        for number, server in enumerate(self.servers):
            for index, tool in enumerate(server.tools):
                yield ("servers", number, "tools", index), server.uri(tool), tool.side_effect_class
        for number, native in enumerate(self.native_tools):
            yield ("native_tools", number), native.uri, NATIVE_CLASS


# --- rules between keys -----------------------------------------------------------------------------


def _transport(m: ToolManifest) -> Iterator[report.Problem]:
    """A stdio server has `command` and `package_digest`, an http server has `endpoint`; none has a key of another.
    One server is the daemon."""
    daemons = [number for number, server in enumerate(m.servers) if server.transport == "daemon"]
    for number in daemons[1:]:
        message = "a second server has the transport `daemon`"
        yield report.Problem(("servers", number, "transport"), message, "list its tools with those of the first")
    for number, server in enumerate(m.servers):
        needed, _ = TRANSPORTS[server.transport]
        for key in needed:
            if getattr(server, key) is None:
                message = f"`{key}` is missing, which the transport `{server.transport}` needs"
                hint = "covenant tools pin PACKAGE writes it" if key == "package_digest" else f"write `{key}`"
                yield report.Problem(("servers", number, key), message, hint)
        for other, (theirs, also) in TRANSPORTS.items():
            for key in (*theirs, *also):
                if other != server.transport and getattr(server, key):
                    message = f"`{key}` is written while the transport is `{server.transport}`"
                    yield report.Problem(("servers", number, key), message, f"it goes with `{other}`", at_key=True)


def _no_tool_of_a_server(m: ToolManifest) -> Iterator[report.Problem]:
    """A server has at least one tool."""
    for number, server in enumerate(m.servers):
        if not server.tools:
            hint = f"list each that it advertises: covenant tools advertised PACKAGE {server.alias} prints them"
            yield report.Problem(("servers", number, "tools"), f"server `{server.alias}` has no tool", hint)


def _aliases(m: ToolManifest) -> Iterator[report.Problem]:
    """No alias, no tool of a server, no native tool and no variable stands twice; no namespace is `mcp`."""
    yield from _twice([(("servers", n, "alias"), s.alias) for n, s in enumerate(m.servers)], "alias")
    for n, server in enumerate(m.servers):
        names = [(("servers", n, "tools", i, "name"), tool.name) for i, tool in enumerate(server.tools)]
        yield from _twice(names, f"tool of `{server.alias}`")
        variables = [(("servers", n, "env", i), split_variable(item)[0]) for i, item in enumerate(server.env)]
        yield from _twice(variables, "variable")
    natives = [(("native_tools", n, "name"), f"{t.namespace}/{t.name}") for n, t in enumerate(m.native_tools)]
    yield from _twice(natives, "native tool")
    for n, native in enumerate(m.native_tools):
        if native.namespace == tool_uri.RESERVED:
            message = f"namespace `{native.namespace}` is that of servers"
            yield report.Problem(("native_tools", n, "namespace"), message, "give another")


def _twice(items: Sequence[tuple[lines.Path, str]], what: str) -> Iterator[report.Problem]:
    seen: set[str] = set()
    for path, item in items:
        if item in seen:
            yield report.Problem(path, f"{what} {text.quote(item)} is listed twice", "keep one")
        seen.add(item)


RULES = (_transport, _no_tool_of_a_server, _aliases)


def parse(raw: bytes) -> ToolManifest:
    """Parse a tool manifest from the bytes that were verified.

    Raises:
        errors.ToolsError: with every finding in ``details["errors"]``, in the order of the file.
    """
    # (1) bytes
    document = tools_report.load(raw, FILE, max_bytes=MAX_BYTES, nesting=NESTING)

    # (2) models, (3) rules
    try:
        manifest = ToolManifest.model_validate(document)
    except ValidationError as e:
        raise tools_report.refusal(e, raw.decode(), FILE, ToolManifest) from None
    manifest._document = raw.decode()  # noqa: SLF001 - its own module
    return manifest


def served(files: Mapping[str, bytes]) -> frozenset[str]:
    """Return the URIs of the tools that the servers of a package's tools.json have; none without that file.

    Raises:
        errors.ToolsError: the file is malformed.
    """
    raw = files.get(FILE)
    if raw is None:
        return frozenset()
    return frozenset(
        str(one.uri(tool)) for one in parse(raw).servers for tool in one.tools if tool.input_schema is not None
    )
