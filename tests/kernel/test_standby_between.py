"""Changes between the offer of an instance and the client's go.

They are seen before anything is begun, and the intent goes elsewhere.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy.signing import trust
from sandbox import config as configuration
from sandbox.lifecycle.types import Request
from sandbox.rundir import marks
from sandbox.rundir.registry import Entry
from sandbox.standby import dispatch, instance
from sandbox.storage import package_reader as packages
from sandbox.storage.trust_state import State
from tests.kernel.conftest import leftovers
from tests.kernel.serving import Served, open_place
from tests.kernel.test_standby import _leaf, _until, _warmed
from tests.kernel.test_standby_rests_on import _serial
from tests.kernel.world import World


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    """One supervisor for all; each test has an agent id of its own."""
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as one:
            yield one
        assert leftovers(world) == []


def _nothing(served: Served, path: Path, one: Entry) -> None:
    pass


def _revoked(served: Served, path: Path, one: Entry) -> None:
    marks.mark_revoked(one.path, "leak")


def _stopped(served: Served, path: Path, one: Entry) -> None:
    marks.mark_stopped(one.path, "somebody", "why")


def _newer_serial(served: Served, path: Path, one: Entry) -> None:
    world, now_ms = served.world, int(time.time() * 1000)
    newer = path.with_name(f"{path.name}-newer")
    shutil.copytree(path, newer)
    world.sign(newer, serial=_serial(world, one.agent_id) + 1)
    with State(world.state) as state:
        root = state.trust_root(now_ms)
        trusted = trust.verify(packages.read(newer), root, now_ms=now_ms, audience="", serials=state)
        state.accept(trusted, now_ms=now_ms)


def _loosened(served: Served, path: Path, one: Entry) -> None:
    limit = Path(one.cgroups["pids"], "pids.max")
    limit.write_text(str(int(limit.read_text()) + 1))


def _thawed(served: Served, path: Path, one: Entry) -> None:
    _leaf(one).thaw()


def _go(served: Served, path: Path, one: Entry, act: Callable[..., None], late: float) -> dict[str, object]:
    """Return the client's answer when `act` happens before it says go."""
    world = served.world
    request = Request(packages.read(path), "x", world.issuer, package_name=str(path))
    digest = configuration.load(world.state).digest
    (connection,) = dispatch._ready(world.state / "runs", dispatch.socket_name(request.package))
    with connection:
        dispatch.send(connection, dispatch.order(request, digest))
        assert dispatch.receive(connection)["offer"] == one.run_id
        act(served, path, one)
        time.sleep(late)
        dispatch.send(connection, {"go": one.run_id})
        said = dict(dispatch.receive(connection))
        while not {"cold", "answer"} & said.keys():
            said = dict(dispatch.receive(connection))
        return said


LATE = instance.FRESH_SECONDS + 0.05
WHAT = {
    "marked as revoked": (_revoked, 0.0, "leak"),
    "marked as stopped": (_stopped, 0.0, "somebody"),
    "superseded": (_newer_serial, 0.0, "serial"),
    "given more": (_loosened, LATE, "its limit pids.max was changed"),
    "thawed": (_thawed, LATE, "somebody thawed it"),
}


@pytest.mark.parametrize("what", WHAT)
def test_what_was_changed_between_offer_and_go_is_begun_by_nobody(served: Served, what: str) -> None:
    act, late, words = WHAT[what]
    path, (one,) = _warmed(served, f"between-{what.replace(' ', '-')}")
    said = _go(served, path, one, act, late)
    assert words in str(said.get("cold", said))
    _until(lambda: not one.path.exists(), served)
    kinds = [row["kind"] for row in served.world.rows() if row["kind"].get("run_id") == one.run_id]
    assert not {"run_started", "capability_check"} & {kind["type"] for kind in kinds}
    assert "Running" not in [kind.get("state") for kind in kinds]


@pytest.mark.parametrize("late", [0.0, LATE])
def test_control_is_given_its_intent_however_late(served: Served, late: float) -> None:
    path, (one,) = _warmed(served, f"control-{late > 0}")
    answer = _go(served, path, one, _nothing, late)["answer"]
    assert isinstance(answer, dict)
    assert (answer["error"], answer["result"] is not None) == (None, True)
    _until(lambda: not one.path.exists(), served)
