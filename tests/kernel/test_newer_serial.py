"""A newer serial of an agent id, accepted while an older package of it runs: on_newer_serial, by real runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from sandbox.control import manager
from sandbox.kernel.cgroup import cgroup
from sandbox.lifecycle.context import RunContext
from sandbox.rundir import marks, registry
from sandbox.storage.trust_state import State
from sandbox.supervisor import Supervisor
from tests.kernel import revoking
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.world import HEAD, ROOT, TAIL, World

pytestmark = pytest.mark.kernel

ASKER = manager.Requester("operator@local", root=True)
LOCAL: dict[str, Any] = {"backend": "trusted-local", "required": "false"}
LONG: dict[str, Any] = {"cpu_ms": 250_000}
NEW = HEAD + "answer = 'new'" + TAIL


@pytest.fixture(params=["linux-gvisor", "trusted-local"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return LOCAL if request.param == "trusted-local" else {}


def signed(world: World, name: str, code: str, *, key: Any = None, **fields: Any) -> Path:
    """A package in a directory of its own; all have one agent id unless ``fields`` says another."""
    made = world.package({"main.py": code}, name=name, **{"id": "agent", **LONG, **fields})
    return world.sign(made, key=key)


def is_running(world: World, run_id: str) -> bool:
    live = registry.live(world.state / "runs")
    return any(one.run_id == run_id and one.state == "Running" for one in live)


def processes(run: revoking.Running) -> list[int]:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), run.entry.run_id)
    leaf.adopt(leaf.plan())
    return leaf.pids()


def refusal(world: World, package: Path) -> str:
    """The code that a package is refused with."""
    with pytest.raises(errors.CovenantError) as caught:
        world.run(package)
    return caught.value.code


def stopped_rows(world: World) -> list[dict[str, Any]]:
    return [row["kind"] for row in world.rows() if row["kind"]["type"] == "runs_stopped"]


def order(world: World, *wanted: tuple[str, str]) -> list[int]:
    """The places in the log of the first rows of a kind that name a run."""
    rows = [row["kind"] for row in world.rows()]
    return [next(i for i, row in enumerate(rows) if row["type"] == kind and run in str(row)) for kind, run in wanted]


def highest(world: World) -> int:
    with State(world.state) as state:
        last = state.accepted("agent")
    assert last is not None
    return last.serial


def cold(world: World, package: Path) -> dict[str, Any]:
    """Run `covenant run` in its own process, and return the document that it prints at its end."""
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(package), "hi", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_newer_serial_ends_older_run(world: World, backend: dict[str, Any]) -> None:
    older = signed(world, "old", SLEEPS, **backend)
    bystander = signed(world, "other", SLEEPS, id="other", **backend)
    newer = signed(world, "new", NEW, **backend)
    with revoking.running(world, older) as old, revoking.running(world, bystander) as other:
        until(lambda: is_running(world, old.entry.run_id) and is_running(world, other.entry.run_id))
        answer = world.run(newer)
        assert answer.error is None, answer.error
        document = old.document()
        assert document["code"] == "superseded", document
        assert f"serial {highest(world)} of agent `agent` was accepted" in document["message"]
        assert processes(old) == []
        assert is_running(world, other.entry.run_id), "the control: another agent id goes on"
    (row,) = stopped_rows(world)
    assert [one["run_id"] for one in row["runs"]] == [old.entry.run_id]
    named, ended, began = order(
        world, ("runs_stopped", old.entry.run_id), ("run_ended", old.entry.run_id), ("run_started", answer.run_id)
    )
    assert named < ended
    assert named < began
    assert refusal(world, older) == "serial_rollback"
    assert world.run(newer).error is None, "the newest may run any number of times"
    assert len(stopped_rows(world)) == 1


def test_newer_serial_ends_suspended_run(world: World) -> None:
    older, newer = signed(world, "old", SLEEPS), signed(world, "new", NEW)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        manager.operate(world.state, ASKER, "suspend", old.entry.run_id)
        assert world.run(newer).error is None
        assert old.document()["code"] == "superseded"
        assert processes(old) == []


def test_finish_lets_older_run_answer(world: World) -> None:
    world.configure(on_newer_serial="finish")
    code = HEAD + "import time\ntime.sleep(10)\nanswer = 'old'" + TAIL
    older, newer = signed(world, "old", code), signed(world, "new", NEW)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        manager.operate(world.state, ASKER, "suspend", old.entry.run_id)
        for _ in range(2):
            assert world.run(newer).error is None
        assert refusal(world, older) == "serial_rollback"
        assert processes(old) != []
        manager.operate(world.state, ASKER, "resume", old.entry.run_id)
        assert json.loads(old.document()["text"]) == "old"
    assert stopped_rows(world) == []
    assert refusal(world, older) == "serial_rollback"


def test_same_payload_again_ends_nothing(world: World) -> None:
    """The control: nothing newer comes. A copy elsewhere is the same package."""
    package = signed(world, "one", SLEEPS)
    with revoking.running(world, package) as first, revoking.running(world, package) as second:
        until(lambda: is_running(world, first.entry.run_id) and is_running(world, second.entry.run_id))
        other = signed(world, "other", NEW, id="other")
        assert world.run(other).error is None
        assert is_running(world, first.entry.run_id)
        assert is_running(world, second.entry.run_id)
        other = world.package({"main.py": NEW}, name="same-serial", **LONG, id="agent")
        world.sign(other, serial=highest(world))
        assert refusal(world, other) == "serial_rollback"
        assert is_running(world, first.entry.run_id)
    assert stopped_rows(world) == []


def test_refused_newer_package_ends_nothing(world: World) -> None:
    second = revoking.second_operator(world)
    older = signed(world, "old", SLEEPS)
    unlisted = Ed25519PrivateKey.generate()
    refused = {
        "unknown_key": signed(world, "unlisted", NEW, key=unlisted),
        "rule_8_identity": signed(world, "second", NEW, key=second),
        "rule_6_resources": signed(world, "large", NEW, memory_mb=4_000_000),
    }
    newer = signed(world, "new", NEW)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        before = highest(world)
        for code, package in refused.items():
            assert refusal(world, package) == code
            assert is_running(world, old.entry.run_id), code
        assert highest(world) == before, "a package that is refused leaves no serial"
        assert stopped_rows(world) == []
        # The control: the operator's own newer package ends it.
        assert world.run(newer).error is None
        assert old.document()["code"] == "superseded"


def test_newer_serial_in_same_place_ends_older(world: World) -> None:
    package = signed(world, "one", SLEEPS)
    with revoking.running(world, package) as old:
        until(lambda: is_running(world, old.entry.run_id))
        (package / "main.py").write_text(NEW)
        world.sign(package)
        assert world.run(package).error is None
        assert old.document()["code"] == "superseded"


# --- races ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before it is accepted", "before it is seen"])
def test_older_that_was_just_starting_is_refused(world: World, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    older, newer = signed(world, "old", NEW), signed(world, "new", NEW)
    said: list[dict[str, Any]] = []
    accept = RunContext.accept

    def late(run: Any, trusted: Any) -> None:
        if when == "before it is accepted":
            said.append(cold(world, newer))
        accept(run, trusted)
        if when == "before it is seen":
            said.append(cold(world, newer))

    monkeypatch.setattr(RunContext, "accept", late)
    assert refusal(world, older) == "serial_rollback"
    assert [one["kind"] for one in said] == ["intent_result"]
    started = {row["kind"]["run_id"] for row in world.rows() if row["kind"]["type"] == "run_state"}
    assert len(started) == 2
    running = [row["kind"] for row in world.rows() if row["kind"].get("state") == "Running"]
    assert len(running) == 1, "the older agent had no intent"


def test_both_started_at_once_leave_newer(world: World) -> None:
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    seen = set()
    for number in range(4):
        about = {"id": f"agent-{number}"}
        older, newer = signed(world, "old", SLEEPS, **about), signed(world, "new", NEW, **about)
        first, second = [
            subprocess.Popen(
                [sys.executable, "-m", "covenant", "run", str(package), "hi", "--json"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for package in (older, newer)
        ]
        old, new = (json.loads(one.communicate(timeout=120)[0]) for one in (first, second))
        assert new["kind"] == "intent_result", new
        seen.add(old["code"])
    assert seen <= {"superseded", "serial_rollback"}, seen


# --- a process that is killed over it ------------------------------------------------------------------------


POINTS = {
    "recorded, not marked": "sandbox.control.succession._catch",
    "marked, not named": "sandbox.audit.run_events.RunEvents.runs_stopped",
    "named, not killed": "sandbox.control.tree_kill.end_together",
}


def _killed_at(world: World, package: Path, point: str) -> None:
    """Start the package in a process that is killed as soon as it has come so far."""
    code = f"""
