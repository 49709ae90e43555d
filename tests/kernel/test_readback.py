"""Reading a network namespace and a filter out of the kernel: each thing that is put there is a line, and one only."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel import libc
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.net import dump as net_dump
from sandbox.kernel.net import netns
from sandbox.kernel.seccomp import dump

IP, NFT = "/usr/sbin/ip", "/usr/sbin/nft"


@pytest.fixture(scope="module")
def space() -> Iterator[int]:
    (fd,) = netns.make()
    run(fd, f"{IP} link set lo up")
    run(fd, f"{IP} link add a0 address 02:00:00:00:00:01 type veth peer name b0 address 02:00:00:00:00:02")
    run(fd, f"{IP} link set a0 up")
    yield fd
    os.close(fd)


def run(fd: int, command: str) -> None:
    done = netns.within(fd, lambda: subprocess.run(command.split(), capture_output=True, text=True, timeout=60))
    assert done.returncode == 0, (command, done.stderr)


def _program(words: str) -> str:
    return f"/usr/sbin/{words}" if words.startswith("tc ") else f"{IP} {words}"


# What is done, what undoes it, and the words of the line that is there meanwhile.
THINGS = [
    ("address add 10.0.0.1/24 dev a0", "address delete 10.0.0.1/24 dev a0", "address 10.0.0.1/24 at device"),
    ("address add fd00::1/64 dev a0 nodad", "address delete fd00::1/64 dev a0", "address fd00::1/64"),
    ("route add 10.1.0.0/16 dev a0", "route delete 10.1.0.0/16", "route unicast 10.1.0.0/16 in table 254"),
    ("route add blackhole 10.3.0.0/16", "route delete blackhole 10.3.0.0/16", "route blackhole 10.3.0.0/16"),
    ("route add local 10.4.0.0/16 dev lo", "route delete local 10.4.0.0/16 dev lo", "route local 10.4.0.0/16"),
    ("route add 10.5.0.0/16 dev a0 table 7", "route flush table 7", "in table 7"),
    ("rule add fwmark 3 lookup 7", "rule delete fwmark 3 lookup 7", "rule 2"),
    ("neigh add 10.0.0.9 lladdr 02:00:00:00:00:09 nud permanent dev a0", "neigh delete 10.0.0.9 dev a0",
     "neighbour 10.0.0.9 02:00:00:00:00:09"),
    ("link add c0 type veth peer name d0", "link delete c0", "c0 veth"),
    ("link set a0 mtu 1400", "link set a0 mtu 1500", "mtu 1400"),
    ("tc qdisc add dev a0 clsact", "tc qdisc delete dev a0 clsact", "queue clsact"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "undo", "line"), THINGS, ids=[line for _, _, line in THINGS])
def test_what_is_put_there_is_line_and_gone_when_it_is_gone(space: int, make: str, undo: str, line: str) -> None:
    before = netns.within(space, net_dump.lines)
    run(space, _program(make))
    more = netns.within(space, net_dump.lines) - before
    run(space, _program(undo))
    assert [one for one in more if line in one], more
    assert netns.within(space, net_dump.lines) == before


def _attached(device: str) -> int | None:
    """A link of a program that lets everything pass to the ingress of a device (tcx); None before Linux 6.6."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    # r0 = 0; exit (linux/bpf.h): BPF_PROG_LOAD of type SCHED_CLS, then BPF_LINK_CREATE at BPF_TCX_INGRESS.
    code = ctypes.create_string_buffer(struct.pack("=BBhiBBhi", 0xB7, 0, 0, 0, 0x95, 0, 0, 0))
    terms = ctypes.create_string_buffer(b"GPL")
    load = struct.pack("=IIQQ", 3, 2, ctypes.addressof(code), ctypes.addressof(terms))
    program = call(libc.SYS_BPF, 5, ctypes.create_string_buffer(load, 120), 120)
    assert program >= 0, os.strerror(ctypes.get_errno())
    attach = struct.pack("=IIII", program, socket.if_nametoindex(device), 46, 0)
    link: int = call(libc.SYS_BPF, 28, ctypes.create_string_buffer(attach, 64), 64)
    number = ctypes.get_errno()
    os.close(program)
    assert link >= 0 or number == errno.EINVAL, os.strerror(number)
    return link if link >= 0 else None


