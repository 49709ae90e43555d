"""Check that a replaced file is recognised without its times, and that a lock is released."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.control import tree_kill
from sandbox.kernel import libc
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import lock, registry
from sandbox.storage import atomic_file


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("size", [0, 1, 5_000_000_000])
def test_file_is_told_as_stat_tells_it(tmp_path: Path, folder: int, size: int) -> None:
    made = tmp_path / "rows\u00e9"
    made.touch()
    os.truncate(made, size)
    info = made.stat()
    assert atomic_file.which(folder, made.name) == ((info.st_dev, info.st_ino), size)


@pytest.mark.parametrize("mode", [0o600, 0o4755, 0o000])
def test_open_file_is_told_as_fstat_tells_it(tmp_path: Path, mode: int) -> None:
    made = tmp_path / "rows"
    made.write_bytes(b"one")
    (tmp_path / "second").hardlink_to(made)
    with made.open("rb") as stream:
        made.chmod(mode)
        info, found = os.fstat(stream.fileno()), atomic_file.opened(stream.fileno())
    assert found == tuple(getattr(info, name) for name in found._fields)
    assert found.st_nlink == 2


def test_link_is_told_and_not_what_it_leads_to(tmp_path: Path, folder: int) -> None:
    made, link = tmp_path / "rows", tmp_path / "link"
    made.write_bytes(b"one")
    link.symlink_to(made)
    info = link.lstat()
    assert atomic_file.which(folder, "link") == ((info.st_dev, info.st_ino), info.st_size)


def test_another_file_under_name_is_another(tmp_path: Path, folder: int) -> None:
    made = tmp_path / "rows"
    made.write_bytes(b"one")
    before = atomic_file.which(folder, "rows")
    other = tmp_path / "other"
    other.write_bytes(b"one")
    other.replace(made)
    assert atomic_file.which(folder, "rows")[0] != before[0]


def test_name_that_nothing_has_is_told_as_missing(folder: int) -> None:
    with pytest.raises(FileNotFoundError, match="statx"):
        atomic_file.which(folder, "rows")


@pytest.mark.parametrize("what", ["gate", "directory", "look"])
def test_lock_is_let_go_though_whoever_was_forked_meanwhile_has_copy_of_it(tmp_path: Path, what: str) -> None:
    """In a process with threads, a child of another thread holds the lock until execve, and may hang before it."""
    tmp_path.chmod(0o700)
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    (tmp_path / "lock").touch(mode=0o600)
    children = []

    def forks() -> None:
        if not (pid := os.fork()):
            libc.set_parent_death_signal(signal.SIGKILL)
            while True:
                signal.pause()
        children.append(pid)

    def again(place: str) -> bool:
        with open(tmp_path / place) as file:
            return atomic_file.take(file.fileno(), 0.0)

    try:
        if what == "gate":
            with lock.gate(tmp_path):
                forks()
                assert not again(".gate")
            assert again(".gate")
        elif what == "directory":
            with atomic_file.locked(directory, where="here", error=errors.StateError):
                forks()
                assert not again("lock")
            assert again("lock")
        else:
            real = fcntl.flock

            def flock(fd: int, how: int) -> None:
                real(fd, how)
                if how & fcntl.LOCK_SH:
                    forks()
                    assert not again("lock")

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(fcntl, "flock", flock)
                assert not atomic_file.held(tmp_path / "lock")
            assert again("lock")
        assert len(children) == 1
    finally:
        os.close(directory)
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@contextlib.contextmanager
def held(place: Path) -> Iterator[None]:
    """Hold the lock, as a process that hangs does."""
    with open(place) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_whoever_holds_lock_for_good_is_named_and_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_file, "TURN_SECONDS", 0.01)
    gate = tmp_path / ".gate"
    gate.touch(mode=0o600)
    with held(gate):
        with pytest.raises(errors.KeeperError, match=rf"is held by process {os.getpid()}, ") as refused:
            rundir_directory.RunDirectory(tmp_path / "one", {}).__enter__()
        assert refused.value.where == str(gate)
        with pytest.raises(errors.KeeperError):
            registry.live(tmp_path)
        with pytest.raises(errors.KeeperError), rundir_directory.abandoned(tmp_path):
            pass
    assert list(tmp_path.iterdir()) == [gate]
    monkeypatch.setattr(atomic_file, "LOCKS", tmp_path / "of-another-kernel")
    with held(gate), pytest.raises(errors.KeeperError, match="held by another process"):
        registry.live(tmp_path)


def test_what_run_came_to_is_told_where_its_directory_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack:
        with rundir_directory.RunDirectory(tmp_path / "one", {"agent_id": "a"}) as one:
            monkeypatch.setattr(atomic_file, "TURN_SECONDS", 0.01)
            stack.enter_context(held(tmp_path / ".gate"))
        assert one.path.exists()
    assert registry.live(tmp_path) == []
    with rundir_directory.abandoned(tmp_path) as found:
        assert found == [one.path]


@pytest.mark.parametrize("what", ["gate", "enforcement", "directory"])
def test_terminal_stops_nobody_over_lock(tmp_path: Path, folder: int, what: str) -> None:
    """Under sudo an ordinary user could suspend `covenant ps` from its terminal while it holds the gate."""
    stopping = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not stopping & blocked
    locks = {
        "gate": lambda: lock.gate(tmp_path),
        "enforcement": lambda: tree_kill.allow_thaw(tmp_path / "one"),
        "directory": lambda: atomic_file.locked(folder, where="here", error=errors.StateError),
    }
    with locks[what]():
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked | stopping
    with pytest.raises(RuntimeError), locks[what]():
        raise RuntimeError
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == blocked
