"""A machine that stops in the middle of a session: its workspace and its volume are found again at the next boot.

Every process of the session is killed at once, so that its mounts and loop devices are gone. The commands after it run
with an empty /run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel import procfs
from tests.kernel import volume_kit
from tests.kernel.live_runs import until
from tests.kernel.session_kit import Home
from tests.kernel.test_workspace import listed

OWNER = 1000
EMPTY_RUN = [
    "unshare",
    "--mount",
    "--propagation",
    "private",
    "sh",
    "-c",
    'mount -t tmpfs none /run && exec "$@"',
    "sh",
]
WORK = "echo kept > n.txt; rm old.txt; echo row > /data/log; sync; echo ready; sleep 300"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    made = Home(tmp_path, "debian-minimal")
    done = made.covenant("volume", "create", "data", "--size", "16M")
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture
def project() -> Iterator[Path]:
    """A directory of a user on a file system that takes idmapped mounts."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        top = Path(made) / "project"
        top.mkdir()
        (top / "old.txt").write_text("old\n")
        for path in (top, top / "old.txt"):
            os.chown(path, OWNER, OWNER)
        yield top


def power_cut(home: Home, words: list[str | Path]) -> None:
    """Kill a session with all of its processes once it says that it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "covenant", "exec", *map(str, words)],
        env=home.environment(),
        cwd=home.base,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert volume_kit.attached_below(home.world.state), "control: devices are attached"
        first = procfs.name(process.pid)
        assert first is not None
        for pid in procfs.family(first) or ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    until(lambda: not volume_kit.attached_below(home.world.state))


def test_workspace_and_volume_are_found_again(home: Home, project: Path) -> None:
    granted = ("--write", "volume:data:/data")
    words: list[str | Path] = ["--quiet", "--workspace", project, "--keep-workspace", *granted, "--", "sh", "-ec", WORK]
    power_cut(home, words)
    home.before = EMPTY_RUN
    (one,) = listed(home)
    assert one["settled"] is False
    shown = home.covenant("workspace", "diff", one["run_id"])
    assert shown.stdout.decode().splitlines() == ["+ n.txt  5 bytes", "- old.txt"], shown.stderr
    forked = json.loads(home.covenant("workspace", "fork", one["run_id"], "--json").stdout)["fork"]
    volume = json.loads(home.covenant("volume", "show", "data", "--json").stdout)
    assert volume["name"] == "data"
    resumed = home.exec(
        *("--quiet", "--workspace", project, "--resume", one["run_id"], *granted, "--"),
        *("sh", "-ec", "cat n.txt /data/log; test ! -e old.txt; echo more >> n.txt; echo more >> /data/log"),
    )
    assert (resumed.returncode, resumed.stdout) == (0, b"kept\nrow\n"), resumed.stderr
    assert sorted(os.listdir(project)) == ["old.txt"]
    found = {row["run_id"]: row for row in listed(home)}
    assert found.pop(forked)["settled"]
    (two,) = found.values()
    applied = home.covenant("workspace", "apply", two["run_id"])
    assert applied.returncode == 0, applied.stderr
    assert (project / "n.txt").read_text() == "kept\nmore\n"
    assert os.listdir(project) == ["n.txt"]
    # The fork goes on from where it was copied, and what was applied since is the host's.
    again = home.exec(
        *("--quiet", "--workspace", project, "--resume", forked, "--"), "sh", "-ec", "cat n.txt; echo x > fork"
    )
    assert (again.returncode, again.stdout) == (0, b"kept\n"), again.stderr
    (three,) = listed(home)
    assert b"+ fork" in home.covenant("workspace", "diff", three["run_id"]).stdout
    assert home.covenant("workspace", "apply", three["run_id"], "fork").returncode == 0
    assert sorted(os.listdir(project)) == ["fork", "n.txt"]
    assert (project / "n.txt").read_text() == "kept\nmore\n"
    read = home.exec("--quiet", *granted, "--", "cat", "/data/log")
    assert read.stdout == b"row\nmore\n", read.stderr
