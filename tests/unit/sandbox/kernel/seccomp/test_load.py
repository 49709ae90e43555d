"""The trusted-local filter as libseccomp builds it, read decision by decision without loading it."""

from __future__ import annotations

import errno
import functools
import os

import pytest
from msgspec import structs

from policy import data, errors
from policy.compile import seccomp
from policy.decompile import bpf
from sandbox.kernel.seccomp import load

X86 = 0xC000003E
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBERS = data.syscalls("x86_64").numbers


def described(**changes: object) -> seccomp.DenyFilter:
    denied = seccomp.compile_denylist(data.deny().names, arch="x86_64", network=False)
    return structs.replace(denied, **changes)


@pytest.fixture(scope="module")
def program() -> bytes:
    return load.export(load.prepare(described()))


def act(program: bytes, name: str, *arguments: int, arch: int = X86) -> int:
    return bpf.decide(program, number=NUMBERS[name], arch=arch, arguments=arguments)


def test_all_of_deny_list_is_refused_and_nothing_else_is(program: bytes) -> None:
    denied = {NUMBERS[name] for name in data.deny().names if name in NUMBERS}
    assert len(denied) > 70
    for number in range(601):
        # AF_UNIX and no flags: what the argument rules let pass.
        action = bpf.decide(program, number=number, arch=X86, arguments=[1 if number in (41, 53) else 0])
        expected = ENOSYS if number == NUMBERS["clone3"] else EPERM if number in denied else bpf.ALLOW
        assert action == expected, number


@pytest.mark.parametrize("bit", [17, 25, 26, 27, 28, 29, 30])  # CLONE_NEW* of linux/sched.h
def test_each_namespace_flag_of_clone_is_refused(program: bytes, bit: int) -> None:
    flag = 1 << bit
    for flags in (flag, flag | 17, flag | 0x003D0F00, flag | 1 << 40):
        assert act(program, "clone", flags) == EPERM
    assert act(program, "clone", 0x003D0F00) == bpf.ALLOW
    assert act(program, "clone", 17) == bpf.ALLOW


@pytest.mark.parametrize("call", ["socket", "socketpair"])
def test_no_family_but_unix(program: bytes, call: str) -> None:
    assert act(program, call, 1) == bpf.ALLOW
    for family in (0, *range(2, 64), 1 | 1 << 32, 2 | 1 << 32, 2**64 - 1):
        assert act(program, call, family) == EPERM, family


@pytest.mark.parametrize("family", [*range(64), 1 << 32 | 2, 2**64 - 1])
def test_network_allows_tcp_udp_and_unix_only(family: int) -> None:
    free = _network_program()
    for kind in range(12):
        for flags in (0, 0x80000, 0x800, 0x80800, 1 << 40):
            for protocol in (0, 1, 6, 17, 132, 136, 256, 262, 1 << 32 | 6):
                fits = kind in ((1, 2, 5) if family == 1 else (1, 2)) and protocol & 0xFFFFFFFF in (0, 6, 17)
                passes = family in (1, 2, 10) and fits
                answer = act(free, "socket", family, kind | flags, protocol)
                assert (answer == bpf.ALLOW) == passes, (kind, flags, protocol)
    assert (act(free, "socketpair", family, 1) == bpf.ALLOW) == (family == 1)


@functools.cache
def _network_program() -> bytes:
    return load.export(load.prepare(seccomp.compile_denylist([], arch="x86_64", network=True)))


@pytest.mark.parametrize("upper", [0, 1 << 32, 0xFFFFFFFF << 32])
def test_what_acts_on_terminal_for_others_is_refused(program: bytes, upper: int) -> None:
    refused = {0x5412, 0x541C, 0x5423}  # TIOCSTI, TIOCLINUX, TIOCSETD
    for request in (*range(0x5400, 0x5460), 0, 0xFFFFFFFF, 0x80045430):
        assert act(program, "ioctl", 0, request | upper) == (EPERM if request in refused else bpf.ALLOW), hex(request)


@pytest.mark.parametrize("upper", [0, 1 << 32, 0xFFFFFFFF << 32])
def test_no_personality_but_ordinary_one(program: bytes, upper: int) -> None:
    for value in (0, 0xFFFFFFFF):
        assert act(program, "personality", value | upper) == bpf.ALLOW
    for bit in range(32):
        for value in (1 << bit, 0xFFFFFFFF ^ 1 << bit, (1 << bit) - 1 or 1, 0x80000000 | 1 << bit >> 1):
            assert (act(program, "personality", value | upper) == EPERM) == (value not in (0, 0xFFFFFFFF)), hex(value)


def test_export_is_same_each_time_and_leaves_no_descriptor() -> None:
    prepared = load.prepare(described())
    before = set(os.listdir("/proc/self/fd"))
    assert load.export(prepared) == load.export(prepared)
    assert load.export(prepared) == load.export(load.prepare(described()))
    assert set(os.listdir("/proc/self/fd")) == before


class Broken:
    """A filter whose export fails as libseccomp reports it."""

    def export_bpf(self, file: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_export_that_fails_is_error() -> None:
    with pytest.raises(errors.HostError, match="No space left"):
        load.export(Broken())


def test_no_32_bit_and_no_x32_call_passes(program: bytes) -> None:
    for number in (0, 1, 20, 39, 59, 0x40000000, 0x40000000 + 39, 0x40000000 + 520, 0x7FFFFFFF, 0xFFFFFFFE):
        assert bpf.decide(program, number=number, arch=0x40000003) == EPERM
        if number >= 0x40000000:
            assert bpf.decide(program, number=number, arch=X86) == EPERM


def test_number_that_libseccomp_disagrees_with_is_error() -> None:
    wrong = seccomp.DenyRule("bpf", NUMBERS["read"], errno.EPERM)
    with pytest.raises(errors.HostError, match="`bpf` is 0 in our table and 321"):
        load.prepare(described(rules=(wrong,)))


def test_call_that_libseccomp_knows_but_our_table_does_not_is_error() -> None:
    with pytest.raises(errors.HostError, match="knows system call `bpf`"):
        load.prepare(described(absent=("bpf",)))


def test_call_newer_than_libseccomp_is_denied_by_number() -> None:
    future = seccomp.DenyRule("a_call_of_tomorrow", 599, errno.EPERM)
    prepared = load.prepare(described(rules=(future,), absent=("stime", "no_such_call")))
    assert bpf.decide(load.export(prepared), number=599, arch=X86) == EPERM


def test_filter_of_another_architecture_is_not_loaded() -> None:
    arm = seccomp.compile_denylist(["bpf"], arch="aarch64", network=True)
    with pytest.raises(errors.HostError, match="`aarch64`"):
        load.prepare(arm)
