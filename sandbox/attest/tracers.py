"""Tracers of a run's processes: each thread of sandbox, gofer, stubs, ``runsc run``, gates and shim is read.

A tracer holds the memory and the registers of a thread, and can put its filter out of force (PTRACE_O_SUSPEND_SECCOMP,
ptrace(2)). /proc shows such a filter as before, so each tracer is drift, with two exceptions. gVisor's kernel traces a
stub while it makes it (systrap). A process that reads filters traces the first thread of gofer and sandbox for less
than a millisecond (``kernel.readback_filter``), so a tracer is drift only once it stays.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

from policy.prove.live import Layer, Standing
from sandbox.attest.processes import Family
from sandbox.kernel import procfs
from sandbox.kernel.procfs import Name

# How long a tracer may be one that reads filters, such as `covenant attest` beside a supervisor.
PASSING_SECONDS, _AGAIN_SECONDS = 5.0, 0.005


def shim(runner: Name) -> Name | None:
    """The process that started ``runsc run``: the shim of the run; None when it is gone."""
    return procfs.name(procfs.parent(runner.pid))


def judge(found: Family, gates: Iterable[Name]) -> Iterator[Layer]:
    """Yield one layer ``process`` for each traced thread."""
    watched = _watched(found, gates)
    until = time.monotonic() + PASSING_SECONDS
    while (traced := [*_traced(found, watched)]) and time.monotonic() < until:
        # Only the processes that were traced are read again: the rest of the run need not be, until the next round.
        watched = {name: watched[name] for name, _, _ in traced}
        time.sleep(_AGAIN_SECONDS)
    for name, thread, tracer in traced:
        yield Layer(
            "process",
            Standing.WIDER,
            f"no thread of {watched[name]} {name.pid} is traced",
            f"thread {thread} is traced by {tracer}: its filter may be out of force",
        )


def _watched(found: Family, gates: Iterable[Name]) -> dict[Name, str]:
    """Every process that is looked at, with its word for people."""
    watched = {one.name: "stub" for one in found.others}
    watched |= {found.runner.name: "runsc run", found.gofer.name: "gofer", found.sandbox.name: "sandbox"}
    watched |= dict.fromkeys(gates, "gate")
    if (own := shim(found.runner.name)) is not None:
        watched[own] = "shim"
    return watched


def _traced(found: Family, watched: Iterable[Name]) -> Iterator[tuple[Name, int, int]]:
    """Each process with a traced thread of it, and the tracing thread."""
    stubs = {one.name for one in found.others if not one.arguments and one.parent != found.runner.name.pid}
    for name in watched:
        for thread, tracer in procfs.tracers(name.pid).items():
            if name in stubs and os.path.exists(f"/proc/{found.sandbox.name.pid}/task/{tracer}"):
                continue
            # A number that was given out again is another's process by now.
            if procfs.name(name.pid) == name:
                yield name, thread, tracer
