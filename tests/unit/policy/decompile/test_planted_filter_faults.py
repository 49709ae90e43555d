"""Faults of a compiler of filters, planted into real artefacts: each of them ends the proof.

Most are planted into one of the two filters, which must say the same. The worst are planted into both alike, as a
compiler with a wrong idea would write them: those only the grants can tell.
"""

from __future__ import annotations

import copy
import json
import struct
from collections.abc import Callable
from typing import Any

import pytest

from policy import data, errors, prove
from policy.compile import seccomp
from policy.compile.artefacts import Artefacts
from policy.decompile import bpf, calls
from policy.rules import nine
from tests.unit.policy.compile import sample

# node's profile has every kind of rule: one value, several, a mask, two arguments, both halves of one.
MANIFEST = sample.manifest(runtime="node", more='[permissions.syscalls]\nallow = ["mknodat", "socket"]')
EFFECTIVE = nine.requested(MANIFEST, roles=data.roles())
FACTS = sample.host(runtimes={"node": sample.closure("node", "/usr/bin/node")})
HONEST = sample.compiled(MANIFEST, FACTS)
NAMES = EFFECTIVE.syscalls.names
NUMBERS = data.syscalls("x86_64").numbers
BY_NUMBER = {number: name for name, number in NUMBERS.items()}
PROGRAM = HONEST.files["seccomp.bpf"]
CODE = bpf.parse(PROGRAM)

X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
LOAD, AND, RETURN, JEQ, JGE = 0x20, 0x54, 0x06, 0x15, 0x35
EPERM, ENOSYS = calls.EPERM, calls.ENOSYS

Json = dict[str, Any]


