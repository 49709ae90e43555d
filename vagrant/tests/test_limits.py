"""Limits are hit for real on pure cgroup v2, by agents that run at the same time: who hits one ends, the others do not.

One start of a sandbox takes half a minute on an emulated machine, so all agents are started once, together.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from vagrant.tests import kit

SMALL = "memory_mb = 64\ndisk_mb = 8\n"
# Only when the others have started and were looked at.
FILL = "time.sleep(45)\nblock = bytearray(512 << 20)\nfor i in range(0, len(block), 4096): block[i] = 1\nanswer = 1\n"
# Alive while the others end, and answers afterwards.
WAIT = "time.sleep(180)\nanswer = 'alive'\n"
SPIN = "while True: pass\n"
# As many children as there may be, then as before the wall: one goes, one comes, over and over.
FORK = """\
pids, number = [], 0
try:
    while True:
        pid = os.fork()
        if pid == 0: signal.pause()
        pids.append(pid)
except OSError as e: number = e.errno
print('full', len(pids) + 1, number, file=sys.stderr, flush=True)
answer = [len(pids) + 1, number]
for _ in range(600):
    os.kill(pids[0], 9); os.waitpid(pids.pop(0), 0); time.sleep(0.5)
    pid = os.fork()
    if pid == 0: signal.pause()
    pids.append(pid)
"""


@dataclasses.dataclass
class Fleet:
    """Agents that were started together, and where their sandboxes lie."""

    agents: dict[str, kit.Agent]
    leaves: dict[str, pathlib.Path]


@pytest.fixture(scope="module")
def fleet(operator: kit.Operator) -> Iterator[Fleet]:
    written = operator.signed(
        {
            "hog": (FILL, SMALL),
            "bystander": (WAIT, SMALL),
            "slow": (SPIN, SMALL + "cpu_millis = 100\n"),
            "fork": (FORK, SMALL + "pids_max = 12\n"),
        }
    )
    agents = {name: operator.start(path) for name, path in written.items()}
    try:
        yield Fleet(agents, {name: agent.leaf() for name, agent in agents.items()})
    finally:
        for agent in agents.values():
            agent.process.terminate()
            agent.process.communicate(timeout=kit.PATIENCE_SECONDS)


def test_every_limit_is_in_the_kernel(fleet: Fleet) -> None:
    mib = 1 << 20
    held = {name: {f: (leaf / f).read_text().strip() for f in _FILES} for name, leaf in fleet.leaves.items()}
    assert held["hog"] == {
        "memory.max": str((64 + 8 + 64 + 32) * mib),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(2 * 64 + 64),
        "cpu.max": "100000 100000",
        "cpu.weight": "100",
    }
    assert held["slow"]["cpu.max"] == "10000 100000"
    assert held["fork"]["pids.max"] == str(2 * 12 + 64)


_FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max", "cpu.weight")


def test_cpu_max_is_a_quota(fleet: Fleet) -> None:
    """Of what the kernel counted: a tenth of a core, throttled, while its neighbours take many times that."""
    before, began = _used(fleet), time.monotonic()
    time.sleep(10)
    seconds, after = time.monotonic() - began, _used(fleet)
    share = {name: (after[name]["usage_usec"] - before[name]["usage_usec"]) / 1e6 / seconds for name in after}
    print({name: f"{value:.3f} of a core" for name, value in share.items()})
    assert after["slow"]["nr_throttled"] > before["slow"]["nr_throttled"]
    assert 0.03 < share["slow"] < 0.13
    assert max(share["bystander"], share["fork"]) > 2 * share["slow"]


def _used(fleet: Fleet) -> dict[str, Any]:
    return {name: kit.numbers(fleet.leaves[name] / "cpu.stat") for name in ("slow", "bystander", "fork")}


def test_memory_max_kills_the_agent_and_nobody_else(fleet: Fleet) -> None:
    document = fleet.agents["hog"].answer()
    assert (document["kind"], document["code"]) == ("error", "out_of_memory")
    ended = [row for row in kit.rows("run_ended") if row["agent_id"] == "hog"][-1]
    assert ended["oom"] is True
    said = [line for line in kit.kernel_log() if "oom_memcg=" in line]
    print("\n".join(said))
    assert said
    # The kernel names the cgroup whose limit was hit, and the one that it took a process from.
    place = "/" + str(fleet.leaves["hog"].relative_to(kit.CGROUPS))
    assert all(f"oom_memcg={place}," in line and f"task_memcg={place}," in line for line in said)
    assert not fleet.leaves["hog"].exists()
    for name in ("bystander", "slow", "fork"):
        assert fleet.agents[name].process.poll() is None, name


def test_cgroup_kill_ends_all_of_one_agent(fleet: Fleet) -> None:
    leaf = fleet.leaves["slow"]
    pids = (leaf / "cgroup.procs").read_text().split()
    assert len(pids) > 2
    (leaf / "cgroup.kill").write_text("1")
    assert fleet.agents["slow"].answer()["kind"] == "error"
    assert [pid for pid in pids if pathlib.Path(f"/proc/{pid}").exists()] == []
    assert not leaf.exists()
    assert fleet.agents["bystander"].process.poll() is None


def test_pids_max_is_a_wall(fleet: Fleet) -> None:
    """Nothing that the agent does reaches the second wall, so the wall comes down to where the agent is."""
    leaf, agent = fleet.leaves["fork"], fleet.agents["fork"]
    seen = kit.until(lambda: _settled(leaf), "all children")
    assert 2 * 12 < seen <= 2 * 12 + 64
    assert kit.numbers(leaf / "pids.events")["max"] == 0
    (leaf / "pids.max").write_text(str(seen - 2))
    # The sandbox does not outlive it, and its leaf goes with it: the kernel's log keeps who was refused a task.
    document = agent.answer()
    assert document["kind"] == "error"
    print(document["code"], document["message"])
    said = [line for line in kit.kernel_log() if "rejected by pids controller" in line]
    print("\n".join(said))
    assert said
    assert all(line.endswith("/" + str(leaf.relative_to(kit.CGROUPS))) for line in said)
    assert fleet.agents["bystander"].process.poll() is None


def _settled(leaf: pathlib.Path) -> int | None:
    """How many tasks there are, once no more come."""
    before = int((leaf / "pids.current").read_text())
    time.sleep(3)
    return before if before > 2 * 12 and abs(int((leaf / "pids.current").read_text()) - before) < 4 else None


def test_who_did_nothing_answers(fleet: Fleet) -> None:
    assert fleet.agents["bystander"].value() == "alive"
