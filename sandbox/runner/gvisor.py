"""The linux-gvisor runner: compiled artefacts to a running sandbox, and back to one result with nothing left.

Every acquisition is entered on one stack and released in reverse, after any failure too. What a kill -9 of this process
leaves behind (a run directory, an empty cgroup) is removed by the next start (``sandbox.runner.recovery``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, structs

from policy import contract, data, denials, errors
from policy.compile import bundle as compiled_bundle
from policy.prove import connections
from sandbox.attest import monitor, reference, streams, volumes
from sandbox.attest import network as attest_network
from sandbox.attest.workspace import WorkspaceReference
from sandbox.audit.denials import every_program_is_granted, failed_calls, refused_calls, traced
from sandbox.broker.server import Broker
from sandbox.config import trusted_binary
from sandbox.control import tree_kill
from sandbox.host import facts
from sandbox.kernel import procfs
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import signals, spawn
from sandbox.kernel.runsc import command, console, debug_log, start_trace
from sandbox.network import addresses, gateway
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.probes import preload
from sandbox.rootfs import covered
from sandbox.run_io import ContainerIO, PeriodicCheck, RunOutcome
from sandbox.rundir import marks
from sandbox.rundir.directory import RunDirectory
from sandbox.rundir.uid_pool import UidLease
from sandbox.runner import mounts as runner_mounts
from sandbox.runner import own_limits, start_gate
from sandbox.runner.limits import METER, CpuTime, Meter, on_devices
from sandbox.runner.observer import RunnerObserver
from sandbox.runner.spec import CREDENTIALS, PACKAGE, SandboxSpec, Secrets, StartedSandbox
from sandbox.shim.agent_loop import AgentLoop, AgentSession, out_of_memory
from sandbox.shim.stdio import StdioSession
from sandbox.shim.stream import StreamSession
from sandbox.shim.terminal import TerminalSession

__all__ = ["CREDENTIALS", "SandboxSpec", "Secrets", "StartedSandbox", "run"]

# How often the sandbox's log is read: by the clock, since an agent that makes it write would wake us at each line.
_CALLS_SECONDS = 0.1
# How often connections that are over are taken out of the tables (sandbox.network.base_rules).
_COLLECT_SECONDS = 1.0

_KILLED = 128 + signal.SIGKILL


def run(job: SandboxSpec, *, runs: Path, uids: UidLease, hierarchies: cgroup.Hierarchies | None = None) -> RunOutcome:
    """Start the sandbox, hold the exchange, end everything; what of the network takes longest goes with ``job.after``.

    Raises:
        errors.MachineError: the sandbox could not be set up; nothing of it is left.
    """
    with contextlib.ExitStack() as lasting:
        directory, finished = _run(job, runs, uids, hierarchies or cgroup.Hierarchies.read(), lasting)
        if job.after is not None and job.artefacts.json("network.json")["gateway"] is not None:
            # Where the gate is not to be had, all of it is taken away now.
            with contextlib.suppress(errors.KeeperError):
                # Its end is not written yet: a kill before that must not make its use look like zero.
                directory.vacate(METER)
                job.after.push(lasting.pop_all())
    # Its shim's own look came before others saw it no more (directory.RunDirectory): it is ended, or it is answered.
    return finished if directory.ended is None else structs.replace(finished, error=directory.ended)


def _run(
    job: SandboxSpec, runs: Path, uids: UidLease, hierarchies: cgroup.Hierarchies, lasting: contextlib.ExitStack
) -> tuple[RunDirectory, RunOutcome]:
    """``lasting`` is given the resources that outlive the processes: the directory and the gateway."""
    with contextlib.ExitStack() as stack:
        heard, denied = None, job.observer.denied
        if job.files.tries is not None:
            heard = stack.enter_context(contextlib.closing(preload.ProbeReports(job.files.tries, denied)))
            denied = heard.denied
        uid = stack.enter_context(uids)
        if job.workspace is not None:
            # Before the cgroup: it is settled when no process of the run is left.
            stack.enter_context(job.workspace)
        directory = lasting.enter_context(RunDirectory(runs / job.run_id, job.label, claim=job.claim))
        if job.operations is not None:
            stack.enter_context(job.operations.listening(directory.path))
        leaf = cgroup.Leaf(hierarchies, job.run_id)
        job = _install_signal_kill(job, leaf)
        gates = _gates(job, leaf)
        directory.note_cgroups({**leaf.plan(), **({} if gates is None else gate_cgroup.noted(gates))})
        stack.enter_context(leaf)
        # A revocation finds the cgroup by now; one that came before left its mark.
        _check_not_revoked(job, directory)
        broker = stack.enter_context(_broker(job))
        limits = _limits(job, leaf.hierarchies.version)
        leaf.apply(limits)
        directory.write_config(_config(job, uid, directory))
        job = runner_mounts.with_secrets(own_limits.given(job, directory.path, stack), stack, uid)
        job = runner_mounts.with_volumes(runner_mounts.with_workspace(job, uid), uid, stack)
        mounts = [*runner_mounts.attached(job, directory, stack, uid), runner_mounts.memory(job, directory, stack)]
        gate = None if gates is None else _gateway(job, directory, stack.enter_context(gates), denied, lasting)
        started = stack.enter_context(contextlib.closing(start_trace.StartTrace(directory.trace, saw=job.observe)))
        calls = _refused_calls(job, directory, stack, heard)
        places = {
            "--pod-init-config": str(started.config),
            **(debug_log.flags(directory.trace, _traced(job)) if calls else {}),
        }
        # Once more: the vault and the gateway took their time, and a revocation does not wait that long for a shim.
        _check_not_revoked(job, directory)
        job.files.check_root()
        terminal = _console(job, directory, stack)
        launch = _launch(job, directory, leaf, mounts, places, gate, broker, terminal)
        child = stack.enter_context(spawn.spawn(launch, _patience(job, directory, leaf)))
        stack.callback(leaf.kill)
        if job.signals is not None:
            stack.callback(job.signals.handlers, leaf.kill)  # its descriptor is closed after this
            job.signals.handlers(leaf.kill, child.has_ended)
        # INVARIANT: before the trace session is answered, for which runsc waits before it makes the sandbox: no agent
        # has run by then, no gate is unsealed that an attestation could find, and the addresses are not taken over.
        # Then there may be less than this, and never more.
        network = None if gate is None or gates is None else _network(job, gate, gates)
        attestor = _attestor(job, directory, leaf, limits, child, uid, network, terminal)
        watches = {**job.watches, **(gate.watches if gate else {}), **(broker.watches if broker else {})}
        rounds = _rounds(job, calls, gate, broker)
        watching = _watching(job, leaf, attestor)
        begun = stack.enter_context(
            contextlib.closing(start_gate.StartGate(started, watching, heard=heard, calls=calls))
        )
        meter = Meter(leaf, gates, directory.path / METER)
        channel = ContainerIO(
            stdin=child.stdin,
            stdout=child.stdout,
            stderr=child.stderr,
            pidfd=child.pidfd,
            started=begun.fileno(),
            has_started=begun.poll,
            handle=_Sandbox(job, directory, leaf),
            observer=RunnerObserver(job.observer, meter, broker, swept=directory.path),
            watches={**watches, **started.watches},
            # Whether the run is revoked is asked after the attestation, which takes its time: that comes last at the
            # start.
            rounds=(*(one.round() for one in watching), *rounds),
        )
        if job.operations is not None:
            channel = job.operations.joined(channel)
        held_for = StartedSandbox(directory.path, leaf, limits, child.stdin, attestor, meter)
        later = None if job.later is None else job.later(held_for)
        session = stack.enter_context(_session(job, terminal))
        exchange = AgentLoop(channel, session, job.intent, job.limits, later=later)
        if job.operations is not None:
            job.operations.converses(exchange)
        exchange.run()
        tree_kill.wait_for_sweep(directory.path)
        status = child.reap()
        if job.signals is not None and (told := job.signals.outcome(status)) is not None:
            exchange.ended_by(told)
        leaf.kill()
        if refused := leaf.pids_refused():
            denied(denials.Denial("pids", "pids_max", denials.HOST_TASKS), count=refused)
        revoked = marks.verdict(directory.path)
        cut_short = revoked is not None or not isinstance(exchange.error, errors.StartTimeoutError | None)
        if not cut_short and (fault := begun.fault(status, by_us=exchange.killed)) is not None:
            raise fault
        return directory, _finish(exchange, status, leaf, revoked, meter, gate)


def _config(job: SandboxSpec, uid: int, directory: RunDirectory) -> bytes:
    """Return the config.json of this run."""
    return compiled_bundle.instantiate(
        job.artefacts,
        run_id=job.run_id,
        uid=uid,
        arguments=job.arguments or compiled_bundle.with_intent(job.artefacts, job.argument, job.appended),
        image="" if job.files.root_file is None else str(directory.root_file),
    )


def _console(job: SandboxSpec, directory: RunDirectory, stack: contextlib.ExitStack) -> console.ConsoleSocket | None:
    """Return the socket for the agent's terminal, where its contract has one."""
    if job.caller is None or job.caller.size is None or job.contract != contract.StreamContract(terminal=True):
        return None
    return stack.enter_context(contextlib.closing(console.ConsoleSocket(directory.path, job.caller.size)))


