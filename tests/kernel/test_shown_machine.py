"""The memory that a sandbox shows to its agent is the agent's own, under raw runsc the host's."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.kernel import plain_runsc
from tests.kernel.world import World

# /proc/meminfo by name in kB, sysconf's total, sysinfo's own total (ctypes), and the processors.
SEEN = """
import ctypes, os
def meminfo():
    return {line.split(":")[0]: int(line.split()[1]) for line in open("/proc/meminfo")}
info = (ctypes.c_ulong * 16)()
ctypes.CDLL(None).sysinfo(info)
pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
answer = {"meminfo": meminfo(), "pages": pages, "sysinfo": info[4] // 1024, "cpus": os.cpu_count()}
"""
# What node plans its heap with: the old generation is half of the machine's memory, up to V8's own ceiling.
HEAP = """
const fs = require("fs"), os = require("os"), v8 = require("v8");
fs.readFileSync(0);
const seen = [os.totalmem() / 1048576, v8.getHeapStatistics().heap_size_limit / 1048576];
console.log(JSON.stringify({text: JSON.stringify(seen)}));
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("memory_mb", [64, 300])
def test_agent_sees_its_own_memory(world: World, memory_mb: int) -> None:
    seen = world.ask(SEEN, memory_mb=memory_mb)
    assert (seen["meminfo"]["MemTotal"], seen["pages"], seen["sysinfo"]) == (memory_mb * 1024,) * 3
    assert 0 < seen["meminfo"]["MemFree"] <= memory_mb * 1024
    assert seen["cpus"] == os.cpu_count()


def test_plain_sandbox_sees_memory_of_host() -> None:
    done = plain_runsc.run(["/usr/bin/python3", "-I", "-c", SEEN + "\nimport json; print(json.dumps(answer))"])
    assert done.status == 0, done.stderr
    host_kb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024
    assert json.loads(done.stdout)["meminfo"]["MemTotal"] == host_kb


def test_full_scratch_leaves_memory_of_agent_readable(world: World) -> None:
    """The scratch counts as used memory inside, and may be larger than ``memory_mb``."""
    code = (
        SEEN
        + """
with open("/tmp/large", "wb") as file:
    for _ in range(96):
        file.write(bytes(1 << 20))
answer = [answer["meminfo"], meminfo()]
"""
    )
    before, after = world.ask(code, memory_mb=64, disk_mb=128)
    assert before["MemTotal"] == after["MemTotal"] == 65536
    assert after["MemFree"] == 0 < before["MemFree"]


def test_node_plans_heap_by_its_own_memory(world: World) -> None:
    package = world.package({"main.js": HEAP}, runtime="node", entry="main.js", memory_mb=256)
    answer = world.run(world.sign(package))
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    total, heap = json.loads(answer.result.text)
    assert total == 256
    # V8 takes no less than 256 MiB; on the host, with the host's memory, it takes several times that.
    command = ["/usr/bin/node", "-p", "require('v8').getHeapStatistics().heap_size_limit / 1048576"]
    host = subprocess.run(command, check=True, capture_output=True).stdout
    assert heap < 300 < float(host)
