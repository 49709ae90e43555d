"""Check root directories: exact contents and modes, made once, made whole or not at all, collected when unused."""

from __future__ import annotations

import concurrent.futures
import fcntl
import hashlib
import multiprocessing
import os
import shutil
import stat
import threading
import time
from pathlib import Path

import pytest

from policy import errors
from policy.host import Closure, ClosureFile
from sandbox.rootfs import skeleton, tree_store

POINTS: list[skeleton.MountPoint] = [("/proc", "dir"), ("/workspace", "dir"), ("/srv/docs/page", "file")]


def _file(tmp_path: Path, path: str, data: bytes, mode: int = 0o644) -> ClosureFile:
    source = tmp_path / "host" / path.strip("/").replace("/", "_")
    source.parent.mkdir(exist_ok=True)
    source.write_bytes(data)
    os.utime(source, (1_600_000_000, 1_600_000_000))
    return ClosureFile(path, "file", mode, len(data), hashlib.sha256(data).hexdigest(), "", str(source))


def _dir(path: str) -> ClosureFile:
    return ClosureFile(path, "dir", 0o755)


@pytest.fixture
def runtime(tmp_path: Path) -> Closure:
    files = (
        ClosureFile("/bin", "symlink", target="usr/bin"),
        _dir("/usr"),
        _dir("/usr/bin"),
        _file(tmp_path, "/usr/bin/tool", b"program", 0o755),
        _file(tmp_path, "/usr/bin/library", b"library"),
    )
    return Closure("tool", "/usr/bin/tool", files)


@pytest.fixture
def store(tmp_path: Path) -> skeleton.Skeletons:
    return skeleton.Skeletons(tmp_path / "state" / "rootfs")


def _listing(root: Path) -> dict[str, tuple[str, int]]:
    out = {}
    for folder, directories, names in os.walk(root):
        for name in (*directories, *names):
            place = Path(folder) / name
            mode = os.lstat(place).st_mode
            out["/" + str(place.relative_to(root))] = (stat.filemode(mode)[0], stat.S_IMODE(mode))
    return out


def test_root_holds_closure_and_mount_points_and_nothing_else(store: skeleton.Skeletons, runtime: Closure) -> None:
    root = store.get([runtime], POINTS)
    assert _listing(root) == {
        "/bin": ("l", 0o777),
        "/usr": ("d", 0o755),
        "/usr/bin": ("d", 0o755),
        "/usr/bin/tool": ("-", 0o755),
        "/usr/bin/library": ("-", 0o644),
        "/proc": ("d", 0o755),
        "/workspace": ("d", 0o755),
        "/srv": ("d", 0o755),
        "/srv/docs": ("d", 0o755),
        "/srv/docs/page": ("-", 0o644),
    }
    assert (root / "usr/bin/tool").read_bytes() == b"program"
    assert (root / "bin").readlink() == Path("usr/bin")
    assert stat.S_IMODE(root.stat().st_mode) == 0o755
    assert (root / "usr/bin/tool").stat().st_mtime == 1_600_000_000, "byte code names its source's mtime"


def test_umask_does_not_reach_root(store: skeleton.Skeletons, runtime: Closure) -> None:
    old = os.umask(0o077)
    try:
        root = store.get([runtime], POINTS)
    finally:
        os.umask(old)
    modes = _listing(root)
    assert modes["/usr"] == ("d", 0o755)
    assert modes["/srv/docs/page"] == ("-", 0o644)
    assert modes["/usr/bin/tool"] == ("-", 0o755)


def test_setuid_and_write_bits_of_listing_are_not_copied(tmp_path: Path, store: skeleton.Skeletons) -> None:
    closure = Closure("x", "/x", (_file(tmp_path, "/x", b"program", 0o6777),))
    assert _listing(store.get([closure], []))["/x"] == ("-", 0o755)


def test_same_root_is_made_once(store: skeleton.Skeletons, runtime: Closure) -> None:
    root = store.get([runtime], POINTS)
    inode = root.stat().st_ino
    assert store.get([runtime], list(reversed(POINTS))) == root
    assert skeleton.Skeletons(store.directory).get([runtime], [*POINTS, *POINTS]) == root
    assert root.stat().st_ino == inode
    assert store.get([runtime], POINTS[:1]) != root


