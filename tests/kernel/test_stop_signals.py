"""Signals at the moments when most can be lost: a start, an end, an agent that must be dead, a child's use."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.audit import run_archive
from sandbox.audit.log import Ledger
from sandbox.audit.run_events import RunEvents
from sandbox.broker import delegation
from sandbox.control import manager
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import pipes
from sandbox.kernel.proc import spawn as proc_spawn
from sandbox.lifecycle import child_run
from sandbox.lifecycle import run as lifecycle_run
from sandbox.rootfs import skeleton
from sandbox.rundir import directory, marks, registry
from sandbox.shim import agent_loop, signals
from sandbox.shim import process as shim_process
from sandbox.standby import wanted as standby_wanted
from sandbox.storage import atomic_file, package_reader
from sandbox.supervisor import Request, Supervisor
from tests.kernel.conftest import leftovers
from tests.kernel.families import BIG, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.test_stop import ASKER, begun
from tests.kernel.world import HEAD, TAIL, World


def _of(rows: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [row["kind"] for row in rows if row["kind"]["type"] == kind]


def test_start_durable_has_its_end_however_early_signal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))
    assert world.run(path).error is None
    real = Ledger.append_all

    def told(ledger: Ledger, records: Any, **more: Any) -> Any:
        done = real(ledger, records, **more)
        if any(one.kind == "run_started" for one in records):
            # Also where another thread takes it: a mask of the main thread's would not be asked.
            def takes() -> None:
                signal.pthread_sigmask(signal.SIG_SETMASK, ())
                signal.raise_signal(signal.SIGTERM)

            thread = threading.Thread(target=takes)
            thread.start()
            thread.join()
        return done

    monkeypatch.setattr(Ledger, "append_all", told)
    before = len(world.rows())
    with pytest.raises(KeyboardInterrupt):
        world.run(path)
    rows = world.rows()[before:]
    assert len(_of(rows, "run_started")) == 1
    assert [one["code"] for one in _of(rows, "run_ended")] == ["interrupted"]


@pytest.mark.parametrize("where", ["run_ended", "store"])
def test_end_of_run_that_machine_failed_is_not_cut_short(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))
    assert world.run(path).error is None

    def fails(_: cgroup.Leaf) -> int:
        raise errors.KernelError("it cannot be read")

    owner: Any = RunEvents if where == "run_ended" else run_archive
    real = getattr(owner, where)

    def told(*args: Any, **fields: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(*args, **fields)

    monkeypatch.setattr(cgroup.Leaf, "pids_refused", fails)
    monkeypatch.setattr(owner, where, told)
    before = len(world.rows())
    with pytest.raises((KeyboardInterrupt, errors.KernelError)):
        world.run(path)
    rows = world.rows()[before:]
    (run,) = {one["run_id"] for one in _of(rows, "run_started")}
    assert [one["code"] for one in _of(rows, "run_ended")] == [errors.KernelError.code]
    record = run_archive.read(world.state, run)
    assert record is not None


def test_child_interrupted_is_billed(world: World) -> None:
    burns = """
import time
end = time.process_time() + 3.0
while time.process_time() < end: pass
print("BURNT", file=sys.stderr, flush=True)
time.sleep(60)
answer = 1
"""
    member(world, "burns", burns, **{**SMALL, "resources": "pids_max = 16\ncpu_millis = 1000\n"})
    elder = member(world, "elder", 'answer = child("burns")', more=spawn(2, 4), **BIG)

    def end() -> None:
        def burnt() -> registry.Entry | None:
            for one in registry.live(world.state / "runs"):
                if one.agent_id == "burns" and "BURNT" in manager.logs(world.state, ASKER, one.run_id)["text"]:
                    return one
            return None

        os.kill(until(burnt).keeper, signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    answer = world.run(elder)
    thread.join()
    ends = {one["agent_id"]: one for one in _of(world.rows(), "run_ended")}
    assert ends["burns"]["code"] == "interrupted"
    # gVisor counts an agent's time by ticks, and on a busy machine more of it than the cgroup (2.7 for 3 s).
    assert ends["burns"]["cpu_ms"] >= 1500, "its own row has it"
    assert answer.error is None
    assert (answer.usage.cpu_ms or 0) >= ends["burns"]["cpu_ms"]


def test_child_interrupted_when_it_has_answered_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent hears what it used as well: until it has, nothing cuts it short."""
    member(world, "heir", 'answer = "from below"', **SMALL)
    elder = member(world, "elder", 'answer = child("heir")', more=spawn(2, 4), **BIG)
    outcome = child_run._outcome

    def told(answer: Any, **more: Any) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return outcome(answer, **more)

    monkeypatch.setattr(child_run, "_outcome", told)
    answer = world.run(elder)
    assert answer.error is None
    assert answer.result is not None
    assert "from below" in answer.result.text
    (below,) = [one["cpu_ms"] for one in _of(world.rows(), "run_ended") if one["agent_id"] == "heir"]
    assert (answer.usage.cpu_ms or 0) >= below > 0


