"""Check that a forked shim inherits nothing from its parent and leaves nothing in it."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.shim import process
from tests.unit.sandbox import forked


def _open_fds() -> list[int]:
    return sorted(int(name) for name in os.listdir("/proc/self/fd"))


def test_it_has_only_descriptors_kept() -> None:
    many = [os.open("/dev/zero", os.O_RDONLY) for _ in range(20)]
    try:

        def look() -> Any:
            return {"open": _open_fds(), "stdio": [os.readlink(f"/proc/self/fd/{n}") for n in range(3)]}

        seen = forked.returned(look)
        # 0 to 2, the pipe, and the directory that the listing reads.
        assert len(seen["open"]) == 5
        assert not set(many) & set(seen["open"][:-1])
        assert seen["stdio"] == ["/dev/null"] * 3
    finally:
        for fd in many:
            os.close(fd)


def test_it_keeps_several_and_closes_between_them() -> None:
    fds = [os.open("/dev/zero", os.O_RDONLY | os.O_CLOEXEC) for _ in range(5)]
    inherited = [fds[1], fds[3]]

    def work() -> None:
        names = set(_open_fds())
        ok = set(inherited) <= names and not {fds[0], fds[2], fds[4]} & names
        os._exit(0 if ok else 7)

    child = process.fork(work, keep=inherited)
    assert child.reap() == 0
    child.close()
    for fd in fds:
        os.close(fd)


def test_signals_are_as_for_new_process_and_session_is_its_own() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        seen = forked.returned(
            lambda: {
                "usr1": signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL,
                "pipe": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
                "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
                "session": os.getsid(0) == os.getpid(),
            }
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert seen == {"usr1": True, "pipe": True, "mask": 0, "session": True}


def test_what_is_raised_in_it_stays_in_it(capfd: pytest.CaptureFixture[str]) -> None:
    cleaned = []

    def work() -> None:
        cleaned.append("in the keeper")
        raise RuntimeError("of the keeper's own")

    try:
        child = process.fork(work, keep=[2])
        assert child.reap() == 1
        child.close()
    finally:
        # Only this process leaves the block; the shim does not.
        cleaned.append("here")
    assert cleaned == ["here"]
    assert "of the keeper's own" in capfd.readouterr().err


def test_it_cleans_up_when_it_is_asked_to_end() -> None:
    ours, its = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        try:
            os.write(its, b"1")
            time.sleep(60)
        finally:
            os.write(its, b"2")

    child = process.fork(work, keep=[its])
    os.close(its)
    assert os.read(ours, 1) == b"1"
    assert child.reap(block=False) is None
    assert not process.wait(child.pidfd, 0)
    child.signal(signal.SIGTERM)
    assert os.read(ours, 1) == b"2"
    assert child.reap() == 1
    assert process.wait(child.pidfd, 0)
    child.signal(signal.SIGTERM)  # the child is gone, and no other process gets the signal
    child.close()
    child.close()
    os.close(ours)


def test_killed_one_says_so() -> None:
    child = process.fork(lambda: time.sleep(60))
    child.signal(signal.SIGKILL)
    assert child.reap() == 128 + signal.SIGKILL
    child.close()


def _children() -> set[str]:
    """Return our child processes with zombies; a worker of the test runner may have children of other tests."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_process_that_cannot_be_made_is_error_and_leaves_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = _children()
    # The kernel gives out the lowest free number.
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(errors.KernelError, match="pidfd_open"):
            process.fork(lambda: time.sleep(60))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert _children() == before
