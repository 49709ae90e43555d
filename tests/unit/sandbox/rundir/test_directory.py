"""Check run directories: removal never races with the check for abandoned ones, and none is left half made."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
import uuid
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel import libc, small_files
from sandbox.kernel.cgroup import cgroup as cgroup_cgroup
from sandbox.network import uplink
from sandbox.rundir import directory, label, marks, registry
from sandbox.runner import recovery


def _live(runs: Path, times: int, said: SimpleQueue[str]) -> None:
    for _ in range(times):
        try:
            with directory.RunDirectory(runs / str(uuid.uuid4()), {"agent_id": "a"}):
                pass
        except Exception as e:
            said.put(f"run: {e!r}")


def _next_start(runs: Path, times: int, said: SimpleQueue[str]) -> None:
    for _ in range(times):
        try:
            with directory.abandoned(runs) as found:
                for path in found:
                    said.put(f"taken for abandoned: {path.name}")
                    directory.remove(path)
            registry.live(runs)
        except Exception as e:
            said.put(f"next start: {e!r}")


def test_runs_that_end_and_supervisors_that_start_do_not_meet(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    said: SimpleQueue[str] = fork.SimpleQueue()
    jobs = [fork.Process(target=job, args=(tmp_path, 150, said)) for job in (_live, _next_start) * 2]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert said.empty(), said.get()
    assert [p.name for p in tmp_path.iterdir()] == [".gate"]


def test_what_dead_process_left_is_found(tmp_path: Path) -> None:
    """The control: the lock of a dead process is free."""
    code = (
        "import os, pathlib, sys\nfrom sandbox.rundir import directory as bundle\n"
        "bundle.RunDirectory(pathlib.Path(sys.argv[1]), {'agent_id': 'a'}).__enter__()\nos._exit(0)\n"
    )
    left = tmp_path / str(uuid.uuid4())
    environment = {"PYTHONPATH": str(Path(directory.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(left)], env=environment, check=True)
    with (
        directory.RunDirectory(tmp_path / str(uuid.uuid4()), {"agent_id": "b"}),
        directory.abandoned(tmp_path) as found,
    ):
        assert found == [left]
        directory.remove(left)
    assert not left.exists()


def test_directory_that_cannot_be_filled_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full while the label is written: a truncated label would block every later run."""

    def full(path: Path, raw: bytes) -> int:
        raise OSError(28, "No space left on device")

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(small_files, "put", full)
    with pytest.raises(OSError, match="No space"):
        directory.RunDirectory(tmp_path / str(uuid.uuid4()), {"agent_id": "a"}).__enter__()
    assert [p.name for p in tmp_path.iterdir()] == [".gate"]
    assert set(os.listdir("/proc/self/fd")) == before
    assert registry.live(tmp_path) == []


def test_what_killed_owner_was_starting_is_waited_for(tmp_path: Path) -> None:
    """A child that was forked with the lock holds it until PR_SET_PDEATHSIG kills it."""
    code = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from sandbox.rundir.directory import RunDirectory\n"
        "RunDirectory(Path(sys.argv[1]) / 'run', {}).__enter__()\n"
        "if os.fork() == 0:\n    os.close(1)\n    time.sleep(0.5)\n"
        "os._exit(0)\n"
    )
    environment = {"PYTHONPATH": str(Path(directory.__file__).parents[2])}
    # This waits for the parent alone: the child has closed its end of the pipe.
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True, stdout=subprocess.PIPE)
    with directory.abandoned(tmp_path) as found:
        assert [path.name for path in found] == ["run"]
    # The control: a live owner keeps its lock, and the check does not wait for it.
    with directory.RunDirectory(tmp_path / "live", {}), directory.abandoned(tmp_path) as found:
        assert [path.name for path in found] == ["run"]


def test_what_dead_supervisor_left_running_is_killed_before_anything_that_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "network.json").write_text("{}")

    def refused(*_: object, **__: object) -> None:
        done.append("network")
        raise errors.KernelError("nft does not answer")

    monkeypatch.setattr(cgroup_cgroup.Leaf, "kill", lambda leaf: done.append(f"kill {leaf.name}"))
    monkeypatch.setattr(recovery, "trusted_binary", Path)
    monkeypatch.setattr(uplink, "recover", refused)
    with pytest.raises(errors.KernelError, match="nft does not answer"):
        recovery.recover(tmp_path, hierarchies=cgroup_cgroup.Hierarchies(0, {}))
    assert done == ["kill one", "kill two", "network"]
    # It remains for the next start, which removes the rest.
    assert (tmp_path / "one").is_dir()


