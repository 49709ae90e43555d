"""An agent sees at a granted path what the host shows there: what a mount covers is refused, and drift in a live run.

The mounts are in a mount namespace of the test's own (covered_paths.py); everything else is a real run.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import live_runs
from tests.kernel.world import ROOT

GONE = errno.ENOENT


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("covered")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.kernel.covered_paths"]
    done = subprocess.run([*command, str(base), str(warm)], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    # The kernel lets go of a loop device after the last mount of its file is gone.
    live_runs.until(lambda: str(base) not in subprocess.run(["losetup", "-a"], capture_output=True).stdout.decode())
    whole: dict[str, Any] = json.loads(done.stdout)
    assert whole["leftovers"] == []
    return whole


def pages(page: str | int, inner: str | int, room: str | int = GONE) -> dict[str, str | int]:
    """Return the expected answer of the agent for each page."""
    return {"/srv/docs/page": page, "/srv/docs/inner/page": inner, "/srv/docs/room/page": room}


def refused(path: str, point: str) -> list[str]:
    """The refusal of a path in which a mount lies."""
    return [
        "path_refused",
        f"path `{path}` cannot be granted: a mount at `{point}` covers a part of it, which the agent would see",
        f"umount {point}, or grant in place of `{path}` the files and directories in it that the agent needs",
    ]


def test_path_with_covered_part_is_refused(found: dict[str, Any]) -> None:
    got = found["before"]
    assert got["plain"] == pages("docs", "docs"), "control"
    assert got["a file over a file"] == refused("/srv/docs", "/srv/docs/page")
    assert got["a file system over a directory"] == refused("/srv/docs", "/srv/docs/inner")
    assert got["in a mount over the path"] == refused("/srv/docs", "/srv/docs/page")


def test_both_fixes_of_refusal_work(found: dict[str, Any]) -> None:
    got = found["before"]
    assert got["taken away"] == pages("docs", "docs")
    # Granted in its place, while the mount is there.
    assert got["what lies beside it"] == pages(GONE, "docs")
    assert got["that file alone"] == pages("other", GONE), "as the host shows it"


def test_mount_over_whole_path_is_granted(found: dict[str, Any]) -> None:
    got = found["before"]
    assert got["over the path itself"] == pages("other", "other")
    assert got["elsewhere over the same file"] == pages("docs", "docs"), "a mount elsewhere covers nothing here"


def test_written_path_may_lie_in_read_one(found: dict[str, Any]) -> None:
    got = found["writing"]
    assert got["read alone"] == refused("/srv/docs", "/srv/docs/room")
    assert got["read and written"] == pages("docs", "docs", "room")


def test_written_path_with_covered_part(found: dict[str, Any]) -> None:
    got = found["writing"]
    wrong = refused("/srv/docs/room", "/srv/docs/room/below")
    assert got["covered for writing"] == got["covered for writing, read around it"] == wrong
    assert got["written"] == pages(GONE, GONE, "room"), "unmounted, it is granted"


@pytest.mark.parametrize("when", ["before the copy", "after the copy"])
def test_mount_after_check_is_refused(found: dict[str, Any], when: str) -> None:
    assert found["racing"][when] == refused("/srv/docs", "/srv/docs/page")
    assert found["racing"]["nobody came"] == pages("docs", "docs"), "control"


@pytest.mark.parametrize(
    ("where", "point"),
    [("over a file", "/srv/docs/page"), ("over the path", "/srv/docs"), ("above the path", "/srv")],
)
def test_mount_during_run_is_drift(found: dict[str, Any], where: str, point: str) -> None:
    got, drift = found["lasting"], ["mounts", f"one at {point}"]
    assert got["at first"] == [[], []], "control"
    assert got[where] == [[drift], drift]
    assert got[f"{where}, taken away"] == []


def test_mount_in_renamed_directory_is_drift(found: dict[str, Any]) -> None:
    got = found["lasting"]
    assert got["renamed"] == got["named as before"] == [], "control"
    assert got["over a file, renamed"] == [["mounts", "one at /srv/renamed/page"]]


def test_mount_during_run_ends_it(found: dict[str, Any]) -> None:
    code, message, _ = found["lasting"]["ended"]
    assert code == "drift"
    assert "mounts is not as it was made: one at /srv/docs/page" in message


def test_package_with_covered_file_is_refused(found: dict[str, Any]) -> None:
    got = found["packaged"]
    assert got["plain"] is got["mounted itself"] is got["taken away"] is None, "control, and the fix"
    assert got["a file in it covered"] == [
        "package_invalid",
        "`main.py` cannot be read: another file system is mounted there",
        "umount it, or copy the package and sign the copy",
    ]
