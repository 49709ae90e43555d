"""The directory of a run that is over becomes the next one's: what was one run's is in no other, and it is seen as one
run's or not at all."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import errors
from policy.compile import artefacts
from sandbox.kernel.runsc import debug_log, start_trace
from sandbox.rundir import directory, marks, registry, reuse, reuse_place
from sandbox.rundir import label as rundir_label
from sandbox.rundir import lock as rundir_lock
from sandbox.rundir.directory import RunDirectory
from sandbox.rundir.reuse import Spares
from sandbox.shim import control_socket

POLICY = artefacts.Artefacts({name: name.encode() for name in artefacts.NAMES})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path


def spares(base: Path) -> Spares:
    return Spares(base / reuse.SPARE, POLICY.digest)


def begun(base: Path, agent: str = "a") -> RunDirectory:
    """One that is not entered yet."""
    label = {"agent_id": agent, "started_ms": "1"}
    return RunDirectory(base / "runs" / str(uuid.uuid4()), label, spares=spares(base))


def over(base: Path, *, agent: str = "a", late: Callable[[Path], None] = lambda _: None) -> int:
    """A run that came to its end; the inode of its directory. ``late`` is done just before that."""
    with begun(base, agent) as one:
        traced = start_trace.StartTrace(one.trace)
        calls = debug_log.RefusedCalls(one.trace, {}, lambda *_: None)
        one.note_cgroups({"memory": Path("/sys/fs/cgroup/memory/covenant", one.path.name)})
        one.write_policy(POLICY)
        traced.close()
        calls.close()
        late(one.path)
        return one.path.stat().st_ino


def place(base: Path) -> Path:
    """The one that waits."""
    (found,) = spares(base).there("place")
    return Path(found)


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_the_next_has_the_same_directory_and_its_own_label_lock_and_files(base: Path) -> None:
    first = over(base, agent="a-name-that-is-longer-than-the-next")
    with begun(base, "b") as one:
        assert one.path.stat().st_ino == first
        assert rundir_label.label_of(one.path) == {"agent_id": "b", "started_ms": "1"}
        assert rundir_lock.owner_of(one.path) == os.getpid()
        assert directory.cgroups_of(one.path) == {}, "the cgroups of the run before are nobody's to remove"
        assert registry.under_way(one.path)
        assert list(one.runsc_root.iterdir()) == []
        assert marks.revoked_of(one.path) is None
    # That one did not get as far as its policy: its directory is not kept.
    assert over(base) != 0
    assert [path.name for path in (base / "runs").iterdir()] == [".gate"]


def _revoked(path: Path) -> None:
    with rundir_lock.gate(path.parent):
        marks.mark_revoked(path, "it leaks")


def _more(path: Path) -> None:
    (path / "attest.json").write_text("{}")
    (path / "secrets").mkdir()
    (path / "secrets" / "one").write_text("the first run's")
    (path / "trace" / "more").mkdir()
    (path / ".label.json").symlink_to("/etc/shadow")


@pytest.mark.parametrize("late", [_revoked, _more])
def test_what_else_was_in_it_is_gone(base: Path, late: Callable[[Path], None]) -> None:
    first = over(base, late=late)
    with begun(base) as one:
        assert one.path.stat().st_ino == first
        # The bundle is a part of its own.
        assert {path.name for path in one.path.iterdir()} == {
            *("bundle", "cgroups.json", "label.json", "lock", "root", "trace")
        }
        assert {path.name for path in one.trace.iterdir()} == {"pod-init.json", "sentry.log"}
        assert marks.revoked_of(one.path) is None


def _metered(path: Path) -> None:
    _more(path)
    (path / reuse_place.METER).write_bytes(b"used")
    (path / "lock").write_bytes(b"of the run before, longer than any number")


def test_it_is_taken_once_locked_and_without_a_trace_of_the_one_before(base: Path) -> None:
    over(base, late=_metered)
    # The end of the one before may not be written yet.
    assert (place(base) / reuse_place.METER).read_bytes() == b"used"
    two = base / "runs" / "two"
    lock = reuse_place.take(spares(base), two, b"label")
    assert lock is not None
    try:
        assert {path.name for path in two.iterdir()} == {"lock", "label.json", "cgroups.json", "root", "trace"}
        assert {path.name for path in (two / "trace").iterdir()} == {start_trace.CONFIG, debug_log.NAME}
        assert (two / "label.json").read_bytes() == b"label"
        assert (two / "cgroups.json").read_bytes() == b"{}"
        assert (two / "lock").read_text() == str(os.getpid())
        with (two / "lock").open() as another, pytest.raises(BlockingIOError):
            fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert reuse_place.take(spares(base), base / "runs" / "three", b"label") is None
    finally:
        os.close(lock)


def _linked(path: Path) -> None:
    """As it was, but by a symlink out of the place."""
    elsewhere = next(one for one in path.parents if one.name == reuse.SPARE).with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: _linked(path / "label.json"),
        lambda path: _linked(path / "lock"),
        lambda path: _linked(path / "cgroups.json"),
        lambda path: _linked(path / "root"),
        lambda path: _linked(path / "trace" / "pod-init.json"),
        lambda path: _linked(path / "trace" / "sentry.log"),
        lambda path: (path / "root" / "state").write_text("runsc's"),
        lambda path: (path / "revoked").write_text("meant for another"),
        lambda path: (path / "trace" / "pod-init.json").rename(path / "trace" / "other.json"),
        lambda path: (path / "cgroups.json").unlink(),
        lambda path: (path / "trace" / "sentry.log").unlink() or (path / "trace" / "sentry.log").write_text("plain"),
    ],
    ids=[
        *("label-linked", "lock-linked", "cgroups-linked", "root-linked", "traced-linked", "log-linked"),
        *("root-not-empty", "more", "traced-more", "less", "log-plain"),
    ],
)
def test_one_that_is_not_as_it_was_left_is_not_taken(base: Path, spoil: Callable[[Path], object]) -> None:
    first = over(base)
    spoil(place(base))
    before = descriptors()
    assert reuse_place.take(spares(base), base / "runs" / "two", b"label") is None
    assert not (base / "runs" / "two").exists()
    assert descriptors() == before
    with begun(base) as one:
        assert one.path.stat().st_ino != first
        assert rundir_label.label_of(one.path) == {"agent_id": "a", "started_ms": "1"}


def test_nor_is_it_left_for_the_next(base: Path) -> None:
    over(base, late=lambda path: (path / "root" / "left").touch())
    assert spares(base).there("place") == []
    assert [path.name for path in (base / "runs").iterdir()] == [".gate"]


@pytest.mark.parametrize("how", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_one_of_which_somebody_still_has_the_lock_is_not_taken(base: Path, how: int) -> None:
    """As a process that was forked with it and has not died yet."""
    first = over(base)
    held = os.open(place(base) / "lock", os.O_RDWR)
    fcntl.flock(held, how)
    before = descriptors()
    assert reuse_place.take(spares(base), base / "runs" / "two", b"label") is None
    assert descriptors() == before
    with begun(base) as one:
        assert one.path.stat().st_ino != first
    os.close(held)
    with begun(base) as one:
        assert one.path.stat().st_ino == first, "the control"


def test_one_that_cannot_be_moved_is_let_go(base: Path) -> None:
    over(base)
    before = descriptors()
    assert reuse_place.take(spares(base), base / "none" / "two", b"label") is None
    assert descriptors() == before


def test_it_is_not_seen_before_it_is_labelled_and_locked(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    over(base, agent="before")
    seen: list[tuple[bool, dict[str, str] | None]] = []
    rename = os.rename

    def looked(source: str, target: Path) -> None:
        rename(source, target)
        if Path(target).parent == base / "runs":
            seen.append((registry.held(Path(target)), rundir_label.label_of(Path(target))))

    monkeypatch.setattr(os, "rename", looked)
    with begun(base, "after"):
        assert seen == [(True, {"agent_id": "after", "started_ms": "1"})]


def test_a_claim_that_is_refused_leaves_it_for_the_next(base: Path) -> None:
    first = over(base)

    def refuse() -> None:
        raise errors.RunRevokedError("not now")

    one = begun(base)
    one._claim = refuse
    with pytest.raises(errors.RunRevokedError):
        one.__enter__()
    with begun(base) as one:
        assert one.path.stat().st_ino == first


def test_a_start_that_fails_behind_the_gate_leaves_no_lock_and_no_run(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(base)
    before = descriptors()

    def refused(part: str, target: Path) -> bool:
        raise OSError(28, "No space left on device")

    one = begun(base)
    monkeypatch.setattr(one._spares, "take", refused)
    with pytest.raises(OSError, match="No space"):
        one.__enter__()
    assert descriptors() == before
    assert [path.name for path in (base / "runs").iterdir()] == [".gate"]


@pytest.fixture
def listening(base: Path) -> Iterator[Path]:
    """A run with a control socket, in a directory that was another's."""
    over(base)
    with begun(base) as one, control_socket.Server(one.path, {}):
        yield one.path


