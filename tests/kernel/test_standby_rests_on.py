"""The inputs of an idle instance that are replaced but not revoked: the runsc that started it, and its serial."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from policy.signing import change
from tests.kernel.conftest import leftovers
from tests.kernel.revoking import next_root, revoke
from tests.kernel.serving import Served, open_place
from tests.kernel.test_standby import _await, _codes, _ready, _said, _until, _warmed
from tests.kernel.world import World


@pytest.fixture
def binary() -> Iterator[Path]:
    """A runsc of the test's own, in a directory that only root can write to."""
    place = Path(f"/srv/covenant-runsc-{os.getpid()}")
    place.mkdir(mode=0o755)
    try:
        yield Path(shutil.copy2(shutil.which("runsc") or "", place / "runsc"))
    finally:
        shutil.rmtree(place)


def _replace(binary: Path) -> None:
    """By one that does the same and is another file with another digest, as an upgrade does it."""
    other = binary.with_name("new")
    shutil.copy2(binary, other)
    with other.open("ab") as file:
        file.write(b"\0")
    other.rename(binary)


def _policies(served: Served) -> dict[str, str]:
    """By run, the policy that it was started under, which names the digest of runsc."""
    started = (row["kind"] for row in served.world.rows() if row["kind"]["type"] == "run_started")
    return {row["run_id"]: row["policy_digest"] for row in started}


def test_runsc_that_was_replaced_starts_next_and_ends_who_waits_under_old(warm: Path, binary: Path) -> None:
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world, runsc=str(binary)) as served:
            path, (used,) = _warmed(served, "upgraded")
            assert _said(served.run(path, "x"))["run"] == used.run_id, "the control: nothing changed"
            (asked,) = _await(served, "upgraded")
            _replace(binary)
            answer = served.run(path, "y")
            assert _said(answer)["run"] != asked.run_id
            _until(lambda: not asked.path.exists(), served)
            policies = _policies(served)
            assert policies[str(answer.run_id)] != policies[used.run_id]
            # Without a request, the clock finds it.
            (waits,) = _await(served, "upgraded")
            _replace(binary)
            _until(lambda: not waits.path.exists(), served)
            (fresh,) = _await(served, "upgraded")
            assert _said(served.run(path, "z"))["run"] == fresh.run_id
        assert leftovers(world) == []


def test_one_whose_serial_was_revoked_is_ended_and_newer_one_waits_and_answers(warm: Path) -> None:
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as served:
            path, (old,) = _warmed(served, "leaks")
            other, (stays,) = _warmed(served, "other")
            serial = _serial(world, "leaks")
            root = next_root(
                world,
                lambda document: change.revoke_serials(
                    document, "leaks", serial, now_ms=world.now_ms, reason="the old ones leak"
                ),
            )
            assert [one.run_id for one in revoke(world, root).ended] == [old.run_id]
            _until(lambda: not old.path.exists(), served)
            assert _codes(world, old.run_id) == [], "who waited was never started, and has no end"
            with pytest.raises(errors.SignatureError, match="revoked"):
                served.run(path, "x")
            assert not _ready(served, "leaks")
            assert _said(served.run(other, "x"))["run"] != stays.run_id, "that one rested on the root before"
            world.sign(path, serial=serial + 1)
            first = served.run(path, "y")
            assert first.error is None
            (fresh,) = _await(served, "leaks")
            assert _said(served.run(path, "z"))["run"] == fresh.run_id
        assert leftovers(world) == []


def test_one_that_waits_under_older_serial_is_told_nothing_once_newer_one_was_accepted(warm: Path) -> None:
    with open_place() as place:
        world = World(place, warm=warm)
        with Served(world) as served:
            path, (used,) = _warmed(served, "serials")
            assert _said(served.run(path, "x"))["run"] == used.run_id, "the control"
            (waits,) = _await(served, "serials")
            older = place / "older"
            shutil.copytree(path, older)
            world.sign(path, serial=_serial(world, "serials") + 1)
            assert served.run(path, "y").error is None
            assert waits.path.exists(), "nobody has ended it yet"
            with pytest.raises(errors.SerialError):
                served.run(older, "z")
            _until(lambda: not waits.path.exists(), served)
            assert _codes(world, waits.run_id) == [], "it was never started"
        assert leftovers(world) == []


def _serial(world: World, agent_id: str) -> int:
    """The greatest that was accepted of an agent."""
    accepted = [json.loads(path.read_text()) for path in (world.state / "serials").iterdir()]
    return next(int(one["serial"]) for one in accepted if one["agent_id"] == agent_id)
