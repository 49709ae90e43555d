"""A written path has one writer at a time, under all of its names, until its run ends or is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernel.world import ROOT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("writer")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.kernel.one_writer"]
    done = subprocess.run([*command, str(base), str(warm)], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    whole: dict[str, Any] = json.loads(done.stdout)
    return whole


def test_second_writer_is_refused_by_name(found: dict[str, Any]) -> None:
    assert found["held"].startswith("path_in_use: run `")
    assert "writes `/srv/room` now" in found["held"]
    assert found["held from shared"].startswith("path_in_use: `/srv/room` is shared, and run `")
    # The control: the same run when the first has ended.
    assert found["free"] == 50
    assert found["leftovers"] == []


def test_second_name_of_file_system_is_no_way(found: dict[str, Any]) -> None:
    assert "writes `/srv/other` now, under the name `/srv/room`" in found["by another name"]


def test_killed_writer_holds_nothing(found: dict[str, Any]) -> None:
    assert found["killed"] == 50


def test_shared_path_has_writers_that_all_share(found: dict[str, Any]) -> None:
    assert found["shared"] == 50
    assert found["alone beside shared"].startswith("path_in_use: run `")