@contextlib.contextmanager
def _session(job: SandboxSpec, terminal: console.ConsoleSocket | None) -> Iterator[AgentSession]:
    """Yield the session of the run's contract."""
    if not isinstance(job.contract, contract.StreamContract):
        yield StdioSession(job.contract)
        return
    assert job.caller is not None
    if terminal is None:
        yield StreamSession(job.caller)
        return
    with contextlib.closing(TerminalSession(job.caller, terminal)) as session:
        yield session


def _rounds(
    job: SandboxSpec, calls: debug_log.RefusedCalls | None, gate: gateway.Gateway | None, broker: Broker | None
) -> tuple[PeriodicCheck, ...]:
    """Return the checks of the run and of its helpers. The broker answers from now on."""
    rounds = (*job.rounds, *((PeriodicCheck(_CALLS_SECONDS, calls.ready),) if calls else ()))
    rounds = (*rounds, *((PeriodicCheck(_COLLECT_SECONDS, gate.collect),) if gate else ()))
    if broker is not None:
        broker.started()
        rounds = (*rounds, broker.round())
    return rounds


def _install_signal_kill(job: SandboxSpec, leaf: cgroup.Leaf) -> SandboxSpec:
    """Have a signal kill the processes in the leaf, and end the waits on the run's descriptors."""
    held = {} if job.signals is None else job.signals.handlers(leaf.kill)
    return structs.replace(job, watches={**job.watches, **held})


