"""Who reads of a run whose directory becomes that of another between two of their calls."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from policy.compile import artefacts
from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import directory
from sandbox.rundir.reuse import Spares
from sandbox.runner import limits, recovery

POLICY = artefacts.Artefacts({name: name.encode() for name in artefacts.NAMES})

OLD, NEW = "0f0e5e5a-1c1c-4b4b-9d9d-000000000001", "0f0e5e5a-1c1c-4b4b-9d9d-000000000002"


def planned(run_id: str) -> dict[str, Path]:
    return {"memory": Path("/sys/fs/cgroup/covenant", run_id), "gates.memory": Path("/x/covenant", f"{run_id}-gates")}


def test_whoever_opened_the_cgroups_of_one_run_is_never_told_of_another(tmp_path: Path) -> None:
    """Who ends a run ends what its cgroups hold: here these would be another's, who is to go on."""
    spares = Spares(tmp_path / "spare", "digest")
    (tmp_path / "runs").mkdir()
    old = directory.RunDirectory(tmp_path / "runs" / OLD, {}, spares=spares)
    new = directory.RunDirectory(tmp_path / "runs" / NEW, {}, spares=spares)
    with old:
        old.note_cgroups(planned(OLD))
        assert directory.cgroups_of(old.path) == planned(OLD)
        old._complete = True
        opened = (old.path / "cgroups.json").stat().st_ino
    with new:
        new.note_cgroups(planned(NEW))
        # The very file: whoever opened it as the old one's, and reads now, reads this.
        assert (new.path / "cgroups.json").stat().st_ino == opened
        old.path.mkdir()
        os.link(new.path / "cgroups.json", old.path / "cgroups.json")
        assert directory.cgroups_of(old.path) == {}
        assert directory.cgroups_of(new.path) == planned(NEW)


class Killed(BaseException):
    """As kill -9, but that the test goes on."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the calls that change a directory the one of this number, and every later one, is not made."""
    left = iter(range(step))

    def counted(name: str) -> None:
        call = getattr(os, name)

        def change(*given: Any, **more: Any) -> Any:
            if next(left, None) is None:
                raise Killed
            return call(*given, **more)

        monkeypatch.setattr(os, name, change)

    for name in ("unlink", "rename", "rmdir"):
        counted(name)


@pytest.mark.parametrize("whole", [True, False])
def test_of_one_that_is_killed_while_it_clears_up_nobody_says_that_it_used_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, whole: bool
) -> None:
    """Its end is not written yet: whoever recovers it writes what it had used, which is not known any more."""
    (tmp_path / "runs").mkdir()
    for step in itertools.count():
        run = directory.RunDirectory(tmp_path / "runs" / f"run-{step}", {}, spares=Spares(tmp_path / "spare", "digest"))
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed), run:
            (run.path / limits.METER).write_text("5")
            run.write_policy(POLICY)
            run._complete = whole
            for name in ("control", "sub"):
                (run.path / name).mkdir()
                (run.path / name / "file").touch()
            killed_at(step, patch)
        if not run.path.exists():
            break
        leaf = cgroup.Leaf(cgroup.Hierarchies(2, {}), run.path.name)
        leaf.adopt({})
        if (run.path / "label.json").exists():
            assert recovery.used_by(leaf, run.path).cpu_ms is None, step
    assert step > 5
