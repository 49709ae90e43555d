"""Who reads of a run whose directory becomes that of another between two of their calls."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox import bundle
from sandbox.spare import Spares

OLD, NEW = "0f0e5e5a-1c1c-4b4b-9d9d-000000000001", "0f0e5e5a-1c1c-4b4b-9d9d-000000000002"


def planned(run_id: str) -> dict[str, Path]:
    return {"memory": Path("/sys/fs/cgroup/covenant", run_id), "gates.memory": Path("/x/covenant", f"{run_id}-gates")}


def test_whoever_opened_the_cgroups_of_one_run_is_never_told_of_another(tmp_path: Path) -> None:
    """Who ends a run ends what its cgroups hold: here these would be another's, who is to go on."""
    spares = Spares(tmp_path / "spare", "digest")
    (tmp_path / "runs").mkdir()
    old = bundle.RunDirectory(tmp_path / "runs" / OLD, {}, spares=spares)
    new = bundle.RunDirectory(tmp_path / "runs" / NEW, {}, spares=spares)
    with old:
        old.note_cgroups(planned(OLD))
        assert bundle.cgroups_of(old.path) == planned(OLD)
        old._complete = True
        opened = (old.path / "cgroups.json").stat().st_ino
    with new:
        new.note_cgroups(planned(NEW))
        # The very file: whoever opened it as the old one's, and reads now, reads this.
        assert (new.path / "cgroups.json").stat().st_ino == opened
        old.path.mkdir()
        os.link(new.path / "cgroups.json", old.path / "cgroups.json")
        assert bundle.cgroups_of(old.path) == {}
        assert bundle.cgroups_of(new.path) == planned(NEW)