def _check_not_revoked(job: SandboxSpec, directory: RunDirectory) -> None:
    """Check for a mark and for a signal, at a step where no wait does.

    Raises:
        errors.RunRevokedError, errors.KilledError: Raised when the run is marked.
        errors.StoppedError: Raised when this process was told to end.
    """
    if (revoked := marks.verdict(directory.path)) is not None:
        raise revoked
    if job.signals is not None:
        job.signals.check()


def _limits(job: SandboxSpec, version: int) -> list[cgroup.Limit]:
    entries: Sequence[Mapping[str, Any]] | None = job.artefacts.json("cgroup.json")[f"v{version}"]
    if entries is None:
        raise errors.NotEnforceableError(f"cgroup version {version} cannot hold the limits that were granted")
    return [
        cgroup.Limit(e["controller"], e["file"], on_devices(e["value"], job.files.disks), e["required"])
        for e in entries
    ]


def _gates(job: SandboxSpec, leaf: cgroup.Leaf) -> cgroup.Leaf | None:
    """Return the cgroup of the run's gates, not made yet. None for a run without a network."""
    return gate_cgroup.of(leaf) if job.artefacts.json("network.json")["gateway"] is not None else None


def _gateway(
    job: SandboxSpec, directory: RunDirectory, gates: cgroup.Leaf, denied: denials.Told, stack: contextlib.ExitStack
) -> gateway.Gateway:
    """Return the gateway of the run's network: closed, and not made yet."""
    gates.apply(gate_cgroup.LIMITS[gates.hierarchies.version])
    directory.note_published(job.artefacts.json("gates.json").get("publish", ()))
    opened = gateway.opened(
        job.artefacts,
        job.run_id,
        config=job.config,
        note=directory.note_network,
        denied=denied,
        join_files=gates.join_files(),
        patience=_patience(job, directory, gates),
        services=job.services,
        reached=job.reached,
        publish=job.publish,
        host=job.host,
        inject=own_limits.trusted(job, directory.path),
        ssh=job.ssh,
        desk=job.desk and job.desk.shown_by(directory.note_leases),
        proxy=job.proxy,
    )
    return stack.enter_context(opened)


def _broker(job: SandboxSpec) -> contextlib.AbstractContextManager[Broker | None]:
    """Return the agent's broker, exactly where its policy has one."""
    if command.BROKER_FLAG not in job.artefacts.json("runtime.json")["flags"]:
        return contextlib.nullcontext()
    return job.broker or Broker()


