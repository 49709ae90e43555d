"""The package of a session: a manifest alone, made of a profile, the options of a caller and a command."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from covenant.session import profiles, typed
from covenant.session.profiles import Profile
from policy import errors
from policy.compile.oci import SEARCH_PATH
from policy.manifest.permissions import HOST_NAME
from policy.manifest.text import toml

SHELL: Final = "/bin/sh"
_ID = re.compile(r"[^A-Za-z0-9_.-]+")
# Exact: a command substitution alone would drop newlines at the end of the secret.
_FROM_FILE = (
    '{variable}=$(/bin/cat "$CREDENTIALS_DIRECTORY/{name}" && echo .) || exit 125; '
    'export {variable}="${{{variable}%.}}"'
)


class Volume(Struct, frozen=True):
    """A directory with a file system of its own, or a volume, of ``mb`` MiB, which a session may write to.

    ``path`` is as a manifest writes it.
    """

    path: str
    mb: int


class Project(Struct, frozen=True):
    """A directory of the caller, where the session finds it, and the MiB that it may change there.

    ``repository`` is the common directory of git of a linked worktree, empty without one.
    """

    directory: str
    place: str
    mb: int
    repository: str = ""


class Learnt(Struct, frozen=True):
    """Narrows a session to what was learnt, or opens the network of a run that is observed.

    - ``programs`` replace the trees of the profile. ``exec`` says whether programs of the workspace are started.
    - ``mode`` is the network's, where no host is named.
    - ``notes`` are the evidence of each entry, by the key of its list and its value, and ``about`` is for the top.
    """

    programs: tuple[str, ...] = ()
    exec: bool = False
    mode: str = ""
    notes: Mapping[tuple[str, str], str] = msgspec.field(default_factory=dict)
    about: tuple[str, ...] = ()


class Options(Struct, frozen=True):
    """The options of one session.

    ``base`` and ``layers`` are references by digest, and ``search`` the layers' directories of programs, first on
    PATH. ``read`` has host paths. ``model_env`` tells clients of models where theirs are, unless the caller says it.
    ``cores`` is the number of this host's processors. ``publish`` has ports of the session, each with its place on
    this host. ``inject`` has hosts at which the gate adds a secret to each request, ``ssh`` hosts at which a
    secret signs logins, each with its public keys. ``learnt`` is for a run that is
    observed, and for what it taught.
    """

    base: str
    layers: tuple[str, ...] = ()
    search: tuple[str, ...] = ()
    net: tuple[typed.Destination, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[Volume, ...] = ()
    secrets: tuple[typed.SecretWord, ...] = ()
    models: tuple[typed.ModelWord, ...] = ()
    model_env: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    role: str = ""
    contract: str = "stdio"
    cwd: str = "/tmp"  # noqa: S108 - the agent's own
    workspace: Project | None = None
    cores: int = 1
    publish: tuple[tuple[int, str], ...] = ()
    inject: tuple[typed.InjectWord, ...] = ()
    ssh: tuple[tuple[typed.SshWord, tuple[str, ...]], ...] = ()
    learnt: Learnt | None = None


def agent_id(command: str) -> str:
    """Return the agent id of sessions of this program."""
    name = _ID.sub("-", posixpath.basename(command)).strip("-.") or "command"
    return f"exec-{name}"[:128]


def manifest(name: str, profile: Profile, options: Options, command: Sequence[str]) -> str:
    """Return the manifest of a session as TOML.

    Raises:
        errors.UsageError: there is no command.
    """
    if not command:
        raise errors.UsageError("there is no command", hint="write it after `--`: covenant exec -- sh")
    program, arguments = _started(options, command)
    return "\n".join([
        *_agent(name, options, command[0], program),
        *_limits(profile, options),
        *_permissions(profile, options),
        *(() if options.workspace is None else _workspace(options.workspace, options.learnt)),
        *_process(profile, options, arguments),
        *(f"\n[[publish]]\nport = {port}\nto = {toml(to)}" for port, to in options.publish),
        "",
    ])  # fmt: skip


def variables(profile: Profile, options: Options) -> dict[str, str]:
    """Return the environment variables of a session: the profile's, those of models, PATH with the layers'
    programs, the caller's."""
    found = {name: profiles.value_of(profile, name) for name in profile.env}
    secret = {one.variable for one in options.secrets}
    found |= {name: value for name, value in options.model_env if name not in secret}
    if options.search:
        found["PATH"] = ":".join((*options.search, SEARCH_PATH))
    return {**found, **dict(options.env)}


