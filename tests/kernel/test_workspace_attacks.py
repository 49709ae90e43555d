"""Attacks on a workspace: by an agent that keeps the supervisor busy, by the directory's owner in a race with root."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from policy.workspace.entries import UpperEntry
from sandbox.workspace import image, lower, masks, operations, session, store, upper
from sandbox.workspace.caller import CallerIdentity
from tests.kernel.test_workspace import home, listed, project, work
from tests.kernel.test_workspace_crash import base, place, tree

__all__ = ["base", "home", "place", "project"]

OWNER = 1000
Place = tuple[store.WorkspaceDirectory, Path]


@pytest.fixture
def top(base: Path) -> Iterator[int]:
    """An open directory."""
    (base / "top").mkdir()
    fd = os.open(base / "top", os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)
    # shutil.rmtree is too shallow for some of it.
    subprocess.run(["rm", "-rf", str(base / "top")], check=True)


def libc_mount(target: str, options: str) -> None:
    """Mount a file system of FUSE, of which this process is the server."""
    done = ctypes.CDLL(None, use_errno=True).mount(b"fuse", target.encode(), b"fuse", 0, options.encode())
    assert done == 0, os.strerror(ctypes.get_errno())


def deepen(top: int, depth: int, name: str = "d") -> None:
    """Make directories in one another."""
    at = os.dup(top)
    for _ in range(depth):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)


@pytest.mark.parametrize(("depth", "name"), [(1300, "d"), (150, "n" * 250)])
def test_deep_directories_are_refused(top: int, depth: int, name: str) -> None:
    """Control: 100 are read."""
    deepen(top, 100)
    assert len(upper.read(top, (OWNER, OWNER))) == 100
    deepen(top, depth, name + "x")
    with pytest.raises(errors.WorkspaceError, match="too deep"):
        upper.read(top, (OWNER, OWNER))


def test_agent_with_deep_directories_stops_no_other_run(home: Any, project: Path) -> None:
    script = "i=0; while [ $i -lt 1300 ]; do mkdir d && cd -P d || break; i=$((i+1)); done; echo $i"
    done = work(home, project, script)
    assert (done.returncode, done.stdout) == (0, b"1300\n"), done.stderr
    (one,) = listed(home)
    after = home.exec("--quiet", "--", "true")
    assert after.returncode == 0, after.stderr
    assert json.loads(home.covenant("workspace", "list", "--json").stdout)["workspaces"][0]["settled"], "looked at once"
    assert b"too deep" in home.covenant("workspace", "diff", one["run_id"]).stderr
    discarded = home.covenant("workspace", "discard", one["run_id"])
    assert discarded.returncode == 0, discarded.stderr
    assert listed(home) == []


def test_caller_shows_agent_no_directory_that_it_cannot_enter(home: Any, project: Path) -> None:
    """The caller gives a closed directory of root's the name of one that a layer above has, with the caller's rights.

    overlayfs looks into layers as root. The idmapped mount gives root no rights in files of owners without an id.
    """
    for name, mode in (("a", 0o755), ("closed", 0o700)):
        (project / name).mkdir()
        (project / name / "in.txt").write_text(f"in {name}\n")
        (project / name).chmod(mode)
    os.chown(project / "a", OWNER, OWNER)
    (project / "a" / ".env").touch()

    script = "set +e; cat closed/in.txt; echo there; read go; ls a; cat a/in.txt; cat b/in.txt"
    words = ["exec", "--quiet", "--workspace", str(project), "--", "sh", "-ec", script]
    pipe, command = subprocess.PIPE, [sys.executable, "-m", "covenant", *words]
    started = subprocess.Popen(command, env=home.environment(), cwd=home.base, stdin=pipe, stdout=pipe, stderr=pipe)
    with started as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        (project / "a").rename(project / "b")
        (project / "closed").rename(project / "a")
        said, told = process.communicate(b"go\n", timeout=120)
    assert said == b"in a\n", "the control is the directory of the caller's own"
    assert b"a/in.txt: Permission denied" in told
    assert listed(home) == []


def test_holes_and_second_names_are_not_read_without_end(place: Place) -> None:
    """Twice the size of the image is read. Control: a file before them has its digest, and is applied."""
    made, top = place
    with image.AttachedImage(made.image) as attached:
        fd = attached.mounted()
        changes = Path(f"/proc/self/fd/{fd}") / image.UPPER
        (changes / "a").write_text("small")
        for number in range(4):
            (changes / f"z{number}").touch()
            os.truncate(changes / f"z{number}", 20 << 20)
        os.link(changes / "z3", changes / "z4")
        found = {one.path: one for one in session.read_upper(attached, CallerIdentity(OWNER, OWNER))}
        os.close(fd)
    assert [bool(found[name].sha256) for name in ("a", "z0", "z1", "z2", "z3", "z4")] == [True] * 3 + [False] * 3
    with operations.opened(made) as one:
        done = one.apply(log=lambda changes: None)
    assert {change.path for change in done.left} == {"z2", "z3", "z4"}
    assert (top / "a").read_text() == "small"
    assert not (top / "z2").exists()


def test_replaced_file_goes_with_a_path_below_its_place(place: Place) -> None:
    """A file that became a directory: to apply one path in it is to remove the file, and leaves no half of an apply."""
    made, top = place
    with operations.opened(made) as one:
        done = one.apply(["kind/inside", "d0/f0"], log=lambda changes: None)
        assert [change.path for change in done.applied] == ["d0/f0", "kind", "kind", "kind/inside"]
    assert made.journal() is None
    assert (top / "kind" / "inside").read_text() == "a directory now"


@pytest.mark.parametrize("path", ["", "/", "//"])
def test_empty_path_is_not_everything(place: Place, path: str) -> None:
    """As of an unset variable. Control: `.` is everything."""
    made, top = place
    before = tree(top)
    with operations.opened(made) as one:
        with pytest.raises(errors.WorkspaceError, match="no change is at or below"):
            one.apply([path], log=lambda changes: None)
        assert tree(top) == before
        assert not one.apply(["."], log=lambda changes: None).left


def test_empty_word_is_no_run(place: Place) -> None:
    """Control: its first character is enough."""
    made, _ = place
    state = made.path.parent.parent
    with pytest.raises(errors.WorkspaceError, match="no workspace begins"):
        store.find(state, "")
    assert store.find(state, "0").path == made.path


def test_walk_follows_no_directory_that_becomes_a_link(base: Path, top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the directory replaces it while root walks. Control: without that its files are found."""
    opened = lower.opened
    (base / "outside").mkdir()
    (base / "outside" / ".env").touch()
    inside = base / "top"
    (inside / "sub").mkdir()
    (inside / "sub" / ".env").touch()
    (inside / "first").touch()
    assert masks.found(top, (".env",)) == ["sub/.env"]

    def replaced(within: lower.Tops, path: str) -> int | None:
        if path == "sub":
            (inside / "sub").rename(base / "away")
            (inside / "sub").symlink_to(base / "outside")
        return opened(within, path)

    monkeypatch.setattr(lower, "opened", replaced)
    assert masks.found(top, (".env",)) == []
    assert (inside / "sub").is_symlink()


