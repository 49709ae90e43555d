"""The package of one tool server, cut out of its agent's package: its files, and a manifest that grants nothing more.

A stdio server runs in a sandbox of its own: no network, no host path, memory for its files alone, and of the secrets
that its agent is granted those that its variables name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from policy import errors
from policy.manifest import text
from policy.manifest.tools import checks, http_relay, pins, secret_scan, server_variables
from policy.manifest.tools.document import Server, ToolManifest, split_variable
from policy.package import MANIFEST_NAME, Package

MEMORY_MB: Final = 1024
DISK_MB: Final = 64
_ID_CHARACTERS = 128


def agent_id(tools: ToolManifest, server: Server) -> str:
    """Return the agent id under which a server runs."""
    return f"{tools.agent_id[: _ID_CHARACTERS - len(server.alias) - 1]}.{server.alias}"


def package_of(
    read: Package,
    tools: ToolManifest,
    server: Server,
    *,
    seconds: int,
    with_secrets: bool = False,
    authorities: bytes = b"",
) -> Package:
    """Return the package of a server, which may run for ``seconds``: of one of the transport http, our relay to it.

    Without ``with_secrets`` the references of a stdio server to credentials are left out, and it is given none.
    ``authorities`` are certificates that a relay trusts beside the system's.

    Raises:
        errors.ToolsError: the files are not those of ``package_digest``, or the command is no program of them.
    """
    if server.transport == "http":
        secrets = tuple(sorted(set(http_relay.read_secrets(server).values())))
        start = _Start("python3", http_relay.NAME, (), secrets, http_relay.files(server, authorities))
        lines = _manifest(agent_id(tools, server), server, start, seconds)
        return Package({**start.files, MANIFEST_NAME: "\n".join(lines).encode()})
    place = ("servers", tools.servers.index(server))
    inside = pins.directory(server.alias)
    if pins.package_digest(read, server.alias) != server.package_digest:
        raise errors.ToolsError(
            f"the files in `{inside}` are not those of package_digest",
            hint="look at what changed, then run covenant tools pin",
            where=tools.where((*place, "package_digest")),
        )
    started = checks.program_of(server)
    files = {path.removeprefix(inside): data for path, data in read.files.items() if path.startswith(inside)}
    links = {path.removeprefix(inside): link for path, link in read.links.items() if path.startswith(inside)}
    # A link of node_modules/.bin is started as the file that it leads to.
    program = None if started is None else checks.file_of(read, server, started.program)
    if started is None or program is None:
        raise errors.ToolsError(
            f"the command of server `{server.alias}` starts no program of `{inside}`",
            hint=f"start its own program, such as {checks.example(read, server.alias)}",
            where=tools.where((*place, "command")),
        )
    start = _Start(started.runtime, program, started.arguments)
    if with_secrets and server_variables.secrets_of(server):
        start = _with_starter(start, tools, server)
    if taken := sorted({MANIFEST_NAME, *start.files} & (files.keys() | links.keys())):
        raise errors.ToolsError(
            f"`{inside}` has a file `{taken[0]}`, which is the name of a file of its sandbox",
            hint="take it out, then run covenant tools pin",
            where=tools.where((*place, "alias")),
        )
    lines = _manifest(agent_id(tools, server), server, start, seconds)
    try:
        return Package({**files, **start.files, MANIFEST_NAME: "\n".join(lines).encode()}, None, links)
    except errors.PackageError as e:
        message = f"the package of server `{server.alias}` cannot run alone: {e.message}"
        raise errors.ToolsError(message, hint=e.hint, where=tools.where((*place, "alias"))) from e


class _Start(Struct, frozen=True):
    """The start of a server: runtime, program, arguments, the secrets that it is given, and files of ours."""

    runtime: str
    program: str
    arguments: tuple[str, ...]
    secrets: tuple[str, ...] = ()
    files: Mapping[str, bytes] = {}


def _with_starter(start: _Start, tools: ToolManifest, server: Server) -> _Start:
    """Return the start by a program of ours, which sets the variables that are secrets."""
    starter = server_variables.starter(start.runtime, server)
    if starter is None:
        raise errors.ToolsError(
            server_variables.message(server),
            hint=server_variables.HINT,
            where=tools.where(("servers", tools.servers.index(server), "command")),
        )
    name, code = starter
    secrets = tuple(sorted(set(server_variables.secrets_of(server).values())))
    return _Start(start.runtime, name, (start.program, *start.arguments), secrets, {name: code})


def _manifest(name: str, server: Server, start: _Start, seconds: int) -> Iterator[str]:
    yield f'[agent]\nid = {text.toml(name)}\nname = {text.toml(server.alias)}\nversion = "0"'
    yield f"runtime = {text.toml(start.runtime)}\nentry = {text.toml(start.program)}"
    yield f"\n[resources]\ncpu_ms_per_task = {seconds * 1000}\nmemory_mb = {MEMORY_MB}\ndisk_mb = {DISK_MB}"
    yield f"network = {text.toml('full' if server.transport == 'http' else 'off')}"
    yield '\n[sandbox]\nrequired = true\nbackend = "linux-gvisor"\nfilesystem = "ephemeral"'
    if start.secrets:
        yield f"\n[permissions.credentials]\ngrants = [{', '.join(map(text.toml, start.secrets))}]\nfiles = true"
    yield from _destination(server)
    literals = dict(split_variable(one) for one in server.env)
    env = ", ".join(
        f"{text.toml(variable)} = {text.toml(value)}"
        for variable, value in sorted(literals.items())
        if secret_scan.referenced(value) is None
    )
    yield f"\n[process]\nargs = [{', '.join(map(text.toml, start.arguments))}]"
    yield f'env = {{ {env} }}\ncontract = "stdio"\n'


def _destination(server: Server) -> Iterator[str]:
    """The host of a server of the transport http, with the first header that is a secret, which its gate adds."""
    if server.transport != "http":
        return
    host, port, path = http_relay.address(server)
    yield f'\n[[permissions.network]]\nhost = {text.toml(host)}\nports = [{port}]\nprotocol = "tls"'
    for header, secret in list(http_relay.secrets(server).items())[:1]:
        words = f"secret = {text.toml(secret)}, header = {text.toml(header)}, paths = [{text.toml(path)}]"
        yield f'inject = {{ {words}, methods = ["POST"] }}'
