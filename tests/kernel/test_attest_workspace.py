"""A live run's workspace as attestation sees it: the overlay that the supervisor made, and nothing in its place."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from sandbox.kernel.fs import inode_flags
from sandbox.workspace import image, store
from sandbox.workspace.caller import CallerIdentity
from sandbox.workspace.session import GivenDirectory
from tests.kernel.live_runs import Live, live
from tests.kernel.test_attest import attempt, within
from tests.kernel.workspace_kit import git
from tests.kernel.world import World

OWNER = 1000
MORE = '[workspace]\nmode = "overlay"\nfrom = ["/srv"]\nmax_mb = 8\n'
ANOTHER = {
    "an empty file system": "libc.mount('none', '/work', 'tmpfs')",
    "the directory itself": "libc.mount('/work/sub', '/work', flags=libc.MS_BIND)",
    "a mount below": "libc.mount('none', '/work/sub', 'tmpfs')",
}


@pytest.fixture
def project() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        top = Path(made) / "project"
        (top / "sub").mkdir(parents=True)
        (top / ".env").write_text("TOKEN=secret")
        for path in (Path(made), top, *top.rglob("*")):
            os.chown(path, OWNER, OWNER)
        yield top


@contextlib.contextmanager
def running(world: World, project: Path, repository: Path | None = None) -> Iterator[Live]:
    """A live run on the project, whose own first look may be late and ends nothing."""
    world.configure(attest_seconds=3600, on_drift="alarm")
    with contextlib.ExitStack() as stack:
        fds = []
        for path in filter(None, (project, repository)):
            fds.append(os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            stack.callback(os.close, fds[-1])
        beside = fds[1] if len(fds) > 1 else -1
        given = GivenDirectory(fds[0], CallerIdentity(OWNER, OWNER, (OWNER,)), repository=beside)
        yield stack.enter_context(live(world, more=MORE, disk_mb=64, request={"workspace": given}))


def drift(one: Live) -> dict[str, str]:
    """The findings of an examination by layer."""
    report = one.report()
    assert not report.gone, one.answers
    return {layer.name: layer.found for layer in report.layers if not layer.holds}


@contextlib.contextmanager
def changes(one: Live) -> Iterator[Path]:
    """The file system of the run's changes, mounted by hand."""
    assert one.made.workspace is not None
    fd = image.mounted(one.made.workspace.device)
    try:
        yield Path(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def test_record_changed_by_hand_is_drift(world: World, project: Path) -> None:
    """It holds the patterns that an apply goes by."""
    with running(world, project) as one:
        assert one.made.workspace is not None
        where = store.WorkspaceDirectory(Path(one.made.workspace.directory))
        record, raw = where.record(), (where.path / store.RECORD).read_bytes()
        assert drift(one) == {}, "control"
        for name in ("mask", "protect"):
            fewer = structs.replace(record.terms, **{name: getattr(record.terms, name)[1:]})
            where.write(structs.replace(record, terms=fewer))
            assert list(drift(one)) == ["workspace"]
            assert "1 differ" in drift(one)["workspace"]
        where.write(structs.replace(record, terms=structs.replace(record.terms, git_own=("**",))))
        assert "sha256" in drift(one)["workspace"]
        (where.path / store.RECORD).write_bytes(raw)
        assert drift(one) == {}, "control"


def test_layer_changed_by_hand_is_drift(world: World, project: Path) -> None:
    with running(world, project) as one, changes(one) as top:
        assert drift(one) == {}, "control"
        (top / image.MASK / ".env").rename(top / "away")
        assert drift(one) == {"workspace": "others"}
        (top / "away").rename(top / image.MASK / ".env")
        assert drift(one) == {}, "control"
        (top / image.MASK / ".env").write_text("planted")
        assert drift(one) == {"workspace": "others"}
        (top / image.MASK / ".env").write_text("")
        os.chown(top / image.UPPER, 0, 0)
        assert "one of" in drift(one)["workspace"], "its owner is another in the sandbox"
        os.chown(top / image.UPPER, OWNER, OWNER)
        assert drift(one) == {}, "control"


def test_submodule_made_writable_by_hand_is_drift(world: World, project: Path) -> None:
    (project / "sub/.git").write_text("gitdir: elsewhere\n")
    os.chown(project / "sub/.git", OWNER, OWNER)
    with running(world, project) as one, changes(one) as top:
        assert drift(one) == {}, "control"
        fd = os.open(top / image.UPPER / "sub", os.O_RDONLY | os.O_DIRECTORY)
        try:
            inode_flags.set_immutable(fd, False)
            assert drift(one) == {"workspace": "it can be written"}
            inode_flags.set_immutable(fd, True)
            assert drift(one) == {}, "control"
        finally:
            os.close(fd)


def test_overlay_made_by_hand_is_drift(world: World, project: Path) -> None:
    """It shows the agent the same files."""
    with running(world, project) as one:
        assert drift(one) == {}, "control"
        options = "{'source': 'x', 'lowerdir': '/work:/workspace', 'metacopy': 'on'}"
        code = f"libc.move_mount(libc.new_mount('overlay', {options}, libc.MOUNT_ATTR_NOSUID), '/work')"
        within(one.family().gofer.name.pid, code)
        found = drift(one)
        assert "lowerdir=/work:/workspace" in found["workspace"]
        assert "mounts" in found


def test_repository_of_linked_worktree_is_attested(world: World, project: Path) -> None:
    repository = project.parent / "main"
    repository.mkdir()
    os.chown(repository, OWNER, OWNER)
    git(repository, "init", "-q", "-b", "main")
    git(repository, "commit", "-q", "--allow-empty", "-m", "first")
    tree = project.parent / "tree"
    git(repository, "worktree", "add", "-q", str(tree))
    with running(world, tree, repository / ".git") as one, changes(one) as top:
        assert drift(one) == {}, "control"
        (top / image.REPOSITORY.mask).mkdir(exist_ok=True)
        (top / image.REPOSITORY.mask / "config").write_text("planted")
        assert drift(one) == {"workspace": "others"}
        (top / image.REPOSITORY.mask / "config").unlink()
        # The file that leads there.
        (top / image.MASK / ".git").write_text("gitdir: /elsewhere")
        assert drift(one) == {"workspace": "others"}


@pytest.mark.parametrize("what", ANOTHER)
def test_mount_made_by_hand_is_drift(world: World, project: Path, what: str) -> None:
    # The run's own first examination may come after the change; it would end the run.
    world.configure(attest_seconds=3600, on_drift="alarm")
    fd = os.open(project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        request = {"workspace": GivenDirectory(fd, CallerIdentity(OWNER, OWNER, (OWNER,)))}
        with live(world, more=MORE, disk_mb=64, request=request) as one:
            assert one.report().holds, "control"
            within(one.family().gofer.name.pid, ANOTHER[what])
            assert "mounts" in [layer.name for layer in one.report().layers if not layer.holds]
    finally:
        os.close(fd)


def test_kernel_lets_root_take_no_flag_from_overlay(world: World, project: Path) -> None:
    """Its flags are locked, as those of every mount of the gofer."""
    world.configure(attest_seconds=3600)
    fd = os.open(project, os.O_RDONLY | os.O_DIRECTORY)
    try:
        request = {"workspace": GivenDirectory(fd, CallerIdentity(OWNER, OWNER, (OWNER,)))}
        with live(world, more=MORE, disk_mb=64, request=request) as one:
            gofer = one.family().gofer.name.pid
            kept = "libc.MS_REMOUNT | libc.MS_BIND | libc.MS_NOSUID | libc.MS_NODEV"
            assert attempt(gofer, f"libc.mount('none', '/work', flags={kept})") == "", "control: the same flags"
            for flag in ("NOSUID", "NODEV"):
                refused = attempt(gofer, f"libc.mount('none', '/work', flags=({kept}) & ~libc.MS_{flag})")
                assert "Operation not permitted" in refused
    finally:
        os.close(fd)
