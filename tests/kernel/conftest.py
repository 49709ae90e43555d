"""Kernel tests share one way to make a world, and prove after each that the machine is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import config
from sandbox.audit import open_runs
from sandbox.host import erofs_roots, facts
from tests.kernel import fake_provider, internet
from tests.kernel.fake_provider import Provider
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.world import World, worlds_ended


def leftovers(world: World) -> list[str]:
    """Return what the runs of this world left on the machine: cgroups, processes, mounts, run directories."""
    found = [str(path) for path in world.cgroups()]
    mine = os.fsencode(world.state)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if mine in command and b"runsc" in command:
            found.append(f"process {entry}: {command!r}")
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(world.base) in line]
    runs = world.state / "runs"
    return found + ([p.name for p in runs.iterdir() if p.is_dir()] if runs.exists() else [])


def unfinished(world: World) -> list[str]:
    """Return what the runs of this world left, and which of them have still to write their end row.

    A run writes its end after its clean-up, so a test that waits for the clean-up alone may read the log too early.
    """
    unended = world.state / "unended"
    marks = [p.name for p in unended.iterdir() if not p.name.startswith(".")] if unended.exists() else []
    open_marks = [f"no end row: {run_id}" for run_id in marks if open_runs.is_open(world.state, run_id)]
    return leftovers(world) + open_marks


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state whose closures are already copied: 50 MB and 1,500 files that need not be synced for every test."""
    if os.environ.get("COVENANT_WARM"):  # an emulated machine takes minutes for what it has already
        return Path(os.environ["COVENANT_WARM"])
    made = World(tmp_path_factory.mktemp("warm"))
    # A machine without node runs the tests that need none.
    for agent in ("hello", *(["wordcount"] if config.Config().node.exists() else [])):
        assert made.run(made.sign(made.copy(agent))).error is None
    # Whether runsc reads EROFS roots is found out here once, and not by each world with layers.
    settings, program = config.load(made.state), erofs_roots.program()
    if program is not None:
        runsc = facts.runsc_facts(settings)
        assert erofs_roots.fault(settings, runsc, os.uname().release, program, deadline_seconds=60) == ""
    return made.state


@pytest.fixture(scope="module", autouse=True)
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No world of a file leaves a cgroup; the path of one that does names its test."""
    with worlds_ended(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture
def world(tmp_path: Path, warm: Path) -> Iterator[World]:
    """A world whose runs must leave nothing."""
    with worlds_ended(tmp_path):
        made = World(tmp_path, warm=warm)
        yield made
        assert leftovers(made) == []


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    """An internet in namespaces of its own."""
    with internet.made() as made:
        yield made


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    """A world whose runs reach that internet, and leave nothing there."""
    with worlds_ended(tmp_path):
        yield internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    assert net.leftovers() == []


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    """A provider of models on the loopback of the host."""
    with fake_provider.serving() as made:
        yield made
