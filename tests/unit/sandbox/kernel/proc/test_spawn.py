"""Check the moments around the start of a child: it never does the parent's work and never outlives it.

Each test in this process uses both ways, the starter and a fork; scripts test the steps inside a fork.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import spawn

ROOT = Path(spawn.__file__).resolve().parents[3]
SPAWN = """\
import os, signal, sys, time
from sandbox.kernel import libc
from sandbox.kernel.proc import launcher as starter, spawn as process
starter.there = lambda: False
me, out = os.getpid(), sys.argv[1]
def say(what): open(out, "a").write(what + "\\n")
launch = process.Launch("/bin/sh", ["sh", "-c", f"echo agent >> {out}"], {"PATH": "/bin"})
"""


pytestmark = pytest.mark.usefixtures("way")


def _script(code: str, out: Path) -> list[str]:
    environment = {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", SPAWN + code, str(out)], env=environment, check=False, timeout=60)
    time.sleep(0.3)
    return out.read_text().splitlines()


@pytest.mark.parametrize("what", ["nothing", "signal.SIGINT", "signal.SIGTERM"])
def test_signal_right_after_fork_does_not_make_child_clean_up_for_parent(tmp_path: Path, what: str) -> None:
    code = f"""
def handler(number, frame): raise KeyboardInterrupt
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, handler)
fork, nothing = os.fork, 0
def forked():
    pid = fork()
    if pid == 0: os.kill(os.getpid(), {what})
    return pid
os.fork = forked
try:
    with process.spawn(launch) as child: child.reap()
finally:
    say("clean-up by " + ("parent" if os.getpid() == me else "child"))
"""
    said = _script(code, tmp_path / "said")
    assert said == (["agent"] if what == "nothing" else []) + ["clean-up by parent"]


@pytest.mark.parametrize("dies", [False, True])
def test_parent_that_dies_before_its_death_is_watched_takes_child_along(tmp_path: Path, dies: bool) -> None:
    code = f"""
watch = libc.set_parent_death_signal
def late(number):
    if {dies}:
        os.kill(me, signal.SIGKILL)
        while os.getppid() == me: time.sleep(0.01)
    watch(number)
libc.set_parent_death_signal = late
say("begin")
with process.spawn(launch) as child: child.reap()
"""
    assert _script(code, tmp_path / "said") == ["begin"] + ([] if dies else ["agent"])


def test_no_descriptor_for_child_is_no_child(tmp_path: Path) -> None:
    """Eight descriptors suffice for the pipes but not for the pidfd: the forked child must not run unwatched."""
    out = tmp_path / "out"
    launch = proc_launch.Launch("/bin/sh", ["sh", "-c", f"sleep 0.2; echo ran > {out}"], {"PATH": "/bin"})
    with spawn.spawn(launch) as child:
        assert child.reap() == 0
    assert out.read_text() == "ran\n"
    out.unlink()
    free = os.dup(0)
    os.close(free)
    before, limits = sorted(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 8, limits[1]))
    try:
        with pytest.raises(errors.KernelError):
            spawn.spawn(launch)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    time.sleep(0.5)
    assert not out.exists()
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_what_caller_ignores_child_does_not() -> None:
    numbers = (signal.SIGQUIT, signal.SIGUSR1, signal.SIGTSTP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        with spawn.spawn(proc_launch.Launch("/bin/grep", ["grep", "SigIgn", "/proc/self/status"], {})) as child:
            assert child.reap() == 0
            ignored = int(os.read(child.stdout, 100).split()[1], 16)
        # 32 and 33 are glibc's own, which sigaction refuses to change; make(1) passes them on ignored (nptl(7)).
        assert ignored & ~(0b11 << 31) == 0
        ours = Path("/proc/self/status").read_text()
        assert int(ours.split("SigIgn:")[1].split()[0], 16) & 1 << (signal.SIGQUIT - 1)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@pytest.fixture
def stands(tmp_path: Path) -> proc_launch.Launch:
    """Launch a child that blocks before execve, as in a frozen cgroup: it opens a FIFO that has no reader."""
    os.mkfifo(tmp_path / "fifo")
    return proc_launch.Launch("/bin/true", ["true"], {}, join_files=[str(tmp_path / "fifo")])


def _ours() -> tuple[list[str], set[str]]:
    """Return the descriptors and the children of this process."""
    children = [task.joinpath("children").read_text().split() for task in Path("/proc/self/task").iterdir()]
    return sorted(os.listdir("/proc/self/fd")), {pid for some in children for pid in some}


def _nothing_left(before: tuple[list[str], set[str]]) -> None:
    descriptors, children = _ours()
    assert descriptors == before[0]
    assert children <= before[1]


def test_child_that_stands_on_its_way_is_not_waited_for_for_good(stands: proc_launch.Launch) -> None:
    before, killed = _ours(), list[bool]()
    with pytest.raises(errors.StartTimeoutError, match=r"`/bin/true` was not executed within 0.1 s"):
        spawn.spawn(stands, spawn.Patience(0.1, kill=lambda: killed.append(True)))
    assert killed == [True]
    _nothing_left(before)


@pytest.mark.parametrize("how", ["watch", "look"])
def test_who_may_end_it_is_heard_while_it_stands(stands: proc_launch.Launch, how: str) -> None:
    ours, theirs = os.pipe()
    before, ended = _ours(), errors.KilledError("ended by operator")
    try:
        if how == "watch":
            os.write(theirs, b"x")
            patience = spawn.Patience(watches={ours: lambda: ended})
        else:
            patience = spawn.Patience(look=lambda: ended)
        with pytest.raises(errors.KilledError, match="ended by operator"):
            spawn.spawn(stands, patience)
        _nothing_left(before)
    finally:
        os.close(ours)
        os.close(theirs)


def test_who_asks_for_something_else_is_answered_and_it_goes_on(stands: proc_launch.Launch) -> None:
    ours, theirs = os.pipe()
    asked: list[bytes] = []
    # A reader of the FIFO lets the child continue.
    reader = threading.Thread(target=lambda: Path(stands.join_files[0]).read_bytes())

    def answer() -> None:
        asked.append(os.read(ours, 10))
        reader.start()

    try:
        os.write(theirs, b"state")
        with spawn.spawn(stands, spawn.Patience(watches={ours: answer})) as child:
            assert child.reap() == 0
        reader.join()
    finally:
        os.close(ours)
        os.close(theirs)
    assert asked == [b"state"]


def test_one_that_outlives_its_signal_hears_of_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that waits for a hung disk behaves so: SIGKILL does not end it."""
    before, launch = _ours(), proc_launch.Launch("/bin/sleep", ["sleep", "60"], {})
    monkeypatch.setattr(spawn, "DEATH_SECONDS", 0.05)
    monkeypatch.setattr(spawn.Child, "signal", lambda self, number: None)
    with pytest.raises(errors.KernelError, match=r"process \d+ survives SIGKILL"), spawn.spawn(launch) as child:
        pass
    with pytest.raises(ValueError, match="first") as first, spawn.spawn(launch) as other:
        raise ValueError("first")
    assert "and process" in first.value.__notes__[0]
    assert "survives SIGKILL" in first.value.__notes__[0]
    with pytest.raises(errors.StateError) as ours, spawn.spawn(launch) as third:
        raise errors.StateError("first")
    assert str(ours.value.to_json()["message"]).startswith(f"first; and process {third.pid} survives SIGKILL")
    for one in (child, other, third):
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)
    _nothing_left(before)