def test_what_was_used_is_kept_where_last_row_cannot_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that writes the row next keeps it, and for a parent its own shim."""
    burns = "for _ in range(20_000_000): pass\nanswer = 1"
    path = world.sign(world.package({"main.py": HEAD + burns + TAIL}))
    append, go, runs = RunEvents._append, lifecycle_run.Run.go, list[lifecycle_run.Run]()

    def fails(rows: RunEvents, kind: str, **more: Any) -> None:
        if kind == "run_ended":
            raise errors.LedgerError("the disk is full")
        append(rows, kind, **more)

    def kept(run: lifecycle_run.Run) -> Any:
        runs.append(run)
        return go(run)

    with monkeypatch.context() as patch:
        patch.setattr(RunEvents, "_append", fails)
        patch.setattr(lifecycle_run.Run, "go", kept)
        with pytest.raises(errors.LedgerError):
            world.run(path)
    (run,) = runs
    assert run.used_ms > 100
    run.context.rows.leave()  # as if its process had ended
    assert world.run(path).error is None
    ends = {one["run_id"]: one for one in _of(world.rows(), "run_ended")}
    assert (ends[run.context.run_id]["code"], ends[run.context.run_id]["cpu_ms"]) == (
        errors.CutOffError.code,
        run.used_ms,
    )


def test_agent_is_dead_at_once_when_its_run_is_told_to_end(world: World) -> None:
    """This holds also while another process has the log's lock."""
    path = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}))
    process = begun(world, path)
    until(lambda: any(one["state"] == "Running" for one in _of(world.rows(), "run_state")))
    (run,) = registry.agents(registry.live(world.state / "runs"))
    places = list(run.cgroups.values())

    def lives() -> bool:
        return any(cgroup.members(place) for place in places)

    with open(world.state / "audit" / "events.jsonl", "rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        # No writer's turn can come before that, and a writer would end the agent first.
        while lives() and time.monotonic() - began < atomic_file.TURN_SECONDS / 2:
            time.sleep(0.01)
        dead = not lives()
    out, _ = process.communicate(timeout=40)
    assert json.loads(out)["code"] == "interrupted"
    assert [one["code"] for one in _of(world.rows(), "run_ended")] == ["interrupted"]
    assert leftovers(world) == []
    assert dead


def test_instance_interrupted_is_archived(world: World) -> None:
    """As one that ends by itself before its intent (in a keeper of its own: a holder's threads have no signals)."""
    code = HEAD + "answer = 1" + TAIL
    path = world.sign(world.package({"main.py": code}, more="standby = 1"))
    (alive, ours), (told, tell) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
    with Supervisor(world.state, never_granted=(str(world.home),)) as supervisor:
        supervisor.keeps_standby = True
        request = Request(package_reader.read(path), "hi", world.issuer, package_name=str(path))
        assert supervisor.run(request).error is None
        (wanted, *_) = standby_wanted.wanted(world.state)
        seen = len(world.rows())
        work = lambda: supervisor.stand_by(wanted, alive=alive, told=told, tell=lambda word: None)  # noqa: E731
        child = shim_process.fork(work, keep=(2, alive, told))
        until(lambda: list((world.state / "runs").glob("*/standby-*")), seconds=25)
        child.signal(signal.SIGTERM)
        child.reap()
        child.close()
    for fd in (alive, ours, told, tell):
        os.close(fd)
    states = [one["state"] for one in _of(world.rows()[seen:], "run_state")]
    assert states[-2:] == ["Terminated", "Archived"], states


@pytest.mark.parametrize("backend", ["linux-gvisor", "trusted-local"])
@pytest.mark.parametrize("what", ["signal", "disk"])
def test_start_has_its_end_when_its_state_cannot_be_shown(
    world: World, monkeypatch: pytest.MonkeyPatch, what: str, backend: str
) -> None:
    """The directory in which it is shown goes before the last rows come."""
    show, once = RunEvents.show, [1]

    def fails(rows: RunEvents) -> None:
        if rows._place is not None and once:
            once.pop()
            if what == "disk":
                raise errors.StateError("no space left")
            os.kill(os.getpid(), signal.SIGTERM)
        show(rows)

    code = {"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}
    path = world.sign(world.package(code, backend=backend, required=str(backend == "linux-gvisor").lower()))
    monkeypatch.setattr(RunEvents, "show", fails)
    with pytest.raises(KeyboardInterrupt if what == "signal" else errors.StateError):
        world.run(path)
    assert once == []
    ends = [one["code"] for one in _of(world.rows(), "run_ended")]
    assert ends == ["interrupted" if what == "signal" else errors.StateError.code]
    assert leftovers(world) == []


@pytest.mark.parametrize("where", ["made", "removed", "left"])
def test_start_interrupted_leaves_nothing(world: World, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """While its cgroups are made, while they are removed since it could not be started, and while its directory is."""
    path = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}))
    assert world.run(path, "warm", timeout_ms=1).error is not None
    owner: Any = {"made": pathlib.Path, "removed": cgroup.Leaf, "left": directory.RunDirectory}[where]
    name = {"made": "mkdir", "removed": "remove", "left": "__exit__"}[where]
    real, once = getattr(owner, name), [1, 1]

    def told(self: Any, *args: Any, **more: Any) -> Any:
        if once and (where != "made" or str(self).startswith("/sys/fs/cgroup")):
            once.pop()
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *args, **more)

    monkeypatch.setattr(owner, name, told)
    if where != "made":

        def fails(*_: Any) -> None:
            raise errors.KernelError("there is no process left")

        monkeypatch.setattr(proc_spawn, "spawn", fails)
    before = len(world.rows())
    with pytest.raises(KeyboardInterrupt):
        world.run(path)
    assert len(once) < 2
    ends = [one["code"] for one in _of(world.rows()[before:], "run_ended")]
    assert ends == ["interrupted" if where == "made" else errors.KernelError.code]
    assert leftovers(world) == []


