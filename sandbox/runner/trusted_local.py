"""The trusted-local runner: an agent on the host's own kernel under a dedicated uid. No sandbox, and it says so.

What it holds an agent to is decided in ``policy.compile.trusted_local``; what the child does to itself stands in
``sandbox.kernel.proc.confine``. Here: who the user is, what is hidden, and the same exchange as under gVisor.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import resource
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from policy import errors
from policy.compile import trusted_local as compiler
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.prove import local
from sandbox import config as configuration
from sandbox import core_dumps
from sandbox.host import facts
from sandbox.kernel import libc
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import confine, signals, spawn
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.seccomp import load
from sandbox.run_io import ContainerIO, Limits, Outcome, PeriodicCheck, RunObserver, RunOutcome
from sandbox.rundir import marks
from sandbox.rundir.directory import RunDirectory
from sandbox.runner.limits import METER, Meter
from sandbox.runner.observer import RunnerObserver
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.operations import RunOperations
from sandbox.shim.signals import DeferredSignals
from sandbox.shim.stdio import StdioSession
from sandbox.storage.package_store import PackageStore

# The package's place in the agent's mount namespace: a directory of every Linux system (FHS), so that nothing
# has to be made on the host to mount over.
WORKSPACE = "/mnt"
_SCRATCH = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108 - mount points, private to the run
_RUN = "/run"
# Covering one of these would take away what a program needs to start, or a cover of ours.
_NEEDED = ("/usr", "/lib", "/bin", "/etc", "/dev", "/proc", _RUN, WORKSPACE, *_SCRATCH)

# Members can become root, read the disk, or read what root may: not who an agent should be, although the
# supplementary groups themselves are dropped.
_ROOT_LIKE_GROUPS = frozenset(
    {"root", "sudo", "wheel", "admin", "docker", "lxd", "incus-admin", "incus", "libvirt", "kvm", "disk", "shadow"}
    | {"kmem", "adm", "systemd-journal", "staff", "covenant"}
)
_NOBODY = 65534
_OPEN_FILES = 1024
# Measured with node 20: it starts with 1,024 MiB of RLIMIT_AS and not with 512, at any use.
_NODE_ADDRESS_SPACE = 1024 * 1024 * 1024


class Identity(Struct, frozen=True):
    """The user that the agent becomes."""

    name: str
    uid: int
    gid: int


class Plan(Struct, frozen=True):
    """A run that may start: what the manifest compiled to, who it runs as, what starts it, and what must be refused."""

    policy: compiler.LocalPolicy
    identity: Identity
    program: str
    demand: local.RefusedCalls

    @property
    def not_enforced(self) -> tuple[str, ...]:
        """Return the limits that this backend does not enforce, to print and to log."""
        return self.policy.not_enforced

    def describe(self) -> str:
        """The act in words."""
        return f"run {self.policy.entry} as {self.identity.name} (uid {self.identity.uid}), not sandboxed"


def plan(manifest: Manifest, *, config: configuration.Config, user: str | None, signed: bool) -> Plan:
    """Decide what would run; nothing is started.

    Raises:
        errors.BackendError: the manifest demands what this backend cannot hold, or the user is unfit.
        errors.PrivilegeError: not root.
        errors.HostError: the user or the interpreter is missing.
    """
    policy = compiler.compile(manifest, arch=facts.architecture(), signed=signed)
    _need_root()
    identity = identify(user or config.trusted_local_user, config)
    interpreter = {"python3": config.python3, "node": config.node}.get(policy.runtime)
    own = f"{WORKSPACE}/{policy.entry}"
    program = own if interpreter is None else str(configuration.trusted_binary(interpreter))
    return Plan(policy, identity, program, local.demanded(manifest))


def identify(name: str, config: configuration.Config) -> Identity:
    """The user of that name, if an agent may be it.

    Raises:
        errors.HostError: there is no such user.
        errors.BackendError: it is root, shared, or in a group that makes it as good as root.
    """
    try:
        entry = pwd.getpwnam(name)
    except (KeyError, ValueError) as e:
        raise errors.HostError(
            f"there is no user `{name}`",
            hint="run scripts/setup, or: useradd --system --no-create-home --shell /usr/sbin/nologin covenant-agent",
        ) from e
    check_ids(name, entry.pw_uid, entry.pw_gid, config)
    groups = os.getgrouplist(name, entry.pw_gid)
    for gid in groups:
        with contextlib.suppress(KeyError):
            if gid == 0 or grp.getgrgid(gid).gr_name in _ROOT_LIKE_GROUPS:
                group = grp.getgrgid(gid).gr_name
                raise errors.BackendError(f"user `{name}` is in group `{group}`", hint="use a user of its own")
    return Identity(name, entry.pw_uid, entry.pw_gid)


def check_ids(name: str, uid: int, gid: int, config: configuration.Config) -> None:
    """Refuse ids that are root's, that others share, or that gVisor runs take theirs from.

    Raises:
        errors.BackendError: they are.
    """
    if uid == 0 or gid == 0:
        raise errors.BackendError(f"user `{name}` is root", hint="an agent never runs as uid or gid 0")
    if uid in (_NOBODY, 2**32 - 1) or gid == 2**32 - 1:
        raise errors.BackendError(f"user `{name}` is shared with other services", hint="use a user of its own")
    if config.uid_first <= uid < config.uid_first + config.uid_count:
        raise errors.BackendError(f"uid {uid} of user `{name}` lies in the range of the sandboxed runs")


def run(
    plan: Plan,
    *,
    package: Package,
    run_id: str,
    intent: bytes,
    limits: Limits,
    state: Path,
    hidden: Sequence[str] = (),
    rounds: Sequence[PeriodicCheck] = (),
    watches: Mapping[int, Callable[[], Outcome]] | None = None,
    observer: RunObserver,
    operations: RunOperations | None = None,
    directory: RunDirectory | None = None,
    hierarchies: cgroup.Hierarchies | None = None,
    signals: DeferredSignals | None = None,
) -> RunOutcome:
    """Start the agent, hold the exchange, end everything that it started.

    ``state`` is COVENANT_STATE, ``hidden`` are further directories (COVENANT_HOME) that it may not look into;
    ``rounds`` and ``watches`` are looked at while it lasts; ``operations`` is what may be asked of it meanwhile. What
    it uses is counted by a cgroup that is noted in ``directory``; without one, or where none can be made, nothing is.
    ``signals`` are held back from when its conversation begins.

    Raises:
        errors.PrivilegeError: not root.
        errors.ProofError: the filter that would be loaded is not what the manifest demands; nothing was started.
        errors.MachineError: a step of the confinement failed; nothing of the agent ran.
    """
    _need_root()
    # Built here, where a failure still has a place to go; the child only loads it.
    filter_ = _proved_filter(plan)
    executable = plan.policy.entry if plan.policy.runtime == "rust-bin" else ""
    copy = PackageStore(state / "packages").put(package, executable=executable)
    with contextlib.ExitStack() as stack:
        mount = _package_mount(copy, executable=bool(executable), stack=stack)
        confinement = _confinement(plan, (str(state), *hidden), filter_)
        leaf = None if directory is None else _leaf(directory, run_id, hierarchies, stack)
        watches = dict(watches or {})
        if signals is not None:
            watches |= signals.handlers((lambda: None) if leaf is None else leaf.kill)
            signals.check()
        # A revocation finds the cgroup by now; one that came before left its mark.
        if directory is not None and (revoked := marks.verdict(directory.path)) is not None:
            raise revoked
        launch = _launch(plan, run_id, mount, confinement, leaf)
        asked = {} if operations is None else operations.before()
        patience = _patience(limits, {**watches, **asked}, directory, leaf)
        child = stack.enter_context(spawn.spawn(launch, patience))
        if leaf is not None:
            stack.callback(leaf.kill)  # before it is waited for: what stands in a stopped cgroup takes no signal
        meter = Meter(leaf, noted=None if directory is None else directory.path / METER)
        channel = _channel(child, leaf, RunnerObserver(observer, meter), rounds, watches, stack)
        if signals is not None:
            stack.callback(signals.handlers)  # the descriptor by which it kills is closed after this
            signals.handlers(channel.handle.kill, child.has_ended)
        if operations is not None:
            channel = operations.joined(channel)
        exchange = AgentLoop(channel, StdioSession(), intent, limits)
        if operations is not None:
            operations.converses(exchange)
        exchange.run()
        status = child.reap()
        if signals is not None and (told := signals.outcome(status)) is not None:
            exchange.ended_by(told)
        # The revoking process killed it, which looks like a failure of its own.
        ended = exchange.error if directory is None else marks.verdict(directory.path) or exchange.error
        return _finished(plan, exchange, ended, status, meter)


def _launch(
    plan: Plan, run_id: str, mount: proc_launch.Attach, confinement: confine.Confinement, leaf: cgroup.Leaf | None
) -> proc_launch.Launch:
    arguments = [plan.program] if plan.policy.runtime == "rust-bin" else [plan.program, plan.policy.entry]
    return proc_launch.Launch(
        program=plan.program,
        arguments=arguments,
        environment=_environment(plan, run_id),
        mounts=[mount],
        prepare=lambda: confine.enter(confinement),
        directory=WORKSPACE,
        join_files=() if leaf is None else leaf.join_files(),
    )


def _patience(
    limits: Limits,
    watches: Mapping[int, Callable[[], Outcome]],
    directory: RunDirectory | None,
    leaf: cgroup.Leaf | None,
) -> spawn.Patience:
    return spawn.Patience(
        seconds=limits.start_seconds,
        watches=watches,
        look=lambda: None if directory is None else marks.verdict(directory.path),
        kill=(lambda: None) if leaf is None else leaf.kill,
    )


def _channel(
    child: spawn.Child,
    leaf: cgroup.Leaf | None,
    observer: RunnerObserver,
    rounds: Sequence[PeriodicCheck],
    watches: Mapping[int, Callable[[], Outcome]],
    stack: contextlib.ExitStack,
) -> ContainerIO:
    # spawn returns after execve, so the agent has started: a descriptor that is readable already.
    started = os.eventfd(1, os.EFD_CLOEXEC)
    stack.callback(os.close, started)
    return ContainerIO(
        stdin=child.stdin,
        stdout=child.stdout,
        stderr=child.stderr,
        pidfd=child.pidfd,
        started=started,
        has_started=lambda: True,
        handle=_LocalProcess(child, leaf),
        observer=observer,
        rounds=rounds,
        watches=watches,
    )


def _need_root() -> None:
    if os.geteuid() != 0:
        raise errors.PrivilegeError(
            "trusted-local needs root, to become a user that cannot read your keys",
            hint="run it with sudo, and give COVENANT_HOME",
        )


def _leaf(
    directory: RunDirectory, run_id: str, hierarchies: cgroup.Hierarchies | None, stack: contextlib.ExitStack
) -> cgroup.Leaf | None:
    """A cgroup without a limit, to count what the agent uses. None where there is no place for one: nothing of its
    confinement rests on it."""
    leaf = cgroup.Leaf(hierarchies or cgroup.Hierarchies.read(), run_id)
    try:
        directory.note_cgroups(leaf.plan())
        return stack.enter_context(leaf)
    except (errors.KernelError, errors.NotEnforceableError):
        return None


class _LocalProcess(Struct, frozen=True):
    """The processes of a trusted-local agent (run_io.SandboxHandle). They cannot be frozen."""

    child: spawn.Child
    leaf: cgroup.Leaf | None
    freezer: None = None

    def terminate(self) -> None:
        self.child.signal(signal.SIGTERM)

    def kill(self) -> None:
        # The keeper ends with the namespace; its own death would end it too, without a wait for that.
        self.child.signal(confine.KILL_ALL)
        # The process that stopped it to revoke it may be dead; then only this thaw lets it die.
        if self.leaf is not None:
            self.leaf.kill()

    def out_of_memory(self) -> bool:
        """Whether the kernel killed a process for memory: the limit is on the address space, which kills nothing."""
        return False


def _package_mount(copy: Path, *, executable: bool, stack: contextlib.ExitStack) -> proc_launch.Attach:
    """The verified copy, attached by descriptor: the agent never walks through COVENANT_STATE."""
    fd = os.open(copy, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    stack.callback(os.close, fd)
    detached = libc.open_tree_clone(fd)
    stack.callback(os.close, detached)
    flags = libc.MOUNT_ATTR_RDONLY | libc.MOUNT_ATTR_NOSUID | libc.MOUNT_ATTR_NODEV
    libc.mount_setattr(detached, flags if executable else flags | libc.MOUNT_ATTR_NOEXEC)
    return proc_launch.Attach(detached, WORKSPACE)


def _environment(plan: Plan, run_id: str) -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": _SCRATCH[0] if plan.policy.scratch_bytes else WORKSPACE,
        "LANG": "C.UTF-8",
        "COVENANT_RUN_ID": run_id,
    }


def _proved_filter(plan: Plan) -> Any:
    """The filter that the child will load, after its program was read back (policy.prove.local).

    Raises:
        errors.ProofError: it refuses more or less than the manifest demands.
        errors.HostError: libseccomp cannot make it.
    """
    prepared = load.prepare(plan.policy.filter)
    local.prove(load.export(prepared), plan.demand, arch=facts.architecture())
    return prepared


def _confinement(plan: Plan, hidden: Sequence[str], filter_: Any) -> confine.Confinement:
    policy = plan.policy
    return confine.Confinement(
        uid=plan.identity.uid,
        gid=plan.identity.gid,
        hidden=(*_covers(hidden, plan), *((_RUN,) if policy.hide_run and os.path.isdir(_RUN) else ())),
        scratch=tuple(dict.fromkeys(os.path.realpath(p) for p in _SCRATCH if os.path.isdir(p))),
        scratch_bytes=policy.scratch_bytes,
        own_network=policy.own_network,
        limits=(
            (resource.RLIMIT_CORE, core_dumps.limit()),
            (resource.RLIMIT_FSIZE, policy.file_bytes),
            (resource.RLIMIT_NOFILE, _OPEN_FILES),
            (resource.RLIMIT_NPROC, policy.processes),
            (resource.RLIMIT_AS, policy.memory_bytes),
        ),
        filter=filter_,
    )


def _covers(hidden: Sequence[str], plan: Plan) -> list[str]:
    """The directories to cover, outermost first, without those that another cover hides already.

    Raises:
        errors.HomeError: one of them holds what the agent's program needs, or belongs to the agent's user.
    """
    covered = [*(p for p in _SCRATCH if os.path.isdir(p)), WORKSPACE, "/proc"]
    if plan.policy.hide_run:
        covered.append(_RUN)
    out: list[str] = []
    for given in sorted({os.path.realpath(path) for path in hidden if os.path.exists(path)}):
        path = Path(given)
        if path.stat().st_uid == plan.identity.uid:
            raise errors.HomeError(f"`{given}` belongs to user `{plan.identity.name}`", where=given)
        if any(Path(needed).is_relative_to(path) for needed in (*_NEEDED, os.path.realpath(plan.program))):
            raise errors.HomeError(f"`{given}` cannot be hidden from an agent", where=given)
        if not any(path.is_relative_to(cover) for cover in (*map(os.path.realpath, covered), *out)):
            out.append(given)
    return out


def _finished(plan: Plan, exchange: AgentLoop, error: errors.RunError | None, status: int, meter: Meter) -> RunOutcome:
    if error is None and status != 0:
        small = plan.policy.runtime == "node" and plan.policy.memory_bytes < _NODE_ADDRESS_SPACE
        hint = "node reserves much address space: raise resources.memory_mb to 1024, or use linux-gvisor"
        error = errors.AgentFailedError(
            f"the agent {signals.ending(status)}", hint=hint if small else "", exit_status=status
        )
    # Not by getrusage(2): that counts the start, misses children that were not waited for, and of several processes
    # gives the memory of the largest.
    return exchange.finished(status, error, cpu_ms=meter.cpu_ms(), memory_peak_bytes=meter.memory_peak_bytes())
