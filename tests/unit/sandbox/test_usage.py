"""Check a run's usage from its cgroup's files, and the parts of a request that a warm instance gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import contract
from policy.package import Package
from sandbox.audit import open_runs
from sandbox.kernel.cgroup.cgroup import Hierarchies, Leaf
from sandbox.lifecycle.types import Request
from sandbox.network.gate import cgroup
from sandbox.runner.limits import Meter, was_begun
from sandbox.standby import dispatch
from sandbox.storage import json_cache


def _leaf(version: int, place: Path, **files: str) -> Leaf:
    names = {"cpu": {1: "cpuacct.usage", 2: "cpu.stat"}, "peak": {1: "memory.max_usage_in_bytes", 2: "memory.peak"}}
    for what, content in files.items():
        (place / names[what][version]).write_text(content)
    return Leaf(Hierarchies(version, {}), "leaf", dict.fromkeys(("memory", "cpu", "cpuacct"), place))


@pytest.mark.parametrize(
    ("version", "then", "now"), [(1, "5000000", "48000000"), (2, "usage_usec 5000", "usage_usec 48000")]
)
def test_processor_time_counts_from_intent(tmp_path: Path, version: int, then: str, now: str) -> None:
    meter = Meter(_leaf(version, tmp_path, cpu=then))
    assert meter.cpu_ms() is None
    meter.begin()
    _leaf(version, tmp_path, cpu=now)
    assert meter.cpu_ms() == 43


@pytest.mark.parametrize(
    ("version", "then", "now"), [(1, "5000000", "48000000"), (2, "usage_usec 5000", "usage_usec 48000")]
)
def test_what_gates_of_run_take_is_its_own(tmp_path: Path, version: int, then: str, now: str) -> None:
    places = tmp_path / "agent", tmp_path / "gates"
    for place in places:
        place.mkdir()
    agent, gates = (_leaf(version, place, cpu=then) for place in places)
    meter = Meter(agent, gates)
    meter.begin()
    _leaf(version, places[1], cpu=now)
    assert meter.cpu_ms() == 43
    _leaf(version, places[0], cpu=now)
    assert meter.cpu_ms() == 86


def test_what_killed_run_used_is_counted_from_its_intent_by_whoever_finds_it(tmp_path: Path) -> None:
    leaf, noted = _leaf(1, tmp_path, cpu="5000000"), tmp_path / "meter"
    assert Meter.of_one_that_was_killed(leaf, None, noted).cpu_ms() is None
    Meter(leaf, None, noted).begin()
    _leaf(1, tmp_path, cpu="48000000")
    assert Meter.of_one_that_was_killed(leaf, None, noted).cpu_ms() == 43
    Meter(None, None, tmp_path / "uncounted").begin()
    assert Meter.of_one_that_was_killed(leaf, None, tmp_path / "uncounted").cpu_ms() is None


def test_meter_made_ahead_says_of_nobody_that_they_had_intent(tmp_path: Path) -> None:
    noted = tmp_path / "meter"
    seen = [was_begun(noted)]
    noted.touch()
    seen.append(was_begun(noted))
    Meter(None, None, noted).begin()
    assert [*seen, was_begun(noted)] == [False, False, True]


def test_of_meter_begun_ahead_and_again_first_time_counts(tmp_path: Path) -> None:
    meter = Meter(_leaf(1, tmp_path, cpu="5000000"), None, tmp_path / "none" / "meter")
    with pytest.raises(FileNotFoundError):
        meter.begin()  # the caller then calls it again
    (tmp_path / "none").mkdir()
    meter.begin()
    _leaf(1, tmp_path, cpu="48000000")
    meter.begin()
    assert meter.cpu_ms() == 43
    assert meter.noted is not None
    assert meter.noted.read_text() == "5000"


def test_what_was_noted_of_killed_run_stands_when_whoever_noted_it_is_killed_as_well(tmp_path: Path) -> None:
    """The next recovery finds its cgroups gone, and would otherwise note that it had used nothing."""
    (tmp_path / "unended").mkdir(mode=0o700)
    open_runs.note_used(tmp_path, "run", contract.Usage(43, 1 << 20, 0))
    assert open_runs.used(tmp_path, "run") is None  # the log owes it no end
    (tmp_path / "unended" / "run").touch()
    for found in (contract.Usage(43, 1 << 20, 0), contract.NOTHING_USED):
        open_runs.note_used(tmp_path, "run", found)
    assert open_runs.used(tmp_path, "run") == contract.Usage(43, 1 << 20, 0)


@pytest.mark.parametrize(
    "record",
    [
        {"x": 1},
        {"cpu_ms": 1},
        {"cpu_ms": "1", "memory_peak_bytes": 1, "wall_ms": 1},
        {"cpu_ms": -1, "memory_peak_bytes": 1, "wall_ms": None},
        {"cpu_ms": 1, "memory_peak_bytes": True, "wall_ms": None},
        {"cpu_ms": 1, "memory_peak_bytes": None, "wall_ms": 1.5},
    ],
)
def test_what_another_version_noted_is_none_and_stops_nobody_who_writes_ends(
    tmp_path: Path, record: dict[str, object]
) -> None:
    (tmp_path / "unended").mkdir(mode=0o700)
    (tmp_path / "unended" / "run").touch()
    open_runs.note_used(tmp_path, "run", contract.Usage(43, 1 << 20, None))
    [place] = [one for one in (tmp_path / "unended").iterdir() if one.name != "run"]
    assert open_runs.used(tmp_path, "run") == contract.Usage(43, 1 << 20, None)
    json_cache.write(place, record)
    assert open_runs.used(tmp_path, "run") is None
    open_runs.note_used(tmp_path, "run", contract.NOTHING_USED)
    assert open_runs.used(tmp_path, "run") == contract.NOTHING_USED


def test_gates_part_of_what_was_noted_is_found_again(tmp_path: Path) -> None:
    leaf = Leaf(Hierarchies(1, {"cpuacct": tmp_path}), "run")
    gates = cgroup.of(leaf)
    noted = {**leaf.plan(), **cgroup.noted(gates)}
    for place in noted.values():
        place.mkdir(parents=True)
    adopted = Leaf(leaf.hierarchies, "run")
    adopted.adopt(noted)
    found = cgroup.adopted_of(adopted)
    assert found is not None
    assert found.paths == gates.plan()
    alone = Leaf(leaf.hierarchies, "run")
    alone.adopt(leaf.plan())
    assert cgroup.adopted_of(alone) is None


def test_what_is_not_counted_is_not_made_up(tmp_path: Path) -> None:
    leaf = _leaf(1, tmp_path)
    meter = Meter(leaf)
    meter.begin()
    assert (meter.cpu_ms(), leaf.memory_peak_bytes()) == (None, None)


@pytest.mark.parametrize("version", [1, 2])
def test_peak_of_memory(tmp_path: Path, version: int) -> None:
    assert _leaf(version, tmp_path, peak="1048576\n").memory_peak_bytes() == 1 << 20


def test_instance_is_told_intent_s_name_and_priority_and_for_whom_it_is() -> None:
    package = Package({"agent.toml": b"[agent]"}, b"an envelope")
    whom = {"display": "ada@laptop", "pubkey": "2"}
    issuer, reads = {"display": "uid7@local", "pubkey": "1"}, contract.on_behalf(**whom, by="uid7@local")
    request = Request(package, "hi", issuer, intent_id="i", priority="low", behalf=whom, told=reads)
    told = dispatch.ordered(dispatch.order(request, "s"), package)
    assert told is not None
    assert (told.intent_id, told.priority, told.issuer, told.behalf) == ("i", "low", issuer, whom)
    assert told.reads == reads == {"display": "ada@laptop.via.uid7", "pubkey": "2"}
    assert Request(package, "hi", issuer).reads == issuer


def test_run_that_was_told_nothing_used_nothing() -> None:
    assert contract.Usage(0, 0, 0) == contract.NOTHING_USED
