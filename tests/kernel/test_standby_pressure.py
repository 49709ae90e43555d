"""A machine short of memory takes it back from waiting instances; with enough memory they are made anew.

The test writes the kernel's files itself: a real shortage would affect all other processes of this machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.rundir import registry
from sandbox.rundir.registry import Entry
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import until
from tests.kernel.serving import Served
from tests.kernel.test_standby import _codes, _ready, _said, _warmed
from tests.kernel.world import World

# What the main loop reads, and how often, before its first line.
_READS = """
import psutil
from sandbox.serve import standby_pool as pool
psutil.PROCFS_PATH = {place!r}
pool.TICK_SECONDS = 0.2
"""
TOTAL_KIB = 24 << 20
# What else of /proc/meminfo is read with them.
OTHERS = ("MemFree", "Buffers", "Cached", "SReclaimable", "Shmem", "Active", "Inactive", "Slab")
AMPLE, SHORT = TOTAL_KIB, 2 << 20  # a tenth of all of it stays for those that run


class Proc:
    """A double of /proc: the free memory, and the share of time in which tasks waited for memory."""

    def __init__(self, place: Path) -> None:
        self.place = place
        (place / "pressure").mkdir(parents=True)
        self.says()

    def says(self, *, available_kib: int = AMPLE, some: float = 0.0, full: float = 0.0) -> None:
        """Write the files; each is whole at any time."""
        rest = "avg60=0.00 avg300=0.00 total=0"
        rows = {**dict.fromkeys(OTHERS, 0), "MemTotal": TOTAL_KIB, "MemAvailable": available_kib}
        self._put("meminfo", "".join(f"{name}: {kib} kB\n" for name, kib in rows.items()))
        self._put("pressure/memory", f"some avg10={some} {rest}\nfull avg10={full} {rest}\n")

    def _put(self, name: str, text: str) -> None:
        made = self.place / "made"
        made.write_text(text)
        made.rename(self.place / name)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Proc:
    made = Proc(tmp_path / "proc")
    monkeypatch.setattr(serving, "_MAIN", _READS.format(place=str(made.place)) + serving._MAIN)
    return made


@pytest.fixture
def served(warm: Path, proc: Proc) -> Iterator[Served]:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        with Served(world) as made:
            yield made
        assert leftovers(world) == []


def _gone(served: Served, entries: list[Entry]) -> bool:
    return not {one.run_id for one in entries} & {one.run_id for one in registry.live(served.world.state / "runs")}


@pytest.mark.parametrize("how", ["little is free", "everybody waits for some"])
def test_what_waits_is_given_back_and_made_anew_when_there_is_enough(served: Served, proc: Proc, how: str) -> None:
    path, first = _warmed(served, "waits", standby=2)
    assert len(first) == 2
    if how == "little is free":
        proc.says(available_kib=SHORT)
    else:
        proc.says(some=50.0, full=20.0)
    until(lambda: _gone(served, first))
    assert not _ready(served, "waits")
    # A client is answered, by a cold run.
    said = _said(served.run(path, "now"))
    assert said["text"] == "now"
    assert said["run"] not in {one.run_id for one in first}
    # None of them was given an intent, and the log has no start of one.
    assert [_codes(served.world, one.run_id) for one in first] == [[], []]
    proc.says()
    again = until(lambda: found if len(found := _ready(served, "waits")) == 2 else None)
    assert not {one.run_id for one in again} & {one.run_id for one in first}
