"""A sandbox whose cgroup somebody stops before it runs: its keeper hears who ends it, and gives up in the end."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors
from sandbox import bundle, control, registry
from sandbox.kernel import cgroupfs, process
from tests.kernel.live_runs import until
from tests.kernel.test_revocation_races import ANSWERS
from tests.kernel.world import World

pytestmark = pytest.mark.kernel


def test_nothing_is_left_of_a_child_that_joins_a_stopped_cgroup() -> None:
    with cgroupfs.Leaf(cgroupfs.Hierarchies.read(), f"test-{uuid.uuid4()}") as leaf:
        leaf.freeze()
        launch = process.Launch("/bin/sleep", ["sleep", "600"], {}, join_files=leaf.join_files())
        with pytest.raises(errors.StartTimeoutError, match=r"`/bin/sleep` was not executed within 0.2 s"):
            process.spawn(launch, process.Patience(0.2, kill=leaf.kill))
        assert leaf.pids() == []


def _ask(path: Path) -> None:
    with contextlib.suppress(errors.NoRunError):
        control.ask(path, "kill", by="operator@local", reason="it stands")


@pytest.mark.parametrize(
    ("act", "ended"),
    [
        pytest.param(_ask, errors.KilledError, id="whoever asks"),
        pytest.param(lambda path: bundle.mark_revoked(path, "it leaks"), errors.RunRevokedError, id="a revocation"),
        pytest.param(None, errors.StartTimeoutError, id="its deadline"),
    ],
)
def test_a_keeper_whose_sandbox_stands_is_not_deaf(
    world: World, monkeypatch: pytest.MonkeyPatch, act: Callable[[Path], None] | None, ended: type[errors.RunError]
) -> None:
    package = world.sign(world.package({"main.py": ANSWERS}))
    if act is None:
        world.configure(start_deadline_seconds=1)
    spawn, threads = process.spawn, list[threading.Thread]()

    def stand(launch: process.Launch, patience: process.Patience) -> process.Child:
        if not (live := registry.live(world.state / "runs")):
            return spawn(launch, patience)  # runsc itself is tried first
        (one,) = live
        leaf = cgroupfs.Leaf(cgroupfs.Hierarchies.read(), one.run_id)
        leaf.adopt(bundle.cgroups_of(one.path))
        leaf.freeze()

        def once_it_stands(act: Callable[[Path], None]) -> None:
            until(leaf.pids)
            act(one.path)

        if act is not None:
            threads.append(threading.Thread(target=once_it_stands, args=[act]))
            threads[0].start()
        return spawn(launch, patience)

    monkeypatch.setattr(process, "spawn", stand)
    with pytest.raises(ended):
        world.run(package)
    for thread in threads:
        thread.join()
    assert [row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "run_ended"] == [ended.code]
    assert registry.live(world.state / "runs") == []
