"""`kill -9` of an apply at any moment: afterwards the directory is as before it or as after it, never between.

COVENANT_KILLS says how often (150). Each attempt forks a process that applies the same workspace, and kills it.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from policy.workspace.changes import Terms
from sandbox.workspace import caller, image, operations, store
from sandbox.workspace.caller import CallerIdentity

OWNER = 1000
KILLS = int(os.environ.get("COVENANT_KILLS", "150"))
Tree = dict[str, tuple[int, bytes]]


def tree(top: Path) -> Tree:
    """Return mode and content of each path."""
    return {
        str(path.relative_to(top)): (
            path.lstat().st_mode,
            os.fsencode(os.readlink(path)) if path.is_symlink() else path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(top.rglob("*"))
    }


def fill(top: Path) -> None:
    """Make the files of the directory, as they are before an apply."""
    for number in range(12):
        (top / f"d{number % 4}").mkdir(exist_ok=True)
        (top / f"d{number % 4}" / f"f{number}").write_text(f"before {number}\n" * 50)
    (top / "gone").mkdir()
    (top / "gone" / "x").write_text("x")
    (top / "kind").write_text("a file")
    for path in (top, *top.rglob("*")):
        os.lchown(path, OWNER, OWNER)


def change(upper: Path) -> None:
    """Make an upper layer as overlayfs leaves it: new, replaced and removed paths, and one of another kind."""
    for number in range(12):
        (upper / f"d{number % 4}").mkdir(exist_ok=True)
        (upper / f"d{number % 4}" / f"f{number}").write_text(f"after {number}\n" * 5_000)
    for number in range(6):
        (upper / "new" / f"n{number}").mkdir(parents=True)
        (upper / "new" / f"n{number}" / "file").write_text(f"new {number}")
    (upper / "d0" / "link").symlink_to("f0")
    os.mknod(upper / "gone", 0o20000, os.makedev(0, 0))
    (upper / "kind").mkdir()
    (upper / "kind" / "inside").write_text("a directory now")


@pytest.fixture
def base() -> Iterator[Path]:
    """A directory that the owner reaches."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


@pytest.fixture
def place(base: Path) -> tuple[store.WorkspaceDirectory, Path]:
    """A workspace that was settled, and the directory that it is of."""
    top = base / "project"
    top.mkdir()
    fill(top)
    made = store.place(base / "state", "0123456789")
    info = top.stat()
    record = store.WorkspaceRecord(
        run_id="0123456789",
        agent_id="probe",
        policy_digest="0" * 64,
        directory=str(top),
        device=info.st_dev,
        inode=info.st_ino,
        caller=CallerIdentity(OWNER, OWNER),
        # Each attempt makes the files anew: no time of theirs is a conflict.
        started_ns=2**62,
        max_mb=32,
        apply="ask",
        terms=Terms((), ()),
        settled=True,
    )
    made.make(record)
    image.create(made.image, 32, base / "templates")
    with image.AttachedImage(made.image) as attached:
        fd = attached.mounted()
        mounted = Path(f"/proc/self/fd/{fd}")
        for name in (image.UPPER, image.WORK, image.MASK):
            (mounted / name).mkdir()
        change(mounted / image.UPPER)
        os.close(fd)
    return made, top


def restore(top: Path) -> None:
    for path in top.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    fill(top)


def apply(made: store.WorkspaceDirectory) -> None:
    with operations.opened(made) as one:
        done = one.apply(log=lambda changes: None)
        assert not done.left
        assert not done.kept


def killed(made: store.WorkspaceDirectory, after: float) -> bool:
    """Apply in a process of its own, and kill that after some seconds. Returns whether it was still at work."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            apply(made)
        os._exit(0)
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) < 0


def test_killed_apply_is_before_or_after(place: tuple[store.WorkspaceDirectory, Path]) -> None:
    made, top = place
    before = tree(top)
    began = time.monotonic()
    apply(made)
    took = time.monotonic() - began
    after = tree(top)
    assert after != before
    chance, seen, limit = random.Random(7), {"before": 0, "after": 0, "at work": 0}, took * 1.2
    for attempt in range(KILLS):
        restore(top)
        assert tree(top) == before, attempt
        delay = chance.random() * limit
        at_work = killed(made, delay)
        seen["at work"] += at_work
        # The machine may be busier than it was: most kills shall come while it works, and some after its end.
        limit *= 1.1 if at_work and delay > 0.8 * limit else 0.95 if not at_work else 1.0
        _until_free(made)
        with operations.opened(made):
            pass
        found = tree(top)
        assert found in (before, after), sorted(set(found) ^ set(after)) or sorted(
            path for path in found if found[path] != after.get(path)
        )
        seen["before" if found == before else "after"] += 1
        assert made.journal() is None
    assert min(seen.values()) >= KILLS // 15, seen


def _until_free(made: store.WorkspaceDirectory) -> None:
    """Wait for the process with the caller's rights, which ends with its parent and holds the lock a moment longer."""
    for _ in range(500):
        with contextlib.suppress(Exception), made.locked():
            return
        time.sleep(0.01)
    raise AssertionError("the lock is held")


def test_full_disk_leaves_directory_as_it_was(place: tuple[store.WorkspaceDirectory, Path], base: Path) -> None:
    """The directory is on a file system without room for the new files: nothing of the apply stays."""
    made, _ = place
    small = base / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k,mode=0755", "none", str(small)], check=True)
    try:
        fill(small)
        info = small.stat()
        made.write(structs.replace(made.record(), directory=str(small), device=info.st_dev, inode=info.st_ino))
        before = tree(small)
        with pytest.raises(Exception, match="No space left"):
            apply(made)
        assert tree(small) == before
        assert made.journal() is None
        # Control: with room it is applied.
        subprocess.run(["mount", "-o", "remount,size=8m", str(small)], check=True)
        apply(made)
        assert tree(small) != before
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_apply_has_rights_of_caller_alone(place: tuple[store.WorkspaceDirectory, Path]) -> None:
    """A directory that the caller cannot write to is not written to. Control: the same directory as its own."""
    made, top = place
    os.chown(top / "d1", 0, 0)
    (top / "d1").chmod(0o755)
    before = tree(top)
    with pytest.raises(Exception, match="Permission denied"):
        apply(made)
    assert tree(top) == before
    os.chown(top / "d1", OWNER, OWNER)
    apply(made)
    assert tree(top) != before


def test_process_of_caller_has_no_capability() -> None:
    def status() -> dict[str, str]:
        lines = Path("/proc/self/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    found = caller.work(CallerIdentity(OWNER, OWNER, (OWNER, 4)), status, dict[str, str])
    assert {found[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert found["Uid"].split() == [str(OWNER)] * 4
    assert found["Gid"].split() == [str(OWNER)] * 4
    assert sorted(map(int, found["Groups"].split())) == [4, OWNER]
    assert found["NoNewPrivs"] == "1"
    as_root = caller.work(CallerIdentity(0, 0), status, dict[str, str])
    assert {as_root[name] for name in ("CapPrm", "CapEff", "CapBnd")} == {"0" * 16}, "root gives none either"
