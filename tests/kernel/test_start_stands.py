"""A sandbox, or a gate of its network, whose cgroup is frozen before it runs.

Its shim still notices a command to end, and gives up in the end.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import spawn as proc_spawn
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.network.gate import prefork
from sandbox.network.gate.process import GateProcess
from sandbox.rundir import directory, marks, registry
from sandbox.shim import control_socket
from tests.kernel import internet
from tests.kernel.internet import NetworkedWorld
from tests.kernel.live_runs import until
from tests.kernel.test_revocation_races import ANSWERS
from tests.kernel.world import World

pytestmark = pytest.mark.kernel


def test_nothing_is_left_of_child_that_joins_stopped_cgroup() -> None:
    with cgroup.Leaf(cgroup.Hierarchies.read(), f"test-{uuid.uuid4()}") as leaf:
        leaf.freeze()
        launch = proc_launch.Launch("/bin/sleep", ["sleep", "600"], {}, join_files=leaf.join_files())
        with pytest.raises(errors.StartTimeoutError, match=r"`/bin/sleep` was not executed within 0.2 s"):
            proc_spawn.spawn(launch, proc_spawn.Patience(0.2, kill=leaf.kill))
        assert leaf.pids() == []


def _ask(path: Path) -> None:
    with contextlib.suppress(errors.NoRunError):
        control_socket.ask(path, "kill", by="operator@local", reason="it stands")


@pytest.mark.parametrize(
    ("act", "ended"),
    [
        pytest.param(_ask, errors.KilledError, id="whoever asks"),
        pytest.param(lambda path: marks.mark_revoked(path, "it leaks"), errors.RunRevokedError, id="a revocation"),
        pytest.param(None, errors.StartTimeoutError, id="its deadline"),
    ],
)
def test_keeper_whose_sandbox_stands_is_not_deaf(
    world: World, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None] | None, ended: type[errors.RunError]
) -> None:
    package = world.sign(world.package({"main.py": ANSWERS}))
    if act is None:
        world.configure(start_deadline_seconds=1)
    spawn, threads = proc_spawn.spawn, list[threading.Thread]()

    def stand(launch: proc_launch.Launch, patience: proc_spawn.Patience) -> proc_spawn.Child:
        if not (live := registry.live(world.state / "runs")):
            return spawn(launch, patience)  # runsc itself is tried first
        (one,) = live
        leaf = cgroup.Leaf(cgroup.Hierarchies.read(), one.run_id)
        leaf.adopt(directory.cgroups_of(one.path))
        leaf.freeze()

        def once_it_stands(act: Callable[[Path], None]) -> None:
            until(leaf.pids)
            act(one.path)

        if act is not None:
            threads.append(threading.Thread(target=once_it_stands, args=[act]))
            threads[0].start()
        return spawn(launch, patience)

    monkeypatch.setattr(proc_spawn, "spawn", stand)
    with pytest.raises(ended):
        world.run(package)
    for thread in threads:
        thread.join()
    assert [row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "run_ended"] == [ended.code]
    assert registry.live(world.state / "runs") == []


@contextlib.contextmanager
def _standing_gates(world: World, act: Callable[[Path], None]) -> Iterator[None]:
    """Freeze the gates of the one run during the block; ``act`` is done once one of their processes is frozen."""
    (one,) = registry.live(world.state / "runs")
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), one.run_id)
    leaf.adopt(directory.cgroups_of(one.path))
    gates = gate_cgroup.adopted_of(leaf)
    assert gates is not None
    gates.freeze()

    def once_it_stands(gates: cgroup.Leaf, act: Callable[[Path], None]) -> None:
        until(gates.pids)
        act(one.path)

    thread = threading.Thread(target=once_it_stands, args=[gates, act])
    thread.start()
    try:
        yield
    finally:
        thread.join()


ENDS: dict[str, tuple[Callable[[Path], None], type[errors.RunError]]] = {
    "whoever asks": (_ask, errors.KilledError),
    "a revocation": (lambda path: marks.mark_revoked(path, "it leaks"), errors.RunRevokedError),
}


@pytest.mark.parametrize("by", ["whoever asks", "a revocation"])
def test_keeper_whose_gates_stand_is_not_deaf(
    networked: NetworkedWorld, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    (act, ended), grant = ENDS[by], internet.entries(("www.example.com", "[443]", "tls"))
    package = networked.sign(networked.package({"main.py": ANSWERS}, network="full", more=grant))
    ready = GateProcess.ready

    def never_ready(self: GateProcess, *arguments: Any) -> None:
        monkeypatch.setattr(GateProcess, "ready", ready)
        with _standing_gates(networked, act):
            ready(self, 60)

    monkeypatch.setattr(prefork, "START", "import time; time.sleep(600)")
    monkeypatch.setattr(GateProcess, "ready", never_ready)
    with pytest.raises(ended):
        networked.run(package)
    assert [row["kind"]["code"] for row in networked.rows() if row["kind"]["type"] == "run_ended"] == [ended.code]
    assert registry.live(networked.state / "runs") == []
