"""The probes inside every interpreter, and the reports that must follow."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import data
from policy.denials import Denial
from sandbox.probes import preload, preload_object
from sandbox.probes.preload_object import ProbeStep
from sandbox.probes.probe_program import Bytes, Call, Result
from sandbox.rootfs import elf
from tests import proof_kit
from tests.unit.policy.compile import sample

NUMBERS = data.syscalls("x86_64").numbers


def records(raw: bytes) -> Iterator[tuple[int, ...]]:
    """The records of an object: number, six arguments, source, least and most."""
    count, at = struct.unpack_from("<QQ", raw, 0x1000)
    for index in range(count):
        yield struct.unpack_from("<8Qqq", raw, at + 80 * index)


def test_it_is_shared_object_without_needs_whose_pointers_are_relocated() -> None:
    steps = [
        ProbeStep(Call(257, (-100, Bytes(b"/x\0"), 0)), -4095, -1),
        ProbeStep(Call(3, (Result(0), 7)), 0, 0),
    ]
    raw = preload_object.build("/usr/bin/python3.11", steps)
    found = elf.parse(raw, name="prelude")
    assert (found.arch, found.kind, found.interpreter, found.needed) == ("x86_64", elf.ET_DYN, "", ())
    assert raw[0x1010:].startswith(b"/usr/bin/python3.11\0")
    first, second = records(raw)
    assert (first[0], first[1], first[-2:]) == (257, 2**64 - 100, (-4095, -1))
    assert raw[first[2] :].startswith(b"/x\0")
    # The second takes its first argument from where the first leaves what it gave.
    head = struct.unpack_from("<QQ", raw, 0x1000)[1]
    assert (second[0], second[2], second[7], second[-2:]) == (3, 7, head, (0, 0))
    relocated = {place for place in range(0x1000, len(raw) - 8, 8) if struct.unpack_from("<Q", raw, place)[0] == 8}
    assert len(relocated) >= 3


@pytest.mark.parametrize("name", sorted(proof_kit.CASES))
def test_every_policy_has_its_tries_and_last_is_refused_by_every_filter(name: str) -> None:
    made = preload.tries(proof_kit.CASES[name]().artefacts)
    steps = list(records(made.object))
    numbers = data.syscalls("aarch64" if name == "aarch64" else "x86_64").numbers
    assert made.calls[-1] == steps[-1][0] == numbers["chroot"]
    # Each call that the filter refuses gives EPERM there, and its report comes here in the same order.
    refused = [step[0] for step in steps if step[-2:] == (-1, -1)]
    assert refused == list(made.calls)
    tried = {numbers[call] for call in ("openat", "execve", "socket", "chroot")}
    assert tried <= {step[0] for step in steps}
    assert len(made.object) < 2 * 0x1000


def test_tries_act_in_process_of_agent() -> None:
    """getpid() is compared with 1, or with 2 where an init starts the agent."""
    programs = sample.manifest(more='[permissions.executables]\nallow = ["/usr/bin/cat"]\n')
    found = {}
    for process, policy in ((1, sample.compiled(sample.manifest())), (2, sample.compiled(programs))):
        code = preload.tries(policy).object
        found[process] = code[code.index(bytes.fromhex("b8270000000f05")) + 7 :][:3]
    assert found == {1: bytes.fromhex("83f801"), 2: bytes.fromhex("83f802")}


def test_what_must_be_heard_of_follows_policy() -> None:
    def told(**fields: str) -> frozenset[Denial]:
        return preload.tries(sample.compiled(sample.manifest(**fields))).told

    metadata, name = (
        Denial("packet", "169.254.169.254:80/tcp", "not_granted"),
        Denial("dns", "covenant-canary.invalid", "name_not_granted"),
    )
    assert told() == frozenset()
    assert told(network="full", more=sample.entries(("api.example.com", "[443]", "tls"))) == {metadata, name}
    assert told(network="outbound-https-only") == {metadata}
    assert told(network="full", more=sample.entries(("169.254.169.254", "[80]", "tcp"))) == {
        Denial("packet", "10.255.255.254:9/tcp", "not_granted")
    }


def test_each_try_is_taken_once_and_what_comes_on_top_is_passed_on() -> None:
    passed: list[tuple[Denial, int]] = []

    def denied(denial: Denial, *, count: int = 1) -> None:
        passed.append((denial, count))

    one, other = Denial("packet", "192.0.2.1:9/tcp", "not_granted"), Denial("packet", "192.0.2.1:10/tcp", "not_granted")
    heard = preload.ProbeReports(preload.InProcessProbes(b"", (161,), frozenset({one})), denied)
    try:
        heard.denied(other)
        heard.denied(one, count=3)
        heard.denied(one)
        assert passed == [(other, 1), (one, 2), (one, 1)]
        assert list(heard.missing) == ["the filter of call 161"]
        heard.calls.popleft()
        assert not heard.missing
    finally:
        heard.close()


@pytest.mark.parametrize(
    ("runtime", "arch", "possible"),
    [("python3", "x86_64", True), ("node", "x86_64", True), ("rust-bin", "x86_64", False), ("node", "aarch64", False)],
)
def test_who_can_be_asked(runtime: str, arch: str, possible: bool) -> None:
    assert preload.possible(runtime, arch) is possible


def test_many_that_start_at_once_never_copy_what_another_is_just_writing(tmp_path: Path) -> None:
    """A closure is checked while it is copied: a half of one would refuse the run, and have all of them listed anew."""
    made = preload.closure.__wrapped__(tmp_path, b"the object")
    source = next(file.source for file in made.files if file.sha256 and file.path == preload_object.PATH)
    Path(source).write_bytes(b"another")
    with open(source, "rb") as copied:
        preload.closure.__wrapped__(tmp_path, b"the object")
        assert copied.read() == b"another"
    assert Path(source).read_bytes() == b"the object"
    assert {name for name in os.listdir(tmp_path) if name.startswith(".")} == set()
