"""An instance with an intent outlives the supervisor where the operator says so; one that waits never does."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.kernel.cgroup import cgroup
from sandbox.run_result import RunResult
from sandbox.rundir import label, registry
from sandbox.rundir.registry import Entry
from sandbox.serve.api import client
from tests.kernel import serving
from tests.kernel.conftest import unfinished
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World

PATIENCE = 60 * SLOWNESS
# Works until the file GO exists, or has nothing to do at all.
WAITS = (
    HEAD
    + """
import time
while intent['text'] == 'wait' and not os.path.exists(GO):
    time.sleep(0.02)
answer = [intent['text'], os.environ['COVENANT_RUN_ID']]
"""
    + TAIL
)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that the agent may read."""
    place = Path(f"/srv/covenant-outlives-{os.getpid()}")
    place.mkdir(mode=0o755)
    yield place
    (place / "go").unlink(missing_ok=True)
    place.rmdir()


def _until(true: Callable[[], bool], served: Served) -> None:
    until = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < until, (served.log(), serving.why_not_ready(served))
        time.sleep(0.02)


def _live(served: Served) -> list[Entry]:
    return registry.live(served.world.state / "runs")


def _ready(served: Served) -> list[Entry]:
    return [one for one in _live(served) if label.STANDBY in one.label and list(one.path.glob("standby-*"))]


def _working(served: Served) -> list[Entry]:
    return [one for one in _live(served) if one.agent_id == "waits" and one.state == "Running"]


def _rows(world: World, entry: Entry) -> list[dict[str, Any]]:
    """Return the rows of its start and its end."""
    kinds = [row["kind"] for row in world.rows() if row["kind"]["type"] in ("run_started", "run_ended")]
    return [kind for kind in kinds if kind["run_id"] == entry.run_id]


def _frozen(entry: Entry) -> bool:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), entry.run_id)
    leaf.adopt(entry.cgroups)
    return leaf.frozen()


def _operate(served: Served, operation: str, run_id: str) -> None:
    with served.connected() as sock:
        client.ask(sock, "operate", operation=operation, run=run_id)


def _package(world: World, shared: Path) -> Path:
    reads = f"[permissions.filesystem]\nread = [{str(shared)!r}]"
    code = WAITS.replace("GO", repr(str(shared / "go")))
    package = world.package({"main.py": code}, name="waits", id="waits", more=reads, cpu_ms=120_000 * SLOWNESS)
    manifest = package / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[sandbox]\n", "[sandbox]\nstandby = 2\n"))
    return world.sign(package)


@pytest.mark.parametrize("wanted", ["continue", "end"])
def test_instance_at_work_outlives_supervisor_as_any_run_and_one_that_waits_never_does(
    wanted: str, shared: Path, warm: Path
) -> None:
    with serving.open_place() as place:
        world = World(place, warm=warm)
        with Served(world, on_supervisor_exit=wanted) as served:
            package = _package(world, shared)
            assert served.run(package, "first").error is None
            _until(lambda: len(_ready(served)) == 2, served)
            instances = {one.run_id: one for one in _ready(served)}
            with serving.asked(served.path, package, "wait") as sock:
                _until(lambda: len(_working(served)) == 1, served)
                (used,) = _working(served)
                (waits,) = [one for one in instances.values() if one.run_id != used.run_id]
                assert used.run_id in instances
                served.kill()
                _until(lambda: not waits.path.exists(), served)
                answer = None
                if wanted == "continue":
                    served.start()
                    _goes_on(served, used)
                    (shared / "go").touch()
                    answer = _answer(sock)
                    assert answer.error is None
                # The last row of one comes after its directory is gone.
                _until(lambda: len(_rows(world, used)) == 2, served)
            assert [row["type"] for row in _rows(world, used)] == ["run_started", "run_ended"]
            assert _rows(world, used)[1]["code"] == (None if wanted == "continue" else "stopped")
            # An unused instance has neither row.
            assert _rows(world, waits) == []
            if answer is not None:
                assert answer.result is not None
                assert json.loads(answer.result.text) == ["wait", used.run_id]
        _until(lambda: not unfinished(world), served)


def _goes_on(served: Served, used: Entry) -> None:
    """The next supervisor finds it, leaves it alone, and can stop it and let it go on as any run of its own."""
    assert [one.run_id for one in _working(served)] == [used.run_id]
    _operate(served, "suspend", used.run_id)
    assert _frozen(used)
    _operate(served, "resume", used.run_id)
    assert [one.run_id for one in _working(served)] == [used.run_id]
    assert not _frozen(used)


def _answer(sock: socket.socket) -> RunResult:
    """Return the answer that the dead supervisor's client gets, after all state messages."""
    while (document := client._next(sock))["kind"] == "state":
        pass
    return RunResult.from_json(document)
