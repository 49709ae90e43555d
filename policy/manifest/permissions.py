"""The ten domains below ``[permissions]``: filesystem, network, syscalls, executables, credentials, skills.

Identity stands in ``[agent]``, resources, spawning and lifetime in sections of their own (design.md, One manifest).
An absent list grants nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator

from policy.manifest import fields, hosts, paths, process, text
from policy.manifest.tools import skill_rules, tool_uri

says = fields.says
HostPath = Annotated[str, AfterValidator(paths.absolute)]
PathList = Annotated[tuple[HostPath, ...], fields.LIST, AfterValidator(fields.unique)]
Protocol = Literal["tls", "tcp", "udp"]
OnDeny = Literal["deny", "ask"]
# A client waits for a name as long as its resolver does: 4 tries of 30 s (docs/approvals.md).
DEFAULT_ASK_SECONDS: Final = 60
MAX_ASK_SECONDS: Final = 110
AskSeconds = Annotated[int, fields.whole(1, MAX_ASK_SECONDS, 'seconds that it is held at most, with on_deny = "ask"')]
SideEffect = Literal["read", "write", "network", "shell", "chain"]


_NAME = r"[a-z0-9][a-z0-9-]{0,31}"
VOLUME_NAME = re.compile(_NAME)
VOLUME_PATTERN = f"volume:{_NAME}:"
VOLUME = "volume:"
_VOLUME_HINT = 'write "volume:NAME:/place", where NAME is 1 to 32 of a-z, 0-9 and `-`'


class VolumeGrant(NamedTuple):
    """A volume by its name, and where the agent finds it."""

    name: str
    place: str

    @property
    def grant(self) -> str:
        """As it stands in grants."""
        return f"{self.name}:{self.place}"

    @classmethod
    def of(cls, grant: str) -> VolumeGrant:
        """Return the volume of a grant."""
        name, _, place = grant.partition(":")
        return cls(name, place)


def volume_name(value: str) -> str:
    """The name of a volume, as it is.

    Raises:
        PydanticCustomError: no volume has it.
    """
    if not VOLUME_NAME.fullmatch(value):
        raise text.wrong(f"{text.quote(value)} is no name of a volume", "1 to 32 of a-z, 0-9 and `-`, the first no `-`")
    return value


def path_or_volume(value: str) -> str:
    """A host path, or a volume with its place, as it is.

    Raises:
        PydanticCustomError: it is neither.
    """
    text.plain(value)
    if not value.startswith(VOLUME):
        return paths.absolute(value)
    name, colon, place = value.removeprefix(VOLUME).partition(":")
    if not colon or not VOLUME_NAME.fullmatch(name):
        raise text.wrong(f"{text.quote(value)} is no volume with its place", _VOLUME_HINT)
    paths.absolute(place)
    return value


class Filesystem(fields.Section):
    """``[permissions.filesystem]``: host paths; a directory covers everything below it."""

    read: Annotated[
        PathList,
        says(
            "host paths, mounted read-only at the same place; links of root are followed, and their names are there too"
        ),
    ] = ()
    write: Annotated[
        tuple[Annotated[str, AfterValidator(path_or_volume)], ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says('host paths, mounted writable, and volumes as `"volume:NAME:/place"`; needs sandbox.filesystem = "host"'),
    ] = ()
    shared: Annotated[
        bool,
        says("whether other runs may write the same at the same time; locks of one run are not seen by another"),
    ] = False

    @property
    def write_paths(self) -> tuple[tuple[int, str], ...]:
        """The host paths of ``write``, each with its index."""
        return tuple((index, one) for index, one in enumerate(self.write) if not one.startswith(VOLUME))

    @property
    def volumes(self) -> tuple[tuple[int, VolumeGrant], ...]:
        """The volumes of ``write``, each with its index."""
        found = ((index, one.removeprefix(VOLUME)) for index, one in enumerate(self.write) if one.startswith(VOLUME))
        return tuple((index, VolumeGrant.of(one)) for index, one in found)


CREDENTIAL_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"
CredentialName = Annotated[
    str, AfterValidator(text.Matching("credential", CREDENTIAL_NAME, "1 to 128 of A-Z a-z 0-9 _ . -"))
]
# Headers by which a message is read, and those by which the gate itself speaks, belong to no secret.
_FRAMING = "|".join(
    "".join(f"[{ch}{ch.upper()}]" if ch.isalpha() else ch for ch in name)
    for name in (
        *("accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host"),
        *("keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
    )
)
INJECT_HEADER: Final = rf"(?!(?:{_FRAMING})$)[A-Za-z][A-Za-z0-9-]{{0,63}}"
INJECT_FORMAT: Final = r"(?:[!-z|~](?:[ -z|~]{0,62}[!-z|~])? ?)?\{\}(?:[ -z|~]{0,62}[!-z|~])?"
INJECT_METHOD: Final = r"\*|(?!(?:CONNECT|TRACE)$)[A-Z][A-Z-]{0,31}"
# No part is empty, `.` or `..`: the gate takes no such path, so a grant of one would be none.
INJECT_PATH: Final = r"/(?!.*//)(?!(?:.*/)?\.{1,2}(?:/|$))[A-Za-z0-9._~!$&'()+,;=:@/-]{0,500}\*?"
INJECT_USER: Final = r"[A-Za-z0-9._~@+-]{0,64}"
_HEADER = text.Matching("header", INJECT_HEADER, "a name such as Authorization, none that frames a message")
_METHOD = text.Matching("method", INJECT_METHOD, "a method such as GET, or `*`")
_PATH = text.Matching("path", INJECT_PATH, "a path, or the beginning of one with one `*` at its end")


class Inject(fields.Section):
    """``inject`` of a destination: a header that the gate adds to requests to it. Absent, the gate reads no request."""

    secret: Annotated[CredentialName, says("name of a secret of this agent in the vault, of at least 8 bytes")]
    methods: Annotated[
        tuple[Annotated[str, AfterValidator(_METHOD)], ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says('methods of requests, or `"*"` for each but CONNECT and TRACE'),
    ]
    paths: Annotated[
        tuple[Annotated[str, AfterValidator(_PATH)], ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says('paths of requests; `"/repos/*"` is every path that begins so'),
    ]
    header: Annotated[
        str,
        AfterValidator(_HEADER),
        says("the header that carries it; what the agent writes there is taken away"),
    ] = "Authorization"
    format: Annotated[
        str,
        AfterValidator(text.Matching("format", INJECT_FORMAT, "ASCII text with one `{}`, such as `Bearer {}`")),
        says("the header's value, in which `{}` stands for the secret"),
    ] = "{}"
    user: Annotated[
        str,
        AfterValidator(text.Matching("user", INJECT_USER, "at most 64 of A-Z a-z 0-9 . _ ~ @ + -")),
        says("where it is written, `{}` stands for the Base64 of USER:SECRET, as `Basic {}` needs (RFC 7617)"),
    ] = ""
    env: Annotated[
        str,
        AfterValidator(text.Matching("variable", f"(?:{process.VARIABLE})?", "A-Z a-z 0-9 and `_`, no digit first")),
        says("variable that holds a placeholder, for programs that want one"),
    ] = ""
    on_deny: Annotated[
        OnDeny,
        says('`"ask"` holds each other request to the host until an operator grants or denies it (docs/approvals.md)'),
    ] = "deny"
    ask_seconds: AskSeconds = DEFAULT_ASK_SECONDS

    @property
    def asked(self) -> bool:
        """Whether an operator is asked about requests beyond ``methods`` and ``paths``."""
        return self.on_deny == "ask"


# The name by which an agent reaches granted ports of this host's loopback, through a gate of its own.
HOST_NAME: Final = "host.covenant"
# Ports below are those of the system, and the gateway has this one for its TLS gate.
HOST_PORTS_FROM, HOST_PORT_TAKEN = 1_024, 8_443
# A gate is given its listeners as descriptors, of which it takes 16 in all (sandbox.network.gate.main).
_HOST_PORTS: Final = 8


class NetworkEntry(fields.Section):
    """One ``[[permissions.network]]``: a destination, one table each.

    ``ports`` are sorted pairs (first, last), both included, which do not overlap.
    """

    host: Annotated[
        str,
        AfterValidator(hosts.check),
        says(
            "exact name, `*.name` (two labels or more after the star), address or CIDR block; `host.covenant` is the "
            "loopback of this host"
        ),
    ]
    ports: Annotated[
        tuple[tuple[int, int], ...],
        BeforeValidator(hosts.port_ranges),
        says('numbers from 1 to 65535 and ranges such as `"8000-8010"`, at least one'),
    ]
    protocol: Annotated[Protocol, says("`tls` is TCP that begins with a ClientHello for the host")]
    inject: Annotated[
        Inject | None,
        says(
            "a secret that the gate adds to requests to this host, so that the agent has none: `{ secret, header, "
            "format, user, methods, paths, env, on_deny, ask_seconds }`; secret, methods and paths are needed"
        ),
    ] = None

    on_deny: Annotated[
        OnDeny,
        says(
            '`"ask"` holds a connection to the host, which is not granted, until an operator grants it for a time or '
            "denies it (docs/approvals.md); tls and a name only"
        ),
    ] = "deny"
    ask_seconds: AskSeconds = DEFAULT_ASK_SECONDS

    @property
    def asked(self) -> bool:
        """Whether the destination needs a lease of an operator."""
        return self.on_deny == "ask"

    @property
    def kind(self) -> hosts.HostKind:
        """``name``, ``wildcard``, ``address`` or ``cidr``."""
        return hosts.kind(self.host)

    @property
    def to_host(self) -> bool:
        """Whether it grants ports of this host's loopback."""
        return self.host == HOST_NAME