def test_agent_is_dead_at_once_when_its_keeper_waits_for_log(world: World) -> None:
    """Another process has the log's lock, the run has a row to write, and then it is told to end."""
    path = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}))
    process = begun(world, path)
    until(lambda: any(one["state"] == "Running" for one in _of(world.rows(), "run_state")))
    (run,) = registry.agents(registry.live(world.state / "runs"))
    places = list(run.cgroups.values())

    def lives() -> bool:
        return any(cgroup.members(place) for place in places)

    def suspend() -> None:
        with contextlib.suppress(errors.CovenantError):  # it is gone before it answers
            manager.operate(world.state, ASKER, "suspend", run.run_id)

    asks = threading.Thread(target=suspend)
    with open(world.state / "audit" / "events.jsonl", "rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        asks.start()
        time.sleep(0.5)  # it asks its keeper, who tries for the log's turn
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while lives() and time.monotonic() < deadline:
            time.sleep(0.01)
        dead = not lives()
    out, _ = process.communicate(timeout=40)
    asks.join()
    assert dead
    assert json.loads(out)["code"] == "interrupted"
    assert [one["code"] for one in _of(world.rows(), "run_ended")] == ["interrupted"]
    assert leftovers(world) == []


def test_canary_that_machine_fails_while_it_is_interrupted_has_not_failed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.configure(self_test=True)
    path = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))

    def fails(_: cgroup.Leaf) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        raise errors.KernelError("it cannot be read")

    with monkeypatch.context() as patch:
        patch.setattr(cgroup.Leaf, "pids_refused", fails)
        with pytest.raises(KeyboardInterrupt):
            world.run(path)
    assert not [one for one in _of(world.rows(), "self_test") if not one["passed"]]
    assert leftovers(world) == []
    assert world.run(path).error is None


