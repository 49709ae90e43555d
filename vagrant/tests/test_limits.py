"""Limits are hit for real on pure cgroup v2, by agents that run at the same time: who hits one ends, the others do not.

One start of a sandbox takes half a minute on an emulated machine, so all agents are started once, together.
"""

from __future__ import annotations

import dataclasses
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vagrant.tests import kit

SMALL = "memory_mb = 64\ndisk_mb = 8\n"
# Busy until the others have started and were looked at, and only then hungry.
FILL = """\
end = time.monotonic() + 60
while time.monotonic() < end: pass
block = bytearray(512 << 20)
for i in range(0, len(block), 4096): block[i] = 1
answer = 1
"""
WRITTEN_MB, WRITE_BPS = 4, 1 << 19
DISK = "memory_mb = 64\ndisk_mb = 24\n"
# The agent returns the seconds until the data is on the disk.
WRITE = f"""\
begin = time.monotonic()
with open("/srv/written/{{}}/file", "wb") as file:
    file.write(bytes({WRITTEN_MB} << 20)), file.flush(), os.fsync(file.fileno())
answer = time.monotonic() - begin
"""
# The agent stays alive while the others end, and answers afterwards.
WAIT = "time.sleep(180)\n"
SPIN = "while True: pass\n"
# Start children one at a time, up to the limit. Each needs host tasks that did not exist before, and only an agent that
# has not reached the limit can be stopped on the way.
EVERY_SECONDS = 20
FORK = f"""\
number = 0
try:
    while True:
        pid = os.fork()
        if pid == 0: signal.pause()
        time.sleep({EVERY_SECONDS})
except OSError as e: number = e.errno
answer = number
"""


@dataclasses.dataclass
class Fleet:
    """Agents that were started together, the cgroups of their sandboxes, and the limits in these."""

    agents: dict[str, kit.Agent]
    leaves: dict[str, pathlib.Path]
    held: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], pathlib.Path]]:
    """Makes a file system of its own at /srv/written/NAME, which is what a written path has to be."""
    base, made = tmp_path_factory.mktemp("images"), []

    def make(name: str) -> pathlib.Path:
        file, place = base / f"{name}.img", pathlib.Path("/srv/written") / name
        with file.open("wb") as raw:
            raw.truncate(16 << 20)
        place.mkdir(mode=0o755, parents=True)
        subprocess.run(["/sbin/mkfs.ext4", "-q", str(file)], check=True, timeout=120)
        subprocess.run(["/bin/mount", "-o", "loop,nosuid,nodev", str(file), str(place)], check=True, timeout=120)
        made.append(place)
        return place

    yield make
    for place in made:
        subprocess.run(["/bin/umount", str(place)], check=True, timeout=120)


@pytest.fixture(scope="module")
def untried() -> Iterator[None]:
    """Policies are not tried before their first run: that is another sandbox for each, and test_machine.py had it."""
    config = kit.STATE / "config.toml"
    config.write_text(pathlib.Path("/etc/covenant/config.toml").read_text() + "self_test = false\n")
    config.chmod(0o600)
    yield
    config.unlink()


@pytest.fixture(scope="module")
def fleet(operator: kit.Operator, image: Callable[[str], pathlib.Path], untried: None) -> Iterator[Fleet]:
    written = operator.signed(
        {
            "hog": kit.Package(FILL, SMALL),
            "bystander": kit.Package(WRITE.format("bystander") + WAIT, DISK, str(image("bystander"))),
            "writer": kit.Package(WRITE.format("writer"), f"{DISK}io_write_bps = {WRITE_BPS}\n", str(image("writer"))),
            "slow": kit.Package(SPIN, SMALL + "cpu_millis = 100\n"),
            "fork": kit.Package(FORK, SMALL + "pids_max = 12\n"),
        }
    )
    agents = {name: operator.start(path) for name, path in written.items()}
    try:
        # Read as each is found: on a busy machine the first one ends before the last has started.
        leaves, held = {}, {}
        for name, agent in agents.items():
            leaves[name] = leaf = agent.leaf()
            held[name] = {file: (leaf / file).read_text().strip() for file in _FILES}
        yield Fleet(agents, leaves, held)
    finally:
        for agent in agents.values():
            agent.process.terminate()
            agent.process.communicate(timeout=kit.PATIENCE_SECONDS)


