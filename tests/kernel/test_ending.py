"""Many cgroups ended at once, also with members that fork without a pause, are frozen, or are about to begin."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from policy import errors
from sandbox.kernel.cgroup import cgroup, kill
from tests.kernel.live_runs import until

MANY = 160
JOIN = "import os, sys, time\nfor file in sys.argv[1:]:\n    open(file, 'w').write('0')\n"
SLEEPS = JOIN + "print('in', flush=True)\ntime.sleep(600)\n"
# Each forks as fast as the bound on processes lets it, and lives for a moment.
FORKS = (
    JOIN
    + """
print('in', flush=True)
while True:
    try:
        if os.fork() == 0:
            time.sleep(0.001)
    except OSError:
        pass
"""
)


@contextlib.contextmanager
def leaf() -> Iterator[cgroup.Leaf]:
    with cgroup.Leaf(cgroup.Hierarchies.read(), f"test-{uuid.uuid4()}") as made:
        made.apply([cgroup.Limit("pids", "pids.max", "64")])
        yield made


@contextlib.contextmanager
def inside(place: cgroup.Leaf, code: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-I", "-S", "-c", code, *place.join_files()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def started(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == b"in\n"


@pytest.mark.parametrize("code", [SLEEPS, FORKS])
@pytest.mark.parametrize("frozen", [False, True])
def test_all_of_them_are_empty_when_it_returns(code: str, *, frozen: bool) -> None:
    with contextlib.ExitStack() as stack:
        leaves = [stack.enter_context(leaf()) for _ in range(3)]
        processes = [stack.enter_context(inside(one, code)) for one in leaves]
        for one, process in zip(leaves, processes, strict=True):
            started(process)
            if frozen:
                one.freeze()
        other = stack.enter_context(leaf())
        started(stack.enter_context(inside(other, SLEEPS)))
        kill.stop(leaves)
        kill.kill(leaves)
        assert [one.pids() for one in leaves] == [[], [], []]
        assert [process.wait(60) for process in processes] == [-9, -9, -9]
        # The control: the neighbour lives.
        assert other.pids() != []


def test_it_needs_no_descriptor_to_know_that_all_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def none_left(pid: int, flags: int = 0) -> int:
        asked.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with leaf() as place, inside(place, SLEEPS) as process:
        started(process)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", none_left)
            kill.kill([place])
        assert asked == [process.pid]
        assert place.pids() == []
        assert process.wait(60) == -9


@pytest.mark.parametrize("held", [0, 2 * MANY])
def test_many_at_once_leave_descriptors_for_files_of_their_cgroups(held: int) -> None:
    """Without one no leaf is thawed, so that none who was killed in it dies, and none of its lists is read."""
    many = JOIN + f"for _ in range({MANY}):\n    if not os.fork():\n        time.sleep(600)\nprint('in', flush=True)\n"
    with (
        cgroup.Leaf(cgroup.Hierarchies.read(), f"test-{uuid.uuid4()}") as place,
        inside(place, many + "time.sleep(600)\n") as process,
        contextlib.ExitStack() as stack,
    ):
        started(process)
        for _ in range(held):
            stack.callback(os.close, os.dup(0))
        assert len(place.pids()) == MANY + 1
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        ours = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (ours + MANY // 2, before[1]))
        try:
            kill.kill([place])
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            left = place.pids()
            place.kill()
        assert left == []
        assert process.wait(60) == -9


def test_without_descriptor_to_look_with_nobody_is_said_to_be_gone() -> None:
    with leaf() as place, inside(place, SLEEPS) as process:
        started(process)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            with pytest.raises(errors.KernelError, match="Too many open files"):
                kill.kill([place], deadline_seconds=0.05)
            with pytest.raises(errors.KernelError, match="Too many open files"):
                place.kill(deadline_seconds=0.05)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert process.poll() is None
        kill.kill([place])
        assert process.wait(60) == -9


def test_whoever_joins_one_that_was_empty_stands_until_it_is_killed() -> None:
    with leaf() as place:
        kill.stop([place])
        kill.kill([place])
        with inside(place, SLEEPS) as process:
            until(place.pids)
            assert process.stdout is not None
            until(lambda: "frozen" in _wchan(process.pid) or place.frozen())
            kill.kill([place])
            assert process.wait(60) == -9
            assert process.stdout.read() == b""
    # The control: without the stop the same process begins.
    with leaf() as place, inside(place, SLEEPS) as process:
        started(process)


def _wchan(pid: int) -> str:
    with open(f"/proc/{pid}/wchan") as file:
        return file.read()
