"""The other half of agents/hostile/probes.toml: under Covenant every probe is blocked, with the errno it says.

Its control half is test_hostile_controls.py: the same probes do what they are named for in a plain bundle.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from policy import errors
from tests.kernel import hostile_table as table
from tests.kernel.world import World

PROBES, GRANTED = table.load()
PACKAGES = sorted({probe.package for probe in PROBES})


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> World:
    table.built()
    world = World(tmp_path_factory.mktemp("hostile"), warm=warm)
    for name in PACKAGES:
        world.sign(world.copy(f"hostile/{name}"))
    return world


def _run(world: World, package: str, text: str) -> table.Row | errors.CovenantError | dict[str, table.Row]:
    answer = world.run(world.base / "packages" / f"hostile-{package}", text)
    if answer.error is not None:
        return answer.error
    assert answer.result is not None
    rows = table.rows(answer.result.text)
    return rows if text.startswith("batch:") else rows[text]


@pytest.fixture(scope="module")
def batches(hostile: World) -> dict[str, table.Row]:
    """Every probe that can share its sandbox, one sandbox a package."""
    found: dict[str, table.Row] = {}
    for package in PACKAGES:
        together = [p.id for p in PROBES if p.package == package and not p.alone and p.limit is None]
        if together:
            rows = _run(hostile, package, table.batch(together))
            assert isinstance(rows, dict), rows
            found |= rows
    return found


@pytest.mark.parametrize("probe", PROBES, ids=[p.id for p in PROBES])
def test_blocked(hostile: World, batches: dict[str, table.Row], probe: table.Probe) -> None:
    if probe.limit is not None:
        ended = _run(hostile, probe.package, probe.id)
        assert isinstance(ended, errors.RunError), ended
        assert ended.code == probe.limit, ended
        return
    row = batches.get(probe.id) or _run(hostile, probe.package, probe.id)
    assert isinstance(row, table.Row), row
    assert row.outcome == "blocked", row
    assert (row.errno or table.NO_ERRNO) in probe.expect, row


@pytest.mark.parametrize("act", GRANTED, ids=[g.id for g in GRANTED])
def test_what_is_granted_still_works(hostile: World, act: table.Granted) -> None:
    row = _run(hostile, act.package, act.id)
    assert isinstance(row, table.Row), row
    assert row.outcome == "succeeded", row


@functools.cache
def _count(kind: str) -> int:
    return sum(probe.control == kind for probe in PROBES)


def test_table_is_what_issue_asks() -> None:
    assert len(PROBES) >= 40
    assert _count("a") >= 30
    assert _count("a") + _count("b") + _count("c") == len(PROBES)