def test_program_at_device_is_line_and_gone_when_it_is_gone(space: int) -> None:
    """It sees frames before every rule and may send them elsewhere; `tc` and `ip` of this machine list none of it."""
    before = netns.within(space, net_dump.lines)
    link = netns.within(space, lambda: _attached("a0"))
    if link is None:
        return
    more = netns.within(space, net_dump.lines) - before
    os.close(link)
    assert [one.partition(" of ")[0] for one in more] == ["program at ingress"]
    assert netns.within(space, net_dump.lines) == before


def test_number_of_rules_moves_with_each_transaction_and_by_nothing_else(space: int) -> None:
    first = netns.within(space, net_dump.generation)
    assert netns.within(space, net_dump.generation) == first
    run(space, f"{NFT} list ruleset")
    assert netns.within(space, net_dump.generation) == first
    run(space, f"{NFT} add table inet one")
    second = netns.within(space, net_dump.generation)
    assert second != first
    (other,) = netns.make()
    try:
        run(other, f"{NFT} add table inet one")
        assert netns.within(space, net_dump.generation) == second, "each namespace has its own"
    finally:
        os.close(other)


FILTERED = """
import ctypes, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
for raw in map(bytes.fromhex, sys.argv[1:]):
    program = Program(len(raw) // 8, raw)
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
print("loaded", flush=True)
sys.stdin.read()
"""
# return ALLOW, in one instruction and in two (linux/filter.h, linux/seccomp.h).
ALLOW = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000)
LONGER = struct.pack("=HBBI", 0x20, 0, 0, 0) + ALLOW


def test_filters_are_read_out_of_process_that_has_them_oldest_first() -> None:
    command = [sys.executable, "-c", FILTERED, ALLOW.hex(), LONGER.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None
        assert one.stdout.readline() == b"loaded\n"
        expected = tuple(f"{len(raw) // 8}:{hashlib.sha256(raw).hexdigest()}" for raw in (ALLOW, LONGER))
        assert dump.digests(one.pid) == expected
        assert dump.digests(one.pid) == expected, "reading changes nothing"
    assert one.returncode == 0, "it went on as if nobody had looked"


def test_who_is_frozen_is_not_waited_for_and_read_once_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen process cannot be stopped by a tracer, and the process that froze it may be waiting for us."""
    monkeypatch.setattr(dump, "_DEADLINE_SECONDS", 3600.0)
    expected = (f"1:{hashlib.sha256(ALLOW).hexdigest()}",)
    command = [sys.executable, "-c", FILTERED, ALLOW.hex()]
    with (
        cgroup.Leaf(cgroup.Hierarchies.read(), f"test-readback-{os.getpid()}") as leaf,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one,
    ):
        assert one.stdout is not None
        assert one.stdout.readline() == b"loaded\n"
        for file in leaf.join_files():
            Path(file).write_text(str(one.pid))
        assert dump.digests(one.pid) == expected
        leaf.freeze()
        try:
            assert dump.digests(one.pid) is None
        finally:
            leaf.thaw()
        assert dump.digests(one.pid) == expected
    assert one.returncode == 0


def test_process_without_filter_is_not_read_and_one_gone_says_so() -> None:
    """The kernel says EINVAL for a process without one, as it does where it cannot say."""
    with subprocess.Popen(["/usr/bin/cat"], stdin=subprocess.PIPE) as one:
        assert dump.digests(one.pid) is None
    with pytest.raises(ProcessLookupError):
        dump.digests(one.pid)
