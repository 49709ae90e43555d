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
from policy.data import argument_table
from policy.data.types import SESSION_CALL
from policy.decompile import bpf, calls

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


def oracle(names: list[str], arch: str, *, network: bool = False) -> bytes:
    """libseccomp's own program for the same grant."""
    theirs = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    theirs.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.ERRNO(errno.EPERM))
    if LIBRARY[arch] != pyseccomp.system_arch():
        theirs.remove_arch(pyseccomp.system_arch())
        theirs.add_arch(LIBRARY[arch])
    for name in names:
        alternatives = data.arguments().alternatives(name, network=network)
        if data.syscalls(arch).numbers.get(name) is None:
            continue
        if alternatives is None:
            theirs.add_rule(pyseccomp.ALLOW, name)
        for alternative in alternatives or ():
            checks = [pyseccomp.Arg(c.argument, pyseccomp.MASKED_EQ, c.mask, c.value) for c in alternative.conditions]
            theirs.add_rule(pyseccomp.ALLOW, name, *checks)
    if "clone" in names:
        theirs.add_rule(pyseccomp.ERRNO(errno.ENOSYS), "clone3")
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
    # Arguments are 0 here, which some rules refuse; test_each_rule_is_libseccomps_and_tables asks for others.
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
        *(1 << bit for bit in (17, 25, 26, 27, 28, 29, 30)),
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


def test_oci_form() -> None:
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


def test_oci_form_of_alternatives() -> None:
    def entry(*checks: dict[str, object]) -> dict[str, object]:
        return {"names": ["prctl"], "action": "SCMP_ACT_ALLOW", "args": list(checks)}

    def option(number: int) -> dict[str, object]:
        return {"index": 0, "value": 0xFFFFFFFF, "valueTwo": number, "op": "SCMP_CMP_MASKED_EQ"}

    found = seccomp.compile(["prctl"], arch="x86_64").oci["syscalls"]
    assert entry(option(15)) in found
    assert entry(option(38), {"index": 1, "value": 1, "op": "SCMP_CMP_EQ"}) in found
    assert len(found) == len(data.arguments().rules["prctl"].allow)


BOUNDARY_BITS = (0, 1 << 8, 1 << 11, 1 << 13, 1 << 19, 1 << 31, 1 << 32, 1 << 63, 0xFFFFFFFF00000000)


def probes(call: str) -> set[tuple[int, ...]]:
    """Arguments at and one step off each value of the rule of `call`, and its namesakes with upper bits set."""
    found: set[tuple[int, ...]] = {(0,) * 6, (2**64 - 1,) * 6}
    for alternative in data.arguments().rules[call].allow:
        exact = [0] * 6
        for condition in alternative.conditions:
            exact[condition.argument] = condition.value
        found.add(tuple(exact))
        for condition, step in itertools.product(alternative.conditions, (*BOUNDARY_BITS, 1, -1)):
            changed = list(exact)
            plus = exact[condition.argument] + step if abs(step) == 1 else exact[condition.argument] ^ step
            changed[condition.argument] = plus % 2**64
            found.add(tuple(changed))
    values = [sorted({p[i] for p in found})[:24] for i in range(3)]
    return found | {(a, b, c, 0, 0, 0) for a in values[0] for b in values[1] for c in values[2]}


@pytest.mark.parametrize("arch", TAGS)
@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("call", sorted(data.arguments().rules))
def test_each_rule_is_libseccomps_and_tables(arch: str, call: str, network: bool) -> None:
    number = data.syscalls(arch).numbers.get(call)
    artefact = seccomp.compile([call], arch=arch, network=network)
    if number is None:
        assert (artefact.names, artefact.oci["syscalls"]) == ((), [])
        return
    theirs = oracle([call], arch, network=network)
    alternatives = data.arguments().alternatives(call, network=network)
    assert alternatives
    answers = set()
    for arguments in probes(call):
        mine = bpf.decide(artefact.bpf, number=number, arch=TAGS[arch], arguments=arguments)
        assert mine == bpf.decide(theirs, number=number, arch=TAGS[arch], arguments=arguments), arguments
        meant = any(all(arguments[c.argument] & c.mask == c.value for c in a.conditions) for a in alternatives)
        assert mine == (bpf.ALLOW if meant else EPERM), arguments
        answers.add(mine)
    assert answers == {bpf.ALLOW, EPERM}