def proved(program: bytes | None = None, document: Json | None = None) -> None:
    """The proof of the artefacts with another program, or another document in both of its places."""
    files = dict(HONEST.files)
    if program is not None:
        files["seccomp.bpf"] = program
    if document is not None:
        config = json.loads(files["config.json"])
        config["linux"]["seccomp"] = document
        for name, value in (("seccomp.json", document), ("config.json", config)):
            files[name] = json.dumps(value, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    prove.prove(EFFECTIVE, Artefacts(files))


def caught(program: bytes | None = None, document: Json | None = None, *, match: str | None = None) -> None:
    with pytest.raises((errors.ProofError, errors.ArtefactError), match=match):
        proved(program, document)


def test_honest_artefacts_are_proved() -> None:
    proved()
    proved(PROGRAM, HONEST.json("seccomp.json"))


# --- the program --------------------------------------------------------------------------------------


def edited(at: int, **fields: int) -> bytes:
    """The program with one instruction changed."""
    values = dict(zip(("operation", "if_true", "if_false", "constant"), CODE[at], strict=True))
    return PROGRAM[: at * 8] + struct.pack("<HBBI", *{**values, **fields}.values()) + PROGRAM[at * 8 + 8 :]


def where(operation: int, constant: int | None = None, *, after: int = 0) -> int:
    return next(
        at
        for at, step in enumerate(CODE)
        if at >= after and step[0] == operation and (constant is None or step[3] == constant)
    )


def body(name: str) -> int:
    """The first instruction that looks at an argument of this call."""
    at, number = 0, NUMBERS[name]
    loaded = 0
    while True:
        operation, if_true, if_false, constant = CODE[at]
        if operation == LOAD and constant >= bpf.ARGUMENTS:
            return at
        if operation == LOAD:
            loaded = constant
        value = X86 if loaded == bpf.ARCH else number
        holds = {JEQ: value == constant, JGE: value >= constant}
        at += 1 + ((if_true if holds[operation] else if_false) if operation in holds else 0)


READ = calls.read_bpf(PROGRAM, "x86_64", BY_NUMBER)


def seen(program: bytes) -> bool:
    """Whether the reader tells this program from the honest one: for sweeps, since a whole proof takes longer."""
    try:
        return not READ.is_equal(calls.read_bpf(program, "x86_64", BY_NUMBER))
    except errors.ArtefactError:
        return True


TAG = where(JEQ, X86)
X32 = where(JGE, 0x40000000)


@pytest.mark.parametrize("tag", [ARM, I386, X86 ^ 1, X86 & ~0x40000000, 0])
def test_wrong_architecture_tag(tag: int) -> None:
    caught(edited(TAG, constant=tag), match="architecture 0x")


def test_architecture_not_looked_at() -> None:
    _, if_true, if_false, _ = CODE[TAG]
    caught(edited(TAG, if_false=if_true), match="architecture 0x")
    caught(edited(TAG, if_true=if_false, if_false=if_true), match="architecture 0x")
    caught(edited(TAG, operation=JGE), match="architecture 0xff")


def test_x32_calls_that_pass() -> None:
    refusal = X32 + 1 + CODE[X32][1]
    assert CODE[refusal] == (RETURN, 0, 0, EPERM)
    caught(edited(refusal, constant=bpf.ALLOW), match="call 1073741824, which has no name")
    # Without the bound an x32 call is judged by the tree, which must refuse it too: then nothing is lost.
    proved(edited(X32, constant=0xFFFFFFFF))


def test_every_bound_of_range_of_numbers_off_by_one() -> None:
    bounds = [at for at, step in enumerate(CODE) if step[0] == JGE and at > X32 and step[3] in range(1, 600)]
    for at in bounds:
        for step in (-1, 1):
            assert seen(edited(at, constant=CODE[at][3] + step)), at
    assert len(bounds) > 50


def test_every_answer_turned_round() -> None:
    returns = [at for at, step in enumerate(CODE) if step[0] == RETURN]
    for at in returns:
        for action in {bpf.ALLOW, EPERM, ENOSYS, 0, 0x50000, 0x50002, 0x30000, 0x7FF00000, 0x7FFC0000} - {CODE[at][3]}:
            assert seen(edited(at, constant=action)), (at, hex(action))
    assert len(returns) > 50


@pytest.mark.parametrize("name", ["ioctl", "prctl", "clone", "socketpair", "mknodat", "socket", "arch_prctl"])
def test_every_bit_of_every_mask_and_value(name: str) -> None:
    start = body(name)
    end = next(
        at for at in range(start + 1, len(CODE)) if CODE[at][0] == JGE or (CODE[at][0] == LOAD and CODE[at][3] == 0)
    )
    looked = 0
    for at in range(start, end):
        if CODE[at][0] in (AND, JEQ):
            for bit in range(32):
                assert seen(edited(at, constant=CODE[at][3] ^ 1 << bit)), (at, bit)
                looked += 1
    assert looked >= 32


@pytest.mark.parametrize("name", ["ioctl", "prctl", "clone", "mknodat", "socket"])
def test_wrong_argument(name: str) -> None:
    at = body(name)
    for place in range(bpf.ARGUMENTS, 64, 4):
        if place != CODE[at][3]:
            caught(edited(at, constant=place), match="seccomp.json|seccomp.bpf|the filter")


def test_equal_turned_into_unequal() -> None:
    for name in ("ioctl", "prctl", "clone", "socketpair", "arch_prctl"):
        at = where(JEQ, after=body(name))
        _, if_true, if_false, _ = CODE[at]
        assert if_true != if_false
        caught(edited(at, if_true=if_false, if_false=if_true))
        caught(edited(at, operation=JGE))


def test_high_word_not_looked_at() -> None:
    """prctl compares all 64 bits of some second arguments."""
    at, found = body("prctl"), 0
    for load in range(at, at + 40):
        if CODE[load][0] == LOAD and CODE[load][3] == bpf.ARGUMENTS + 12:
            test = load + 1
            assert CODE[test][0] == JEQ
            caught(edited(test, if_false=CODE[test][1]), match="`prctl` with arguments")
            found += 1
    assert found > 0


def test_program_cut_off_or_of_another_grant() -> None:
    caught(PROGRAM[:-8])
    caught(PROGRAM[8:])
    caught(b"")
    caught(PROGRAM + b"\x06" * 7)
    for name in sorted(NAMES & NUMBERS.keys()):
        caught(seccomp.compile(NAMES - {name}, arch="x86_64", network=False).bpf, match=f"`{name}`")
    caught(seccomp.compile(NAMES | {"mseal"}, arch="x86_64", network=False).bpf, match="`mseal`")
    caught(seccomp.compile(NAMES, arch="x86_64", network=True).bpf, match="`socket`")
    caught(seccomp.compile(NAMES, arch="aarch64", network=False).bpf, match="architecture 0x")


def test_whatever_instruction_is_changed_nothing_that_matters_gets_by() -> None:
    """Each jump and constant of the whole program moved by one: refused, or the same program to every call."""
    honest, same = answers(PROGRAM), 0
    for at, (operation, if_true, if_false, constant) in enumerate(CODE):
        changes = [{"constant": constant + 1}, {"constant": max(constant, 1) - 1}]
        if operation in bpf.TESTS:
            changes += [{"if_true": if_true + 1}, {"if_false": if_false + 1}, {"operation": operation ^ 0x30}]
        for change in changes:
            program = edited(at, **change)
            if not seen(program):
                assert answers(program) == honest, (at, change)
                same += 1
    # A jump to another return of the same answer, and the bound of x32.
    assert same < 40


def answers(program: bytes) -> list[int]:
    """The program run on every number with a name and its neighbours, at a few edges of its rules."""
    points = [(number, X86, (value, value)) for number in range(500) for value in (0, 1)]
    points += [(NUMBERS["ioctl"], X86, (0, 0x5401)), (NUMBERS["prctl"], X86, (15, 1 << 32)), (2**32 - 1, X86, (0, 0))]
    points += [(39, tag, (0, 0)) for tag in (0, I386, ARM, X86 - 1, X86 + 1)]
    return [bpf.decide(program, number=number, arch=tag, arguments=at) for number, tag, at in points]


# --- the document, which is what runsc reads ----------------------------------------------------------


def entry(document: Json, name: str) -> Json:
    found: Json = next(each for each in document["syscalls"] if name in each["names"])
    return found


def ruled(document: Json, name: str) -> Json:
    """The first condition of a call."""
    found: Json = entry(document, name)["args"][0]
    return found


def without(document: Json, name: str) -> Json:
    return {**document, "syscalls": [each for each in document["syscalls"] if name not in each["names"]]}


FAULTS: dict[str, Callable[[Json], Any]] = {
    "the default allows": lambda d: d.update(defaultAction="SCMP_ACT_ALLOW"),
    "the default does not exist": lambda d: d.update(defaultAction="SCMP_ACT_TRACE"),
    "the default kills": lambda d: d.update(defaultAction="SCMP_ACT_KILL"),
    "another errno": lambda d: d.update(defaultErrnoRet=38),
    "another architecture": lambda d: d.update(architectures=["SCMP_ARCH_AARCH64"]),
    "32-bit entry too": lambda d: d["architectures"].append("SCMP_ARCH_X86"),
    "a flag": lambda d: d.update(flags=["SECCOMP_FILTER_FLAG_SPEC_ALLOW"]),
    "a call more": lambda d: entry(d, "read")["names"].append("bpf"),
    "a call less": lambda d: entry(d, "read")["names"].remove("read"),
    "a call of no architecture": lambda d: entry(d, "read")["names"].append("a_call_of_tomorrow"),
    "clone3 passes": lambda d: entry(d, "clone3").update(action="SCMP_ACT_ALLOW"),
    "clone3 is refused": lambda d: d["syscalls"].remove(entry(d, "clone3")),
    "clone3 is killed": lambda d: entry(d, "clone3").update(action="SCMP_ACT_KILL"),
    "a call does not exist": lambda d: entry(d, "clone3")["names"].append("bpf"),
    "a rule without its condition": lambda d: entry(d, "clone").pop("args"),
    "a rule beside one without condition": lambda d: d["syscalls"].append({**entry(d, "read"), "names": ["ioctl"]}),
    "a rule dropped": lambda d: d["syscalls"].remove(entry(d, "ioctl")),
    "a mask widened": lambda d: ruled(d, "clone").update(value=ruled(d, "clone")["value"] | 1),
    "a mask narrowed": lambda d: ruled(d, "clone").update(value=ruled(d, "clone")["value"] & ~0x20000),
    "another value": lambda d: ruled(d, "ioctl").update(valueTwo=0x5412),
    "another argument": lambda d: ruled(d, "ioctl").update(index=2),
    "mask and value exchanged": lambda d: ruled(d, "ioctl").update(
        value=ruled(d, "ioctl")["valueTwo"], valueTwo=ruled(d, "ioctl")["value"]
    ),
    "unequal for equal": lambda d: ruled(d, "ioctl").update(op="SCMP_CMP_NE", valueTwo=0),
    "at least for equal": lambda d: ruled(d, "arch_prctl").update(op="SCMP_CMP_GE", valueTwo=0),
    "the same argument twice": lambda d: entry(d, "socketpair")["args"][1].update(index=0),
    "one condition more on the same argument": lambda d: entry(d, "clone")["args"].append(
        {"index": 0, "op": "SCMP_CMP_MASKED_EQ", "value": 0xFF, "valueTwo": 17}
    ),
    "one condition less": lambda d: entry(d, "socketpair")["args"].pop(),
    "a refusal first": lambda d: d["syscalls"].insert(0, {"names": ["read"], "action": "SCMP_ACT_ERRNO"}),
    "a key in other letters": lambda d: d.update(DefaultAction="SCMP_ACT_ALLOW"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_document(fault: str) -> None:
    document = HONEST.json("seccomp.json")
    before = copy.deepcopy(document)
    FAULTS[fault](document)
    assert document != before, "the fault is one"
    caught(None, document)


def test_every_alternative_dropped() -> None:
    honest = HONEST.json("seccomp.json")
    conditional = [at for at, each in enumerate(honest["syscalls"]) if "args" in each]
    for at in conditional:
        document = {**honest, "syscalls": [each for place, each in enumerate(honest["syscalls"]) if place != at]}
        caught(None, document, match=f"`{honest['syscalls'][at]['names'][0]}` with arguments")
    assert len(conditional) > 15


def test_order_of_entries_and_names_is_no_fault() -> None:
    document = HONEST.json("seccomp.json")
    document["syscalls"] = [{**each, "names": each["names"][::-1]} for each in document["syscalls"][::-1]]
    assert document != HONEST.json("seccomp.json")
    proved(None, document)


def test_documents_in_their_two_places_that_differ() -> None:
    files = dict(HONEST.files)
    document = without(HONEST.json("seccomp.json"), "ioctl")
    files["seccomp.json"] = json.dumps(document, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    with pytest.raises(errors.ArtefactError):
        prove.prove(EFFECTIVE, Artefacts(files))


# --- both alike ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "network", "message"),
    [
        (NAMES | {"mseal"}, False, "mseal"),
        (NAMES | {"execve"}, False, "execve"),
        (NAMES - {"read"}, False, "read"),
        (NAMES - {"clone"}, False, "clone"),
        (NAMES, True, "socket"),
        (NAMES | data.addition("network").names, True, "connect"),
    ],
    ids=["mseal", "execve", "no read", "no clone", "network sockets", "network"],
)
def test_fault_in_both_filters_is_told_by_grants(names: frozenset[str], network: bool, message: str) -> None:
    wrong = seccomp.compile(names, arch="x86_64", network=network)
    with pytest.raises(errors.ProofError) as failure:
        proved(wrong.bpf, wrong.oci)
    assert message in f"{failure.value} {failure.value.details}"


def test_condition_left_out_of_both_filters_is_told_by_table() -> None:
    document = HONEST.json("seccomp.json")
    entry(document, "clone").pop("args")
    at = body("clone")
    program = edited(at, operation=RETURN, constant=bpf.ALLOW)
    with pytest.raises(errors.ProofError, match="clone"):
        proved(program, document)
