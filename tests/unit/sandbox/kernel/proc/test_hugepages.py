"""Pages of 2 MiB: what is put together holds what it held, in this process and in one that is forked from it."""

from __future__ import annotations

import hashlib
import os

import pytest

from sandbox.kernel import libc
from sandbox.kernel.proc import hugepages

_MAPS = """\
55d2c0000000-55d2c0100000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000900000 rw-p 00000000 00:00 0
7f0001000000-7f0001400000 r--p 00000000 00:00 0
7f0002000000-7f0002400000 rw-s 00000000 00:01 12                         /dev/zero (deleted)
7f0003000000-7f0003400000 rw-p 00000000 fe:00 99                         /usr/lib/libc.so.6
7ffc00000000-7ffc00400000 rw-p 00000000 00:00 0                          [stack]
"""


def test_only_whole_regions_of_memory_process_s_own_are_asked_for() -> None:
    assert [hex(one) for one in hugepages.regions(_MAPS)] == ["0x7f0000200000", "0x7f0000400000", "0x7f0000600000"]


def test_what_was_put_together_holds_what_it_held_and_fork_s_writes_stay_its_own() -> None:
    held = [os.urandom(4000) for _ in range(2000)]
    digest = hashlib.sha256(b"".join(held)).digest()
    hugepages.collapse()
    assert hashlib.sha256(b"".join(held)).digest() == digest
    pid = os.fork()
    if pid == 0:
        same = hashlib.sha256(b"".join(held)).digest() == digest
        held[:] = [bytes(4000) for _ in held]
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert hashlib.sha256(b"".join(held)).digest() == digest


def test_kernel_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuse(address: int, length: int, advice: int) -> None:
        asked.append(address)
        raise OSError(22, "madvise")

    monkeypatch.setattr(libc, "madvise", refuse)
    monkeypatch.setattr(hugepages, "regions", lambda maps: iter((1 << 30, 2 << 30)))
    assert (hugepages.collapse(), asked) == (0, [1 << 30, 2 << 30])