def _started(options: Options, command: Sequence[str]) -> tuple[str, list[str]]:
    """Return the program that the run starts, and its arguments: a shell, where a secret becomes a variable."""
    sets = [_FROM_FILE.format(variable=one.variable, name=one.name) for one in options.secrets if one.variable]
    if not sets:
        return command[0], list(command[1:])
    return SHELL, ["-c", "; ".join([*sets, 'exec "$@"']), "sh", *command]


def _agent(name: str, options: Options, command: str, program: str) -> Iterator[str]:
    learnt = options.learnt or Learnt()
    yield from (f"# {line}" for line in learnt.about)
    yield "[agent]"
    yield f"id = {toml(agent_id(command))}"
    yield f"name = {toml(posixpath.basename(command) or command)}"
    yield f"description = {toml(f'a session of the profile {name}')}"
    yield 'version = "0"'
    yield 'runtime = "command"'
    yield f"entry = {toml(program)}"
    if options.role:
        yield f"role = {toml(options.role)}"


def _limits(profile: Profile, options: Options) -> Iterator[str]:
    # A port of this host goes with each mode.
    outside = [one for one in options.net if one.host != HOST_NAME]
    logins = [one for one, _ in options.ssh if one.host != HOST_NAME]
    mode = "full" if outside or options.inject or logins else "off"
    if mode == "full" and not logins and all(one.port == typed.HTTPS for one in outside):
        mode = "outbound-https-only"
    if mode == "off" and options.learnt is not None and options.learnt.mode:
        mode = options.learnt.mode
    yield "\n[resources]"
    yield f"cpu_ms_per_task = {profile.seconds * 1000}"
    yield f"memory_mb = {profile.memory_mb}"
    taken = sum(one.mb for one in options.write) + (0 if options.workspace is None else options.workspace.mb)
    yield f"disk_mb = {profile.disk_mb + taken}"
    yield f"pids_max = {profile.pids_max}"
    yield f"cpu_millis = {min(profile.cpu_millis, options.cores * 1000)}"
    yield f"network = {toml(mode)}"
    yield '\n[sandbox]\nrequired = true\nbackend = "linux-gvisor"'
    yield f"filesystem = {toml('host' if options.write else 'ephemeral')}"
    yield f"dev_shm_mb = {profile.dev_shm_mb}"


