"""Check that the starter and a fork start a child alike: the same steps, errors and environment."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import launcher, spawn

ROOT = Path(spawn.__file__).resolve().parents[3]
TRUE: tuple[str, list[str], dict[str, str]] = ("/bin/true", ["true"], {})
# Prints all that a program can see of its start.
TELL = """\
import json, os, sys
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Seccomp", "CapEff", "CapBnd", "Uid", "Gid", "Groups")
places = sys.argv[1].split(",")
sys.stdout.write(json.dumps({
    "status": {name: status[name] for name in names},
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + fd)),
    "session": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "where": os.getcwd(), "environment": dict(os.environ), "arguments": sys.argv,
    "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in ("net", "pid", "user", "ipc", "uts")},
    "own mounts": os.readlink("/proc/self/ns/mnt") != places[0],
    "seen": [sorted(os.listdir(place)) for place in places[1:]],
}))
"""


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Make three folders with a file each: one is mounted over the second, and the third is covered."""
    for name in ("shown", "over", "covered"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"of-{name}").touch()
    return tmp_path


def _detached(folder: Path) -> int:
    fd = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        return libc.open_tree_clone(fd)
    finally:
        os.close(fd)


def _told(launch: proc_launch.Launch, folders: Path) -> dict[str, Any]:
    mount = _detached(folders / "shown")
    try:
        launch = structs.replace(launch, mounts=[proc_launch.Attach(mount, str(folders / "over"))])
        with spawn.spawn(launch) as child, os.fdopen(os.dup(child.stdout)) as out:
            text = out.read()
            assert child.reap() == 0
    finally:
        os.close(mount)
    value: dict[str, Any] = json.loads(text)
    return value


def test_program_cannot_tell_how_it_was_started(monkeypatch: pytest.MonkeyPatch, folders: Path) -> None:
    """The test compares namespaces, mounts, descriptors, signals, session, identity, directory and environment."""
    joined = folders / "procs"
    joined.touch()
    network = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    kept, forgotten = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC), os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(forgotten, True)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    places = [os.readlink("/proc/self/ns/mnt"), str(folders / "over"), str(folders / "covered")]
    launch = proc_launch.Launch(
        sys.executable,
        ["python", "-I", "-S", "-c", TELL, ",".join(places)],
        {"LC_ALL": "C.UTF-8", "ONE": "two words", "EMPTY": ""},
        join_files=[str(joined)],
        network=network,
        covered=[str(folders / "covered")],
        directory=str(folders),
        keep=[kept],
    )
    try:
        by_starter = _told(launch, folders)
        assert joined.read_bytes() == b"0"
        monkeypatch.setattr(launcher, "there", lambda: False)
        joined.write_bytes(b"")
        by_fork = _told(launch, folders)
        assert joined.read_bytes() == b"0"
    finally:
        signal.signal(signal.SIGUSR1, before)
        for fd in (network, kept, forgotten):
            os.close(fd)
    assert by_starter == by_fork
    assert by_starter["fds"] == [0, 1, 2, kept]
    assert by_starter["session"] == [True, True]
    assert by_starter["seen"] == [["of-shown"], []]
    assert by_starter["own mounts"]
    assert by_starter["environment"] == {"LC_ALL": "C.UTF-8", "ONE": "two words", "EMPTY": ""}
    assert int(by_starter["status"]["SigBlk"], 16) == 0
    assert by_starter["status"]["Umask"].strip() == "0077"
    # The start changed nothing in this process.
    assert sorted(os.listdir(folders / "over")) == ["of-over"]


def test_network_of_its_own_is_new_one_with_nothing_up(way: str) -> None:
    show = ["sh", "-c", "readlink /proc/self/ns/net; cat /sys/class/net/lo/flags /proc/net/dev"]
    with spawn.spawn(proc_launch.Launch("/bin/sh", show, {"PATH": "/bin"}, own_network=True)) as child:
        assert child.reap() == 0
        space, _, devices = os.read(child.stdout, 4096).decode().partition("\n")
    assert space.startswith("net:[")
    assert space != os.readlink("/proc/self/ns/net")
    assert [line.split(":")[0].strip() for line in devices.splitlines() if ":" in line] == ["lo"]


