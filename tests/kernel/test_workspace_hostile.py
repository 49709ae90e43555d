"""Over 200 hostile probes in a workspace: not one byte of the host changes, and an apply does nothing that it may not.

A probe counts where its control, the same lines below /tmp, changed something (tests/kernel/workspace_probes.py).
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import workspace_probes
from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.workspace_probes import KEPT, TREE

OWNER = 1000
# What gVisor refuses everywhere, so that there is nothing to see below /tmp either.
NOWHERE = frozenset(
    {"whiteout by hand", "device", "disk", "opaque attribute", "redirect attribute", "metacopy attribute"}
    | {"capability attribute", "owner", "mount", "user attribute", "leave by root of proc"}
)
Seen = dict[str, tuple[Any, ...]]


def seen(top: Path) -> Seen:
    """Everything that a change of the host would change."""
    found: Seen = {}
    for path in (top, *sorted(top.rglob("*"))):
        info = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        where = (info.st_ino, info.st_mode, info.st_uid, info.st_gid, info.st_nlink, info.st_mtime_ns, info.st_ctime_ns)
        found[os.fsencode(path.relative_to(top)).decode("utf-8", "backslashreplace")] = (*where, content)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("hostile"), "debian-minimal", "python3")
    yield made
    assert leftovers(made.world) == []


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        yield Path(made)


def fill(top: Path, count: int) -> Path:
    """Make the project with a tree for each probe, and what is outside of it."""
    project, outside = top / "project", top / "outside"
    for number in range(count):
        for name, content in TREE.items():
            path = project / f"p{number:03}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        (project / f"p{number:03}" / "re\u0301sume\u0301").write_text("twin")
    outside.mkdir()
    (outside / "victim").write_text("victim")
    for path in (top, *top.rglob("*")):
        os.lchown(path, OWNER, OWNER)
    # An agent that leaves the project could write there.
    outside.chmod(0o777)
    (outside / "victim").chmod(0o666)
    return project


def test_no_probe_changes_host(home: Home, top: Path) -> None:
    probes = workspace_probes.probes()
    assert len(probes.keys() - NOWHERE) >= 200, "each with its control"
    project = fill(top, len(probes))
    before = seen(top)
    done = home.exec(
        *("--quiet", "--profile", "python", "--workspace", project, "--", "python3", "-c", workspace_probes.MAIN),
        stdin=json.dumps([str(project), str(top / "outside"), probes, TREE]).encode(),
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    assert [name for name, (_, (changed, _)) in answers.items() if not changed and name not in NOWHERE] == [], "control"
    assert [name for name in NOWHERE if answers[name][0][0]] == [], "nor in the workspace"
    assert sum(here[0] for here, _ in answers.values()) >= 150, "they are free to do it in their own view"
    assert seen(top) == before, "not one byte, mode, owner or time of the host"

    (one,) = json.loads(home.covenant("workspace", "list", "--json").stdout)["workspaces"]
    applied = home.covenant("workspace", "apply", one["run_id"], "--json")
    assert applied.returncode == 0, applied.stderr
    document = json.loads(applied.stdout)
    assert len(document["applied"]) > 50
    assert len(document["left"]) > 100
    after = seen(top)
    for place in ("outside", "outside/victim"):
        assert after[place] == before[place]
    for number in range(len(probes)):
        for name in KEPT:
            path = f"project/p{number:03}/{name}"
            assert after.get(path) == before[path], (list(probes)[number], path)
    for path, (_, mode, uid, *_) in after.items():
        assert stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK), path
        assert not mode & (stat.S_ISUID | stat.S_ISGID), path
        assert uid == OWNER, path
    names = {os.path.basename(path) for path in after}
    assert not names & {"readme", ".GIT", "agents.md", ".envrc", ".mcp.json"}
    assert not [path for path in after if path.endswith(("/bare/config", "sub/.git", ".git/info/attributes"))
                and path not in before and not stat.S_ISDIR(after[path][1])]  # fmt: skip
    assert not [path for path in after if ".covenant-" in path or ".lock" in path]
    assert not names & {".gitmodules", "config.worktree"}
    assert ".gitattributes" in names, "control: it names a filter, and starts none"


WHILE_IT_RUNS = """
cat changed replaced deep/x > /tmp/read; echo ready; read line
for path in changed replaced gone deep/x deep/new swapped/inner late/f kind; do
    (mkdir -p $(dirname $path); echo agent >> $path) 2>/tmp/why || true
done
rm -rf moved; echo own > own
"""


def test_directory_that_changes_meanwhile_is_conflict(home: Home, top: Path) -> None:
    """Each path that the agent changed too: the host's stays, also when it is applied by name. Control: another."""
    project, outside = top / "project", top / "outside"
    for name in ("changed", "replaced", "gone", "kind", "deep/x", "swapped/inner", "moved/y"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("before\n")
    outside.mkdir()
    (outside / "inner").write_text("victim\n")
    for path in (top, *top.rglob("*")):
        os.lchown(path, OWNER, OWNER)
    words = ("exec", "--quiet", "--workspace", str(project), "--", "sh", "-ec", WHILE_IT_RUNS)
    process = subprocess.Popen(
        [sys.executable, "-m", "covenant", *words],
        env=home.environment(),
        cwd=home.base,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (project / "changed").write_text("host\n")
    (project / "own copy").write_text("host\n")
    (project / "own copy").rename(project / "replaced")
    (project / "gone").unlink()
    (project / "deep").rename(project / "was deep")
    (project / "deep").mkdir()
    (project / "swapped").rename(project / "was swapped")
    (project / "swapped").symlink_to("../outside")
    (project / "late").symlink_to("../outside")
    (project / "kind").unlink()
    (project / "kind").mkdir()
    (project / "moved").rename(top / "moved")
    (project / "moved").mkdir()
    (project / "moved" / "host").write_text("host\n")
    for path in (project, *project.rglob("*")):
        os.lchown(path, OWNER, OWNER)
    before = seen(top)
    process.communicate(b"go\n", timeout=60)
    assert process.returncode == 0
    assert seen(top) == before
    rows = json.loads(home.covenant("workspace", "list", "--json").stdout)["workspaces"]
    (one,) = (row for row in rows if row["directory"] == str(project))
    found = json.loads(home.covenant("workspace", "diff", one["run_id"], "--json").stdout)["changes"]
    paths = [row["path"] for row in found]
    assert {"changed", "replaced", "gone", "own"} <= set(paths)
    assert home.covenant("workspace", "apply", one["run_id"]).returncode == 1, "one conflict holds all of it"
    assert seen(top) == before
    for name in paths:
        home.covenant("workspace", "apply", one["run_id"], name)
    after = {path: row[-1] for path, row in seen(top).items()}
    assert after.pop("project/own") == b"own\n"
    assert {name: after.get(name) for name in before} == {name: row[-1] for name, row in before.items()}
    assert not {name for name in after.keys() - before.keys() if name.startswith("outside")}
    assert os.readlink(project / "swapped") == "../outside"
    home.covenant("workspace", "discard", one["run_id"])
