"""The seccomp compiler against libseccomp, decision by decision, and its own promises."""

from __future__ import annotations

import errno
import itertools
import random
import struct
import tempfile

import pyseccomp
import pytest

from policy import data, errors
from policy.compile import bpf as emitter
from policy.compile import seccomp
from policy.decompile import bpf

TAGS = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
LIBRARY = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}
FOREIGN_TAGS = (0x40000003, 0x40000028, 0, 0xFFFFFFFF)  # i386, arm, nonsense
X32 = 0x40000000
EDGES = (0x3FFFFFFF, X32, X32 + 1, X32 + 59, X32 + 512, X32 + 547, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF)
EPERM = 0x00050000 | errno.EPERM
ENOSYS = 0x00050000 | errno.ENOSYS
NEWUSER = 0x10000000
THREAD_FLAGS = 0x003D0F00  # what glibc's pthread_create passes


def known(arch: str) -> list[str]:
    """Names that can be granted and that this libseccomp can resolve for `arch`."""
    numbers = set(data.syscalls(arch).numbers) - data.deny().names
    return sorted(n for n in numbers if pyseccomp.resolve_syscall(LIBRARY[arch], n) >= 0)


def oracle(names: list[str], arch: str) -> bytes:
    """libseccomp's own program for the same grant."""
    theirs = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    theirs.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.ERRNO(errno.EPERM))
    if LIBRARY[arch] != pyseccomp.system_arch():
        theirs.remove_arch(pyseccomp.system_arch())
        theirs.add_arch(LIBRARY[arch])
    for name in names:
        if name == "clone":
            clear = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, 0x7E020000, 0)
            theirs.add_rule(pyseccomp.ALLOW, "clone", clear)
            theirs.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
        elif data.syscalls(arch).numbers.get(name) is not None:
            theirs.add_rule(pyseccomp.ALLOW, name)
    with tempfile.TemporaryFile() as file:
        theirs.export_bpf(file)
        file.seek(0)
        return file.read()


def grants(arch: str) -> dict[str, list[str]]:
    everything = known(arch)
    shuffled = list(everything)
    random.Random(7).shuffle(shuffled)
    return {
        "nothing": [],
        "one": ["read"],
        "python3": sorted(data.profile("python3").names & set(everything)),
        "node": sorted(data.profile("node").names & set(everything)),
        "static": sorted(data.profile("static").names & set(everything)),
        "every second": sorted(everything, key=data.syscalls(arch).numbers.__getitem__)[::2],
        "half at random": shuffled[: len(shuffled) // 2],
        "everything": everything,
    }


CASES = [(arch, which) for arch in TAGS for which in grants(arch)]


@pytest.mark.parametrize(("arch", "which"), CASES)
def test_each_decision_is_libseccomps(arch: str, which: str) -> None:
    names = grants(arch)[which]
    ours, theirs = seccomp.compile(names, arch=arch).bpf, oracle(names, arch)
    # What libseccomp is too old for stays out of both programs; the numbers are still asked for.
    for number in (*range(601), *EDGES):
        mine = bpf.decide(ours, number=number, arch=TAGS[arch])
        assert mine == bpf.decide(theirs, number=number, arch=TAGS[arch]), number
    for tag, number in itertools.product((*FOREIGN_TAGS, *TAGS.values()), (0, 1, 39, 59, 221, *EDGES)):
        if tag != TAGS[arch]:
            assert bpf.decide(ours, number=number, arch=tag) == EPERM
            assert bpf.decide(theirs, number=number, arch=tag) == EPERM


@pytest.mark.parametrize("arch", TAGS)
@pytest.mark.parametrize(
    "flags",
    [
        0,
        17,
        THREAD_FLAGS,
        0x7E020000,
        NEWUSER,
        NEWUSER | 17,
        1 << 40,
        (1 << 40) | NEWUSER,
        0xFFFFFFFFFFFFFFFF,
        0x81FDFFFF,
        *seccomp.NAMESPACE_FLAGS.values(),
    ],
)
def test_clone_is_granted_without_namespaces(arch: str, flags: int) -> None:
    ours, theirs = seccomp.compile(["clone"], arch=arch).bpf, oracle(["clone"], arch)
    number, tag = data.syscalls(arch).numbers["clone"], TAGS[arch]
    mine = bpf.decide(ours, number=number, arch=tag, arguments=[flags])
    assert mine == bpf.decide(theirs, number=number, arch=tag, arguments=[flags])
    assert (mine == bpf.ALLOW) == (not flags & 0x7E020000)


@pytest.mark.parametrize("arch", TAGS)
def test_clone3_says_that_it_does_not_exist_wherever_clone_is_granted(arch: str) -> None:
    number = data.syscalls(arch).numbers["clone3"]
    with_clone, without = seccomp.compile(["clone"], arch=arch), seccomp.compile(["read"], arch=arch)
    assert bpf.decide(with_clone.bpf, number=number, arch=TAGS[arch]) == ENOSYS
    assert bpf.decide(without.bpf, number=number, arch=TAGS[arch]) == EPERM
    assert {"names": ["clone3"], "action": "SCMP_ACT_TRACE"} in with_clone.oci["syscalls"]


def test_the_oci_form() -> None:
    assert seccomp.compile(["write", "clone", "read"], arch="x86_64").oci == {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 1,
        "architectures": ["SCMP_ARCH_X86_64"],
        "syscalls": [
            {"names": ["read", "write"], "action": "SCMP_ACT_ALLOW"},
            {
                "names": ["clone"],
                "action": "SCMP_ACT_ALLOW",
                "args": [{"index": 0, "value": 0x7E020000, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
            },
            {"names": ["clone3"], "action": "SCMP_ACT_TRACE"},
        ],
    }


def test_nothing_granted_is_a_filter_that_refuses_everything() -> None:
    artefact = seccomp.compile([], arch="aarch64")
    assert artefact.oci["syscalls"] == []
    assert bpf.allowed(artefact.bpf, arch=TAGS["aarch64"]) == ()


def test_no_rule_has_two_conditions_on_one_argument() -> None:
    # runsc ORs them.
    for rule in seccomp.compile(data.syscall_names() - data.deny().names, arch="x86_64").oci["syscalls"]:
        indexes = [check["index"] for check in rule.get("args", [])]
        assert len(indexes) == len(set(indexes))


def test_the_architecture_is_tested_before_the_number() -> None:
    code = list(struct.iter_unpack("<HBBI", seccomp.compile(["read"], arch="x86_64").bpf))
    assert code[:4] == [(0x20, 0, 0, 4), (0x15, 1, 0, 0xC000003E), (0x06, 0, 0, EPERM), (0x20, 0, 0, 0)]
    assert code[4:6] == [(0x35, 0, 1, X32), (0x06, 0, 0, EPERM)]


def test_long_jumps_are_used_and_right() -> None:
    # Far more than 255 instructions on one side of the root.
    decisions = [(i, emitter.Return(0x7FFF0000 if i % 2 else EPERM)) for i in range(1500)]
    program = emitter.program(decisions, audit_arch=1, other_arch=EPERM, number_limit=None)
    assert any(code == 0x05 for code, *_ in struct.iter_unpack("<HBBI", program))
    for number in range(1500):
        assert bpf.decide(program, number=number, arch=1) == (0x7FFF0000 if number % 2 else EPERM)


def test_a_program_too_long_for_the_kernel_is_refused() -> None:
    decisions = [(i, emitter.Return(i)) for i in range(2100)]
    with pytest.raises(ValueError, match="the kernel takes 4096"):
        emitter.program(decisions, audit_arch=1, other_arch=0, number_limit=None)


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 5, 3]])
def test_unsorted_decisions_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="sorted"):
        emitter.program([(s, emitter.Return(0)) for s in starts], audit_arch=1, other_arch=0, number_limit=None)