Syscall = Annotated[
    str,
    AfterValidator(text.Matching("system call", r"[a-z_][a-z0-9_]{0,63}", "use the kernel's name, such as `openat`")),
]
SyscallList = Annotated[tuple[Syscall, ...], fields.LONG_LIST, AfterValidator(fields.unique)]
ProfileName = Annotated[
    str,
    AfterValidator(text.Matching("profile", r"[a-z][a-z0-9-]{0,63}", "use a profile's name: a-z, 0-9 and `-`")),
]


class Syscalls(fields.Section):
    """``[permissions.syscalls]``: a profile, calls added to it and calls taken from it."""

    profile: Annotated[ProfileName | None, says("the base set; absent, the runtime's own")] = None
    allow: Annotated[SyscallList, says("system calls added to the profile")] = ()
    deny: Annotated[SyscallList, says("system calls taken from the profile")] = ()


class ExecutableEntry(fields.Section):
    """A program that may be started: its host path and, when written, the digest that it must have.

    For a tree of programs ``tree`` names it, and ``path`` is empty.
    """

    path: Annotated[HostPath, says("absolute host path")]
    sha256: Annotated[str | None, says("64 lower-case hex digits")] = None
    tree: Annotated[str, says("`root`, `layer:NAME` or `workspace`")] = ""


