"""Check the canary, a program that makes given calls, and the evaluation of its answers."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import data, denials, errors
from sandbox.host import code_digest
from sandbox.lifecycle import probe_run
from sandbox.probes import denial_probes, probe_program
from sandbox.probes.probe_program import Bytes, Call, Result
from sandbox.rootfs import elf
from tests import proof_kit
from tests.unit.policy.compile import sample

NUMBERS = data.syscalls(os.uname().machine).numbers


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_it_is_static_program_of_one_page(arch: str) -> None:
    raw = probe_program.program(arch)
    found = elf.parse(raw, name="canary")
    assert (found.arch, found.interpreter, found.needed) == (arch, "", ())
    assert len(raw) < 400


def test_it_makes_calls_that_it_is_told_and_says_what_they_gave(tmp_path: Path) -> None:
    """The test uses this machine's own kernel, with calls that change nothing."""
    program, file = tmp_path / "canary", tmp_path / "file"
    program.write_bytes(probe_program.program(os.uname().machine))
    program.chmod(0o700)
    file.write_bytes(b"something to read")
    calls = [
        Call(NUMBERS["getpid"]),
        Call(NUMBERS["openat"], (-100, Bytes(os.fsencode(file) + b"\0"), 0)),
        Call(NUMBERS["read"], (Result(1), Bytes(bytes(9)), 9)),
        Call(NUMBERS["openat"], (-100, Bytes(b"/no/such\0"), 0)),
    ]
    done = subprocess.run([program], input=probe_program.message(calls), capture_output=True, timeout=30, check=True)
    found = probe_program.results(calls, done.stdout)
    assert found is not None
    (pid, _), (opened, _), read, (absent, _) = found
    assert pid > 1
    assert opened >= 3
    assert read == (9, b"something")
    assert absent == -errno.ENOENT


def test_answer_to_something_else_is_none() -> None:
    calls = [Call(1, (Bytes(b"x"),))]
    sent = probe_program.message(calls)
    assert probe_program.results(calls, sent) == ((1, b"x"),)
    assert probe_program.results(calls, sent[:-1]) is None
    assert probe_program.results(calls, b"\1" + bytes(len(sent) - 1)) is None
    assert probe_program.results(calls, b"") is None
    with pytest.raises(ValueError, match="cannot be written at once"):
        probe_program.message(calls * 64)


def answered(plan: denial_probes.ProbePlan, result: Callable[[denial_probes.Probe], tuple[int, bytes]]) -> bytes:
    """Return the answer of a canary whose probes gave these results, and whose other calls gave 3."""
    sent = bytearray(plan.message())
    by_call = {probe.call: result(probe) for probe in plan.probes}
    for index, call in enumerate(plan.calls):
        value, held = by_call.get(index, (3, b""))
        words = struct.unpack_from("<8Q", sent, 16 + 64 * index)
        struct.pack_into("<q", sent, 16 + 64 * index, value)
        if held:
            places = [word for word, one in zip(words[1:], call.arguments, strict=False) if isinstance(one, Bytes)]
            at = places[-1] - 0x600000
            sent[at : at + len(held)] = held
    return bytes(sent)


NXDOMAIN = struct.pack(">HHHHHH", 0xC0DE, 0x8183, 1, 0, 0, 0)


def told(plan: denial_probes.ProbePlan) -> set[denials.Denial]:
    """Return the denials of the gateway and its gates for a canary that was refused every probe."""
    return {probe.told for probe in plan.probes if probe.told is not None}


def as_it_should(probe: denial_probes.Probe) -> tuple[int, bytes]:
    if probe.name:
        return len(NXDOMAIN), NXDOMAIN
    return (-min(probe.denied), b"") if probe.denied else (3, b"")