def test_network_widens_sockets_and_nothing_else() -> None:
    names = data.syscall_names() - data.deny().names - {SESSION_CALL}
    off, on = (seccomp.compile(names, arch="x86_64", network=network) for network in (False, True))
    assert off.names == on.names
    more = [rule for rule in on.oci["syscalls"] if rule not in off.oci["syscalls"]]
    assert {rule["names"][0] for rule in more} == {"socket"}
    assert [rule for rule in off.oci["syscalls"] if rule not in on.oci["syscalls"]] == []


def test_session_widens_sockets_and_terminals() -> None:
    names = data.syscall_names() - data.deny().names
    without, with_it = (
        [rule for rule in seccomp.compile(some, arch="x86_64").oci["syscalls"] if "args" in rule]
        for some in (names - {SESSION_CALL}, names)
    )
    assert {rule["names"][0] for rule in with_it if rule not in without} == {"socket", "ioctl"}
    assert [rule for rule in without if rule not in with_it] == []


def test_session_never_types_into_terminal() -> None:
    names = data.profile("command").names
    program = seccomp.compile(names, arch="x86_64").bpf
    for request in (0x5412, 0x541C, 0x5423):  # TIOCSTI, TIOCLINUX, TIOCSETD
        answer = bpf.decide(program, number=16, arch=TAGS["x86_64"], arguments=(0, request, 0, 0, 0, 0))
        assert answer == EPERM


def test_rule_of_which_no_alternative_holds_refuses_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = argument_table.read(
        1, {"getppid": {"reason": "x", "allow": [{"where": [[0, 1, 0]], "when": "network", "reason": "x"}]}},
        {"rest": [], "refuse": {}},
    )  # fmt: skip
    monkeypatch.setattr(data, "arguments", lambda: rules)
    seccomp.compile_rules.cache_clear()
    refused, granted = (seccomp.compile(["getppid", "read"], arch="x86_64", network=n) for n in (False, True))
    seccomp.compile_rules.cache_clear()
    number = data.syscalls("x86_64").numbers["getppid"]
    assert bpf.decide(refused.bpf, number=number, arch=TAGS["x86_64"]) == EPERM
    assert bpf.decide(granted.bpf, number=number, arch=TAGS["x86_64"]) == bpf.ALLOW
    assert [rule["names"] for rule in refused.oci["syscalls"]] == [["read"]]
    assert [rule["names"] for rule in granted.oci["syscalls"]] == [["read"], ["getppid"]]


# Numbers of asm-generic/unistd.h and, for x86_64, of arch/x86/entry/syscalls/syscall_64.tbl, written down by hand.
GOLDEN = {
    "x86_64": {"read": 0, "ioctl": 16, "socket": 41, "socketpair": 53, "clone": 56, "mknod": 133, "personality": 135,
               "prctl": 157, "arch_prctl": 158, "mknodat": 259, "seccomp": 317, "execve": 59, "openat": 257},
    "aarch64": {"read": 63, "ioctl": 29, "socket": 198, "socketpair": 199, "clone": 220, "mknodat": 33,
                "personality": 92, "prctl": 167, "seccomp": 277, "execve": 221, "openat": 56},
}  # fmt: skip


@pytest.mark.parametrize("arch", TAGS)
def test_numbers_are_those_of_architecture(arch: str) -> None:
    other = next(tag for name, tag in TAGS.items() if name != arch)
    for name, number in GOLDEN[arch].items():
        raw = seccomp.compile([name], arch=arch).bpf
        first = {"clone": [0], "ioctl": [0, 0x5401], "socket": [1, 1], "socketpair": [1, 1], "prctl": [15],
                 "arch_prctl": [0x1002], "seccomp": [2]}.get(name, [])  # fmt: skip
        answers = [bpf.decide(raw, number=n, arch=TAGS[arch], arguments=first) for n in range(600)]
        assert [n for n, answer in enumerate(answers) if answer == bpf.ALLOW] == [number]
        assert bpf.decide(raw, number=number, arch=other, arguments=first) == EPERM
    assert set(GOLDEN["x86_64"]) - set(GOLDEN["aarch64"]) == {"mknod", "arch_prctl"}
    assert set(data.arguments().rules) <= set(GOLDEN["x86_64"])


