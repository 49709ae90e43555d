"""The cgroup freezer on every version that this machine has: nothing frozen runs, what is thawed goes on, and death
reaches the frozen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.fs import filesystems

_TICK = 1 / os.sysconf("SC_CLK_TCK")
# Two processes of two threads each that never rest.
_BUSY = r"""
import os, threading
os.fork()
threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
os.write(1, b"busy\n")
while True: pass
"""


def _unified() -> Path | None:
    for line in filesystems.lines(None):
        left, _, right = line.partition(" - ")
        if right.split()[0] == "cgroup2":
            return Path(left.split()[4])
    return None


def _versions() -> list[int]:
    found = [1] if cgroup.Hierarchies.read().version == 1 else []
    return [*found, *([2] if _unified() is not None else [])]


@pytest.fixture(params=_versions())
def leaf(request: pytest.FixtureRequest) -> Iterator[cgroup.Leaf]:
    """A leaf of our own with a freezer. On a hybrid machine version 2 has no controllers, and freezes all the same."""
    name, here = f"test-freezer-{os.getpid()}", cgroup.Hierarchies.read()
    if request.param == here.version:
        with cgroup.Leaf(here, name) as made:
            yield made
        return
    unified = _unified()
    assert unified is not None
    base = unified / "covenant"
    new = not base.exists()
    (base / name).mkdir(parents=True)
    made = cgroup.Leaf(cgroup.Hierarchies(2, {"memory": unified}), name, paths={"memory": base / name})
    try:
        yield made
    finally:
        made.kill()
        made.remove()
        if new:
            base.rmdir()


@pytest.fixture
def busy(leaf: cgroup.Leaf) -> Iterator[subprocess.Popen[bytes]]:
    def join() -> None:
        for path in set(leaf.paths.values()):
            (path / "cgroup.procs").write_text(str(os.getpid()))

    with subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.PIPE, preexec_fn=join) as child:  # noqa: PLW1509
        try:
            assert child.stdout is not None
            assert [child.stdout.readline() for _ in range(2)] == [b"busy\n"] * 2
            yield child
        finally:
            leaf.kill()


def _cpu_seconds(leaf: cgroup.Leaf) -> float:
    used = 0
    for pid in leaf.pids():
        used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return used * _TICK


def _used_in(leaf: cgroup.Leaf, seconds: float) -> float:
    before = _cpu_seconds(leaf)
    time.sleep(seconds)
    return _cpu_seconds(leaf) - before


def test_what_is_frozen_takes_no_processor_and_what_is_thawed_does(
    leaf: cgroup.Leaf, busy: subprocess.Popen[bytes]
) -> None:
    assert len(leaf.pids()) == 2
    assert not leaf.frozen()
    for _ in range(3):
        leaf.freeze()
        assert leaf.frozen()
        assert _used_in(leaf, 0.1) == 0
        leaf.thaw()
        assert not leaf.frozen()
        # The control: it is the freezer that stops it. On a busy machine its turn comes later.
        assert any(_used_in(leaf, 0.1) > 0 for _ in range(100))


def test_frozen_die_at_once_and_leave_leaf_not_frozen(leaf: cgroup.Leaf, busy: subprocess.Popen[bytes]) -> None:
    leaf.freeze()
    leaf.kill()
    assert busy.wait(60) == -9
    assert leaf.pids() == []


def test_empty_leaf_freezes_and_what_joins_it_then_stands(leaf: cgroup.Leaf) -> None:
    leaf.freeze()
    assert leaf.frozen()
    child = subprocess.Popen(["/bin/sleep", "60"])
    try:
        for path in set(leaf.paths.values()):
            (path / "cgroup.procs").write_text(str(child.pid))
        assert leaf.pids() == [child.pid]
        leaf.kill()
        assert child.wait(60) == -9
    finally:
        child.kill()
        child.wait()


def test_one_to_thaw_quickly_thaws_and_goes_with_all_that_was_made_for_it(leaf: cgroup.Leaf) -> None:
    leaf.freeze()
    leaf.keep_frozen()
    assert leaf.frozen()
    leaf.thaw()
    assert not leaf.frozen()
    places = set(leaf.paths.values())
    leaf.remove()
    assert [path for path in places if path.exists()] == []