def test_who_asks_a_run_that_is_over_does_not_reach_the_next_in_its_directory(
    listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory was opened under the name of the run before, and got its new one before the connection."""
    old = listening.with_name(str(uuid.uuid4()))
    connect = socket.socket.connect

    class Late(socket.socket):
        def connect(self, address: object) -> None:
            if old.exists():
                old.rename(listening)
            connect(self, address)  # type: ignore[arg-type]

    listening.rename(old)
    monkeypatch.setattr(socket, "socket", Late)
    with pytest.raises(errors.NoRunError, match="has ended"):
        control_socket.Connection(old)
    assert listening.exists(), "the control: it was renamed meanwhile"
    with control_socket.Connection(listening) as one:
        assert one.keeper >= 0, "the control: it listens"


def test_what_is_kept_says_nothing_to_whoever_looks_for_runs(base: Path) -> None:
    over(base)
    assert registry.live(base / "runs") == []
    with directory.abandoned(base / "runs") as found:
        assert found == []
    assert json.loads((place(base) / "cgroups.json").read_text()) == {}


def test_a_directory_is_removed_whole_and_its_meter_last(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, rmtree, left = base / "one", shutil.rmtree, []
    (one / "root").mkdir(parents=True)
    for name in ("lock", reuse_place.METER, "root/state"):
        (one / name).touch()

    def told(path: str | Path) -> None:
        if Path(path) == one:
            left.extend(os.listdir(path))
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", told)
    reuse_place.remove(one)
    assert left == [reuse_place.METER]
    assert not one.exists()