def test_files_are_links_to_one_copy(store: skeleton.Skeletons, runtime: Closure) -> None:
    first, second = store.get([runtime], POINTS), store.get([runtime], [])
    assert os.path.samefile(first / "usr/bin/tool", second / "usr/bin/tool")
    assert (first / "usr/bin/tool").stat().st_nlink == 3


def test_closures_are_merged_and_program_of_either_is_executable(
    tmp_path: Path, store: skeleton.Skeletons, runtime: Closure
) -> None:
    other = Closure(
        "other",
        "/usr/bin/library",
        (_dir("/usr"), _dir("/usr/bin"), _file(tmp_path, "/usr/bin/library", b"library", 0o755)),
    )
    for order in ([runtime, other], [other, runtime]):
        assert _listing(store.get(order, []))["/usr/bin/library"] == ("-", 0o755)
    assert _listing(store.get([runtime], []))["/usr/bin/library"] == ("-", 0o644)


def test_closures_that_disagree_are_refused(tmp_path: Path, store: skeleton.Skeletons, runtime: Closure) -> None:
    changed = _file(tmp_path / "host", "/usr/bin/tool", b"another", 0o755)
    other = Closure("other", "/usr/bin/tool", (_dir("/usr"), _dir("/usr/bin"), changed))
    with pytest.raises(errors.HostError, match="two closures disagree about `/usr/bin/tool`"):
        store.get([runtime, other], [])


def test_file_that_changed_after_listing_is_refused_and_leaves_nothing(
    tmp_path: Path, store: skeleton.Skeletons, runtime: Closure
) -> None:
    Path(runtime.files[3].source).write_bytes(b"another")
    record = tmp_path / "state" / "closures" / "runtime.json"
    record.parent.mkdir()
    record.write_text("{}")
    with pytest.raises(errors.StaleClosureError):
        store.get([runtime], POINTS)
    assert _listing(store.directory) == {"/closures": ("d", 0o700), "/skeletons": ("d", 0o700)}
    assert not record.exists(), "what was remembered is forgotten, so that the next attempt lists anew"


@pytest.mark.parametrize(
    "point",
    [("/usr/bin/tool", "dir"), ("/usr/bin", "file"), ("/usr/bin/tool/x", "dir"), ("/bin/x", "dir"), ("/bin", "dir")],
)
def test_mount_point_that_runs_through_something_else_is_refused(
    store: skeleton.Skeletons, runtime: Closure, point: skeleton.MountPoint
) -> None:
    store.get([runtime], [("/usr/bin", "dir"), ("/usr/bin/tool", "file"), ("/usr/share/doc", "dir")])
    with pytest.raises(errors.HostError, match="cannot be made"):
        store.get([runtime], [point])


@pytest.mark.parametrize("path", ["/", "relative", "/a/../etc", "/a//b", "//a", "/a/", "/a\0b", "/" + "a" * 5000])
def test_path_that_could_lead_out_of_root_is_refused(store: skeleton.Skeletons, path: str) -> None:
    with pytest.raises(errors.HostError, match="cannot be a path"):
        store.get([], [(path, "dir")])
    with pytest.raises(errors.HostError, match="cannot be a path"):
        store.get([Closure("x", path, (ClosureFile(path, "dir", 0o755),))], [])


def test_file_below_symlink_of_closure_is_refused(tmp_path: Path, store: skeleton.Skeletons) -> None:
    """A write through the link would change the link's target on the host."""
    closure = Closure("x", "/x", (ClosureFile("/x", "symlink", target="/etc"), _file(tmp_path, "/x/passwd", b"evil")))
    with pytest.raises(errors.HostError, match="stands in no directory"):
        store.get([closure], [])


def test_makers_at_same_time_agree(tmp_path: Path, runtime: Closure) -> None:
    def make(_: int) -> Path:
        return skeleton.Skeletons(tmp_path / "rootfs").get([runtime], POINTS)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(make, range(16)))) == 1
    assert [p.name for p in (tmp_path / "rootfs").rglob(".*")] == []


