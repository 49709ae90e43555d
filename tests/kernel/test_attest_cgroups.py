"""Ways to widen a cgroup besides its limits, in cgroups and processes of the test's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.attest import cgroups
from sandbox.kernel.fs import filesystems
from tests.kernel import planted_bpf


@pytest.fixture
def leaf() -> Iterator[Path]:
    """A cgroup of version 2: hybrid machines mount it as well."""
    mounts = [line.split() for line in filesystems.lines(None) if " - cgroup2 " in line]
    path = Path(mounts[0][4], f"covenant-hand-{os.getpid()}")
    path.mkdir()
    yield path
    path.rmdir()


def test_bpf_program_at_cgroup_is_told(leaf: Path) -> None:
    fd = os.open(leaf, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert list(cgroups.judge([str(leaf)], "the run")) == [], "control"
        with planted_bpf.attached(planted_bpf.CGROUP_SKB, planted_bpf.AT_CGROUP_EGRESS, fd):
            (layer,) = cgroups.judge([str(leaf)], "the run")
            assert (layer.name, layer.found) == ("cgroup", "1")
        assert list(cgroups.judge([str(leaf)], "the run")) == []
    finally:
        os.close(fd)


def test_thread_under_real_time_is_told() -> None:
    with subprocess.Popen(["/usr/bin/sleep", "60"]) as child:
        try:
            assert list(cgroups.scheduled([child.pid])) == [], "control"
            os.sched_setscheduler(child.pid, os.SCHED_FIFO, os.sched_param(1))
            (layer,) = cgroups.scheduled([child.pid])
            assert (layer.name, layer.found) == ("cgroup", f"policy {os.SCHED_FIFO} for thread {child.pid}")
            os.sched_setscheduler(child.pid, os.SCHED_BATCH, os.sched_param(0))
            assert list(cgroups.scheduled([child.pid])) == []
        finally:
            child.kill()
    assert list(cgroups.scheduled([child.pid])) == [], "a thread that is gone is not told"
