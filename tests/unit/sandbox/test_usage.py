"""What a run used, read from the files of its cgroup; and what of a request a warm instance is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import contract
from policy.package import Package
from sandbox import standby_wire
from sandbox.kernel.cgroupfs import Hierarchies, Leaf
from sandbox.limits import Meter
from sandbox.request import Request


def _leaf(version: int, place: Path, **files: str) -> Leaf:
    names = {"cpu": {1: "cpuacct.usage", 2: "cpu.stat"}, "peak": {1: "memory.max_usage_in_bytes", 2: "memory.peak"}}
    for what, content in files.items():
        (place / names[what][version]).write_text(content)
    return Leaf(Hierarchies(version, {}), "leaf", dict.fromkeys(("memory", "cpu", "cpuacct"), place))


@pytest.mark.parametrize(
    ("version", "then", "now"), [(1, "5000000", "48000000"), (2, "usage_usec 5000", "usage_usec 48000")]
)
def test_processor_time_counts_from_the_intent(tmp_path: Path, version: int, then: str, now: str) -> None:
    meter = Meter(_leaf(version, tmp_path, cpu=then))
    assert meter.cpu_ms() is None
    meter.begin()
    _leaf(version, tmp_path, cpu=now)
    assert meter.cpu_ms() == 43


def test_what_is_not_counted_is_not_made_up(tmp_path: Path) -> None:
    leaf = _leaf(1, tmp_path)
    meter = Meter(leaf)
    meter.begin()
    assert (meter.cpu_ms(), leaf.memory_peak_bytes()) == (None, None)


@pytest.mark.parametrize("version", [1, 2])
def test_the_peak_of_memory(tmp_path: Path, version: int) -> None:
    assert _leaf(version, tmp_path, peak="1048576\n").memory_peak_bytes() == 1 << 20


def test_an_instance_is_told_the_intent_s_name_and_priority() -> None:
    package = Package({"agent.toml": b"[agent]"}, b"an envelope")
    request = Request(package, "hi", {"display": "a@b", "pubkey": "1"}, intent_id="i", priority="low")
    told = standby_wire.ordered(standby_wire.order(request), package)
    assert told is not None
    assert (told.intent_id, told.priority) == ("i", "low")


def test_a_run_that_was_told_nothing_used_nothing() -> None:
    assert contract.Usage(0, 0, 0) == contract.NOTHING_USED
