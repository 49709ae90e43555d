"""A shim that is killed while it removes the directory of its run."""

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
from sandbox.runner import limits, recovery

POLICY = artefacts.Artefacts({name: name.encode() for name in artefacts.NAMES})


class Killed(BaseException):
    """Stands for SIGKILL, after which the test goes on."""


def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the call of this number that changes a directory raise, and every later one."""
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
def test_removal_killed_shows_no_usage_of_zero(tmp_path: Path, *, whole: bool) -> None:
    """The run's end is not written yet. Recovery writes it, with a usage that is not known any more."""
    (tmp_path / "runs").mkdir()
    for step in itertools.count():
        run = directory.RunDirectory(tmp_path / "runs" / f"run-{step}", {})
        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Killed), run:
            (run.path / limits.METER).write_text("5")
            if whole:
                run.write_policy(POLICY)
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
