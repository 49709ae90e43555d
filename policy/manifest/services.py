"""``[services]``: models, searches, pages, agents and telemetry, which the agent has at its own service gate.

``[spawn]``: agents that it may start, and rights that it may give to them.

``[[publish]]``: ports of the agent that this host reaches, each at one place. Absent, nothing, and there is no gate.

Sources: design.md ("What an agent may ask"), docs/adr/0084.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator

from policy.manifest import fields, hosts, paths, text
from policy.manifest.permissions import HOST_NAME, CredentialName, HostPath, Protocol
from policy.ssh import wire

says, whole = fields.says, fields.whole

PROVIDER: Final = r"[a-z][a-z0-9_-]{0,31}"
PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}\*?|\*"
_U31 = 2**31 - 1
# Results of one search, at most.
RESULTS: Final = 20
# The owner of the providers' keys in the vault: no agent may have this id.
PROVIDERS_ID: Final = "covenant-providers"

ProviderName = Annotated[
    str, AfterValidator(text.Matching("provider", PROVIDER, "the name of a table of providers.toml: a-z 0-9 _ -"))
]
ModelPattern = Annotated[
    str,
    AfterValidator(text.Matching("model", PATTERN, "a model's name, or the beginning of one with one `*` at its end")),
]


class ModelsEntry(fields.Section):
    """One item of ``services.models.allow``: models of one provider."""

    provider: Annotated[ProviderName, says("name of a provider of the operator's providers.toml")]
    models: Annotated[
        tuple[ModelPattern, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says('names of models; `"claude-*"` is every model whose name begins so'),
    ]


def _unique_providers(items: tuple[ModelsEntry, ...]) -> tuple[ModelsEntry, ...]:
    fields.unique(tuple(item.provider for item in items))
    return items


class Models(fields.Section):
    """``[services.models]``: models behind ``http://models.covenant``. The provider's key stays outside the sandbox."""

    allow: Annotated[
        tuple[ModelsEntry, ...],
        fields.LIST,
        AfterValidator(_unique_providers),
        says('`{ provider = "NAME", models = ["PATTERN", ...] }`, one for each provider'),
    ] = ()
    requests_per_minute: Annotated[int | None, whole(1, _U31, "requests in any 60 seconds")] = None
    tokens_per_hour: Annotated[
        int | None, whole(1, _U31, "tokens in and out in any hour; the request that crosses it is the last")
    ] = None
    max_output_tokens: Annotated[int | None, whole(1, _U31, "tokens of one answer")] = None

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: the section allows a model, and so does each of its items."""
        for index, one in enumerate(self.allow):
            if not one.models:
                yield f"services.models.allow[{index}].models", "models is an empty list", 'write models = ["NAME"]'
        if not self.allow:
            yield "services.models", "[services.models] allows no model", "write allow, or take the section out"


class Search(fields.Section):
    """``[services.search]``: searches of the web at ``http://search.covenant``, by the operator's providers."""

    allow: Annotated[
        tuple[ProviderName, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("names of providers of the operator's providers.toml, of kind `brave`, `serpapi`, `searxng` or `mock`"),
    ] = ()
    requests_per_minute: Annotated[int | None, whole(1, _U31, "searches in any 60 seconds")] = None
    max_results: Annotated[int | None, whole(1, RESULTS, "results of one search")] = None


def fetched(value: str) -> str:
    """Accept a name, or ``*.`` and a name.

    Raises:
        PydanticCustomError: it is an address, a block, or no name.
    """
    if hosts.kind(value) not in ("name", "wildcard"):
        raise text.wrong(f"host {text.quote(value)} is no name", "pages are fetched by name: write its name")
    return hosts.check(value)


class Fetch(fields.Section):
    """``[services.fetch]``: the text of pages at ``http://fetch.covenant``, by https and by GET alone."""

    hosts: Annotated[
        tuple[Annotated[str, AfterValidator(fetched)], ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("exact names, or `*.name` (two labels or more after the star)"),
    ] = ()
    requests_per_minute: Annotated[int | None, whole(1, _U31, "pages in any 60 seconds")] = None


# As an agent's id (policy.manifest.agent), in a path of a URL: none that is dots alone.
AGENT: Final = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}"
AGENTS: Final = 256
AgentName = Annotated[str, AfterValidator(text.Matching("agent", AGENT, "the id of an agent: A-Z a-z 0-9 _ . -"))]


Signal = Literal["traces", "metrics", "logs"]


class Agents(fields.Section):
    """``[services.agents]``: agents of the daemon at ``http://agents.covenant/AGENT``, over A2A."""

    allow: Annotated[
        tuple[AgentName, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("ids of agents that it may send messages to"),
    ] = ()


class Telemetry(fields.Section):
    """``[services.telemetry]``: OTLP of the agent at ``http://telemetry.covenant``, for the operator's collector."""

    signals: Annotated[
        tuple[Signal, ...], fields.LIST, AfterValidator(fields.unique), says("`traces`, `metrics`, `logs`")
    ] = ()
    bytes_per_minute: Annotated[int | None, whole(1, _U31, "bytes of requests in any 60 seconds, unpacked")] = None
    requests_per_minute: Annotated[int | None, whole(1, _U31, "requests in any 60 seconds")] = None


# Keys of one service: an agent offers each of them to a host, and hosts end a connection after six.
SSH_KEYS: Final = 4
SSH_HOSTS: Final = 16
_SSH_KEY_HINT: Final = "write a line of `ssh-keyscan HOST` without the name, such as `ssh-ed25519 AAAA...`"


def ssh_host(value: str) -> str:
    """Accept a name or an address.

    Raises:
        PydanticCustomError: it is a pattern or a block.
    """
    if hosts.kind(value) not in ("name", "address"):
        raise text.wrong(f"host {text.quote(value)} is no single host", "write one name: it is the key that decides")
    return hosts.check(value)


def ssh_key(value: str) -> str:
    """Accept a public key of a host, as its type and its base64.

    Raises:
        PydanticCustomError: it is none, or of a type that is not supported.
    """
    try:
        wire.read_line(value)
    except wire.WireError as e:
        raise text.wrong(f"{text.quote(value[:64])} is no key of a host: {e}", _SSH_KEY_HINT) from e
    return value


class SshHost(fields.Section):
    """One item of ``hosts``: a host at which logins are signed, known by its keys."""

    name: Annotated[str, AfterValidator(ssh_host), says("name of the host, for people and for the log")]
    keys: Annotated[
        tuple[Annotated[str, AfterValidator(ssh_key)], ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("public keys of the host, as `ssh-ed25519 AAAA...`; also ecdsa-sha2-nistp256, -384, -521 and ssh-rsa"),
    ]


class SshAgentEntry(fields.Section):
    """One ``[[services.ssh_agent]]``: a private key that signs logins at hosts, and never enters the sandbox."""

    secret: Annotated[
        CredentialName, says("secret of the vault with the private key, in the form of OpenSSH or PKCS#8")
    ]
    hosts: Annotated[
        tuple[SshHost, ...], fields.LIST, says('`{ name = "git.example.org", keys = ["ssh-ed25519 AAAA..."] }`')
    ]

    def problems(self, at: str) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: a key has hosts, a few, each once, and each host has keys."""
        if not 0 < len(self.hosts) <= SSH_HOSTS:
            yield f"{at}.hosts", f"{len(self.hosts)} hosts are named", f"name from 1 to {SSH_HOSTS}"
        for index, host in enumerate(self.hosts):
            if not host.keys:
                yield f"{at}.hosts[{index}].keys", "keys is an empty list", "write what `ssh-keyscan HOST` shows"
            if host.name in {one.name for one in self.hosts[:index]}:
                yield f"{at}.hosts[{index}].name", f"host {text.quote(host.name)} is named twice", "name it once"


class Services(fields.Section):
    """``[services]``: what the agent reaches at its own gateway."""

    models: Models = Models()
    search: Search = Search()
    fetch: Fetch = Fetch()
    agents: Agents = Agents()
    telemetry: Telemetry = Telemetry()
    ssh_agent: Annotated[tuple[SshAgentEntry, ...], fields.LIST] = ()

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: a section that is written grants something."""
        if "models" in self.model_fields_set:
            yield from self.models.problems()
        if "search" in self.model_fields_set and not self.search.allow:
            yield "services.search", "[services.search] allows no provider", "write allow, or take the section out"
        if "fetch" in self.model_fields_set and not self.fetch.hosts:
            yield "services.fetch", "[services.fetch] allows no host", "write hosts, or take the section out"
        if "agents" in self.model_fields_set and not 0 < len(self.agents.allow) <= AGENTS:
            message = f"[services.agents] allows {len(self.agents.allow)} agents"
            yield "services.agents", message, f"name from 1 to {AGENTS} agents, or take the section out"
        if "telemetry" in self.model_fields_set and not self.telemetry.signals:
            message, mend = "[services.telemetry] names no signal", "write signals, or take the section out"
            yield "services.telemetry", message, mend
        if len(self.ssh_agent) > SSH_KEYS:
            yield "services.ssh_agent", f"{len(self.ssh_agent)} keys are granted", f"grant at most {SSH_KEYS}"
        for index, one in enumerate(self.ssh_agent):
            yield from one.problems(f"services.ssh_agent[{index}]")
            if one.secret in {each.secret for each in self.ssh_agent[:index]}:
                at, message = f"services.ssh_agent[{index}].secret", f"secret `{one.secret}` is written twice"
                yield at, message, "write its hosts in one table"

    def ssh_problems(self, programs: Collection[object], filesystem: str) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: an ssh-agent has a client, and a writable place for its socket."""
        if self.ssh_agent and not programs:
            message = "[[services.ssh_agent]] is written, and no program is granted"
            yield "services.ssh_agent", message, 'grant the client: [permissions.executables] allow = ["/usr/bin/ssh"]'
        if self.ssh_agent and filesystem == "read-only-package":
            message = "[[services.ssh_agent]] is written, and there is no place for its socket"
            yield "services.ssh_agent", message, 'write sandbox.filesystem = "ephemeral"'


UNIX: Final = "unix:"
LOOPBACK: Final = "127.0.0.1:"
# A path of a socket that connect(2) takes (unix(7), sun_path), without the NUL.
PATH_BYTES: Final = 107
# A lower port is a service of the host.
FIRST_PORT: Final = 1024
ENTRIES: Final = 8
# From 1024 to 65535.
_FOUR = "102[4-9]|10[3-9][0-9]|1[1-9][0-9]{2}|[2-9][0-9]{3}"
_FIVE = "[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]"
PORT: Final = f"(?:{_FOUR}|{_FIVE})"
_LOOPBACK = re.compile(rf"127\.0\.0\.1:{PORT}")
_RULE = f"write {UNIX}/PATH, or {LOOPBACK}PORT with a port from {FIRST_PORT}"


def place(value: str) -> str:
    """Accept ``unix:`` and an absolute path of at most 107 bytes, or ``127.0.0.1:`` and a port.

    Raises:
        PydanticCustomError: it is neither.
    """
    if value.startswith(UNIX):
        path = paths.absolute(value.removeprefix(UNIX))
        if len(path.encode()) > PATH_BYTES:
            raise text.wrong(
                f"path {text.quote(path)} has {len(path.encode())} bytes", f"a socket's has at most {PATH_BYTES}"
            )
    elif not _LOOPBACK.fullmatch(value):
        raise text.wrong(f"{text.quote(value)} is no place to publish a port at", _RULE)
    return value


class PublishEntry(fields.Section):
    """One ``[[publish]]``: a TCP port of the agent, and where this host reaches it."""

    port: Annotated[int, whole(1, 65535, "TCP port that the agent listens on, at 0.0.0.0 or its own address")]
    to: Annotated[
        str,
        AfterValidator(place),
        says(
            '`"unix:/PATH"`, a socket in a directory of the caller (mode 0600), or `"127.0.0.1:PORT"`, '
            "which the operator's configuration must allow"
        ),
    ]


def unique_ports(items: tuple[PublishEntry, ...]) -> tuple[PublishEntry, ...]:
    """No port and no place twice.

    Raises:
        PydanticCustomError: one is written twice.
    """
    fields.unique(tuple(item.port for item in items))
    fields.unique(tuple(item.to for item in items))
    return items


OnParentExit = Literal["terminate", "wind-down", "adopt"]


class MayGrantEntry(fields.Section):
    """One item of ``spawn.may_grant``: a destination, a path or a secret."""

    host: Annotated[
        Annotated[str, AfterValidator(hosts.check)] | None,
        says("exact name, `*.name`, address or CIDR block, with ports and protocol"),
    ] = None
    ports: Annotated[
        tuple[tuple[int, int], ...], BeforeValidator(hosts.port_ranges), says("as in a network entry")
    ] = ()
    protocol: Annotated[Protocol | None, says("as in a network entry")] = None
    read: Annotated[HostPath | None, says("host path")] = None
    secret: Annotated[CredentialName | None, says("name of a secret of the child in the vault")] = None

    def problems(self, at: str) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: one right, whole."""
        rights = [name for name in ("host", "read", "secret") if getattr(self, name) is not None]
        if len(rights) != 1:
            message = f"a right of spawn.may_grant has {' and '.join(rights) or 'nothing'}"
            yield at, message, "write one of host, read and secret in each item"
        if (self.host is None) != (not self.ports) or (self.host is None) != (self.protocol is None):
            message = "host, ports and protocol of a right go together"
            yield at, message, '{ host = "NAME", ports = [443], protocol = "tls" }'
        if self.host == HOST_NAME:
            yield f"{at}.host", f"`{HOST_NAME}` cannot be given to children", "grant it in the child's own manifest"


class Spawn(fields.Section):
    """``[spawn]``: agents that this agent may start."""

    allowed: Annotated[bool, says("whether it may start agents")] = False
    max_depth: Annotated[int, whole(0, 32, "generations that may exist below it")] = 0
    max_descendants: Annotated[int, whole(0, 10_000, "live descendants at one time, the whole tree")] = 0
    on_parent_exit: Annotated[OnParentExit, says("what becomes of it when its parent ends")] = "terminate"
    may_grant: Annotated[
        tuple[MayGrantEntry, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says(
            'rights that it may give to its children and has not itself: `{ host = "NAME", ports = [443], protocol = '
            '"tls" }`, `{ read = "/PATH" }` or `{ secret = "NAME" }` each'
        ),
    ] = ()

    def problems(self) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: ``allowed`` goes with limits of at least 1, its absence with nothing."""
        for key in ("max_depth", "max_descendants"):
            value: int = getattr(self, key)
            if self.allowed and value == 0:
                message = f"spawn.allowed is `true` while {key} is `0`"
                yield f"spawn.{key}", message, f"give {key} at least 1"
            elif value and not self.allowed:
                message = f"{key} is `{value}` while spawn.allowed is `false`"
                yield f"spawn.{key}", message, "write allowed = true, or 0"
        if self.may_grant and not self.allowed:
            message = "may_grant is written while spawn.allowed is `false`"
            yield "spawn.may_grant", message, "write allowed = true, or take it out"
        for index, one in enumerate(self.may_grant):
            yield from one.problems(f"spawn.may_grant[{index}]")