def test_alternatives_share_what_they_load_and_jump_far() -> None:
    def loads(*alternatives: tuple[emitter.Masked, ...]) -> tuple[bytes, int]:
        decision = emitter.IfAny(alternatives, hit=bpf.ALLOW, miss=EPERM)
        raw = emitter.program([(0, decision)], audit_arch=1, other_arch=EPERM, number_limit=None)
        return raw, sum(code == 0x20 and k >= 16 for code, _, _, k in struct.iter_unpack("<HBBI", raw))

    word = 0xFFFFFFFF
    raw, count = loads(*((emitter.Masked(1, word, value),) for value in range(0, 2000, 2)))
    assert count == 1
    for value in (0, 1, 2, 508, 510, 511, 512, 1020, 1998, 2000, 1 << 32):
        expected = bpf.ALLOW if value & word in range(0, 2000, 2) else EPERM
        assert bpf.decide(raw, number=0, arch=1, arguments=[0, value]) == expected, value
    raw, count = loads(*(
        (emitter.Masked(0, word, a), emitter.Masked(1, word, b)) for a in (1, 2) for b in range(3, 1000, 3)
    ))  # fmt: skip
    assert count == 3
    for a, b in itertools.product((0, 1, 2, 3), (0, 3, 4, 996, 999, 1000)):
        expected = bpf.ALLOW if a in (1, 2) and b in range(3, 1000, 3) else EPERM
        assert bpf.decide(raw, number=0, arch=1, arguments=[a, b]) == expected, (a, b)


@pytest.mark.parametrize("tests", [(), (emitter.Masked(0, 0, 0),), (emitter.Masked(0, 1, 2),)])
def test_what_always_or_never_holds_is_no_test(tests: tuple[emitter.Masked, ...]) -> None:
    decision = emitter.IfAny((tests,), hit=bpf.ALLOW, miss=EPERM)
    with pytest.raises(ValueError, match="hold"):
        emitter.program([(0, decision)], audit_arch=1, other_arch=EPERM, number_limit=None)


def test_nothing_granted_is_filter_that_refuses_everything() -> None:
    artefact = seccomp.compile([], arch="aarch64")
    assert artefact.oci["syscalls"] == []
    assert calls.read_bpf(artefact.bpf, "aarch64", {}) == calls.CallTable()


def test_no_rule_has_two_conditions_on_one_argument() -> None:
    # runsc ORs them.
    for rule in seccomp.compile(data.syscall_names() - data.deny().names, arch="x86_64").oci["syscalls"]:
        indexes = [check["index"] for check in rule.get("args", [])]
        assert len(indexes) == len(set(indexes))


def test_architecture_is_tested_before_number() -> None:
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


def test_program_too_long_for_kernel_is_refused() -> None:
    decisions = [(i, emitter.Return(i)) for i in range(2100)]
    with pytest.raises(ValueError, match="the kernel takes 4096"):
        emitter.program(decisions, audit_arch=1, other_arch=0, number_limit=None)


@pytest.mark.parametrize("starts", [[], [1], [0, 0], [0, 5, 3]])
def test_unsorted_decisions_are_refused(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="sorted"):
        emitter.program([(s, emitter.Return(0)) for s in starts], audit_arch=1, other_arch=0, number_limit=None)


@pytest.mark.parametrize("arch", TAGS)
def test_worst_grant_fits_into_kernel(arch: str) -> None:
    worst = sorted(data.syscalls(arch).numbers, key=data.syscalls(arch).numbers.__getitem__)[::2]
    for names in (worst, data.syscalls(arch).numbers):
        assert len(seccomp.compile(set(names) - data.deny().names, arch=arch).bpf) // 8 < 1024


def test_same_bytes_for_any_order() -> None:
    names = sorted(data.profile("python3").names)
    first = seccomp.compile(names, arch="x86_64")
    for seed in range(20):
        random.Random(seed).shuffle(names)
        seccomp.compile_rules.cache_clear()
        again = seccomp.compile([*names, *names[:5]], arch="x86_64")
        assert (again.oci, again.bpf, again.names) == (first.oci, first.bpf, first.names)


def test_changed_answer_does_not_reach_next_caller() -> None:
    seccomp.compile(["read"], arch="x86_64").oci["syscalls"][0]["names"].append("bpf")
    assert seccomp.compile(["read"], arch="x86_64").oci["syscalls"][0]["names"] == ["read"]


def test_call_of_another_architecture_is_left_out() -> None:
    artefact = seccomp.compile(["open", "openat"], arch="aarch64")
    assert artefact.names == ("openat",)
    assert artefact.oci["syscalls"] == [{"names": ["openat"], "action": "SCMP_ACT_ALLOW"}]
    assert seccomp.compile(["open", "openat"], arch="x86_64").names == ("open", "openat")