_DIGEST = re.compile(r"[0-9a-f]{64}")
_EXECUTABLE_HINT = 'write "/usr/bin/tool" or "/usr/bin/tool@sha256:" and 64 lower-case hex digits'


def _executable(value: Any) -> Any:
    if isinstance(value, ExecutableEntry):
        return value
    if not isinstance(value, str):
        raise text.wrong(f"executable {text.quote(value)} is not a string", _EXECUTABLE_HINT)
    if re.fullmatch(process.TREE, value):
        return ExecutableEntry.model_construct(path="", sha256=None, tree=value)
    path, at, digest = value.partition("@sha256:")
    if re.search(r"@sha[0-9]*:?", path, re.IGNORECASE):
        raise text.wrong(f"executable {text.quote(value)} has a digest of another form", _EXECUTABLE_HINT)
    if not at:
        return ExecutableEntry.model_construct(path=paths.absolute(value), sha256=None)
    if not _DIGEST.fullmatch(digest):
        raise text.wrong(f"executable {text.quote(value)} has a malformed digest", _EXECUTABLE_HINT)
    if len(set(digest)) == 1:
        raise text.wrong(f"executable {text.quote(value)} has a filler digest", "give the program's own SHA-256")
    return ExecutableEntry.model_construct(path=paths.absolute(path), sha256=digest)


def _unique_paths(items: tuple[ExecutableEntry, ...]) -> tuple[ExecutableEntry, ...]:
    fields.unique(tuple(item.tree or item.path for item in items))
    return items