FAILURES: dict[str, tuple[Callable[[int], proc_launch.Launch], str]] = {
    "join": (lambda fd: proc_launch.Launch(*TRUE, join_files=["/nowhere/procs"]), "join the cgroup: No such file"),
    "join a folder": (lambda fd: proc_launch.Launch(*TRUE, join_files=["/"]), "join the cgroup: Is a directory"),
    "network": (
        lambda fd: proc_launch.Launch(*TRUE, network=fd),
        r"enter the network namespace: (\w+: )?Invalid argument",
    ),
    "cover": (lambda fd: proc_launch.Launch(*TRUE, covered=["/nowhere"]), r"attach the mounts: (\w+: )?No such file"),
    "attach": (
        lambda fd: proc_launch.Launch(*TRUE, mounts=[proc_launch.Attach(fd, "/")]),
        r"attach the mounts: (\w+: )?Invalid",
    ),
    "directory": (lambda fd: proc_launch.Launch(*TRUE, directory="/nowhere"), "connect stdio: No such file"),
    "filter": (lambda fd: proc_launch.Launch(*TRUE, filter=b"\xff" * 8), r"load the filter: (\w+: )?Invalid argument"),
    "execute": (lambda fd: proc_launch.Launch("/nowhere", ["true"], {}), "execute /nowhere: No such file"),
    "a folder": (lambda fd: proc_launch.Launch("/", ["true"], {}), "execute /: Permission denied"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_step_that_fails_is_named(way: str, case: str) -> None:
    make, words = FAILURES[case]
    fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = sorted(os.listdir("/proc/self/fd"))
        with pytest.raises(errors.KernelError, match=f"cannot start the sandbox: {words}"):
            spawn.spawn(make(fd))
        assert sorted(os.listdir("/proc/self/fd")) == before
    finally:
        os.close(fd)


def test_it_dies_with_whoever_started_it(tmp_path: Path, way: str) -> None:
    out = tmp_path / "pid"
    code = f"""
import os, signal, sys
from sandbox.kernel.proc import spawn as process; from sandbox.kernel.proc import launcher as starter
if {way == "fork"}: starter.there = lambda: False
with process.spawn(process.Launch("/bin/sleep", ["sleep", "300"], {{}})) as child:
    open({str(out)!r}, "w").write(str(child.pid))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    environment = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    status, until = Path("/proc", out.read_text(), "stat"), time.monotonic() + 30
    while time.monotonic() < until and status.exists() and ") Z " not in status.read_text():
        time.sleep(0.01)
    assert not status.exists() or ") Z " in status.read_text()


def _directly(*words: str, version: str = "2", parent: int | None = None) -> tuple[int, bytes, bytes]:
    """Run the starter directly; return its exit status, its report, and the output of it and its program."""
    told, tell = os.pipe()
    try:
        head = [version, str(os.getpid() if parent is None else parent), str(tell)]
        command = [launcher.PROGRAM, *head, *words]
        done = subprocess.run(command, capture_output=True, pass_fds=[tell], check=False, timeout=60)
    finally:
        os.close(tell)
    with os.fdopen(told, "rb") as report:
        return done.returncode, report.read(), done.stdout + done.stderr


def test_alone_it_does_what_it_is_told() -> None:
    assert _directly("die", "execute", "/bin/echo", "echo", "here") == (0, b"", b"here\n")


def test_whose_caller_is_gone_does_nothing() -> None:
    """PR_SET_PDEATHSIG would give no signal for the death of another parent."""
    assert _directly("die", "execute", "/bin/echo", "echo", "here", parent=1) == (127, b"", b"")


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["walk", "execute", "/bin/echo", "echo"], 0),
        (["die", "join"], 1),
        (["die", "execute", "/bin/echo"], 1),
        (["die", "attach", "3"], 1),
    ],
)
def test_what_it_does_not_understand_is_no_step(words: list[str], number: int) -> None:
    status, told, printed = _directly(*words)
    assert (status, printed) == (127, b"")
    step, error = json.loads(told)
    assert (step, os.strerror(error)) == (number, "Protocol error")


# One instruction that allows every call (BPF_RET, SECCOMP_RET_ALLOW).
ALLOW = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000).hex()


@pytest.mark.parametrize("count", [1, 2, 64])
def test_filter_of_as_many_instructions_as_it_can_note_is_loaded(count: int) -> None:
    show = ("execute", "/bin/grep", "grep", "^Seccomp", "/proc/self/status")
    status, told, printed = _directly("die", *show)
    before = dict(line.split(":\t") for line in printed.decode().splitlines())
    assert (status, told) == (0, b"")
    status, told, printed = _directly("die", "filter", ALLOW * count, *show)
    after = dict(line.split(":\t") for line in printed.decode().splitlines())
    assert (status, told, after["Seccomp"]) == (0, b"", "2")
    assert int(after["Seccomp_filters"]) == int(before["Seccomp_filters"]) + 1


@pytest.mark.parametrize(
    "word", ["", ALLOW[:-1], ALLOW[:-2], ALLOW + "0", ALLOW[:-1] + "g", ALLOW.upper(), ALLOW * 65, "-" + ALLOW[1:]]
)
def test_what_is_no_filter_is_not_loaded(word: str) -> None:
    status, told, printed = _directly("die", "filter", word, "execute", "/bin/echo", "echo")
    assert (status, printed) == (127, b"")
    step, error = json.loads(told)
    assert (step, os.strerror(error)) == (1, "Invalid argument")


@pytest.mark.parametrize("word", ["-1", "3x", "", "99999999999", "0x3", " "])
def test_number_is_number(word: str) -> None:
    for words in (("network", word), ("keep", word), ("attach", word, "/")):
        status, told, printed = _directly("die", *words, "execute", "/bin/echo", "echo")
        assert (status, printed) == (127, b"")
        assert json.loads(told)[0] == 1


def test_of_another_version_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version differs after a package was upgraded under a running supervisor."""
    status, told, printed = _directly("execute", "/bin/echo", "echo", version="3")
    assert (status, printed, json.loads(told)[0]) == (127, b"", -1)
    monkeypatch.setattr(launcher, "VERSION", "3")
    with pytest.raises(errors.KernelError, match=r"cannot start the sandbox: understand `.*covenant-start`: Protocol"):
        spawn.spawn(proc_launch.Launch(*TRUE))


def test_more_descriptors_than_it_can_note_are_refused() -> None:
    keeps = [word for _ in range(65) for word in ("keep", "2")]
    status, told, printed = _directly(*keeps, "execute", "/bin/echo", "echo")
    assert (status, printed, json.loads(told)[0]) == (127, b"", 64)


def test_what_was_not_built_is_forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launcher, "PROGRAM", str(tmp_path / "covenant-start"))
    assert not launcher.there()
    with spawn.spawn(proc_launch.Launch("/bin/echo", ["echo", "here"], {})) as child:
        assert child.reap() == 0
        assert os.read(child.stdout, 100) == b"here\n"


def test_prepare_is_always_run() -> None:
    """`prepare` is Python code of the caller, and a quick start must not skip it."""
    with spawn.spawn(proc_launch.Launch(*TRUE, prepare=lambda: os._exit(42))) as child:
        assert child.reap() == 42


def test_what_is_only_covered_is_covered_in_namespace_of_its_own() -> None:
    """The test only compares the steps: without a namespace they would cover the host's own directory."""
    words = launcher.Steps(proc_launch.Launch(*TRUE, covered=["/srv/a", "/srv/b"])).words
    assert words[words.index("private") :][:5] == ["private", "cover", "/srv/a", "cover", "/srv/b"]
    assert "private" not in launcher.Steps(proc_launch.Launch(*TRUE)).words