def test_misspelt_call_is_named() -> None:
    with pytest.raises(errors.UnknownSyscallError, match="`raed`"):
        seccomp.compile(["raed", "write"], arch="x86_64")


@pytest.mark.parametrize("name", sorted(data.deny().names & data.syscall_names()))
def test_nothing_of_deny_list_is_compiled(name: str) -> None:
    with pytest.raises(errors.DenyListViolation, match=f"`{name}`") as caught:
        seccomp.compile(["read", name], arch="x86_64")
    assert caught.value.grant == name


def test_architecture_without_table_is_refused() -> None:
    with pytest.raises(errors.HostError, match="`riscv64`"):
        seccomp.compile(["read"], arch="riscv64")
    with pytest.raises(errors.HostError, match="`riscv64`"):
        seccomp.compile_denylist(["bpf"], arch="riscv64", network=True)


def test_deny_filter_describes_itself() -> None:
    described = seccomp.compile_denylist(["stime", "bpf", "clone3"], arch="x86_64", network=False)
    assert described.absent == ("stime",)
    assert [(r.name, r.error) for r in described.rules[:2]] == [("bpf", errno.EPERM), ("clone3", errno.ENOSYS)]
    assert {r.name for r in described.rules} == {
        "bpf",
        "clone3",
        "clone",
        "socket",
        "socketpair",
        "ioctl",
        "personality",
    }
    shuffled = seccomp.compile_denylist({"clone3", "bpf", "stime"}, arch="x86_64", network=False)
    assert described == shuffled


def test_call_denied_whole_gets_no_second_rule() -> None:
    described = seccomp.compile_denylist(["socket", "clone"], arch="x86_64", network=False)
    assert [r.check for r in described.rules if r.name in ("socket", "clone")] == [None, None]


def test_rule_about_call_that_architecture_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"where": [[0, 0xFF, 7]], "reason": "x"}]
    unix = [{"where": [[0, 0xFF, 1], [1, 0xFF, 1]], "reason": "x"}]
    calls = {"arch_prctl": {"reason": "x", "allow": rows}, "socket": {"reason": "x", "allow": unix}}
    rules = argument_table.read(1, calls, {"rest": ["arch_prctl"], "refuse": {"mknod": rows}})
    monkeypatch.setattr(data, "arguments", lambda: rules)
    for arch, names in (("x86_64", {"arch_prctl", "mknod"}), ("aarch64", set())):
        found = seccomp.compile_denylist([], arch=arch, network=False)
        assert {rule.name for rule in found.rules} == names | {"socket", "socketpair"}


def test_complement_of_masked_value_is_one_check_bit() -> None:
    found = seccomp.compile_denylist([], arch="x86_64", network=True).rules
    namespaces = [rule.check for rule in found if rule.name == "clone"]
    assert len(namespaces) == 7
    for flags in (0, 17, THREAD_FLAGS, *(1 << bit for bit in range(64)), NEWUSER | THREAD_FLAGS, 2**64 - 1):
        holding = [check for check in namespaces if check and flags & check.mask == check.value]
        assert len(holding) == bool(flags & 0x7E020000)


@pytest.mark.parametrize("arch", sorted(TAGS))
@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_without_call_every_other_is_let_by(arch: str, error: int) -> None:
    """For what we start: what it has not is answered as it was told, and no call of another architecture passes."""
    numbers = data.syscalls(arch).numbers
    program = seccomp.compile_without(["membarrier", "kexec_load"], arch=arch, error=error)
    absent = {numbers["membarrier"], numbers["kexec_load"]}
    for number in range(max(numbers.values()) + 2):
        action = bpf.decide(program, number=number, arch=TAGS[arch], arguments=())
        assert action == (0x00050000 | error if number in absent else bpf.ALLOW), number
    other = next(tag for name, tag in TAGS.items() if name != arch)
    assert bpf.decide(program, number=0, arch=other, arguments=()) == EPERM
    x32 = bpf.decide(program, number=X32, arch=TAGS[arch], arguments=())
    assert x32 == (EPERM if arch == "x86_64" else bpf.ALLOW)


def test_call_that_only_another_architecture_has_is_none_to_leave_out() -> None:
    for_one, none = (seccomp.compile_without(names, arch="aarch64") for names in (["arch_prctl"], []))
    assert "arch_prctl" not in data.syscalls("aarch64").numbers
    assert for_one == none
