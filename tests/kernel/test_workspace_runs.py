"""Packages with [workspace], in one process and through a supervisor: whose directory is taken, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_serve import eventually
from tests.kernel.world import World

CODE = """
import json, os, sys
json.loads(sys.stdin.readline())
os.chdir('/work')
answer = open('in.txt').read()
open('out.txt', 'w').write(answer.upper())
print(json.dumps({'text': answer}))
"""
MORE = '[workspace]\nmode = "overlay"\nfrom = ["{below}"]\nmax_mb = 16\n'


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as one:
        yield one
        assert leftovers(one.world) == []


@pytest.fixture
def top() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def project(top: Path, name: str, uid: int, gid: int | None = None) -> Path:
    """Make a directory of a user."""
    made = top / name
    made.mkdir()
    (made / "in.txt").write_text("hello")
    for path in (made, made / "in.txt"):
        os.chown(path, uid, uid if gid is None else gid)
    return made


def package(served: Served, below: Path, **fields: str) -> Path:
    more = fields.pop("more", MORE.format(below=below))
    return served.world.sign(served.world.package({"main.py": CODE}, more=more, disk_mb=64, **fields))


def run(served: Served, made: Path, *words: str, uid: int, supervised: bool = True) -> subprocess.CompletedProcess[str]:
    """Run `covenant run` as a user."""
    environment = serving.environment_of(served, uid)
    if not supervised:
        del environment["COVENANT_SOCKET"]
    return subprocess.run(
        serving.covenant_command("run", str(made), "hi", *words),
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **serving.identity(uid),
    )


def workspace(served: Served, *words: str) -> subprocess.CompletedProcess[str]:
    """Run `covenant workspace` as root."""
    return subprocess.run(
        serving.covenant_command("workspace", *words),
        env=serving.environment_of(served, 0),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(("uid", "supervised"), [(CALLER, True), (0, True), (0, False)])
def test_caller_gives_directory_of_its_own(served: Served, top: Path, uid: int, supervised: bool) -> None:
    mine = project(top, "mine", CALLER)
    done = run(served, package(served, top), "--workspace", str(mine), uid=uid, supervised=supervised)
    assert (done.returncode, done.stdout) == (0, "hello\n"), done.stderr
    assert sorted(os.listdir(mine)) == ["in.txt"]
    (one,) = json.loads(workspace(served, "list", "--json").stdout)["workspaces"]
    applied = workspace(served, "apply", one["run_id"])
    assert applied.returncode == 0, applied.stderr
    out = mine / "out.txt"
    assert (out.read_text(), out.stat().st_uid, out.stat().st_gid) == ("HELLO", CALLER, CALLER)


def test_directory_of_another_is_refused(served: Served, top: Path) -> None:
    """The agent would read in it with rights that its caller has not."""
    made = package(served, top)
    for name, uid, gid in (("another", 65_000, CALLER), ("group", CALLER, 65_000)):
        theirs = project(top, name, uid, gid)
        theirs.chmod(0o755)
        done = run(served, made, "--workspace", str(theirs), uid=CALLER)
        assert done.returncode != 0
        assert "belongs to" in done.stderr
        assert json.loads(workspace(served, "list", "--json").stdout)["workspaces"] == []


def test_directory_outside_of_manifest_is_refused_and_its_fix_works(served: Served, top: Path) -> None:
    mine = project(top, "mine", CALLER)
    (top / "below").mkdir()
    done = run(served, package(served, top / "below"), "--workspace", str(mine), uid=CALLER)
    assert done.returncode != 0
    assert f"lies outside of {top / 'below'}" in done.stderr
    # The fix: a directory below.
    inside = project(top / "below", "mine", CALLER)
    assert run(served, package(served, top / "below"), "--workspace", str(inside), uid=CALLER).returncode == 0


def test_workspace_and_directory_go_together(served: Served, top: Path) -> None:
    mine = project(top, "mine", CALLER)
    without = run(served, package(served, top), uid=CALLER)
    assert without.returncode != 0
    assert "fix: covenant run PACKAGE TEXT --workspace DIR" in without.stderr
    plain = package(served, top, more="")
    refused = run(served, plain, "--workspace", str(mine), uid=CALLER)
    assert refused.returncode != 0
    assert "fix: leave --workspace out" in refused.stderr


def test_file_system_of_a_process_is_refused(served: Served, top: Path) -> None:
    """Control: a tmpfs is taken."""
    mine = top / "mounted"
    mine.mkdir()
    for kind, taken in (("ramfs", False), ("tmpfs", True)):
        subprocess.run(["mount", "-t", kind, "none", str(mine)], check=True)
        try:
            mine.chmod(0o755)
            (mine / "in.txt").write_text("hello")
            for path in (mine, mine / "in.txt"):
                os.chown(path, CALLER, CALLER)
            done = run(served, package(served, top), "--workspace", str(mine), uid=CALLER)
            assert (done.returncode == 0) == taken, done.stderr
            assert taken or "lies on `ramfs`" in done.stderr
        finally:
            # The process that served the session closes the directory after its answer.
            eventually(lambda: subprocess.run(["umount", str(mine)]).returncode == 0)


RESUMES = """
import json, os, sys
json.loads(sys.stdin.readline())
os.chdir('/work')
before = sorted(os.listdir('.'))
open('more.txt', 'a').write('x')
print(json.dumps({'text': ' '.join(before)}))
"""


def resuming(served: Served, below: Path, terms: str = "") -> Path:
    """A package whose agent goes on, with these terms of its workspace."""
    more = MORE.format(below=below) + terms
    return served.world.sign(served.world.package({"main.py": RESUMES}, more=more, disk_mb=64))


def of_user(served: Served, *words: str, uid: int = CALLER) -> subprocess.CompletedProcess[str]:
    return serving.covenant("workspace", *words, served=served, uid=uid)


def test_user_resumes_its_own_as_bound_as_before(served: Served, top: Path) -> None:
    """A run with a pattern less, or an easier apply, would have what was refused applied."""
    mine = project(top, "mine", CALLER)
    terms = 'mask = ["*.secret"]\nprotect = ["deploy/**"]\napply = "operator"\n'
    first = run(served, resuming(served, top, terms), "--workspace", str(mine), uid=CALLER)
    assert (first.returncode, first.stdout) == (0, "in.txt\n"), first.stderr
    assert "workspace: 1 change; covenant workspace diff" in first.stderr
    (one,) = json.loads(of_user(served, "list", "--json").stdout)["workspaces"]
    resume = ("--resume", one["run_id"][:8])
    looser = {
        "mask": 'protect = ["deploy/**"]\napply = "operator"\n',
        "protect": 'mask = ["*.secret"]\napply = "operator"\n',
        "apply": 'mask = ["*.secret"]\nprotect = ["deploy/**"]\n',
    }
    for name, kept in looser.items():
        refused = run(served, resuming(served, top, kept), *resume, uid=CALLER)
        assert refused.returncode != 0
        assert f"less of `{name}`" in refused.stderr
        assert "fix: resume it with the same package" in refused.stderr
    assert [row["run_id"] for row in json.loads(of_user(served, "list", "--json").stdout)["workspaces"]] == [
        one["run_id"]
    ]
    # Root's word for it, and another's, is one that is not there.
    missing = run(served, resuming(served, top, terms), "--workspace", str(mine), "--resume", "0" * 8, uid=CALLER)
    theirs = run(served, resuming(served, top, terms), "--workspace", str(mine), *resume, uid=0)
    assert "no workspace begins with `00000000`" in missing.stderr
    assert "another uid" in theirs.stderr
    stricter = terms.replace('["*.secret"]', '["*.secret", "*.key"]').replace("operator", "never")
    resuming(served, top, stricter)
    done = of_user(served, "resume", one["run_id"][:8], "go on")
    assert (done.returncode, done.stdout) == (0, "in.txt more.txt\n"), done.stderr
    (two,) = json.loads(of_user(served, "list", "--json").stdout)["workspaces"]
    assert (two["run_id"] != one["run_id"], two["apply"]) == (True, "never")
    assert sorted(os.listdir(mine)) == ["in.txt"]