@pytest.mark.parametrize("arch", TAGS)
def test_the_worst_grant_fits_into_the_kernel(arch: str) -> None:
    worst = sorted(data.syscalls(arch).numbers, key=data.syscalls(arch).numbers.__getitem__)[::2]
    for names in (worst, data.syscalls(arch).numbers):
        assert len(seccomp.compile(set(names) - data.deny().names, arch=arch).bpf) // 8 < 1024


def test_the_same_bytes_for_any_order() -> None:
    names = sorted(data.profile("python3").names)
    first = seccomp.compile(names, arch="x86_64")
    for seed in range(20):
        random.Random(seed).shuffle(names)
        seccomp._compile.cache_clear()
        again = seccomp.compile([*names, *names[:5]], arch="x86_64")
        assert (again.oci, again.bpf, again.names) == (first.oci, first.bpf, first.names)


def test_a_changed_answer_does_not_reach_the_next_caller() -> None:
    seccomp.compile(["read"], arch="x86_64").oci["syscalls"][0]["names"].append("bpf")
    assert seccomp.compile(["read"], arch="x86_64").oci["syscalls"][0]["names"] == ["read"]


def test_a_call_of_another_architecture_is_left_out() -> None:
    artefact = seccomp.compile(["open", "openat"], arch="aarch64")
    assert artefact.names == ("openat",)
    assert artefact.oci["syscalls"] == [{"names": ["openat"], "action": "SCMP_ACT_ALLOW"}]
    assert seccomp.compile(["open", "openat"], arch="x86_64").names == ("open", "openat")


def test_a_misspelt_call_is_named() -> None:
    with pytest.raises(errors.UnknownSyscallError, match="`raed`"):
        seccomp.compile(["raed", "write"], arch="x86_64")


@pytest.mark.parametrize("name", sorted(data.deny().names & data.syscall_names()))
def test_nothing_of_the_deny_list_is_compiled(name: str) -> None:
    with pytest.raises(errors.DenyListViolation, match=f"`{name}`") as caught:
        seccomp.compile(["read", name], arch="x86_64")
    assert caught.value.grant == name


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(errors.HostError, match="`riscv64`"):
        seccomp.compile(["read"], arch="riscv64")
    with pytest.raises(errors.HostError, match="`riscv64`"):
        seccomp.compile_denylist(["bpf"], arch="riscv64", deny_socket_families_except=None)


def test_the_deny_filter_describes_itself() -> None:
    described = seccomp.compile_denylist(["stime", "bpf", "clone3"], arch="x86_64", deny_socket_families_except={1})
    assert described.absent == ("stime",)
    assert [(r.name, r.error) for r in described.rules[:2]] == [("bpf", errno.EPERM), ("clone3", errno.ENOSYS)]
    assert {r.name for r in described.rules} == {"bpf", "clone3", "clone", "socket", "socketpair"}
    shuffled = seccomp.compile_denylist({"clone3", "bpf", "stime"}, arch="x86_64", deny_socket_families_except=[1])
    assert described == shuffled


def test_a_call_that_is_denied_whole_gets_no_second_rule() -> None:
    described = seccomp.compile_denylist(["socket", "clone"], arch="x86_64", deny_socket_families_except={1})
    assert [r.check for r in described.rules if r.name in ("socket", "clone")] == [None, None]