class _Sandbox(Struct, frozen=True):
    """A sandbox of runsc (run_io.SandboxHandle)."""

    job: SandboxSpec
    directory: RunDirectory
    freezer: cgroup.Leaf

    def terminate(self) -> None:
        command.kill(
            self.job.runsc_path,
            root=self.directory.runsc_root,
            container=self.job.run_id,
            signal_name="TERM",
            timeout_seconds=self.job.limits.grace_seconds,
        )

    def kill(self) -> None:
        self.freezer.kill()

    def out_of_memory(self) -> bool:
        return self.freezer.oom_kills() > 0


def _refused_calls(
    job: SandboxSpec, directory: RunDirectory, stack: contextlib.ExitStack, heard: preload.ProbeReports | None
) -> debug_log.RefusedCalls | None:
    """Listen for the calls that the filter refuses, unless the operator does without. Probes are heard in any case."""
    if not job.config.tell_calls and heard is None:
        return None
    names = {number: name for name, number in data.syscalls(facts.architecture()).numbers.items()}
    denied = job.observer.denied if heard is None else heard.denied if job.config.tell_calls else heard.quietly
    told = refused_calls(job.artefacts, denied)
    failed = failed_calls(denied, every_program=every_program_is_granted(job.artefacts))
    awaited = None if heard is None else heard.calls
    calls = debug_log.RefusedCalls(directory.trace, names, told, awaited=awaited, failed=failed)
    return stack.enter_context(contextlib.closing(calls))


def _traced(job: SandboxSpec) -> tuple[str, ...]:
    return traced(files=job.config.tell_files, arch=facts.architecture())


def _launch(
    job: SandboxSpec,
    directory: RunDirectory,
    leaf: cgroup.Leaf,
    mounts: Sequence[proc_launch.Attach],
    places: Mapping[str, str],
    gate: gateway.Gateway | None = None,
    broker: Broker | None = None,
    terminal: console.ConsoleSocket | None = None,
) -> proc_launch.Launch:
    passed = None if broker is None else broker.guest
    return proc_launch.Launch(
        program=job.runsc_path,
        arguments=command.run_arguments(
            job.runsc_path,
            job.artefacts.json("runtime.json")["flags"],
            root=directory.runsc_root,
            places=places,
            bundle=directory.bundle,
            container=job.run_id,
            broker=passed,
            console=None if terminal is None else terminal.address,
        ),
        environment=command.ENVIRONMENT,
        join_files=leaf.join_files(),
        mounts=mounts,
        network=None if gate is None else gate.spaces.agent,
        covered=job.files.covered,
        keep=() if passed is None else (passed,),
        filter=command.own_filter(facts.architecture()),
    )


def _patience(job: SandboxSpec, directory: RunDirectory, leaf: cgroup.Leaf) -> spawn.Patience:
    """Serve kills, requests and revocations while a process is on its way into the leaf."""
    asked = {} if job.operations is None else job.operations.before()
    return spawn.Patience(
        seconds=job.limits.start_seconds,
        watches={**job.watches, **asked},
        look=lambda: marks.verdict(directory.path),
        kill=leaf.kill,
    )


def _network(job: SandboxSpec, gate: gateway.Gateway, gates: cgroup.Leaf) -> attest_network.Network:
    gate.make()
    held, nft, own, via, state = gate_cgroup.written(gates), trusted_binary(job.config.nft), "", "", None
    if job.artefacts.json("network.json")["mode"] != "off" and job.proxy is None:
        own, via, state = addresses.host_device(job.run_id), job.config.uplink, job.config.state
    # What the host's other tables hold now is the operator's; what comes to touch the run later is drift.
    reach = connections.reachable(job.artefacts.files["firewall.nft"])
    return attest_network.Network.made(gate.spaces, device=via, nft=nft, own=own, gates=held, reach=reach, state=state)


