"""The gates of a run lie in a cgroup of their own, with limits that hold, and nothing of it stays."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from pathlib import Path

from sandbox.kernel.cgroup import cgroup
from sandbox.network.gate import cgroup as gate_cgroup
from sandbox.rundir import directory as rundir_directory
from sandbox.runner import recovery
from tests.kernel import internet
from tests.kernel.internet import NetworkedWorld
from tests.kernel.live_runs import SLEEPS, live

GRANTS = internet.entries(("www.example.com", "[443]", "tls"))
# Joins as a gate does, then takes so many MiB.
TAKES = """
import sys
import threading
for file in sys.argv[2:]:
    open(file, "w").write("0")
data = [bytearray(b"x" * (1 << 20)) for _ in range(int(sys.argv[1]))]
print(len(data), flush=True)
"""


def _own() -> cgroup.Leaf:
    return gate_cgroup.of(cgroup.Leaf(cgroup.Hierarchies.read(), f"test-{uuid.uuid4()}"))


def test_both_gates_of_run_are_in_it_and_agent_is_not(networked: NetworkedWorld) -> None:
    with live(networked, SLEEPS, network="full", more=GRANTS) as one:
        noted = rundir_directory.cgroups_of(one.directory)
        gates = gate_cgroup.of(cgroup.Leaf(cgroup.Hierarchies.read(), one.directory.name))
        gates.adopt(gates.plan())
        assert set(gates.paths.values()) <= set(noted.values())
        serving = gates.pids()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in serving]
        assert sorted(b"sandbox.network.dns.server" in one for one in commands) == [False, True]
        assert all(b"sandbox.network.gate import main" in one for one in commands)
        assert not set(serving) & set(_family(one.directory))
        for limit in gate_cgroup.LIMITS[gates.hierarchies.version]:
            assert (gates.paths[limit.controller] / limit.file).read_text().strip() == limit.value
        assert one.report().holds
    assert [str(path) for path in noted.values() if path.exists()] == []


def _family(directory: Path) -> list[int]:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), directory.name)
    leaf.adopt(leaf.plan())
    found = leaf.pids()
    assert found
    return found


def test_what_takes_more_memory_in_it_is_killed() -> None:
    for megabytes, good in ((64, True), (gate_cgroup.MEMORY_BYTES // (1 << 20) + 64, False)):
        with _own() as leaf:
            leaf.apply(gate_cgroup.LIMITS[leaf.hierarchies.version])
            command = [sys.executable, "-I", "-S", "-c", TAKES, str(megabytes), *leaf.join_files()]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert (done.returncode == 0) is good, done
            assert leaf.oom_kills() == (0 if good else 1)


def test_what_killed_keeper_left_of_it_is_emptied_and_removed(tmp_path: Path) -> None:
    """Recovery knows it by what was noted with the run's own cgroup."""
    run_id = str(uuid.uuid4())
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), run_id)
    gates = gate_cgroup.of(leaf)
    directory = rundir_directory.RunDirectory(tmp_path / run_id, {"agent_id": "a"})
    directory.__enter__()
    directory.note_cgroups({**leaf.plan(), **gate_cgroup.noted(gates)})
    leaf.__enter__()
    gates.__enter__()
    left = subprocess.Popen([sys.executable, "-I", "-S", "-c", TAKES + "sys.stdin.read()", "1", *gates.join_files()],
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    assert left.stdout is not None
    assert left.stdout.readline() == b"1\n"
    there = {*leaf.paths.values(), *gates.paths.values()}
    os.close(directory._lock)
    (tmp_path / run_id / "lock").write_text("1999999999")
    threading.Thread(target=left.wait).start()  # its parent reaps it, as init would
    assert recovery.recover(tmp_path) == [run_id]
    assert left.wait(30) == -9
    assert [path for path in there if path.exists()] == []
    for stream in (left.stdin, left.stdout):
        assert stream is not None
        stream.close()