@pytest.mark.parametrize("name", sorted(proof_kit.CASES))
def test_every_policy_has_denials_and_controls_and_each_of_them_counts(name: str) -> None:
    plan = denial_probes.plan(proof_kit.CASES[name]().artefacts)
    refused = [probe for probe in plan.probes if probe.denied or probe.name]
    assert len(refused) >= 5
    assert len(plan.probes) > len(refused)
    assert len(plan.message()) <= probe_program.MESSAGE_BYTES
    assert plan.faults(answered(plan, as_it_should), told(plan)) == ()
    for odd in plan.probes:

        def all_but_one(probe: denial_probes.Probe, odd: denial_probes.Probe = odd) -> tuple[int, bytes]:
            if probe is not odd:
                return as_it_should(probe)
            return (3, b"") if odd.denied or odd.name else (-errno.EPERM, b"")

        faults = plan.faults(answered(plan, all_but_one), told(plan))
        assert len(faults) == 1, (odd, faults)
        assert odd.what in faults[0]
        if odd.told is not None:
            # A remote host may answer as a refusal does: only the layer that refused can confirm it.
            faults = plan.faults(answered(plan, as_it_should), told(plan) - {odd.told})
            assert len(faults) == 1
            assert odd.what in faults[0]
            assert "not refused by" in faults[0]


def test_what_is_tried_follows_policy() -> None:
    def tried(**fields: str) -> set[str]:
        return {probe.what for probe in denial_probes.plan(sample.compiled(sample.manifest(**fields))).probes}

    least, scratch = tried(filesystem="read-only-package"), tried()
    assert "a file made in /tmp" in least
    assert "a file is made in /tmp" in scratch
    assert {"a connection", "a lookup of a name", "start of a program by execve"} <= scratch
    programs = tried(more='[permissions.executables]\nallow = ["/usr/bin/cat"]')
    assert "start of a program by execve" not in programs
    assert "start of a file that is no granted program" in programs
    named = tried(network="full", more=sample.entries(("api.example.com", "[443]", "tls")))
    assert {
        "a connection to 169.254.169.254:80",
        "a connection to the DNS gate",
        "name covenant-canary.invalid",
    } <= named
    metadata = tried(network="full", more=sample.entries(("169.254.169.254", "[80]", "tcp")))
    assert "a connection to 10.255.255.254:9" in metadata
    assert "a connection to the DNS gate" not in metadata
    assert not any("name covenant" in what for what in tried(network="outbound-https-only"))


def test_it_is_remembered_for_day_by_what_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = probe_run.SelfTestKey("p" * 64, sample.host(), "")
    assert not probe_run.passed(tmp_path, key, now_ms=1000)
    probe_run.remember(tmp_path, key, now_ms=1000)
    assert probe_run.passed(tmp_path, key, now_ms=1000)
    assert probe_run.passed(tmp_path, key, now_ms=1000 + probe_run.VALID_MS - 1)
    assert not probe_run.passed(tmp_path, key, now_ms=1000 + probe_run.VALID_MS)
    assert not probe_run.passed(tmp_path, key, now_ms=999)
    for other in (
        probe_run.SelfTestKey("q" * 64, sample.host(), ""),
        probe_run.SelfTestKey("p" * 64, sample.host(kernel="6.2"), ""),
        probe_run.SelfTestKey("p" * 64, sample.host(), "eth0"),
    ):
        assert not probe_run.passed(tmp_path, other, now_ms=1000)
    monkeypatch.setattr(code_digest, "digest", lambda: "another Covenant")
    assert not probe_run.passed(tmp_path, key, now_ms=1000)
    monkeypatch.undo()
    # Values that change all the time are not part of the key.
    assert probe_run.passed(tmp_path, probe_run.SelfTestKey("p" * 64, sample.host(disk_free_mb=1), ""), now_ms=1000)
    probe_run.remember(tmp_path, probe_run.SelfTestKey("q" * 64, sample.host(), ""), now_ms=1000 + probe_run.VALID_MS)
    assert not probe_run.passed(tmp_path, key, now_ms=1000)


def test_what_cannot_be_asked_at_once_is_refusal_and_no_fault_of_ours() -> None:
    """A path has up to 4,096 characters: four paths of over a thousand exceed the program's message."""
    plan = denial_probes.ProbePlan(NUMBERS, ("openat",))
    for _ in range(4):
        plan.denial("writing", plan.call("openat", -100, Bytes(b"/" + b"x" * 1100 + b"\0"), 1), errno.EROFS)
    with pytest.raises(errors.ArtefactError, match="cannot be written at once"):
        plan.message()
