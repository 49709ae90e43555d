"""Compare a run's processes with the expected ones: identity, rights, namespaces and cgroups.

    runsc run          the supervisor's child; root, outside of the sandbox, waits for it
      runsc-gofer      opens files for the sandbox, in a root of its own
      runsc-sandbox    gVisor's kernel
        (no name)      stubs, in which the agent's code runs; as many as it has processes

The rights are gVisor's own and the same in every run (sandbox-facts: "read-back"), so a table lists them. gVisor's
fixed filter restricts the system calls within these rights. It is compared with the filter that this runsc binary
loaded before.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Struct

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
# The flags before the sub-command that name places of this run's files and the content of its log. They grant nothing.
_PLACES: Final = frozenset({
    *("--root", "--pod-init-config", "--debug", "--debug-command", "--debug-log", "--debug-log-fd"),
    "--debug-log-format",
    *("--strace", "--strace-syscalls", "--strace-log-size"),
})  # fmt: skip
# `runsc run` adds this flag for the process that gets the open log.
_LOG: Final = "--debug-log-fd="
# A flag of the sub-command: --pass-fd=OUTSIDE:INSIDE, once for each descriptor.
_PASSED: Final = "--pass-fd="
_COMMANDS: Final = {_GOFER: "gofer", _SANDBOX: "boot"}


class Family(Struct, frozen=True):
    """The processes of one run. ``others`` are the stubs and all other descendants of ``runsc run``."""

    runner: Process
    gofer: Process
    sandbox: Process
    others: tuple[Process, ...]

    def all(self) -> tuple[Process, ...]:
        """Return all of them."""
        return (self.runner, self.gofer, self.sandbox, *self.others)


class Expected(Struct, frozen=True):
    """Values that the supervisor made for the run.

    ``places`` maps flags to the paths of the run's files. ``cgroups`` maps controllers to paths; the key is empty for
    version 2. ``network`` is the inode of the sandbox's network namespace, None if runsc made it. ``threads`` are the
    kernel's lists of the threads in each cgroup; the cgroup of a thread in no list is read by itself.
    """

    places: Mapping[str, str]
    cgroups: Mapping[str, str]
    network: int | None = None
    threads: Mapping[str, Collection[int]] = msgspec.field(default_factory=dict)
    host: Mapping[str, int] = msgspec.field(default_factory=procfs.namespaces)


def family(runner: Name, members: Collection[int] = ()) -> Family | None:
    """Return the family of a ``runsc run``. Returns None if it, its gofer or its sandbox does not exist (any more).

    ``members`` are the processes in the run's cgroups. Its descendants among them belong to its family.
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
    """Whether ``runsc run``, gofer and sandbox are still the same processes, and none of them is at its end."""
    ours = [one.name for one in (found.runner, found.gofer, found.sandbox)]
    return all(procfs.name(one.pid) == one and not procfs.exits(one.pid) for one in ours)


def flags(found: Family, expected: Expected) -> tuple[str, ...]:
    """Return the sandbox's flags that a policy names.

    These are the flags before its sub-command without this run's places, and each descriptor that was passed to the
    agent, by its number inside.
    """
    before = _before_command(found.sandbox, _SANDBOX)
    passed = (one for one in found.sandbox.arguments[1 + len(before) :] if one.startswith(_PASSED))
    numbers = tuple(f"{_PASSED}{one.removeprefix(_PASSED).rpartition(':')[2]}" for one in passed)
    return (*(one for one in before if one not in _own_places(expected)), *numbers)


def judge(found: Family, expected: Expected, members: Mapping[str, set[int]]) -> Iterator[Layer]:
    """Yield a layer for each difference. ``members`` are the processes in each of the run's cgroups, by controller."""
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
            # A process that was born or ended after the family was read is no stranger.
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
    # On version 1 each thread has its own cgroup (cgroups(7)); its process shows the cgroup of its first thread.
    threads: Sequence[Mapping[str, str]] = [one.cgroups]
    # The lists were read from the directories that were made; the first thread's cgroups confirm their names.
    if "" not in expected.cgroups and not _all_listed(one.name.pid, expected):
        threads = procfs.thread_cgroups(one.name.pid)
    for controller, path in expected.cgroups.items():
        for at in {cgroups.get(controller) for cgroups in threads} - {path}:
            yield _drift("cgroup", f"{_named(one)} in {controller}:{path}", f"it is in {at}")


def _all_listed(pid: int, expected: Expected) -> bool:
    """Whether each thread of a process is in each of the cgroups, by the kernel's own lists of them.

    The kernel makes a list anew at each open (cgroups(7), version 1). The lists are older than the process's list of
    threads. A thread that was born or moved meanwhile is in none of them: then all threads of the process are read.
    """
    # A run has some 50 threads: reading a file of each costs more than all other checks of a process.
    numbers = procfs.threads(pid)
    return bool(numbers) and all(
        numbers.issubset(expected.threads.get(controller, ())) for controller in expected.cgroups
    )


def _rights(one: Process, role: str, beneath: int) -> Iterator[Layer]:
    """Yield drift of capabilities, no_new_privs and seccomp. ``beneath`` counts the filters of runsc's caller."""
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