def test_every_limit_is_in_kernel(fleet: Fleet) -> None:
    mib = 1 << 20
    held = fleet.held
    assert held["hog"] == {
        "memory.max": str((64 + 8 + 64 + 32) * mib),
        "memory.swap.max": "0",
        "memory.oom.group": "1",
        "pids.max": str(2 * 64 + 64),
        "cpu.max": "100000 100000",
        "cpu.weight": "100",
    }
    assert held["slow"]["cpu.max"] == "10000 100000"
    # One line for every disk behind the run: the written path's own, and that of the supervisor's state.
    lines = (fleet.leaves["writer"] / "io.max").read_text().splitlines()
    assert len(lines) == 2
    assert all(line.endswith(f" rbps=max wbps={WRITE_BPS} riops=max wiops=max") for line in lines)
    assert held["fork"]["pids.max"] == str(2 * 12 + 64)


_FILES = ("memory.max", "memory.swap.max", "memory.oom.group", "pids.max", "cpu.max", "cpu.weight")


def test_cpu_max_is_quota(fleet: Fleet) -> None:
    """The slow run gets a tenth of a core and is throttled, as the kernel counts it.

    Its neighbour gets many times that.
    """
    before, began = _used(fleet), time.monotonic()
    time.sleep(10)
    seconds, after = time.monotonic() - began, _used(fleet)
    share = {name: (after[name]["usage_usec"] - before[name]["usage_usec"]) / 1e6 / seconds for name in after}
    print({name: f"{value:.3f} of a core" for name, value in share.items()})
    assert after["slow"]["nr_throttled"] > before["slow"]["nr_throttled"]
    assert 0.03 < share["slow"] < 0.13
    assert share["hog"] > 2 * share["slow"]


def _used(fleet: Fleet) -> dict[str, Any]:
    return {name: kit.numbers(fleet.leaves[name] / "cpu.stat") for name in ("slow", "hog")}


def test_memory_max_kills_agent_and_no_other(fleet: Fleet) -> None:
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


def test_pids_max_is_wall(fleet: Fleet) -> None:
    """Nothing that the agent does reaches the second wall, so the wall comes down to where the agent is."""
    leaf, agent = fleet.leaves["fork"], fleet.agents["fork"]
    seen = int((leaf / "pids.current").read_text())
    assert agent.process.poll() is None
    assert seen <= 2 * 12 + 64
    assert kit.numbers(leaf / "pids.events")["max"] == 0
    (leaf / "pids.max").write_text(str(seen - 2))
    # Its next child is refused a task. The sandbox does not outlive that, and its leaf goes with it: the kernel's log
    # keeps who it was.
    document = agent.answer()
    assert document["kind"] == "error"
    print(document["code"], document["message"])
    said = [line for line in kit.kernel_log() if "rejected by pids controller" in line]
    print("\n".join(said))
    assert said
    assert all(line.endswith("/" + str(leaf.relative_to(kit.CGROUPS))) for line in said)
    assert fleet.agents["bystander"].process.poll() is None


def test_io_max_is_rate_and_who_hit_nothing_answers(fleet: Fleet) -> None:
    """The same bytes to disks of the same kind: within the granted rate, and without one."""
    seconds = {name: fleet.agents[name].value() for name in ("writer", "bystander")}
    rate = {name: (WRITTEN_MB << 20) / value for name, value in seconds.items()}
    print({name: f"{value / WRITE_BPS:.2f} of the limit" for name, value in rate.items()})
    assert rate["writer"] < 1.3 * WRITE_BPS < rate["bystander"]