class Executables(fields.Section):
    """``[permissions.executables]``: programs that the agent may start; without one, execve is denied."""

    allow: Annotated[
        tuple[Annotated[ExecutableEntry, BeforeValidator(_executable)], ...],
        fields.LIST,
        AfterValidator(_unique_paths),
        says(
            'absolute host paths, each may end in a digest: `"/usr/bin/tool@sha256:<64 hex digits>"`; or a tree of '
            'programs: `"root"` for all of the root, `"layer:NAME"` for one layer'
        ),
    ] = ()

    @property
    def programs(self) -> tuple[tuple[int, ExecutableEntry], ...]:
        """The single programs, each with its index in ``allow``."""
        return tuple((index, one) for index, one in enumerate(self.allow) if not one.tree)

    @property
    def trees(self) -> tuple[str, ...]:
        """The trees of programs."""
        return tuple(one.tree for one in self.allow if one.tree)


class Credentials(fields.Section):
    """``[permissions.credentials]``: secrets of the vault, by name."""

    grants: Annotated[
        tuple[CredentialName, ...], fields.LIST, AfterValidator(fields.unique), says("names of secrets")
    ] = ()
    files: Annotated[bool, says("whether each is a file of $CREDENTIALS_DIRECTORY as well, from the run's start")] = (
        False
    )


SkillUri = Annotated[str, AfterValidator(tool_uri.check)]


# The most of each limit of calls.
CALLS: Final[Mapping[str, int]] = {
    "calls": 1_000_000_000,
    "calls_per_minute": 1_000_000,
    "call_ms": 600_000,
    "argument_bytes": 4 * 1024 * 1024,
    "answer_bytes": 4 * 1024 * 1024,
}


