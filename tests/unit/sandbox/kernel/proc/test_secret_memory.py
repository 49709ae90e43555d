"""Memory for secrets as the kernel sees it: locked, in no dump, in no child, and zeros when it is given back."""

from __future__ import annotations

import faulthandler
import os
import resource
import signal
from collections.abc import Callable

import pytest

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.proc.secret_memory import Locked, guard_process

PR_GET_DUMPABLE = 3


def flags(address: int) -> set[str]:
    """The VmFlags of the mapping that holds an address (proc(5), smaps)."""
    inside = False
    with open("/proc/self/smaps") as stream:
        for line in stream:
            place, _, rest = line.partition(" ")
            if "-" in place:
                begin, end = (int(part, 16) for part in place.split("-"))
                inside = begin <= address < end
            elif inside and line.startswith("VmFlags:"):
                return set(rest.split())
    raise AssertionError("no such mapping")


def status_of(work: Callable[[], None]) -> int:
    """How a forked process ended: its exit status, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()  # the signal is what is looked for
        try:
            work()
        except BaseException:
            os._exit(99)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_its_pages_are_locked_and_in_no_dump_and_no_child() -> None:
    with Locked(100) as secret:
        assert {"lo", "dd", "dc"} <= flags(secret._address())
        secret.view[:4] = b"here"
        # The child has not these pages; a plain one is the control.
        plain = bytearray(b"here")
        assert status_of(lambda: os._exit(plain[0])) == ord("h")
        assert status_of(lambda: os._exit(secret.view[0])) == -signal.SIGSEGV
        assert bytes(secret.view[:4]) == b"here"


def test_it_is_overwritten_also_under_whoever_still_looks() -> None:
    secret = Locked(8)
    secret.fill_random()
    slice_of_it = secret.view[2:6]
    assert any(secret.view)
    secret.close()
    assert bytes(slice_of_it) == bytes(4)
    secret.close()  # a second time is none


def test_random_bytes_are_others_each_time() -> None:
    with Locked(32) as one, Locked(32) as other:
        one.fill_random()
        other.fill_random()
        assert bytes(one.view) != bytes(other.view) != bytes(32)


def test_what_says_itself_does_not_say_its_content() -> None:
    with Locked(6) as secret:
        secret.view[:] = b"sesame"
        assert "sesame" not in repr(secret) + str(secret) + repr(secret.view)


def test_guarded_process_leaves_no_core_and_is_nobodys_to_trace() -> None:
    def look() -> None:
        libc.prctl(libc.PR_SET_DUMPABLE, 1)
        assert libc.prctl(PR_GET_DUMPABLE) == 1, "the control"
        guard_process()
        assert libc.prctl(PR_GET_DUMPABLE) == 0
        assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)

    assert status_of(look) == 0


def test_memory_that_cannot_be_locked_is_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, length: int) -> None:
        raise OSError(12, "mlock: Cannot allocate memory")

    monkeypatch.setattr(libc, "mlock", refuse)
    with pytest.raises(errors.KernelError, match="memory for secrets"):
        Locked(1)