def test_label_that_may_not_be_there_leaves_one_that_was(tmp_path: Path) -> None:
    seen: list[dict[str, str] | None] = []

    def refused() -> None:
        seen.append(label.label_of(tmp_path / "run"))
        raise errors.BusyError("as many live as may")

    with directory.RunDirectory(tmp_path / "run", {"agent_id": "a", label.STANDBY: "yes"}) as one:
        label.expect_relabel(one.path)
        assert label.label_of(one.path) == {"agent_id": "a", label.STANDBY: "yes"}
        with pytest.raises(errors.BusyError):
            label.relabel(one.path, {"agent_id": "a", "longer": "x" * 10_000}, refused)
        assert [*seen, label.label_of(one.path)] == [{"agent_id": "a", label.STANDBY: "yes"}] * 2
        label.relabel(one.path, {"agent_id": "b"}, lambda: None)
        assert label.label_of(one.path) == {"agent_id": "b"}


def test_label_changes_where_file_system_cannot_have_two_change_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def relabelled(name: str) -> tuple[dict[str, str] | None, bool]:
        with directory.RunDirectory(tmp_path / name, {"agent_id": "a"}) as one:
            label.expect_relabel(one.path)
            label.relabel(one.path, {"agent_id": "b"}, lambda: None)
            return label.label_of(one.path), (one.path / ".label.json").exists()

    # The control: if the file system can exchange two names, the old label remains until the directory is removed.
    assert relabelled("can") == ({"agent_id": "b"}, True)

    def cannot(one: str, other: str) -> None:
        raise OSError(errno.EINVAL, "Invalid argument", other)

    monkeypatch.setattr(libc, "exchange", cannot)
    assert relabelled("cannot") == ({"agent_id": "b"}, False)


def test_mark_has_first_reason_whoever_it_was_made_like(tmp_path: Path) -> None:
    first, second, third, marked = (tmp_path / name for name in ("first", "second", "third", "marked"))
    for path in (first, second, third, marked):
        path.mkdir()
    marks.mark_revoked(first, "it leaks")
    marks.mark_revoked(marked, "another reason")
    marks.mark_revoked(second, "it leaks", like=first)
    marks.mark_revoked(marked, "it leaks", like=first)
    marks.mark_revoked(third, "it leaks", like=tmp_path / "gone")
    assert [marks.revoked_of(path) for path in (first, second, third)] == ["it leaks"] * 3
    assert marks.revoked_of(marked) == "another reason"
    # Removing one run's directory leaves the other runs' marks.
    directory.remove(first)
    assert marks.revoked_of(second) == "it leaks"


def test_who_ends_run_with_its_tree_is_told_as_far_as_it_was_written(tmp_path: Path) -> None:
    first, second, torn = (tmp_path / name for name in ("first", "second", "torn"))
    for path in (first, second, torn):
        path.mkdir()
        assert marks.stopped_of(path) is None
    marks.mark_stopped(first, "uid7@local", "it leaks\nall over")
    marks.mark_stopped(first, "uid8@local", "another reason")
    marks.mark_stopped(second, "uid7@local", "it leaks\nall over", like=first)
    assert [marks.stopped_of(path) for path in (first, second)] == [("uid7@local", "it leaks\nall over")] * 2
    for left in ("", "{", '{"by": "uid7@'):  # its writer was killed halfway
        (torn / "stopped").write_text(left)
        assert marks.stopped_of(torn) == ("", "")
        assert str(marks.verdict(torn)) == "ended by root"
    assert marks.stopped_of(tmp_path / "gone") is None
    assert marks.revoked_of(first) is None


@pytest.mark.parametrize("gone", [True, False], ids=["taken away", "still there"])
def test_run_whose_cgroup_could_not_be_taken_away_leaves_what_says_where_it_lies(tmp_path: Path, gone: bool) -> None:
    """Without a free descriptor to read its list, the processes in the cgroup are unknown.

    The directory was once removed all the same, and with it the record by which the next start could have found it.
    """
    runs, cgroup = tmp_path / "runs", tmp_path / "cgroup" / "one"
    runs.mkdir()
    cgroup.mkdir(parents=True)
    one = directory.RunDirectory(runs / "one", {"agent_id": "a"})

    def fails() -> None:
        with one:
            one.note_cgroups({"memory": cgroup})
            if gone:
                cgroup.rmdir()
            raise errors.KernelError("who is in it cannot be read: Too many open files")

    with pytest.raises(errors.KernelError, match="cannot be read"):
        fails()
    assert registry.live(runs) == []
    assert one.path.exists() is not gone
    assert recovery.recover(runs, hierarchies=cgroup_cgroup.Hierarchies(0, {})) == ([] if gone else ["one"])
    assert not one.path.exists()
    assert not cgroup.exists()
