"""Reading processes: one's own child as the kernel shows it, and that what is gone, or another, is said to be."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel import procfs
from sandbox.kernel.procfs import Name, ProcessMount

SLEEP = (
    "import subprocess, sys, time\nchild = subprocess.Popen(['/usr/bin/sleep', '60'])\nprint(child.pid, flush=True)\n"
)


@pytest.fixture
def child() -> Iterator[tuple[int, int]]:
    """A child of ours and a child of its."""
    code = SLEEP + "sys.stdin.read()\nchild.kill()\nchild.wait()\n"
    with subprocess.Popen(
        [sys.executable, "-c", code, "an argument"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as one:
        assert one.stdout is not None
        yield one.pid, int(one.stdout.readline())


def test_process_is_what_it_is(child: tuple[int, int]) -> None:
    found = procfs.process(child[0])
    assert found is not None
    assert found.name == procfs.name(child[0])
    assert found.parent == os.getpid() == procfs.parent(child[0])
    assert found.arguments[-1] == "an argument"
    assert found.uid == os.geteuid()
    assert (found.no_new_privs, found.seccomp, found.filters) == (False, 0, 0)
    assert found.namespaces == procfs.namespaces()
    info = os.stat(sys.executable)
    assert (found.binary.device, found.binary.inode, found.binary.size) == (info.st_dev, info.st_ino, info.st_size)
    assert found.capabilities["CapInh"] >= 0
    assert procfs.thread_cgroups(child[0]) == [found.cgroups]


def test_family_is_all_that_descend_and_no_other(child: tuple[int, int]) -> None:
    mine = procfs.name(child[0])
    assert mine is not None
    assert procfs.family(mine) == list(child)
    assert procfs.family(Name(mine.pid, mine.start + 1)) is None, "another process with this number"
    assert procfs.descends(child[1], {child[0]})
    assert not procfs.descends(child[0], {child[1]})
    assert not procfs.descends(os.getpid(), {child[0]})


def test_family_is_same_by_each_ones_children_and_by_everybodys_parent(
    child: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = procfs.name(child[0])
    assert mine is not None
    for tells in (True, False):
        monkeypatch.setattr(procfs, "tells_children", lambda tells=tells: tells)
        assert procfs.family(mine) == list(child)


def test_who_is_known_to_be_there_is_of_family_only_if_it_descends(
    child: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the kernel left one out of a list of children, and a stranger is in the cgroup."""
    mine = procfs.name(child[0])
    assert mine is not None
    monkeypatch.setattr(procfs, "by_children", lambda first: [first])
    assert procfs.family(mine) == [child[0]], "the control: it was left out"
    assert procfs.family(mine, {*child, os.getpid(), os.getppid()}) == list(child)


def test_children_of_every_thread_are_of_family() -> None:
    code = (
        "import subprocess, sys, threading\n"
        "def begin(): print(subprocess.Popen(['/usr/bin/sleep', '60']).pid, flush=True); sys.stdin.read()\n"
        "threading.Thread(target=begin).start()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        child = int(one.stdout.readline())
        mine = procfs.name(one.pid)
        assert mine is not None
        try:
            assert procfs.family(mine) == [one.pid, child]
        finally:
            os.kill(child, signal.SIGKILL)
            one.communicate(b"")


def test_what_has_ended_is_gone_though_nobody_waited_for_it() -> None:
    with subprocess.Popen(["/usr/bin/true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert procfs.name(ended.pid) is None
        assert procfs.process(ended.pid) is None
        assert procfs.exits(ended.pid)
    assert not procfs.exits(os.getpid())
    assert procfs.exits(ended.pid)
    assert procfs.thread_cgroups(ended.pid) == []
    assert procfs.parent(ended.pid) in (0, os.getpid())


def test_who_lives_in_namespace(child: tuple[int, int]) -> None:
    inode = procfs.namespaces()["net"]
    found = procfs.in_namespace("net", [inode, 1])
    assert {*child, os.getpid()} <= found[inode]
    assert found[1] == set()


def test_binary_is_one_that_runs_whatever_its_name_leads_to(tmp_path: Path) -> None:
    copy = tmp_path / "sleeper"
    copy.write_bytes(Path("/usr/bin/sleep").read_bytes())
    copy.chmod(0o755)
    with subprocess.Popen([copy, "60"]) as one:
        copy.rename(tmp_path / "old")
        copy.write_bytes(b"another")
        fd, binary = procfs.open_binary(one.pid)
        with os.fdopen(fd, "rb") as stream:
            assert (
                hashlib.file_digest(stream, "sha256").digest()
                == hashlib.sha256(Path("/usr/bin/sleep").read_bytes()).digest()
            )
        assert binary.inode == (tmp_path / "old").stat().st_ino
        one.kill()


def test_mount_is_its_place_its_own_flags_and_what_it_shows() -> None:
    text = (
        "137 134 254:0 /a\\040b/root / ro,nosuid,nodev,relatime - ext4 /dev/vda rw,discard\n"
        "138 137 0:42 / /tmp\\134x rw,noexec,noatime,nosymfollow,idmapped shared:3 - tmpfs none rw,size=4k\n"
    )
    assert procfs.parse_mounts(text) == (
        ProcessMount("/", ("ro", "nosuid", "nodev"), "254:0", "/a b/root", "ext4", ("rw", "discard")),
        ProcessMount("/tmp\\x", ("rw", "noexec", "nosymfollow", "idmapped"), "0:42", "/", "tmpfs", ("rw", "size=4k")),
    )


NAMED = """
import sys
for line in sys.stdin:
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(bytes.fromhex(line))
    print("named", flush=True)
"""


def test_process_with_name_of_any_bytes_is_read() -> None:
    """A name is its process's own to choose, and the other lines of its status are not."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdin is not None
        assert one.stdout is not None
        for name in (b"\xff\xfe\xc3(", b"\nUid:\t0\t0\t0\t0", b"\rSeccomp:\t2", b"\x85Uid:\t0\t"):
            one.stdin.write(name.hex().encode() + b"\n")
            one.stdin.flush()
            assert one.stdout.readline() == b"named\n"
            found = procfs.process(one.pid)
            assert found is not None
            assert (found.uid, found.seccomp) == (os.getuid(), 0)
        one.stdin.close()
