"""Check the judgement of the three files behind an agent's descriptors, on descriptors of a real process."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from sandbox.attest import streams
from sandbox.kernel import procfs
from tests.unit.sandbox.attest.test_verifier import GOFER, SANDBOX

_WAITS = (
    "import os, sys\nfor n, fd in enumerate(map(int, sys.argv[1:])):\n    if fd >= 0: os.dup2(fd, 256 + n)\n"
    "os.write(1, b'x')\nsys.stdin.read()"
)


@contextmanager
def holding(*fds: int) -> Iterator[int]:
    """A process that has these files where gVisor has an agent's streams; -1 is none."""
    given = [fd for fd in fds if fd >= 0]
    command = [sys.executable, "-c", _WAITS, *map(str, fds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=given) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"x"
        yield process.pid
        process.communicate()


def judged(pid: int, *expected: str) -> list[str]:
    """Return what was found of each descriptor that is another."""
    sandbox = structs.replace(SANDBOX, name=procfs.Name(pid, 0))
    layers = list(streams.judge(sandbox, structs.replace(GOFER, name=procfs.Name(pid, 0)), expected))
    assert {layer.name for layer in layers} <= {"streams"}
    assert not any(layer.holds for layer in layers)
    return [layer.found for layer in layers]


def test_streams_of_pipes_hold() -> None:
    (one_r, one_w), (two_r, two_w) = os.pipe(), os.pipe()
    with holding(one_r, two_w, two_w) as pid:
        assert judged(pid, streams.pipe(one_w), streams.pipe(two_r), streams.pipe(two_r)) == []
        swapped = judged(pid, streams.pipe(two_r), streams.pipe(two_r), streams.pipe(one_w))
        assert swapped == [f"it is {streams.pipe(one_r)}", f"it is {streams.pipe(two_w)}"]
    for fd in (one_r, one_w, two_r, two_w):
        os.close(fd)


def test_stream_that_is_another_terminal_is_drift() -> None:
    (master, slave), (callers, caller) = pty.openpty(), pty.openpty()
    mine = streams.terminal(master)
    assert mine is not None
    with holding(slave, slave, caller) as pid:
        assert judged(pid, mine, mine, mine) == [f"it is {streams.terminal(callers)}"]
        assert len(judged(pid, *streams.UNKNOWN)) == 3, "before the terminal has come"
    for fd in (master, slave, callers, caller):
        os.close(fd)


def test_stream_that_is_closed_holds() -> None:
    with holding(-1, -1, -1) as pid:
        assert judged(pid, "pipe:[1]", "pipe:[2]", "pipe:[3]") == []


@pytest.mark.parametrize("mounted", [True, False])
def test_stream_that_is_file_holds_if_agent_sees_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mounted: bool
) -> None:
    """gVisor uses the number of a closed stream again, for files of the agent's root."""
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    if not mounted:
        monkeypatch.setattr(procfs, "mount_ids", lambda pid: set())
    with holding(file, -1, -1) as pid:
        found = judged(pid, "pipe:[1]", "pipe:[2]", "pipe:[3]")
    assert found == ([] if mounted else [f"it is {tmp_path}/file"])
    os.close(file)


def test_stream_that_is_null_device_is_drift() -> None:
    null = os.open("/dev/null", os.O_RDONLY)
    with holding(null, -1, -1) as pid:
        (found,) = judged(pid, "pipe:[1]", "pipe:[2]", "pipe:[3]")
    assert "1:3" in found
    os.close(null)