def test_canary_over_swallows_no_signal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.configure(self_test=True)
    path = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))
    hold = skeleton.Skeletons.hold

    @contextlib.contextmanager
    def told(self: Any, *args: Any, **more: Any) -> Iterator[Any]:
        with hold(self, *args, **more) as held:
            yield held
            if signal.getsignal(signal.SIGTERM) not in (signals._end, signal.SIG_IGN):
                os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(skeleton.Skeletons, "hold", told)
        with pytest.raises(KeyboardInterrupt):
            world.run(path)
    assert _of(world.rows(), "run_started") == []
    assert world.run(path).error is None


@pytest.mark.parametrize("backend", ["linux-gvisor", "trusted-local"])
def test_what_had_ended_by_itself_did(world: World, monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """A signal while the last of its output is read does not say why."""
    code = {"main.py": HEAD + "sys.exit(3)" + TAIL}
    path = world.sign(world.package(code, backend=backend, required=str(backend == "linux-gvisor").lower()))
    drain = agent_loop.AgentLoop._drain

    def told(exchange: agent_loop.AgentLoop) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        drain(exchange)

    monkeypatch.setattr(agent_loop.AgentLoop, "_drain", told)
    with pytest.raises(KeyboardInterrupt):
        world.run(path)
    (end,) = _of(world.rows(), "run_ended")
    assert (end["code"], end["exit_status"]) == (errors.AgentFailedError.code, 3)


@pytest.mark.parametrize("backend", ["linux-gvisor", "trusted-local"])
def test_what_is_below_run_ends_with_it_whichever_is_seen_first(
    world: World, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """It is marked with its tree, told to end, and its exit is seen before the signal is."""
    code = {"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}
    path = world.sign(world.package(code, backend=backend, required=str(backend == "linux-gvisor").lower()))
    below, give = list[tuple[Any, ...]](), agent_loop.AgentLoop._give

    def told(exchange: agent_loop.AgentLoop) -> None:
        give(exchange)
        (run,) = registry.agents(registry.live(world.state / "runs"))
        marks.mark_stopped(run.path, "operator@local", "enough")
        os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: pipes.readable(exchange.channel.pidfd, 0))
        exchange._on_exit()

    monkeypatch.setattr(agent_loop.AgentLoop, "_give", told)
    monkeypatch.setattr(delegation, "end_below", lambda *what: below.append(what[-2:]))
    with pytest.raises(KeyboardInterrupt):
        world.run(path)
    assert below == [("operator@local", "enough")]


def test_run_killed_while_it_is_stopped_is_not_said_to_go_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = world.sign(world.package({"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}))
    says, once = cgroup.Leaf._freezer_says, [1]

    def told(leaf: cgroup.Leaf) -> Any:
        if once and threading.current_thread() is threading.main_thread():
            once.pop()
            os.kill(os.getpid(), signal.SIGTERM)
        return says(leaf)

    def suspend() -> None:
        (run,) = until(lambda: [one for one in registry.live(world.state / "runs") if one.state == "Running"])
        monkeypatch.setattr(cgroup.Leaf, "_freezer_says", told)
        with contextlib.suppress(errors.CovenantError):
            manager.operate(world.state, ASKER, "suspend", run.run_id)

    asks = threading.Thread(target=suspend)
    asks.start()
    with pytest.raises(KeyboardInterrupt):
        world.run(path)
    asks.join()
    assert once == []
    states = [one["state"] for one in _of(world.rows(), "run_state")]
    assert states[-4:] == ["Running", "Suspended", "Terminated", "Archived"]
    assert [one["code"] for one in _of(world.rows(), "run_ended")] == ["interrupted"]


def test_last_row_written_at_second_try_says_as_much(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint('SAID', file=sys.stderr)\nanswer = 1"
    path = world.sign(world.package({"main.py": HEAD + code + TAIL}))
    append, once = RunEvents._append, [1]

    def fails(rows: RunEvents, kind: str, **more: Any) -> None:
        if kind == "run_ended" and once:
            once.pop()
            raise errors.LedgerError("another has the log")
        append(rows, kind, **more)

    monkeypatch.setattr(RunEvents, "_append", fails)
    with pytest.raises(errors.LedgerError):
        world.run(path)
    (end,) = _of(world.rows(), "run_ended")
    assert (end["code"], end["exit_status"], end["stderr_bytes"]) == (errors.LedgerError.code, 0, len("SAID\n"))
    assert end["cpu_ms"] > 100
    record = run_archive.read(world.state, end["run_id"])
    assert record is not None
    assert record.stderr == "SAID\n"
