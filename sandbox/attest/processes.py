"""A run's processes beside what a run's processes are: who they are, what they may, where they live.

    runsc run          the supervisor's child; root, outside of the sandbox, waits for it
      runsc-gofer      opens files for the sandbox, in a root of its own
      runsc-sandbox    gVisor's kernel
        (no name)      stubs, in which the agent's code runs; as many as it has processes

The rights are gVisor's own and the same in every run (sandbox-facts: "read-back"), so they are held to a table; who may
ask the host's kernel for what within them is gVisor's fixed filter, which is held to the one that this runsc binary
loaded before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from policy.prove.live import Layer, Standing
from sandbox.kernel import procfs
from sandbox.kernel.procfs import Name, Process

_GOFER, _SANDBOX = "runsc-gofer", "runsc-sandbox"
# linux/capability.h: CHOWN, DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, FSETID are 0 to 4.
_FILES: Final = 0x1F
_SYS_CHROOT, _SYS_PTRACE = 1 << 18, 1 << 19
# Role -> the most that it may have (directfs), and the namespaces that are its own.
_CAPABILITIES: Final = {_GOFER: _FILES | _SYS_CHROOT, _SANDBOX: _FILES | _SYS_PTRACE}
_OWN: Final = {
    _GOFER: ("ipc", "mnt", "net", "pid", "user", "uts"),
    _SANDBOX: ("ipc", "mnt", "net", "user", "uts"),
}
# Of the flags before the sub-command, those that say where this run's files lie and what is written there, and not what
# it may.
_PLACES: Final = frozenset({
    *("--root", "--pod-init-config", "--debug", "--debug-command", "--debug-log", "--debug-log-fd"),
    *("--strace", "--strace-syscalls", "--strace-log-size"),
})  # fmt: skip
# What `runsc run` itself adds for whom it opened the log.
_LOG: Final = "--debug-log-fd="
# A flag of the sub-command: --pass-fd=OUTSIDE:INSIDE, once for each descriptor.
_PASSED: Final = "--pass-fd="
_COMMANDS: Final = {_GOFER: "gofer", _SANDBOX: "boot"}


@dataclass(frozen=True, slots=True)
class Family:
    """The processes of one run. ``others`` are the stubs, and whatever else descends from ``runsc run``."""

    runner: Process
    gofer: Process
    sandbox: Process
    others: tuple[Process, ...]

    def all(self) -> tuple[Process, ...]:
        """Every one."""
        return (self.runner, self.gofer, self.sandbox, *self.others)


@dataclass(frozen=True, slots=True)
class Expected:
    """What was made: where the run's files lie by flag, its cgroups (controller to path, empty for version 2), and
    the inode of the network namespace that the sandbox was given, None when runsc made one. ``threads`` are those that
    the kernel lists in each of these cgroups; who is in no list is asked where it is."""

    places: Mapping[str, str]
    cgroups: Mapping[str, str]
    network: int | None = None
    threads: Mapping[str, Collection[int]] = field(default_factory=dict)
    host: Mapping[str, int] = field(default_factory=procfs.namespaces)


def family(runner: Name, members: Collection[int] = ()) -> Family | None:
    """The family of a ``runsc run``; None when it, its gofer or its sandbox is not there (yet, or any more).

    ``members`` are the processes in the run's cgroups: those of them that descend from it are among its family.
    """
    numbers = procfs.family(runner, members)
    found = [one for pid in numbers or () if (one := procfs.process(pid)) is not None]
    by_role: dict[str, list[Process]] = {}
    for one in found:
        role = one.arguments[0] if one.arguments and one.parent == runner.pid else ""
        by_role.setdefault(role if role in _COMMANDS else "", []).append(one)
    own = [one for one in found if one.name == runner]
    gofers, sandboxes = by_role.get(_GOFER, []), by_role.get(_SANDBOX, [])
    if not own or not gofers or not sandboxes:
        return None
    rest = (*gofers[1:], *sandboxes[1:], *(one for one in by_role[""] if one.name != runner))
    return Family(own[0], gofers[0], sandboxes[0], rest)


def still_there(found: Family) -> bool:
    """Whether the three that every run has are the same as they were."""
    return all(procfs.name(one.name.pid) == one.name for one in (found.runner, found.gofer, found.sandbox))


def flags(found: Family, expected: Expected) -> tuple[str, ...]:
    """The sandbox's flags that a policy has words for: those before its sub-command, but for this run's places, and
    each descriptor that was passed to the agent, by its number inside."""
    before = _before_command(found.sandbox, _SANDBOX)
    passed = (one for one in found.sandbox.arguments[1 + len(before) :] if one.startswith(_PASSED))
    numbers = tuple(f"{_PASSED}{one.removeprefix(_PASSED).rpartition(':')[2]}" for one in passed)
    return (*(one for one in before if one not in _own_places(expected)), *numbers)


def judge(found: Family, expected: Expected, members: Mapping[str, set[int]]) -> Iterator[Layer]:
    """What is not as it was made. ``members`` are the processes in each of the run's cgroups, by controller."""
    yield from _who(found, expected)
    for one in found.all():
        yield from _where(one, expected)
    for role, processes in ((_GOFER, [found.gofer]), (_SANDBOX, [found.sandbox, *found.others])):
        for one in processes:
            yield from _rights(one, role, found.runner.filters)
            yield from _namespaces(one, role, expected, found)
    ours = {one.name.pid for one in found.all()}
    for controller, pids in members.items():
        for pid in sorted(pids - ours):
            # One that was born or has ended since the family was read is no stranger.
            if procfs.name(pid) is not None and not procfs.descends(pid, ours):
                yield _drift("cgroup", f"no process of others in the run's cgroup {controller}", f"process {pid}")