@pytest.mark.parametrize("kind", ["skeletons", "closures"])
def test_what_has_no_marker_does_not_count(store: skeleton.Skeletons, runtime: Closure, kind: str) -> None:
    root = store.get([runtime], POINTS)
    (broken,) = (store.directory / kind).iterdir()
    (broken / "complete").unlink()
    (broken / "root" / "planted").write_text("x")
    if kind == "closures":
        shutil.rmtree(root.parent)
    again = store.get([runtime], POINTS)
    assert "/planted" not in _listing(again)
    assert (broken / "complete").exists()


def test_store_that_others_can_enter_is_refused(store: skeleton.Skeletons) -> None:
    store.directory.chmod(0o755)
    with pytest.raises(errors.HomeError):
        skeleton.Skeletons(store.directory)


def test_collect_removes_what_is_unused_and_keeps_what_is_held(store: skeleton.Skeletons, runtime: Closure) -> None:
    unused = store.get([runtime], [])
    with store.hold([runtime], POINTS) as held:
        later = held.parent.stat().st_mtime + 10
        assert store.collect(unused_seconds=3600, now=later) == []
        assert store.collect(unused_seconds=0, now=later) == [unused.parent.name]
        assert (held / "usr/bin/tool").read_bytes() == b"program"
    gone = store.collect(unused_seconds=0, now=later)
    assert gone == [held.parent.name, runtime.digest], "the copy goes with the last of its skeletons"
    assert not list((store.directory / "closures").iterdir())
    assert (store.get([runtime], POINTS) / "usr/bin/tool").read_bytes() == b"program"


def test_collect_takes_what_killed_maker_left_and_not_what_one_is_making(store: skeleton.Skeletons) -> None:
    (store.directory / "skeletons" / ".new-dead" / "root").mkdir(parents=True)
    making = store.directory / "closures" / ".new-alive"
    making.mkdir()
    fd = os.open(making, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        store.collect(unused_seconds=3600)
    finally:
        os.close(fd)
    assert [p.name for p in (store.directory / "skeletons").iterdir()] == []
    assert [p.name for p in (store.directory / "closures").iterdir()] == [".new-alive"]


def test_whoever_is_removing_it_is_waited_for(store: skeleton.Skeletons, runtime: Closure) -> None:
    """A collector may get no CPU between its lock and its removal.

    Eight quick tries were over by then, and the run was refused.
    """
    root = store.get([runtime], POINTS)
    fd = os.open(root.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)

    def remove() -> None:
        time.sleep(0.2)
        os.rename(root.parent, root.parent.with_name(".gone-now"))
        os.close(fd)

    collector = threading.Thread(target=remove)
    collector.start()
    with store.hold([runtime], POINTS) as held:
        assert (held / "usr/bin/tool").read_bytes() == b"program"
        assert not collector.is_alive()
    collector.join()


def test_whoever_holds_it_for_too_long_is_named(
    store: skeleton.Skeletons, runtime: Closure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_store, "TURN_SECONDS", 0.05)
    root = store.get([runtime], POINTS)
    fd = os.open(root.parent, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        with pytest.raises(errors.KeeperError) as e, store.hold([runtime], POINTS):
            pass
        assert (e.value.where, str(os.getpid()) in e.value.message) == (str(root.parent), True)
    finally:
        os.close(fd)


def test_runs_and_collectors_of_other_processes_do_not_break_each_other(tmp_path: Path, runtime: Closure) -> None:
    """Every start collects: a directory that is being made is no leftover, and another's removal is no error."""
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()

    def hold(name: str) -> None:
        store = skeleton.Skeletons(tmp_path / "rootfs")
        for i in range(150):
            try:
                with store.hold([runtime], [(f"/{name}{i}", "dir")]) as root:
                    assert (root / "usr/bin/tool").read_bytes() == b"program"
            except Exception as e:
                said.put(f"run: {e!r}")

    def collect() -> None:
        store = skeleton.Skeletons(tmp_path / "rootfs")
        for i in range(1500):
            try:
                # Some collect all that was not used just now, the others only leftovers, as most starts do.
                store.collect(unused_seconds=0.05 if i % 8 == 0 else 3600)
            except Exception as e:
                said.put(f"start: {e!r}")

    jobs = [fork.Process(target=hold, args=(name,)) for name in "ab"] + [fork.Process(target=collect) for _ in "ab"]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert said.empty(), said.get()