def _permissions(profile: Profile, options: Options) -> Iterator[str]:
    notes: Mapping[tuple[str, str], str] = options.learnt.notes if options.learnt else {}
    for one in options.net:
        protocol = "tls" if one.port == typed.HTTPS and one.host != HOST_NAME else "tcp"
        note = notes.get(("network", f"{one.host}:{one.port}"))
        if note:
            yield f"\n# {note}"
        yield f"\n[[permissions.network]]\nhost = {toml(one.host)}\nports = [{one.port}]\nprotocol = {toml(protocol)}"
    for host, port in {(one.host, one.port): None for one, _ in options.ssh}:
        if typed.Destination(host, port) not in options.net:
            yield f'\n[[permissions.network]]\nhost = {toml(host)}\nports = [{port}]\nprotocol = "tcp"'
    for word in options.inject:
        added = "Bearer {}" if word.header.lower() == "authorization" else "{}"
        yield f'\n[[permissions.network]]\nhost = {toml(word.host)}\nports = [{typed.HTTPS}]\nprotocol = "tls"'
        yield f"[permissions.network.inject]\nsecret = {toml(word.secret)}\nheader = {toml(word.header)}"
        yield f'format = {toml(added)}\nmethods = ["*"]\npaths = ["/*"]'
    if options.read or options.write:
        yield "\n[permissions.filesystem]"
        yield f"read = {_noted('read', options.read, notes)}"
        yield f"write = {_noted('write', [one.path for one in options.write], notes)}"
    if options.secrets:
        names = sorted({one.name for one in options.secrets})
        yield f"\n[permissions.credentials]\ngrants = {_texts(names)}\nfiles = true"
    yield from _models(options.models)
    yield from _ssh(options.ssh)
    if options.learnt is None:
        programs: tuple[str, ...] = (*profile.programs, *(() if options.workspace is None else ("workspace",)))
    else:
        programs = (*options.learnt.programs, *(("workspace",) if options.learnt.exec else ()))
    if programs or options.learnt is None:
        yield f"\n[permissions.executables]\nallow = {_noted('executables', programs, notes)}"
    yield f"\n[root]\nbase = {toml(options.base)}\nlayers = {_texts(options.layers)}"


def _models(words: Sequence[typed.ModelWord]) -> Iterator[str]:
    if not words:
        return
    by: dict[str, list[str]] = {}
    for one in words:
        by.setdefault(one.provider, []).append(one.pattern)
    items = (f"{{ provider = {toml(name)}, models = {_texts(patterns)} }}" for name, patterns in by.items())
    yield f"\n[services.models]\nallow = [{', '.join(items)}]"


def _ssh(words: Sequence[tuple[typed.SshWord, Sequence[str]]]) -> Iterator[str]:
    by: dict[str, dict[str, list[str]]] = {}
    for one, keys in words:
        held = by.setdefault(one.secret, {}).setdefault(one.host, [])
        held.extend(key for key in keys if key not in held)
    for secret, hosts in by.items():
        items = (f"{{ name = {toml(host)}, keys = {_texts(keys)} }}" for host, keys in hosts.items())
        yield f"\n[[services.ssh_agent]]\nsecret = {toml(secret)}\nhosts = [{', '.join(items)}]"


def _workspace(project: Project, learnt: Learnt | None) -> Iterator[str]:
    note = "" if learnt is None else learnt.notes.get(("workspace", project.directory), "")
    yield f"\n# {note}" if note else ""
    yield '[workspace]\nmode = "overlay"'
    yield f"path = {toml(project.place)}"
    yield f"from = {_texts([one for one in (project.directory, project.repository) if one])}"
    starts = learnt is None or learnt.exec
    yield f"exec = {'true' if starts else 'false'}\nmax_mb = {project.mb}"


def _process(profile: Profile, options: Options, arguments: Sequence[str]) -> Iterator[str]:
    pairs = [f"{json.dumps(name)} = {toml(value)}" for name, value in sorted(variables(profile, options).items())]
    yield "\n[process]"
    yield f"args = {_texts(arguments)}"
    yield f"env = {{ {', '.join(pairs)} }}" if pairs else "env = {}"
    yield f"cwd = {toml(options.cwd if options.workspace is None else options.workspace.place)}"
    yield f"contract = {toml(options.contract)}"


def _noted(key: str, values: Sequence[str], notes: Mapping[tuple[str, str], str]) -> str:
    """Return a list, with a line and a comment for each value where one of them has a note."""
    said = [notes.get((key, value), "") for value in values]
    if not any(said):
        return _texts(values)
    lines = (f"  {toml(value)},{f'  # {note}' if note else ''}\n" for value, note in zip(values, said, strict=True))
    return f"[\n{''.join(lines)}]"


def _texts(values: Sequence[str]) -> str:
    return f"[{', '.join(map(toml, values))}]"