def _who(found: Family, expected: Expected) -> Iterator[Layer]:
    for one in found.all():
        if one.binary != found.runner.binary:
            yield _drift("process", "runsc alone", f"process {one.name.pid} runs another file")
    for one in found.others:
        if one.arguments or one.parent == found.runner.name.pid:
            yield _drift("process", "one gofer, one sandbox and its stubs", f"process {one.name.pid} {_named(one)}")
    wanted = set(_before_command(found.sandbox, _SANDBOX))
    # The sandbox alone is given the log (debug_log.flags).
    shared = {one for one in wanted if not one.startswith(_LOG)}
    if set(_before_command(found.gofer, _GOFER)) != shared:
        yield _drift("process", "the same flags for gofer and sandbox", _named(found.gofer))
    for place in sorted(_own_places(expected) - wanted):
        yield _drift("process", place, "the sandbox runs with another")


def _where(one: Process, expected: Expected) -> Iterator[Layer]:
    # On version 1 each thread is in a cgroup for itself (cgroups(7)); its process shows that of its first.
    threads: Sequence[Mapping[str, str]] = [one.cgroups]
    # The lists are of the directories that were made, and the first thread says which those are by name.
    if "" not in expected.cgroups and not _all_listed(one.name.pid, expected):
        threads = procfs.thread_cgroups(one.name.pid)
    for controller, path in expected.cgroups.items():
        for at in {cgroups.get(controller) for cgroups in threads} - {path}:
            yield _drift("cgroup", f"{_named(one)} in {controller}:{path}", f"it is in {at}")


def _all_listed(pid: int, expected: Expected) -> bool:
    """Whether each thread of a process is in each of the cgroups, by the kernel's own lists of them.

    These are made anew for whoever opens them (cgroups(7), version 1). They are older than the list of threads here, so
    that one who was born or has come since is in none, and all of the process are asked.
    """
    # A run has some 50 threads: a file of each costs more than all else that is looked at in a process.
    numbers = procfs.threads(pid)
    return bool(numbers) and all(
        numbers.issubset(expected.threads.get(controller, ())) for controller in expected.cgroups
    )


def _rights(one: Process, role: str, beneath: int) -> Iterator[Layer]:
    """``beneath`` is how many filters it has of whoever called runsc: those are not the sandbox's."""
    most = _CAPABILITIES[role]
    for name, held in one.capabilities.items():
        if held & ~most:
            yield _drift("rights", f"{name} of {_named(one)} within {most:#x}", f"{held:#x}")
    if not one.no_new_privs:
        yield _drift("rights", f"{_named(one)} with no_new_privs", "without")
    if one.seccomp != 2 or one.filters <= beneath:
        found = f"Seccomp: {one.seccomp}, {one.filters} filters, {beneath} of them its caller's"
        yield _drift("rights", f"{_named(one)} under a filter of its own", found)


def _namespaces(one: Process, role: str, expected: Expected, found: Family) -> Iterator[Layer]:
    wanted = found.sandbox if role == _SANDBOX else one
    for kind in _OWN[role]:
        there = one.namespaces[kind]
        if there == expected.host[kind]:
            yield _drift("namespace", f"{_named(one)} in a {kind} namespace of its own", "it is in the host's")
        elif there != wanted.namespaces[kind]:
            yield _drift("namespace", f"{_named(one)} in the sandbox's {kind} namespace", "it is in another")
    if role == _SANDBOX and expected.network is not None and one.namespaces["net"] != expected.network:
        yield _drift("namespace", f"{_named(one)} in the network namespace of the run", "it is in another")


def _before_command(one: Process, role: str) -> Sequence[str]:
    arguments = one.arguments[1:]
    return arguments[: arguments.index(_COMMANDS[role])] if _COMMANDS[role] in arguments else arguments


def _own_places(expected: Expected) -> set[str]:
    return {f"{flag}={place}" for flag, place in expected.places.items() if flag in _PLACES}


def _named(one: Process) -> str:
    return f"{one.arguments[0] if one.arguments else 'stub'} {one.name.pid}"


def _drift(layer: str, expected: str, found: str) -> Layer:
    return Layer(layer, Standing.WIDER, expected, found)
