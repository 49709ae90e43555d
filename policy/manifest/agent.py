"""``agent.toml``: Covenant's sections with the additions of design.md, as frozen models.

The names, defaults and meanings of the first six sections are those of seeds/covenant-agent-manifest.txt, so an
existing manifest parses unchanged. ``Manifest`` is made by ``policy.manifest.parse`` alone, which also tells it what
the file wrote and where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from policy.manifest import fields, lines, paths, text
from policy.manifest import process as processes
from policy.manifest import workspace as workspaces
from policy.manifest.permissions import Permissions, VolumeGrant  # by name: a field would hide the module
from policy.manifest.process import Process, Root
from policy.manifest.services import ENTRIES, PROVIDERS_ID, PublishEntry, Services, Spawn, unique_ports  # as above
from policy.manifest.tools import command
from policy.manifest.workspace import TREE, Workspace

Problem = tuple[str, str, str]
SUBPROCESS_RUNTIMES = frozenset({"rust-bin", "python3", "node", "command"})
APPROVAL_POLICIES = ("operator-prompt", "auto-deny", "auto-once")
PERMISSION_DOMAINS = ("filesystem", "network", "syscalls", "executables", "credentials", "skills")


def problems(m: Manifest) -> Iterator[Problem]:
    """Every broken rule of a manifest, in the order of the rules."""
    for rule in RULES:
        yield from rule(m)


def _entry(m: Manifest) -> Iterator[Problem]:
    """``agent.entry`` is written and not empty for rust-bin, python3, node and command; hermes ignores it."""
    if m.agent.runtime in SUBPROCESS_RUNTIMES and not m.agent.entry:
        message = f"`agent.entry` is missing, which the runtime `{m.agent.runtime}` needs"
        yield "agent.entry", message, "write the program or script, relative to the package"


def _sandbox(m: Manifest) -> Iterator[Problem]:
    """``sandbox.required`` and ``sandbox.standby`` need ``backend = "linux-gvisor"``."""
    if m.sandbox.backend != "trusted-local":
        return
    mend = 'write backend = "linux-gvisor"'
    if m.sandbox.required:
        yield "sandbox.required", "sandbox.required is `true` while the backend is `trusted-local`", mend
    if m.sandbox.standby:
        yield "sandbox.standby", f"standby is `{m.sandbox.standby}` while the backend is `trusted-local`", mend


def _hermes(m: Manifest) -> Iterator[Problem]:
    """A hermes agent has no ``[permissions.*]`` and no ``sandbox.required``; for it alone ``[hermes]`` is
    checked by value."""
    if m.agent.runtime != "hermes":
        return
    if m.hermes.approval_policy not in APPROVAL_POLICIES:
        message = f"approval_policy {text.quote(m.hermes.approval_policy)} is not known"
        yield "hermes.approval_policy", message, f"one of {', '.join(APPROVAL_POLICIES)}"
    for index, tool in enumerate(m.hermes.tools_allowed):
        try:
            text.plain(tool)
        except PydanticCustomError as e:
            yield f"hermes.tools_allowed[{index}]", e.context["message"], e.context["hint"]  # type: ignore[index]
    outside = "a hermes agent runs outside this machine: nothing here can hold it to that"
    if m.sandbox.required:
        yield "sandbox.required", "sandbox.required is `true` while the runtime is `hermes`", outside
    for domain in PERMISSION_DOMAINS:
        if domain in m.permissions.model_fields_set:
            message = f"`permissions.{domain}` is written while the runtime is `hermes`"
            yield f"permissions.{domain}", message, outside


def _network(m: Manifest) -> Iterator[Problem]:
    """``[[permissions.network]]`` stays within ``resources.network``: with off none, port 443 and tls with
    outbound-https-only; an empty list is only for off. ``host.covenant`` goes with each mode."""
    entries, mode = m.permissions.network, m.resources.network
    if mode != "off" and "network" in m.permissions.model_fields_set and not entries:
        yield (
            "permissions.network",
            f"`permissions.network` is an empty list while resources.network is `{mode}`",
            'without a table the whole mode is granted: leave it out, or write resources.network = "off"',
        )
    for index, entry in enumerate(entries):
        at = f"permissions.network[{index}]"
        if entry.to_host:
            continue
        if mode == "off":
            message = f"host {text.quote(entry.host)} is granted while resources.network is `off`"
            yield at, message, 'remove the table, or write resources.network = "full" or "outbound-https-only"'
        elif mode == "outbound-https-only":
            yield from _https_only(at, entry.ports, entry.protocol)
    yield from m.permissions.host_problems(m.sandbox.backend)
    yield from m.permissions.inject_problems([name for name, _ in m.process.env])
    yield from m.permissions.ask_problems(any(one.ask for one in m.tools.command))


def _https_only(at: str, ports: tuple[tuple[int, int], ...], protocol: str) -> Iterator[Problem]:
    mend = 'write it as ports = [443] and protocol = "tls", or resources.network = "full"'
    if ports != ((443, 443),):
        bad = next(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in ports if (lo, hi) != (443, 443))
        yield f"{at}.ports", f"port `{bad}` is outside the network mode `outbound-https-only`", mend
    if protocol != "tls":
        yield f"{at}.protocol", f"protocol `{protocol}` is outside the network mode `outbound-https-only`", mend


def _filesystem(m: Manifest) -> Iterator[Problem]:
    """Write paths need ``filesystem = "host"``; ephemeral and host need a ``disk_mb`` of at least 1. ``shared = true``
    goes with a write path."""
    mode = m.sandbox.filesystem
    if mode != "host":
        for index, path in enumerate(m.permissions.filesystem.write):
            message = f"write path {text.quote(path)} is granted while sandbox.filesystem is `{mode}`"
            yield f"permissions.filesystem.write[{index}]", message, 'write sandbox.filesystem = "host"'
    yield from workspaces.written_problems(m.permissions.filesystem, m.volumes)
    # tmpfs takes size=0 for no limit at all (tmpfs(5)): a ceiling of nothing must not become one of everything.
    if mode != "read-only-package" and m.resources.disk_mb == 0:
        message = f"disk_mb is `0` while sandbox.filesystem is `{mode}`"
        yield "resources.disk_mb", message, 'give at least 1, or write filesystem = "read-only-package"'


def syscalls(m: Manifest) -> Iterator[Problem]:
    """No system call is both allowed and denied."""
    allowed = m.permissions.syscalls.allow
    for index, name in enumerate(m.permissions.syscalls.deny):
        if name in allowed:
            message = f"system call `{name}` is both allowed and denied"
            yield f"permissions.syscalls.deny[{index}]", message, "keep it in one list"


def _spawn(m: Manifest) -> Iterator[Problem]:
    """``spawn.allowed`` goes with ``max_depth`` and ``max_descendants`` of at least 1, its absence with 0."""
    yield from m.spawn.problems()


def _lifetime(m: Manifest) -> Iterator[Problem]:
    """``[lifetime]``, when written, has either ``ttl_seconds`` or ``unlimited = true``."""
    if "lifetime" not in m.model_fields_set:
        return
    either = "write either ttl_seconds or unlimited = true; without the section the run ends with its task"
    if m.lifetime.ttl_seconds is None and not m.lifetime.unlimited:
        yield "lifetime", "[lifetime] has neither ttl_seconds nor unlimited = true", either
    if m.lifetime.ttl_seconds is not None and m.lifetime.unlimited:
        message = f"ttl_seconds is `{m.lifetime.ttl_seconds}` while unlimited is `true`"
        yield "lifetime.ttl_seconds", message, either


def _process(m: Manifest) -> Iterator[Problem]:
    """``[process]``, ``[root]`` and ``[workspace]`` need ``backend = "linux-gvisor"``; ``sandbox.standby`` needs the
    contract line; ``{intent}`` stands in an argument of the contract text alone; a variable that changes a loader is
    not set."""
    for name in ("process", "root", "workspace"):
        if name in m.model_fields_set and m.agent.runtime == "hermes":
            yield name, f"[{name}] is written while the runtime is `hermes`", "take the section out"
        elif name in m.model_fields_set and m.sandbox.backend != "linux-gvisor":
            message = f"[{name}] is written while the backend is `{m.sandbox.backend}`"
            yield name, message, 'write backend = "linux-gvisor"'
    if m.agent.runtime == "command" and m.sandbox.backend != "linux-gvisor":
        message = f"the runtime is `command` while the backend is `{m.sandbox.backend}`"
        yield "agent.runtime", message, 'write backend = "linux-gvisor"'
    if m.sandbox.standby and m.process.contract != "line":
        message = f"standby is `{m.sandbox.standby}` while the contract is `{m.process.contract}`"
        yield "sandbox.standby", message, 'write standby = 0, or contract = "line"'
    for index, one in enumerate(m.process.args):
        if processes.INTENT in one and m.process.contract != "text":
            message = f"`{processes.INTENT}` stands in an argument while the contract is `{m.process.contract}`"
            yield f"process.args[{index}]", message, 'write contract = "text"'
    for name, mend in processes.refused_variables(m.process):
        yield f"process.env.{name}", f"variable `{name}` is not a manifest's to set", mend
    for name in sorted({name for name, _ in m.process.env} & set(m.permissions.credentials.grants)):
        message = f"variable `{name}` has the name of a granted secret"
        yield f"process.env.{name}", message, "a manifest is no place for secrets: take the variable out"


def _services(m: Manifest) -> Iterator[Problem]:
    """``[services]`` and ``[[publish]]`` need ``backend = "linux-gvisor"``; a section of services grants something.
    `[[services.ssh_agent]]` needs a granted program and `filesystem` `ephemeral` or `host`."""
    for name, shown in (("services", "[services]"), ("publish", "[[publish]]")):
        if name in m.model_fields_set and m.sandbox.backend != "linux-gvisor":
            message = f"{shown} is written while the backend is `{m.sandbox.backend}`"
            yield name, message, 'write backend = "linux-gvisor"'
    yield from m.services.problems()
    yield from m.services.ssh_problems(m.permissions.executables.allow, m.sandbox.filesystem)


def _tools(m: Manifest) -> Iterator[Problem]:
    """``[[tools.command]]`` needs ``backend = "linux-gvisor"``, ``spawn.allowed``, and the class ``shell``."""
    skills = m.permissions.skills
    yield from command.problems(
        m.tools,
        backend=m.sandbox.backend,
        spawns=m.spawn.allowed,
        effects=skills.side_effects,
        allowed=skills.allow,
    )


def _trees(m: Manifest) -> Iterator[Problem]:
    """A layer that ``permissions.executables.allow`` names stands in ``[root]``; no two layers have one name."""
    names = [one.name for one in m.root.stack]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield "root.layers", f"two layers have the name `{name}`", "build one of them under another name"
    for index, entry in enumerate(m.permissions.executables.allow):
        at = f"permissions.executables.allow[{index}]"
        if entry.tree == TREE:
            if not m.workspace.exec:
                message = "`workspace` is named while workspace.exec is `false`"
                yield at, message, "write exec = true below [workspace], or name the programs, a layer, or root"
        elif entry.tree.startswith(processes.LAYER_TREE):
            name = entry.tree.removeprefix(processes.LAYER_TREE)
            if name not in names:
                mend = f"one of {', '.join(names)}" if names else "list the layer below [root]"
                yield at, f"layer `{name}` is not in the agent's root", mend


def _dev_shm(m: Manifest) -> Iterator[Problem]:
    """``sandbox.dev_shm_mb`` is a part of ``disk_mb``, and needs a file system that can be written."""
    size = m.sandbox.dev_shm_mb
    if not size:
        return
    if m.sandbox.filesystem == "read-only-package":
        message = f"dev_shm_mb is `{size}` while sandbox.filesystem is `read-only-package`"
        yield "sandbox.dev_shm_mb", message, 'write filesystem = "ephemeral", or dev_shm_mb = 0'
    elif size >= m.resources.disk_mb:
        message = f"dev_shm_mb is `{size}` of a disk_mb of `{m.resources.disk_mb}`"
        yield "sandbox.dev_shm_mb", message, f"write disk_mb = {size + 1} or more: the rest is the size of /tmp"


def _workspace(m: Manifest) -> Iterator[Problem]:
    """``[workspace]``, when written, has ``mode`` and ``from``; it needs a file system that can be written, its
    ``max_mb`` is a part of ``disk_mb``, and ``exec = true`` goes with ``"workspace"`` in
    permissions.executables.allow."""
    if "workspace" not in m.model_fields_set:
        return
    one = m.workspace
    if one.mode is None:
        yield "workspace", "[workspace] has no mode", 'write mode = "overlay"'
    if one.mode == "volume":
        yield from workspaces.volume_problems(one, m.sandbox.filesystem)
        yield from workspaces.exec_problems(one, m.permissions.executables.trees)
        return
    if one.volume is not None:
        yield "workspace.volume", f"volume is {text.quote(one.volume)} while mode is `overlay`", 'write mode = "volume"'
    if not one.below:
        yield "workspace.from", "[workspace] does not say where it may be", 'write from = ["/home"], for example'
    if m.sandbox.filesystem == "read-only-package":
        message = "[workspace] is written while sandbox.filesystem is `read-only-package`"
        yield "workspace", message, 'write filesystem = "ephemeral"'
    elif one.max_mb + m.sandbox.dev_shm_mb >= m.resources.disk_mb:
        message = f"max_mb is `{one.max_mb}` of a disk_mb of `{m.resources.disk_mb}`"
        least = one.max_mb + m.sandbox.dev_shm_mb + 1
        yield "workspace.max_mb", message, f"write disk_mb = {least} or more: the rest is the size of /tmp"
    yield from workspaces.exec_problems(one, m.permissions.executables.trees)


RULES: tuple[Callable[[Manifest], Iterator[Problem]], ...] = (
    _entry,
    _sandbox,
    _hermes,
    _network,
    _filesystem,
    syscalls,
    _spawn,
    _lifetime,
    _process,
    _services,
    _tools,
    _trees,
    _dev_shm,
    _workspace,
)


says, whole = fields.says, fields.whole

Runtime = Literal["rust-bin", "python3", "node", "command", "hermes"]
NetworkMode = Literal["off", "outbound-https-only", "full"]
Backend = Literal["trusted-local", "linux-gvisor"]
FilesystemMode = Literal["read-only-package", "ephemeral", "host"]
Priority = Literal["low", "normal", "high"]
OnExpiry = Literal["terminate", "suspend"]

AGENT_ID = r"[A-Za-z0-9_.-]{1,128}"
NAMESPACES = ("intent.", "memory.", "identity.", "tool.", "agent.")

# Ceilings of what can be written; what a host has is rule 6. 16 TiB, a week, a year, 1,024 cores.
_MIB = 16 * 1024 * 1024
_WEEK_MS = 7 * 86_400_000
_YEAR_SECONDS = 365 * 86_400
_BYTES_PER_SECOND = 10**12
_U63 = 2**63 - 1  # TOML's largest integer


def _id(value: str) -> str:
    if not value.strip("."):
        raise text.wrong(f"agent id {text.quote(value)} is only dots", "give it a name")
    if value == PROVIDERS_ID:
        raise text.wrong(f"agent id {text.quote(value)} is the operator's own", "give it another name")
    return value


AgentId = Annotated[
    str,
    AfterValidator(text.Matching("agent id", AGENT_ID, "1 to 128 of A-Z a-z 0-9 _ . - (no `@`, no spaces)")),
    AfterValidator(_id),
]
RoleName = Annotated[
    str,
    AfterValidator(text.Matching("role", r"[a-z][a-z0-9_-]{0,63}", "a role's name is a-z, 0-9, `_` and `-`")),
]
OperatorName = Annotated[
    str,
    AfterValidator(
        text.Matching("operator", r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,127}", "the name of a key of the trust root")
    ),
]


class Agent(fields.Section):
    """``[agent]``: who it is and how it is started."""

    id: Annotated[AgentId, says("stable identifier and routing key: 1 to 128 of `A-Z a-z 0-9 _ . -`")]
    name: Annotated[fields.Text, says("display name")]
    description: Annotated[
        fields.Text | None, says("what it does, for people and the router: an intent that uses its words is for it")
    ] = None
    version: Annotated[fields.Text, says("version of the package; SemVer recommended")]
    runtime: Annotated[Runtime, says("what starts `entry`")]
    entry: Annotated[
        str,
        says(
            "program or script, relative to the package; for command also a path of the agent's root, or a name on "
            "its PATH (`./NAME` is a file of the package); needed except for hermes, which ignores it"
        ),
    ] = ""
    role: Annotated[RoleName | None, says("role whose ceiling the grants must stay within")] = None
    operator: Annotated[OperatorName | None, says("trust-root name of a key that must have signed")] = None

    @field_validator("entry", mode="after")
    @classmethod
    def _inside_the_package(cls, value: str, info: ValidationInfo) -> str:
        # Covenant ignores the entry of a hermes agent; a runtime that is itself wrong is reported alone.
        runtime = info.data.get("runtime")
        if runtime == "command" and value.startswith("/"):
            return paths.absolute(value)
        if runtime == "command" and value.startswith("./"):
            return f"./{paths.relative(value)}"  # without it, it would be a name on PATH
        return paths.relative(value) if runtime in SUBPROCESS_RUNTIMES else value


_action = text.Matching(
    "action",
    r"(?:intent|memory|identity|tool|agent)\.[A-Za-z0-9_.:/*+-]{1,200}",
    f"begin it with one of {' '.join(f'`{n}`' for n in NAMESPACES)} and a name",
)
Actions = Annotated[tuple[Annotated[str, AfterValidator(_action)], ...], fields.LIST, AfterValidator(fields.unique)]


class Capabilities(fields.Section):
    """``[capabilities]``: what the caller of the agent must hold."""

    required: Annotated[Actions, says("actions that the caller must hold")] = ()
    optional: Annotated[Actions, says("actions recorded and not enforced")] = ()


class Resources(fields.Section):
    """``[resources]``: ceilings; what is absent and has no default is not limited."""

    cpu_ms_per_task: Annotated[
        int, whole(1, _WEEK_MS, "milliseconds from the intent line to the answer (wall clock, as Covenant)")
    ] = 30_000
    memory_mb: Annotated[int, whole(1, _MIB, "memory of the agent, MiB")] = 512
    disk_mb: Annotated[int, whole(0, _MIB, "sum of the writable mounts, MiB")] = 100
    network: Annotated[NetworkMode, says("network mode; `sign` wants it written")] = "outbound-https-only"
    pids_max: Annotated[int, whole(1, 4_194_304, "processes and threads at one time")] = 64
    cpu_millis: Annotated[int, whole(10, 1_024_000, "thousandths of one core")] = 1000
    cpu_weight: Annotated[int, whole(1, 10_000, "share of the CPU under contention")] = 100
    cpu_time_ms: Annotated[int | None, whole(1, _YEAR_SECONDS * 1000, "CPU time of the run, milliseconds")] = None
    swap_mb: Annotated[int, whole(0, _MIB, "swap, MiB")] = 0
    io_read_bps: Annotated[int | None, whole(1, _BYTES_PER_SECOND, "bytes read per second")] = None
    io_write_bps: Annotated[int | None, whole(1, _BYTES_PER_SECOND, "bytes written per second")] = None
    io_read_iops: Annotated[int | None, whole(1, 10**9, "read operations per second")] = None
    io_write_iops: Annotated[int | None, whole(1, 10**9, "write operations per second")] = None
    net_bps: Annotated[int | None, whole(1, _BYTES_PER_SECOND, "network bytes per second, each way")] = None


class Sandbox(fields.Section):
    """``[sandbox]``: what confines it."""

    required: Annotated[bool, says("refuse any backend that is no sandbox")] = False
    backend: Annotated[Backend, says("what runs it; only linux-gvisor is a sandbox")] = "trusted-local"
    filesystem: Annotated[
        FilesystemMode,
        says(
            "read-only-package: nothing is writable; ephemeral: /tmp of disk_mb, thrown away; "
            "host: that, and the granted write paths"
        ),
    ] = "read-only-package"
    standby: Annotated[int, whole(0, 64, "instances kept started and waiting, each used once")] = 0
    dev_shm_mb: Annotated[int, whole(0, _MIB, "size of /dev/shm, MiB; a part of disk_mb")] = 0


class Settlement(fields.Section):
    """``[settlement]``: the budget of the agent."""

    budget_credits_per_hour: Annotated[int, whole(0, _U63, "credits an hour; 0 means no budget")] = 0
    priority: Annotated[Priority, says("priority of its intents")] = "normal"


class Hermes(fields.Section):
    """``[hermes]``: consulted when the runtime is hermes, else only its types are checked."""

    tools_allowed: Annotated[
        tuple[str, ...], fields.LIST, says("tools that the run may use: one that begins another is stopped")
    ] = ()
    approval_policy: Annotated[str, says("`operator-prompt`, `auto-deny` or `auto-once`")] = "operator-prompt"


class Lifetime(fields.Section):
    """``[lifetime]``: absent, the run ends with its task."""

    ttl_seconds: Annotated[int | None, whole(1, _YEAR_SECONDS, "seconds that a run may live")] = None
    unlimited: Annotated[bool, says("no end; needs an approval in the signature")] = False
    on_expiry: Annotated[OnExpiry, says("what happens at the end of ttl_seconds")] = "terminate"


class Manifest(fields.Section):
    """A manifest that satisfies every rule of its own; signature, role, host and parent are other checks.

    A section that the file leaves out is its default object: ``wrote`` tells the difference.
    """

    agent: Agent
    capabilities: Capabilities = Capabilities()
    resources: Resources = Resources()
    sandbox: Sandbox = Sandbox()
    settlement: Settlement = Settlement()
    hermes: Hermes = Hermes()
    permissions: Permissions = Permissions()
    spawn: Spawn = Spawn()
    lifetime: Lifetime = Lifetime()
    process: Process = Process()
    root: Root = Root()
    workspace: Workspace = Workspace()
    services: Services = Services()
    publish: Annotated[
        tuple[PublishEntry, ...], Field(strict=False, max_length=ENTRIES), AfterValidator(unique_ports)
    ] = ()
    tools: command.Tools = command.Tools()

    _source: lines.ManifestFile = PrivateAttr(default=lines.ManifestFile())

    @model_validator(mode="after")
    def _structure(self) -> Manifest:
        # INVARIANT: no Manifest exists that breaks a rule across sections, however it was made.
        found = tuple(problems(self))
        if found:
            raise PydanticCustomError("structure", "sections contradict each other", {"problems": found})
        return self

    @property
    def volumes(self) -> tuple[tuple[str, VolumeGrant], ...]:
        """The volumes that the agent writes, each with its dotted key."""
        granted = ((f"permissions.filesystem.write[{i}]", one) for i, one in self.permissions.filesystem.volumes)
        own = self.workspace
        callers = () if own.volume is None else (("workspace.volume", VolumeGrant(own.volume, own.path)),)
        return (*granted, *callers)

    @property
    def source(self) -> lines.ManifestFile:
        """The file beyond its values."""
        return self._source

    @property
    def written(self) -> frozenset[str]:
        """Dotted keys and tables that the file wrote, such as ``resources.memory_mb`` and ``resources``."""
        return self._source.written

    @property
    def unknown_sections(self) -> tuple[str, ...]:
        """Top-level sections that are tolerated and mean nothing here, sorted."""
        return self._source.unknown

    def wrote(self, dotted: str) -> bool:
        """Whether the file wrote this key or table, as opposed to its default applying."""
        return dotted in self._source.written

    def where(self, dotted: str) -> str:
        """``agent.toml:LINE`` of a dotted key such as ``permissions.network[0].host``.

        For what the file did not write, the line of the nearest table around it, or the file alone.
        """
        return self._source.where(lines.parse_dotted(dotted))

    def point(self, dotted: str) -> str:
        """``agent.toml:LINE:COLUMN`` of a dotted key's value, for findings about the text; else as ``where``."""
        return self._source.point(lines.parse_dotted(dotted))
