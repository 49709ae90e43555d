"""The argument rules under real gVisor and in the host's own kernel: granted alternatives pass, neighbours do not.

Each answer with the filter stands beside the answer to the same call without it: what passes the filter says what it
says without one, and what is refused says EPERM and said something else before.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import platform
from typing import Any

import pytest

from policy import data
from policy.compile import seccomp
from tests.kernel import argument_probes, filtered_runsc, host_filter, plain_runsc, traced_runsc
from tests.kernel.argument_probes import Probe

ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
PROBES = argument_probes.probes(ARCH)
# python needs its profile to make the calls at all; the ruled calls that no profile holds are granted beside it.
NAMES = data.profile("python3").names | set(data.arguments().rules)


def granted(*, network: bool) -> seccomp.SeccompArtefact:
    names = NAMES | (data.addition("network").names if network else set())
    return seccomp.compile(names, arch=ARCH, network=network)


@functools.cache
def in_gvisor(network: bool | None) -> dict[str, int]:
    """Errno of each probe by its name; `network` None is no filter at all."""
    filter_ = None if network is None else granted(network=network).oci
    answers = filtered_runsc.errnos([probe.numbers(ARCH) for probe in PROBES], filter_)
    return dict(zip([probe.id for probe in PROBES], answers, strict=True))


@functools.cache
def on_the_host(network: bool) -> dict[str, dict[str, int]]:
    calls = {probe.id: probe.numbers(ARCH) for probe in PROBES}
    answer = host_filter.in_a_child(calls, bpf=granted(network=network).bpf)
    assert answer["seccomp"] == "2"
    return {"before": answer["before"], "after": answer["after"]}


def allowed(probe: Probe, network: bool) -> bool:
    return probe.with_network if network else probe.allowed


def wrong(before: dict[str, int], after: dict[str, int], *, network: bool) -> dict[str, tuple[int, int]]:
    """Probes whose answers (without the filter, with it) are not what their rule says."""
    found = {}
    for probe in PROBES:
        pair = before[probe.id], after[probe.id]
        right = pair[0] == pair[1] != errno.EPERM if allowed(probe, network) else pair[1] == errno.EPERM
        if not right:
            found[probe.id] = pair
    return found


def test_no_probe_stands_there_twice_and_each_rule_has_both_kinds() -> None:
    assert len({probe.id for probe in PROBES}) == len(PROBES)
    for call in set(data.arguments().rules) & set(NUMBERS) - {"clone"}:  # clone: tests/kernel/test_seccomp.py
        assert {probe.with_network for probe in PROBES if probe.call == call} == {True, False}, call


@pytest.mark.parametrize("network", [False, True])
def test_rules_hold_in_gvisor(network: bool) -> None:
    assert wrong(in_gvisor(None), in_gvisor(network), network=network) == {}


@pytest.mark.parametrize("network", [False, True])
def test_rules_hold_in_hosts_kernel(network: bool) -> None:
    answers = on_the_host(network)
    assert wrong(answers["before"], answers["after"], network=network) == {}


def test_what_is_refused_would_say_something_else_without_filter() -> None:
    # A kernel that refuses by itself would prove nothing about the filter. In gVisor the caller has no capability, so
    # there raw and packet sockets and PR_SET_MM are refused twice; the host's kernel, as root, is their control.
    twice = [probe.id for probe in PROBES if in_gvisor(None)[probe.id] == errno.EPERM]
    assert {name.split(",")[0] for name in twice} <= {
        "socket(0x2", "socket(0xa", "socket(0x11", "socket(0x100000011", "prctl(0x23"
    }  # fmt: skip
    assert [probe.id for probe in PROBES if on_the_host(False)["before"][probe.id] == errno.EPERM] == []


def test_upper_halves_of_arguments_decide_nothing_in_either_kernel() -> None:
    # Without a filter: both take 32 bits of what they call int. So a rule on 32 bits is exact, neither wider nor
    # narrower than what the kernel will do.
    for answers in (in_gvisor(None), on_the_host(False)["before"]):
        for probe in argument_probes.UPPER_BITS:
            bare = Probe(probe.call, tuple(a & 0xFFFFFFFF for a in probe.arguments), probe.allowed, probe.with_network)
            if bare.id in answers:
                assert answers[probe.id] == answers[bare.id], probe.id
    # PR_SET_DUMPABLE takes an unsigned long: Linux reads all 64 bits, gVisor 32. The rule asks for all 64.
    name = argument_probes.Probe("prctl", (4, 1 << 32), False, False).id
    assert (on_the_host(False)["before"][name], in_gvisor(None)[name]) == (errno.EINVAL, 0)
    assert (on_the_host(False)["after"][name], in_gvisor(False)[name]) == (errno.EPERM, errno.EPERM)


# --- what runsc makes of the entries: facts that the compiler rests on --------------------------------


def with_rules(*rules: dict[str, Any]) -> dict[str, Any]:
    """The filter of python3 with these entries for getppid instead of its grant."""
    filter_ = seccomp.compile(data.profile("python3").names - {"getppid"}, arch=ARCH).oci
    filter_["syscalls"] += [{"names": ["getppid"], "action": "SCMP_ACT_ALLOW", "args": [r]} for r in rules]
    return filter_


def getppid(*arguments: list[int]) -> list[list[int]]:
    return [[NUMBERS["getppid"], *each] for each in arguments]


def test_runsc_ors_entries_of_one_name() -> None:
    filter_ = with_rules(*({"index": index, "value": 5, "op": "SCMP_CMP_EQ"} for index in (0, 1)))
    calls = getppid([5, 0], [0, 5], [5, 5], [4, 6], [6, 4])
    assert filtered_runsc.errnos(calls, filter_) == [0, 0, 0, errno.EPERM, errno.EPERM]


def test_runsc_compares_all_64_bits() -> None:
    high = 1 << 32
    equal = with_rules({"index": 0, "value": 5, "op": "SCMP_CMP_EQ"})
    assert filtered_runsc.errnos(getppid([5], [5 | high]), equal) == [0, errno.EPERM]
    masked = with_rules({"index": 0, "value": 0xFFFFFFFF, "valueTwo": 5, "op": "SCMP_CMP_MASKED_EQ"})
    assert filtered_runsc.errnos(getppid([5], [5 | high], [4], [4 | high]), masked) == [0, 0, errno.EPERM, errno.EPERM]
    upper = with_rules({"index": 0, "value": high | 0xFF, "valueTwo": high | 5, "op": "SCMP_CMP_MASKED_EQ"})
    assert filtered_runsc.errnos(getppid([5], [5 | high], [5 | high | 256 | high << 1]), upper) == [errno.EPERM, 0, 0]


# --- honest work ---------------------------------------------------------------------------------------


def workload(profile: str, name: str, *additions: str) -> plain_runsc.Result:
    names = data.profile(profile).names.union(*(data.addition(addition).names for addition in additions))
    sample = next(sample for sample in traced_runsc.SAMPLES if sample.name == name)
    return filtered_runsc.run(
        sample.argv,
        seccomp=seccomp.compile(names, arch=ARCH, network="network" in additions).oci,
        files={**traced_runsc.NAME_FILES, f"/{name}": (traced_runsc.WORKLOADS / name).read_bytes()},
    )


def test_python_resolves_and_talks_within_rules_and_without_netlink() -> None:
    done = workload("python3", "network.py", "network")
    assert done.stdout.decode().splitlines() == [
        "1 ['127.0.0.1']", "3 ['127.0.0.1', '127.0.0.2', '127.0.0.3']", "3 ['127.0.0.1', '127.0.0.2', '127.0.0.3']",
        "gaierror True", "hello", "no list of interfaces", "done",
    ], done.stderr.decode()[-2000:]  # fmt: skip


def test_node_resolves_and_talks_within_rules() -> None:
    done = workload("node", "network.js", "network")
    assert done.stdout.split() == [b"3", b"ECONNREFUSED", b"hello", b"done"], done.stderr.decode()[-2000:]


@pytest.mark.parametrize(("profile", "name"), [("python3", "programs.py"), ("node", "programs.js")])
def test_programs_start_within_rules(profile: str, name: str) -> None:
    assert workload(profile, name, "executables").stdout.split() == [b"one", b"two", b"done"]
    assert b"one" not in workload(profile, name).stdout


# --- the profiles against traces ------------------------------------------------------------------------


@pytest.mark.parametrize("sample", traced_runsc.AGENT_SAMPLES, ids=lambda sample: sample.name)
def test_sample_agents_ask_for_nothing_that_their_profile_refuses(sample: traced_runsc.Sample) -> None:
    traced_runsc.build_agents()
    trace = sample.trace()
    assert len(trace.calls) > 10
    assert {"brk", "mmap", "read", "write", "exit_group"} - {"mmap"} <= trace.names
    assert sorted(map(str, sample.refused(trace))) == []


@pytest.mark.parametrize(
    "sample", [s for s in traced_runsc.SAMPLES if s.additions and s.profile == "python3"], ids=lambda s: s.name
)
def test_what_another_grant_brings_is_traced_too(sample: traced_runsc.Sample) -> None:
    trace = sample.trace()
    assert {str(call) for call in sample.refused(trace)} <= set(traced_runsc.KNOWN_REFUSED)
    # The controls: the trace shows the calls that the grant is about, and without the grant they are refused.
    (addition,) = sample.additions
    about = {"network": {"socket", "connect", "sendmmsg"}, "executables": {"execve", "wait4"}}[addition]
    assert about <= trace.names
    bare = dataclasses.replace(sample, additions=())
    assert about & {call.name for call in bare.refused(trace)}


def test_arguments_are_read_as_strace_prints_them() -> None:
    lines = [
        "I1122 02:32:02.1 7888 strace.go:567] [   1:   3] a b E socket(AF_INET, SOCK_DGRAM|SOCK_CLOEXEC|0x800, 0x0)",
        "I1122 02:32:02.1 7888 strace.go:567] [   1:   3] node E ioctl(0x2 host:[2], 0x5401, 0x7ffd)",
        "I1122 02:32:02.1 7888 strace.go:605] [   1:   3] node X ioctl(0x2 host:[2], 0x5401, 0x7ffd) = 0 (0x0) (1µs)",
        "I1122 02:32:02.1 7888 strace.go:570] [   1:   1] p E mknodat(AT_FDCWD /, 0x1 /tmp/fifo, S_IFIFO|0o666, 0x0)",
        "I1122 02:32:02.1 7888 strace.go:570] [   1:   1] p E clone(CLONE_VM|CLONE_VFORK|0x11, 0x0, 0x0, 0x0, 0x0)",
        "I1122 02:32:02.1 7888 strace.go:570] [   1:   1] p E read(0x0 host:[1], 0x4a82e0, 0x400000)",
    ]
    assert [str(call) for call in traced_runsc.parse("\n".join(lines))] == [
        "socket(0x2, 0x80802, 0x0)", "ioctl(0x2, 0x5401)", "mknodat(0xffffffffffffff9c, 0x1, 0x11b6)", "clone(0x4111)",
        "read",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="SOMETHING"):
        traced_runsc.number("SOMETHING_NEW")