def test_walk_enters_no_other_mount(base: Path, top: int) -> None:
    """Control: before the mount the file is found."""
    inside = base / "top" / "sub"
    inside.mkdir()
    (inside / ".env").touch()
    assert masks.found(top, (".env",)) == ["sub/.env"]
    subprocess.run(["mount", "-t", "tmpfs", "none", str(inside)], check=True)
    try:
        (inside / ".env").touch()
        assert masks.found(top, (".env",)) == []
    finally:
        subprocess.run(["umount", str(inside)], check=True)


def test_walk_ends_at_a_number_of_names(top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Directories are counted too, and within one directory. Control: one less is walked."""
    for number in range(10):
        os.mkdir(f"d{number}", dir_fd=top)
    monkeypatch.setattr(masks, "_MOST_NAMES", 10)
    assert masks.found(top, (".env",)) == []
    os.mkdir("one more", dir_fd=top)
    with pytest.raises(errors.WorkspaceError, match="more than 10 names"):
        masks.found(top, (".env",))


def test_names_that_are_no_text_stop_nothing(base: Path, top: int) -> None:
    inside = os.fsencode(base / "top")
    os.mkdir(inside + b"/d\xff")
    for name in (b"/\xff.pem", b"/d\xff/.env", b"/plain.pem"):
        open(inside + name, "w").close()
    os.symlink(b"\xff", inside + b"/link")
    assert sorted(map(os.fsencode, masks.found(top, ("*.pem", ".env")))) == [b"d\xff/.env", b"plain.pem", b"\xff.pem"]
    view = lower.view(lower.Tops(top), [UpperEntry("link", "gone")], {})
    assert view.entries["link"].target == "\\xff"
    assert json.dumps(sorted(view.names[""])).isascii()


def test_directory_of_a_callers_own_mount_is_refused(base: Path) -> None:
    """The path that the kernel names is one of another place. Control: the directory itself is taken."""
    mine, other = base / "mine", base / "other"
    for path in (mine, other):
        path.mkdir()
        os.chown(path, OWNER, OWNER)
    terms = {"below": [str(base)]}
    who = CallerIdentity(OWNER, OWNER)
    fd = os.open(mine, os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert session.check(session.GivenDirectory(fd, who), terms, {}) == str(mine)
        subprocess.run(["mount", "--bind", str(other), str(mine)], check=True)
        with pytest.raises(errors.WorkspaceError, match="another directory on the host"):
            session.check(session.GivenDirectory(fd, who), terms, {})
    finally:
        subprocess.run(["umount", str(mine)], check=False)
        os.close(fd)


def test_full_state_starts_no_workspace(home: Any, project: Path) -> None:
    """Kept workspaces must not fill the file system of the audit log. Control: with room it starts."""
    terms = {"mask": (), "protect": (), "max_mb": 1 << 40, "apply": "ask"}
    about = session.About("0" * 32, "probe", "0" * 64, str(project))
    fd = os.open(project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        given = session.GivenDirectory(fd, CallerIdentity(OWNER, OWNER))
        with session.RunWorkspace(home.world.state, given, terms, about) as one:
            with pytest.raises(errors.WorkspaceError) as full:
                one.mounted(OWNER)
            assert "free space" in str(full.value)
        assert listed(home) == []
        with session.RunWorkspace(home.world.state, given, {**terms, "max_mb": 16}, about) as one:
            assert one.mounted(OWNER).directory >= 0
    finally:
        os.close(fd)
    assert listed(home) == []


def test_damaged_workspace_stops_no_supervisor(place: Place, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = place
    os.rename(made.path.parent.parent, base / "moved")
    state = base / "moved"
    one = store.place(state, made.path.name)
    one.write(structs.replace(one.record(), settled=False))
    monkeypatch.setattr(store.WorkspaceDirectory, "settle", lambda self, changes: os.stat("/dev/null/full"))
    with pytest.raises(NotADirectoryError), operations.opened(one):
        pass
    operations.recover(state)
    assert store.listed(state)
    # Control: without the fault it is settled.
    monkeypatch.undo()
    operations.recover(state)
    assert one.record().settled


def test_owner_with_a_silent_file_system_stops_no_supervisor(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An apply was cut off, and its directory is now on a file system that never answers. Control: without it."""
    made, top = place
    state = made.path.parent.parent
    monkeypatch.setattr(operations, "RECOVERY_SECONDS", 2)
    (top / "staged").touch()
    made.note(store.Journal({"x": "staged"}))
    fuse = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fuse},rootmode=40000,user_id={OWNER},group_id={OWNER},allow_other"
    libc_mount(str(top), options)
    try:
        before = time.monotonic()
        operations.recover(state)
        assert 1 < time.monotonic() - before < 20
        assert made.journal() is not None
    finally:
        subprocess.run(["umount", "--lazy", str(top)], check=True)
        os.close(fuse)
    operations.recover(state)
    assert made.journal() is None
    assert not (top / "staged").exists()