import os, signal, sys
from pathlib import Path
from importlib import import_module
names, last = {POINTS[point]!r}.rsplit(".", 1)
try:
    place = import_module(names)
except ModuleNotFoundError:
    module, name = names.rsplit(".", 1)
    place = getattr(import_module(module), name)
from sandbox.storage import package_reader as package
from sandbox.supervisor import Request, Supervisor
path = Path({str(package)!r})
with Supervisor(Path({str(world.state)!r})) as supervisor:
    setattr(place, last, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    supervisor.run(Request(package.read(path), "hi", {dict(world.issuer)!r}, package_name=str(path)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False, timeout=120)
    assert done.returncode == -9, done


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("recovered", [True, False], ids=["recovery", "keeper"])
def test_killed_over_it_older_run_ends(world: World, point: str, recovered: bool) -> None:
    older, newer = signed(world, "old", SLEEPS), signed(world, "new", NEW)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        before = highest(world)
        _killed_at(world, newer, point)
        assert highest(world) > before, "the serial is durable first"
        if point == "recorded, not marked":
            assert marks.verdict(old.entry.path) is None
        if recovered:
            with Supervisor(world.state):
                assert processes(old) == []
        assert old.document()["code"] == "superseded"
        assert processes(old) == []
        assert refusal(world, older) == "serial_rollback"
        assert world.run(newer).error is None
    named = [one["run_id"] for row in stopped_rows(world) for one in row["runs"]]
    assert named == ([] if point == "marked, not named" else [old.entry.run_id])


def test_recovery_goes_by_setting(world: World) -> None:
    """The serial alone ends nothing: an operator who changes the setting has the next start end the older run."""
    world.configure(on_newer_serial="finish")
    older, newer = signed(world, "old", SLEEPS), signed(world, "new", NEW)
    with revoking.running(world, older) as old:
        until(lambda: is_running(world, old.entry.run_id))
        assert world.run(newer).error is None
        with Supervisor(world.state):
            assert is_running(world, old.entry.run_id)
        world.configure(on_newer_serial="end")
        with Supervisor(world.state):
            assert processes(old) == []
        assert old.document()["code"] == "superseded"