def _attestor(
    job: SandboxSpec,
    directory: RunDirectory,
    leaf: cgroup.Leaf,
    limits: list[cgroup.Limit],
    child: spawn.Child,
    uid: int,
    network: attest_network.Network | None,
    terminal: console.ConsoleSocket | None,
) -> monitor.Attestor | None:
    """Write the reference values of this run for attestation, and return the monitor that attests it."""
    controllers = leaf.paths if leaf.hierarchies.version == 1 else ("",)
    runner = procfs.process(child.pid)
    if runner is None:
        return None  # it ended as soon as it was started, which the exchange says
    seen = {place: os.fstat(fd) for place, fd in job.files.sources.items()}
    file = job.files.root_file
    if file is None:
        seen["/"] = os.lstat(job.files.rootfs)
    package = os.readlink(f"/proc/self/fd/{job.files.sources[PACKAGE]}")
    made = reference.ReferenceValues(
        run_id=job.run_id,
        agent_id=job.label["agent_id"],
        policy_digest=job.artefacts.digest,
        uid=uid,
        runner=runner.name,
        directory=str(directory.path),
        cgroup_version=leaf.hierarchies.version,
        cgroup_files={controller: str(path) for controller, path in leaf.paths.items()},
        memberships={name: runner.cgroups[name] for name in controllers},
        limits={limit.file: limit.value for limit in limits},
        mounts={place: (info.st_dev, info.st_ino) for place, info in seen.items()},
        package=package,
        arguments=tuple(job.arguments) or compiled_bundle.with_intent(job.artefacts, job.argument, job.appended),
        network=network,
        tells_calls=job.config.tell_calls or job.files.tries is not None,
        traced=_traced(job),
        nice=os.getpriority(os.PRIO_PROCESS, 0),
        granted=covered.numbers(job.artefacts.json("mounts.json")["mounts"], job.files.sources),
        streams=_pipes(child) if terminal is None else streams.UNKNOWN,
        root_file=None if file is None else reference.RootFile.of(file),
        volumes=volumes.made(job.artefacts.json("mounts.json")["mounts"], job.config.state),
        workspace=None if job.workspace is None else WorkspaceReference.of(job.workspace, runner_mounts.places(job)),
    )
    directory.write_policy(job.artefacts)
    made.write(directory.path)
    return monitor.Attestor(
        made,
        job.artefacts,
        state=job.config.state,
        seconds=job.config.attest_seconds,
        alarm=job.config.on_drift == "alarm",
        drifted=job.observer.drifted,
        over=lambda: marks.verdict(directory.path) is not None,
        completed=functools.partial(_with_terminal, directory, terminal),
    )


def _pipes(child: spawn.Child) -> tuple[str, ...]:
    return tuple(streams.pipe(fd) for fd in (child.stdin, child.stdout, child.stderr))


def _with_terminal(
    directory: RunDirectory, terminal: console.ConsoleSocket | None, made: reference.ReferenceValues
) -> reference.ReferenceValues:
    """Add the terminal to the reference values of a run. runsc has sent it before it started the sandbox.

    A terminal without a name is that of a sandbox that has ended: what is not ended does not have the unknown one.
    """
    if terminal is None or not terminal.poll() or (name := streams.terminal(terminal.master)) is None:
        return made
    made = structs.replace(made, streams=(name,) * 3)
    made.write(directory.path)
    return made


def _watching(
    job: SandboxSpec, leaf: cgroup.Leaf, attestor: monitor.Attestor | None
) -> tuple[CpuTime | monitor.Attestor, ...]:
    """Return the rounds that look at the run from its first process on."""
    limit_ms = job.artefacts.json("supervision.json")["task"]["cpu_time_ms"]
    clock = None if limit_ms is None else CpuTime(limit_ms, leaf.cpu_time_us)
    return tuple(one for one in (clock, attestor) if one is not None)


def _finish(
    exchange: AgentLoop,
    status: int,
    leaf: cgroup.Leaf,
    revoked: errors.RunRevokedError | errors.KilledError | None,
    meter: Meter,
    gate: gateway.Gateway | None,
) -> RunOutcome:
    is_whole = gate is None or gate.stop()
    oom = leaf.oom_kills()
    error = exchange.error
    if revoked is not None:
        error = revoked  # the revoking process killed it, which looks like a crash
    elif oom and (error is None or isinstance(error, errors.DeadlineError)):
        # An OOM kill shows as status 137, or as 1 with an empty stderr like an agent's own exit 1, or as a sandbox
        # that hangs: only the cgroup's counter tells (sandbox-facts).
        error = out_of_memory()
    elif error is None and exchange.started_at is None:
        error = errors.SandboxCrashedError(f"the sandbox ended with status {status} before the agent started")
    elif error is None and status != 0:
        # runsc gives one status for both.
        subject = "the agent or its sandbox" if status == _KILLED else "the agent"
        error = errors.AgentFailedError(f"{subject} {signals.ending(status)}", exit_status=status)
    return exchange.finished(
        status,
        error,
        oom_kills=oom,
        reported=tuple(leaf.reported),
        all_counted=is_whole,
        cpu_ms=meter.cpu_ms(),
        memory_peak_bytes=meter.memory_peak_bytes(),
    )
