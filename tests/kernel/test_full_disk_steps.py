"""A disk that is full at any step of an apply, a keep, a fork or a verb of volumes: before or after, never between.

The file system is a small one on a loop device. Each attempt leaves so much of it free, from nothing up to enough.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from policy import errors
from policy.workspace.changes import Terms
from sandbox.volumes import image as volume_image
from sandbox.volumes.store import VolumeStore
from sandbox.workspace import image, operations, store
from sandbox.workspace.caller import CallerIdentity
from tests.kernel import volume_kit
from tests.kernel.test_workspace_crash import OWNER, Tree, change, fill, tree

KIB, MIB, BLOCK = 1024, 1024 * 1024, 4096
RUN = "0123456789"


@pytest.fixture
def disk() -> Iterator[Path]:
    """A file system of 64 MiB."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        top, file = Path(made) / "disk", Path(made) / "image"
        top.mkdir()
        with open(file, "xb") as new:
            new.truncate(64 * MIB)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(file)], check=True)
        subprocess.run(["mount", "-o", "loop", str(file), str(top)], check=True)
        try:
            yield top
        finally:
            subprocess.run(["umount", str(top)], check=True)


@contextlib.contextmanager
def only(disk: Path, free: int) -> Iterator[None]:
    """Leave so many bytes free while the block lasts."""
    os.sync()
    filler = disk / "filler"
    fd = os.open(filler, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        piece, at = 64 * MIB, 0
        while piece >= BLOCK:
            system = os.statvfs(disk)
            if system.f_bavail * system.f_frsize < free + piece:
                piece //= 2
                continue
            try:
                os.posix_fallocate(fd, at, piece)
                at += piece
            except OSError:
                piece //= 2
        yield
    finally:
        os.close(fd)
        filler.unlink()


def refused(act: Callable[[], object]) -> bool:
    """Whether the disk is too full for it: an error of ours that says so, or the kernel's."""
    try:
        act()
    except (errors.CovenantError, OSError) as e:
        if "space" in str(e).lower():
            return True
        raise
    return False


def workspace(base: Path) -> tuple[store.WorkspaceDirectory, Path]:
    """Make a settled workspace and its directory, all on one file system."""
    top = base / "project"
    top.mkdir()
    fill(top)
    made, info = store.place(base / "state", RUN), top.stat()
    record = store.WorkspaceRecord(
        run_id=RUN,
        agent_id="probe",
        policy_digest="0" * 64,
        directory=str(top),
        device=info.st_dev,
        inode=info.st_ino,
        caller=CallerIdentity(OWNER, OWNER),
        started_ns=2**62,
        max_mb=16,
        apply="ask",
        terms=Terms((), ()),
        settled=True,
        keeps=True,
    )
    made.make(record)
    image.create(made.image, 16, base / "state" / "workspaces" / store.TEMPLATES)
    with image.AttachedImage(made.image) as attached:
        fd = attached.mounted()
        mounted = Path(f"/proc/self/fd/{fd}")
        for name in (image.UPPER, image.WORK, image.MASK):
            (mounted / name).mkdir()
        change(mounted / image.UPPER)
        os.close(fd)
    return made, top


def apply(made: store.WorkspaceDirectory) -> None:
    with operations.opened(made) as one:
        assert not one.apply(log=lambda changes: None).left


def test_apply_is_before_or_after(disk: Path) -> None:
    made, top = workspace(disk)
    before, after, free, refusals = tree(top), Tree(), 0, 0
    while not after:
        with only(disk, free):
            full = refused(lambda: apply(made))
            found, journal = tree(top), made.journal()
        refusals += full
        assert found == before or not full or journal is not None, free
        # The next look finishes it, or takes it back.
        with operations.opened(made) as one:
            assert one.entries()
        found = tree(top)
        assert made.journal() is None
        if found != before:
            assert not full or journal is not None, free
            after = found
        free += 48 * KIB
    assert refusals > 5
    assert (top / "new/n5/file").read_text() == "new 5"


def test_kept_workspace_is_forked_whole_or_not(disk: Path) -> None:
    made, _ = workspace(disk)
    with operations.opened(made) as one:
        before = one.entries()
    free, refusals = 0, 0
    while True:
        other = store.place(disk / "state", f"f{free}")
        with only(disk, free):
            full = refused(lambda: made.forked(other))  # noqa: B023 - called at once
        refusals += full
        assert other.path.exists() != full, free
        with operations.opened(made) as one:
            assert one.entries() == before
        if not full:
            break
        free += 96 * KIB
    with operations.opened(other) as one:
        assert one.entries() == before
    assert refusals > 3


def test_kept_workspace_is_settled_and_resumed_whole(disk: Path, request: pytest.FixtureRequest) -> None:
    """A run that ends with the disk full leaves it unsettled, until it is next opened. A refused resume leaves it."""
    # ext4 gives root some blocks more, tmpfs ends where it says.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=0755", "none", str(disk)], check=True)
    request.addfinalizer(lambda: subprocess.run(["umount", str(disk)], check=True))
    made, _ = workspace(disk)
    made.write(structs.replace(made.record(), settled=False))
    unsettled = made.record()
    with only(disk, 0):
        assert refused(lambda: made.settle(3))
        assert made.record() == unsettled
    with operations.opened(made) as one:
        assert len(one.entries()) == made.record().changes
    settled = made.record()
    assert settled.settled
    other = store.place(disk / "state", "9876543210")
    resumed = structs.replace(settled, run_id="9876543210", settled=False)
    with only(disk, 0):
        assert refused(lambda: made.resumed(other, resumed))
    assert made.record() == settled
    assert not other.path.exists()
    made.resumed(other, resumed)  # control
    assert other.record() == resumed
    other.write(settled)  # as a process that is killed in the middle
    assert other.record().run_id == "9876543210"


VERBS: dict[str, Callable[[VolumeStore], object]] = {
    "create": lambda found: found.create("other", 8, 0, lambda: None, now_ms=1),
    "snapshot": lambda found: found.snapshot("data", "two", lambda: None),
    "resize": lambda found: found.resize("data", 12, lambda: None),
    "restore": lambda found: found.restore("data", "one", lambda: None),
}


def volumes(state: Path) -> dict[str, object]:
    """Each volume's size, content and snapshots."""
    return {
        one.name: (one.mb, volume_kit.content(one), [(s.name, s.mb) for s in one.snapshots()])
        for one in VolumeStore(state).listed()
    }


@pytest.mark.parametrize("name", VERBS)
def test_verb_of_volume_did_all_or_nothing(disk: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills after the look at what is free."""
    monkeypatch.setattr(volume_image, "check_free", lambda directory, mb: None)
    volume = volume_kit.created(disk, mb=8)
    with volume_kit.opened(volume) as top:
        Path(f"{top}/x").write_bytes(os.urandom(MIB))
    found = VolumeStore(disk)
    found.snapshot("data", "one", lambda: None)
    with volume_kit.opened(volume) as top:
        Path(f"{top}/y").write_bytes(hashlib.sha256(b"y").digest())
    before, after, free, refusals = volumes(disk), dict[str, object](), 0, 0
    while not after:
        with only(disk, free):
            full = refused(lambda: VERBS[name](found))
        refusals += full
        now = volumes(disk)
        assert (now == before) == full, free
        left = [one for one in (disk / "volumes").rglob(".*") if one.name != ".lock"]
        assert left == []
        after = after if full else now
        free += 640 * KIB
    assert refusals > 1
    assert volume_kit.attached_below(disk) == []
