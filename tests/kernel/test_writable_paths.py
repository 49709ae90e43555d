"""A written path is bounded by the file system of its own that is there and leads nowhere else, or it is refused.

The images are mounted in a mount namespace of the test's own (written_image.py); everything else is a real run.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from sandbox.kernel.cgroup import cgroup
from tests.kernel import live_runs
from tests.kernel.world import ROOT

# A process that makes a user namespace, and is interrupted or killed when the child of it is there.
HOLDER = """\
import os, signal, sys
from pathlib import Path
from sandbox.kernel import libc; from sandbox.kernel.fs import idmap
out, what, clone = sys.argv[1], sys.argv[2], libc.clone_ended
def say(what): open(out, "a").write(what + "\\n")
def handler(number, frame): raise KeyboardInterrupt
signal.signal(signal.SIGINT, handler)
def cloned(flags):
    pid = clone(flags)
    say(f"{pid}")
    if what == "stopped": os.kill(os.getpid(), signal.SIGINT)
    return pid
libc.clone_ended = cloned
def written(place):
    if what == "killed": os.kill(os.getpid(), signal.SIGKILL)
    return Path(place)
idmap.Path = written
try:
    os.close(idmap.namespace((0, 0), (5000, 5000)))
    say("made")
finally:
    say("clean-up")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> dict[str, Any]:
    base = tmp_path_factory.mktemp("written")
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-m", "tests.kernel.written_image"]
    done = subprocess.run([*command, str(base), str(warm)], cwd=ROOT, capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    # The kernel lets go of a loop device after the last mount of its file is gone.
    live_runs.until(lambda: str(base) not in subprocess.run(["losetup", "-a"], capture_output=True).stdout.decode())
    whole: dict[str, Any] = json.loads(done.stdout)
    return whole


def test_path_that_nothing_bounds_is_refused_with_what_it_lies_on(found: dict[str, Any]) -> None:
    assert "not_enforceable: write path `/srv/memory`" in found["memory"]
    assert "it lies on tmpfs" in found["memory"]
    assert "it is part of the file system that is mounted at `/srv/room`" in found["below"]
    assert "its file system is mounted at `/srv/open` without nosuid" in found["open"]
    assert "disk_mb is 16, and the file systems of the written paths have 16 MiB" in found["large"]
    # The controls: the same with what was missing.
    assert found["closed"] == 1
    assert found["room"]["change"] == "done"
    assert found["leftovers"] == []


def test_agent_writes_as_owner_of_granted_path_and_as_no_other(found: dict[str, Any]) -> None:
    got = found["room"]
    assert (got["read"], got["change"], got["owners"], got["uid"]) == ("as it was", "done", "done", "mine")
    assert got["new"] == "done"
    assert got["anothers"] == errno.EACCES
    assert got["give away"] == errno.EPERM
    # As root's on the disk, which owns the granted path; the run's own uid is nowhere.
    assert found["on disk"]["new"][0] == found["on disk"]["text"][0] == 0
    assert found["on disk"]["anothers"] == [12345, "0o100600"]


def test_no_link_program_or_device_leads_out_of_it(found: dict[str, Any]) -> None:
    got = found["room"]
    assert got["inner link"] == "as it wasx"
    assert got["outer link"] == errno.ENOENT
    assert got["rename out"] == got["link out"] == errno.EXDEV
    assert got["run it"] in (errno.EPERM, errno.EACCES)
    assert got["device"] == errno.EPERM
    assert "device" not in found["listed"]


def test_bytes_names_and_holes_end_where_its_file_system_ends(found: dict[str, Any]) -> None:
    got = found["room"]
    assert (got["fill"], got["many"]) == (errno.ENOSPC, errno.ENOSPC)
    assert 8 <= got["filled"] < 16
    assert got["sparse"] == errno.EFBIG
    # disk_mb bounds everything that can be written: the scratch has what the path leaves of 24 MiB.
    assert got["scratch"] == 24 - 16


def test_input_and_output_is_as_slow_as_was_granted_or_refused(found: dict[str, Any]) -> None:
    """Four MiB at one a second, on the very disk that holds the path; version 1 of cgroups cannot hold it."""
    assert isinstance(found["any speed"], float)
    if cgroup.Hierarchies.read().version == 1:
        assert "io_write_bps `1048576` needs cgroup version 2" in found["slow"]
    else:
        assert found["slow"] > 3 * found["any speed"]


@pytest.mark.parametrize("what", ["nothing", "stopped", "killed"])
def test_child_of_user_namespace_never_stays(tmp_path: Path, what: str) -> None:
    out = tmp_path / "said"
    command = [sys.executable, "-c", HOLDER, str(out), what]
    subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, check=False, timeout=30)
    said = out.read_text().splitlines()
    lines = {"nothing": ["made", "clean-up"], "stopped": ["clean-up"], "killed": []}
    assert said[1:] == lines[what]
    pid = int(said[0])
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}").exists()
