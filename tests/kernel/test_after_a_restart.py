"""Runs that outlive their supervisor: the next one attests them.

A suspended run is still suspended, or gone whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.attest import processes, reference, verifier
from sandbox.kernel.cgroup.cgroup import Hierarchies, Leaf
from sandbox.lifecycle.types import Request
from sandbox.run_result import RunResult
from sandbox.rundir.registry import Entry
from sandbox.storage import package_reader as packages
from sandbox.supervisor import Supervisor
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.serving import Served, covenant
from tests.kernel.test_serve import LONG, _answer, ended, eventually, live, running
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World


@contextlib.contextmanager
def at_work(served: Served) -> Iterator[tuple[Entry, socket.socket]]:
    """Yield one run, and the connection of its client."""
    world = served.world
    package = world.sign(world.package({"main.py": LONG}, id="long", cpu_ms=60_000 * SLOWNESS))
    with serving.asked(served.path, package) as sock:
        entry = running(world, "long")
        eventually(lambda: _attested(served, entry)["holds"])
        yield entry, sock


def _attested(served: Served, entry: Entry) -> dict[str, Any]:
    """Return the document of ``covenant attest`` for the run."""
    done = covenant("attest", entry.run_id, "--json", served=served)
    document: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) == bool(document.get("holds")), done
    return document


def _leaf(entry: Entry) -> Leaf:
    leaf = Leaf(Hierarchies.read(), entry.run_id)
    leaf.adopt(entry.cgroups)
    return leaf


def _suspended(served: Served, entry: Entry) -> Leaf:
    done = covenant("suspend", entry.run_id, served=served)
    assert done.returncode == 0, done.stderr
    leaf = _leaf(entry)
    assert leaf.frozen()
    return leaf


def _said(sock: socket.socket) -> str:
    """Return the code of the error that the client gets."""
    answer = RunResult.from_json(_answer(sock))
    assert answer.error is not None
    return answer.error.code


def _killed(served: Served, entry: Entry, sock: socket.socket) -> None:
    done = covenant("kill", entry.run_id, served=served)
    assert done.returncode == 0, done.stderr
    assert _said(sock) == "stopped"


def test_run_that_outlived_its_supervisor_is_attested_under_next(world: World) -> None:
    with (
        Served(world, on_supervisor_exit="continue", on_drift="alarm") as served,
        at_work(served) as (entry, sock),
    ):
        keeper = entry.keeper
        served.kill()
        assert _attested(served, entry)["holds"], "nobody serves, and root reads the same"
        served.start()
        assert _attested(served, entry)["holds"]
        assert [one.keeper for one in live(world, "long")] == [keeper]
        file = _leaf(entry).paths["pids"] / "pids.max"
        limit = file.read_text()
        file.write_text("max")
        found = _attested(served, entry)
        assert not found["holds"]
        assert "pids.max" in json.dumps(found)
        file.write_text(limit)
        assert _attested(served, entry)["holds"], "the control"
        _killed(served, entry, sock)
    assert leftovers(world) == []


STAYS = HEAD + "import time\nif intent['text'] == 'stay':\n    time.sleep(60)\nanswer = 1\n" + TAIL


@pytest.mark.parametrize("first", ["served", "alone"])
def test_runsc_is_held_to_same_filters_under_supervisor_and_without_one(world: World, first: str) -> None:
    """A supervisor's own filter lies beneath the one that runsc is started under, and is remembered as none of its."""
    package = world.sign(world.package({"main.py": STAYS}, id="long", cpu_ms=60_000 * SLOWNESS))
    (world.state / "closures" / verifier.FILTERS).unlink(missing_ok=True)
    looked: list[int] = []

    def alone() -> None:
        with Supervisor(world.state) as supervisor:
            assert supervisor.run(Request(packages.read(package), "x", world.issuer)).error is None

    def served() -> None:
        with Served(world) as one, serving.asked(one.path, package, "stay") as sock:
            entry = running(world, "long")
            eventually(lambda: _leaf(entry).pids())
            found = eventually(lambda: (shown := _attested(one, entry)).get("runs") and shown)
            assert found["holds"], found
            made = reference.ReferenceValues.read(entry.path)
            assert made is not None
            family = processes.family(made.runner)
            assert family is not None
            looked.append(family.runner.filters)
            _killed(one, entry, sock)

    for one in (served, alone) if first == "served" else (alone, served):
        one()
        assert (world.state / "closures" / verifier.FILTERS).exists()
    assert looked == [2], "the control: there is one more beneath"
    assert leftovers(world) == []


def test_what_was_suspended_stands_under_next_supervisor_until_it_is_resumed(world: World) -> None:
    with Served(world, on_supervisor_exit="continue") as served, at_work(served) as (entry, sock):
        leaf = _suspended(served, entry)
        served.kill()
        served.start()
        assert leaf.frozen()
        done = covenant("ps", "--json", served=served)
        assert done.returncode == 0, done
        (shown,) = json.loads(done.stdout)["runs"]
        assert (shown["run_id"], shown["state"]) == (entry.run_id, "Suspended")
        done = covenant("resume", entry.run_id, served=served)
        assert done.returncode == 0, done.stderr
        assert not leaf.frozen()
        _killed(served, entry, sock)
    assert leftovers(world) == []


def _supervisor(served: Served, entry: Entry) -> None:
    served.kill()


def _keeper(served: Served, entry: Entry) -> None:
    os.kill(entry.keeper, signal.SIGKILL)


@pytest.mark.parametrize(("kills", "codes"), [(_supervisor, {"stopped"}), (_keeper, {"cut_off"})])
def test_what_was_suspended_is_gone_whole_with_whoever_kept_it(world: World, kills: Any, codes: set[str]) -> None:
    """Frozen processes die of a signal only after the thaw (cgroup version 1), so the clean-up gives them both."""
    with Served(world, on_supervisor_exit="end") as served, at_work(served) as (entry, _):
        pids = _suspended(served, entry).pids()
        assert pids, "the control"
        kills(served, entry)
        (row,) = eventually(lambda: ended(world, entry.run_id))
        assert row["code"] in codes, row
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        eventually(lambda: not live(world, "long"))
        if kills is _supervisor:
            served.start()
        assert served.run(world.sign(world.copy("hello"))).error is None
    assert leftovers(world) == []


def test_what_is_killed_while_it_is_suspended_ends_once_it_goes_on(world: World) -> None:
    with Served(world) as served, at_work(served) as (entry, sock):
        leaf = _suspended(served, entry)
        for pid in leaf.pids():
            os.kill(pid, signal.SIGKILL)
        covenant("resume", entry.run_id, served=served)  # where it has ended by then there is nothing to resume
        assert _said(sock) == "agent_failed"
    assert leftovers(world) == []