class Skills(fields.Section):
    """``[permissions.skills]``: tools by pinned URI, and the classes of side effect that they may have."""

    allow: Annotated[
        tuple[SkillUri, ...], fields.LIST, AfterValidator(fields.unique), says("tool URIs with their version")
    ] = ()
    side_effects: Annotated[
        tuple[SideEffect, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("classes of side effect; absent or empty allows none"),
    ] = ()
    ask: skill_rules.AskedTools = ()
    ask_seconds: Annotated[
        int, fields.whole(1, MAX_ASK_SECONDS, "seconds that a call of a tool of `ask` is held at most")
    ] = DEFAULT_ASK_SECONDS
    rule: Annotated[
        tuple[skill_rules.SkillRule, ...],
        fields.LIST,
        AfterValidator(skill_rules.checked),
        says("values that arguments may have, one table each: `[[permissions.skills.rule]]`"),
    ] = ()
    calls: Annotated[int | None, fields.whole(1, CALLS["calls"], "calls of a run, of all tools: its budget")] = None
    calls_per_minute: Annotated[
        int, fields.whole(1, CALLS["calls_per_minute"], "calls in any 60 seconds, of all tools")
    ] = 600
    call_ms: Annotated[
        int,
        fields.whole(1, CALLS["call_ms"], "milliseconds that one call may take; `timeout_ms` of the tool may be less"),
    ] = 60_000
    argument_bytes: Annotated[
        int, fields.whole(2, CALLS["argument_bytes"], "bytes of one call's arguments, as JSON")
    ] = 65_536
    answer_bytes: Annotated[int, fields.whole(2, CALLS["answer_bytes"], "bytes of one answer, as JSON")] = 1_048_576


def _unique_entries(items: tuple[NetworkEntry, ...]) -> tuple[NetworkEntry, ...]:
    for index, item in enumerate(items):
        if item in items[:index]:
            raise text.wrong(f"the entry for host {text.quote(item.host)} is written twice", "keep one", at=index)
    return items


class Permissions(fields.Section):
    """``[permissions]``: an absent permission is not granted."""

    filesystem: Filesystem = Filesystem()
    network: Annotated[tuple[NetworkEntry, ...], fields.LIST, AfterValidator(_unique_entries)] = ()
    syscalls: Syscalls = Syscalls()
    executables: Executables = Executables()
    credentials: Credentials = Credentials()
    skills: Skills = Skills()

    @property
    def injected(self) -> tuple[tuple[int, str, Inject], ...]:
        """The hosts with a secret that the gate adds, each with the index of its entry."""
        return tuple((i, one.host, one.inject) for i, one in enumerate(self.network) if one.inject is not None)

    @property
    def placeholders(self) -> tuple[tuple[str, str], ...]:
        """The hosts with a secret that the gate adds, each with the variable of its placeholder, or none."""
        return tuple((host, one.env) for _, host, one in self.injected)

    @property
    def host_ports(self) -> tuple[tuple[int, int], ...]:
        """The granted ports of this host's loopback, each with the index of its entry."""
        found = ((i, span) for i, one in enumerate(self.network) if one.to_host for span in one.ports)
        return tuple((i, port) for i, (first, last) in found for port in range(first, last + 1))

    def host_problems(self, backend: str) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: ports of this host are few, granted by TCP, and those of no system service."""
        for index, one in enumerate(self.network):
            at = f"permissions.network[{index}]"
            if not one.to_host:
                continue
            if one.protocol != "tcp":
                message = f"`{HOST_NAME}` is granted by `{one.protocol}`"
                yield f"{at}.protocol", message, 'write protocol = "tcp": the gate reads nothing of what is sent'
            if backend != "linux-gvisor":
                message = f"`{HOST_NAME}` is granted while the backend is `{backend}`"
                yield f"{at}.host", message, 'write backend = "linux-gvisor"'
            first = one.ports[0][0]
            if first < HOST_PORTS_FROM or any(low <= HOST_PORT_TAKEN <= high for low, high in one.ports):
                bad = first if first < HOST_PORTS_FROM else HOST_PORT_TAKEN
                fix = f"write ports from {HOST_PORTS_FROM}, and not {HOST_PORT_TAKEN}"
                yield f"{at}.ports", f"port `{bad}` of `{HOST_NAME}` cannot be granted", fix
            if sum(high - low + 1 for low, high in one.ports) > _HOST_PORTS:
                message = f"more than {_HOST_PORTS} ports of `{HOST_NAME}` are granted"
                yield f"{at}.ports", message, "name the ports that the agent needs"

    def ask_problems(self, commands: bool) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: a name is asked about at the gates that know names, once.

        ``commands``: a command is asked about.
        """
        if "ask_seconds" in self.skills.model_fields_set and not (self.skills.ask or commands):
            yield (
                "permissions.skills.ask_seconds",
                "`ask_seconds` without a question",
                "write ask = [URI], or take it out",
            )
        plain = {one.host for one in self.network if not one.asked}
        for index, one in enumerate(self.network):
            at = f"permissions.network[{index}]"
            if not one.asked:
                if "ask_seconds" in one.model_fields_set:
                    yield f"{at}.ask_seconds", "`ask_seconds` without a question", 'write on_deny = "ask"'
                continue
            if one.protocol != "tls" or one.kind not in ("name", "wildcard"):
                message = f"{text.quote(one.host)} by `{one.protocol}` cannot be held for an operator"
                yield f"{at}.on_deny", message, 'write a name and protocol = "tls", or take on_deny out'
            if one.inject is not None:
                message = f"{text.quote(one.host)} is asked about and has a secret"
                yield f"{at}.on_deny", message, "write on_deny in inject, or take one of on_deny and inject out"
            if one.host in plain:
                message = f"host {text.quote(one.host)} is granted by one entry and asked about by another"
                yield f"{at}.on_deny", message, "keep one of them"

    def inject_problems(self, variables: Collection[str]) -> Iterator[tuple[str, str, str]]:
        """Each place, message and fix: a secret is added to TLS for one exact name, once, and within a list.

        ``variables`` are those that ``[process]`` sets.
        """
        hosts_seen: set[str] = set()
        names = {*variables, *process.NEVER_SET, *process.TRUST_VARIABLES}
        for index, host, one in self.injected:
            at, entry = f"permissions.network[{index}].inject", self.network[index]
            if entry.protocol != "tls" or entry.kind != "name":
                message = f"a secret is added to {text.quote(host)} by `{entry.protocol}`"
                yield at, message, 'grant one exact name, with protocol = "tls"'
            if host in hosts_seen:
                yield at, f"host {text.quote(host)} has two secrets", "keep one, and write its ports in one entry"
            hosts_seen.add(host)
            if "ask_seconds" in one.model_fields_set and not one.asked:
                yield f"{at}.ask_seconds", "`ask_seconds` without a question", 'write on_deny = "ask"'
            for key, example in (("methods", '["GET"]'), ("paths", '["/*"]')):
                if not getattr(one, key):
                    yield f"{at}.{key}", f"{key} is an empty list", f"write {key} = {example}"
            if one.env and one.env in names:
                yield f"{at}.env", f"variable `{one.env}` is set already", "name another, or take it out"
            names.add(one.env)
