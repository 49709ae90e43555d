"""A process of the test traces one thread of a live run: attestation finds it, whichever process the thread is of."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from policy import errors
from policy.prove.live import Standing
from sandbox.attest import monitor, reference, verifier
from sandbox.attest import tracers as attest_tracers
from sandbox.kernel import procfs
from tests.kernel import internet, live_runs
from tests.kernel.world import World

# It seizes a thread without stopping it, with its filters out of force, until its stdin ends.
TRACES: Final = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from sandbox.kernel.seccomp import dump as readback_filter
readback_filter._ptrace(readback_filter.PTRACE_SEIZE, int(sys.argv[1]), 0, 1 << 21)
print("traces", flush=True)
sys.stdin.read()
"""
FORKED: Final = 40
FORKS: Final = f"""
import os, time
for _ in range({FORKED}):
    if not os.fork():
        time.sleep(300)
    time.sleep(0.05)
time.sleep(300)
"""
GRANTS: Final = internet.entries(("93.184.216.34", "[80]", "tcp"), ("api.example.com", "[443]", "tls"))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracer that stays is drift sooner."""
    monkeypatch.setattr(attest_tracers, "PASSING_SECONDS", 0.2)


@contextlib.contextmanager
def traced(thread: int) -> Iterator[int]:
    """Have a process trace a thread; give the tracer's number."""
    command = [sys.executable, "-c", TRACES, str(thread)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as tracer:
        assert tracer.stdin is not None
        assert tracer.stdout is not None
        try:
            assert tracer.stdout.readline() == b"traces\n"
            yield tracer.pid
        finally:
            tracer.stdin.close()
            tracer.wait(live_runs.WAIT_SECONDS)


def last(pid: int) -> int:
    """The youngest thread of a process: another than its first, where it has more than one."""
    return max(procfs.threads(pid))


def kinds(one: live_runs.Live) -> list[tuple[str, int]]:
    """The processes of a run, each after the word that the attestation has for its kind."""
    family = one.family()
    shim = attest_tracers.shim(family.runner.name)
    assert shim is not None
    return [
        ("runsc run", family.runner.name.pid),
        ("gofer", family.gofer.name.pid),
        ("sandbox", family.sandbox.name.pid),
        ("stub", family.others[0].name.pid),
        ("shim", shim.pid),
        *(("gate", gate.pid) for gate in (() if one.made.network is None else one.made.network.bounded)),
    ]


def layers(report: verifier.Examination) -> list[tuple[str, Standing, str, str]]:
    """The layers that do not hold."""
    return [(one.name, one.standing, one.expected, one.found) for one in report.layers if not one.holds]


def test_traced_thread_of_each_process_is_drift(tmp_path: Path, warm: Path) -> None:
    with internet.made() as net:
        world = internet.configured(
            internet.NetworkedWorld(tmp_path, warm=warm), net, attest_seconds=1, on_drift="alarm"
        )
        with live_runs.live(world, network="full", more=GRANTS) as one:
            found = kinds(one)
            assert [kind for kind, _ in found] == ["runsc run", "gofer", "sandbox", "stub", "shim", "gate", "gate"]
            several = {kind for kind, pid in found if last(pid) != pid}
            assert several >= {"runsc run", "gofer", "sandbox", "shim"}, "those have a thread that is not the first"
            assert one.report().holds, "control"
            for kind, pid in found:
                before, thread = len(one.drift()), last(pid)
                with traced(thread) as tracer:
                    assert procfs.tracers(pid) == {thread: tracer}, "control: of this thread alone"
                    says = f"thread {thread} is traced by {tracer}: its filter may be out of force"
                    wrong = ("process", Standing.WIDER, f"no thread of {kind} {pid} is traced", says)
                    assert layers(one.report()) == [wrong]
                    assert one.drift_after(before)[0] == ("process", says)
                assert layers(one.report()) == [], f"{kind}: released, it is as it was"
            assert not one.answers, "an alarm ends nothing"


def test_traced_thread_ends_run(world: World) -> None:
    world.configure(attest_seconds=1)
    with live_runs.live(world) as one:
        time.sleep(1.5)
        assert one.drift() == [], "control"
        with traced(last(one.family().sandbox.name.pid)):
            answer = one.wait()
    assert isinstance(answer.error, errors.DriftError)
    assert answer.error.details["layer"] == "process"


@pytest.mark.parametrize("tracing", [False, True])
def test_run_traced_at_its_start_gets_no_intent(
    world: World, monkeypatch: pytest.MonkeyPatch, *, tracing: bool
) -> None:
    examine = verifier.examine

    def look(made: reference.ReferenceValues, *rest: Any, **more: Any) -> verifier.Examination:
        shim = attest_tracers.shim(made.runner)
        assert shim is not None
        gofer = live_runs.until(
            lambda: next(
                (
                    pid
                    for pid in procfs.family(made.runner) or ()
                    if (one := procfs.process(pid)) is not None and one.arguments[:1] == ("runsc-gofer",)
                ),
                None,
            )
        )
        with traced(last(gofer)) if tracing else contextlib.nullcontext():
            return examine(made, *rest, **more)

    monkeypatch.setattr(monitor, "examine", look)
    answer = world.run(world.sign(world.copy("hello")))
    states = [row["kind"]["state"] for row in world.rows() if row["kind"]["type"] == "run_state"]
    assert (answer.error is None, "Running" in states) == (not tracing,) * 2
    if tracing:
        assert isinstance(answer.error, errors.DriftError)
        assert answer.error.details["layer"] == "process"


def test_tracer_that_lets_go_is_no_drift(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a second process that reads filters."""
    monkeypatch.setattr(attest_tracers, "PASSING_SECONDS", live_runs.WAIT_SECONDS)
    with live_runs.live(world) as one:
        with contextlib.ExitStack() as stack:
            sandbox = one.family().sandbox.name.pid
            stack.enter_context(traced(last(sandbox)))
            real, seen = procfs.tracers, []

            def tracers(pid: int) -> dict[int, int]:
                found = real(pid)
                if pid == sandbox:
                    seen.append(found)
                    stack.close()
                return found

            monkeypatch.setattr(procfs, "tracers", tracers)
            assert one.report().holds
        assert seen[0], "control: the first look saw it"
        assert seen[-1] == {}


def _process_of(thread: int) -> int | None:
    """Return the process of a thread; None when the thread has ended, as one of Go's may right after it traced."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        lines = Path(f"/proc/{thread}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("Tgid:"))
    return None


def test_gvisor_may_trace_its_own_stubs(world: World) -> None:
    """Each process of the agent begins as a stub that a thread of the sandbox traces (systrap)."""
    with live_runs.live(world, FORKS, pids_max=64) as one:
        family = one.family()
        runner, sandbox = one.made.runner, family.sandbox.name.pid
        # A reader of filters traces the first thread of gofer and sandbox, and no stub.
        others = {runner.pid, sandbox, family.gofer.name.pid}
        owners: set[int] = set()
        until = time.monotonic() + live_runs.WAIT_SECONDS
        while not owners and time.monotonic() < until:
            stubs = set(procfs.family(runner) or ()) - others
            owners = {owner for stub in stubs for owner in map(_process_of, procfs.tracers(stub).values()) if owner}
        assert owners, "control: a stub is traced while it is made"
        assert owners == {sandbox}, "by a thread of the sandbox alone"
        for _ in range(20):
            assert layers(one.report()) == []


def test_stub_that_shim_traces_is_drift(world: World) -> None:
    """The exception holds for gVisor's kernel alone: this process is the shim of the run.

    gVisor attaches to a stub while it makes another from it, and ends when it cannot. The test therefore traces a stub
    only when the agent makes no more of them: it has two for each of its processes. An alarm ends no run that the
    monitor examines meanwhile.
    """
    world.configure(on_drift="alarm")
    with live_runs.live(world, FORKS, pids_max=64) as one:
        live_runs.until(lambda: len(one.family().others) >= 2 * (1 + FORKED))
        for _ in range(10):
            found = dict(kinds(one))
            assert found["shim"] == os.getpid()
            stub = procfs.name(found["stub"])
            with traced(found["stub"]) as tracer:
                assert tracer not in procfs.threads(found["sandbox"])
                wrong = [layer[0] for layer in layers(one.report())]
                # gVisor ends a stub with its guest's process; only a stub that lives counts.
                if stub is not None and procfs.name(stub.pid) == stub:
                    break
        else:
            pytest.fail("no stub lived as long as a look")
        assert wrong == ["process"]
        assert one.report().holds
