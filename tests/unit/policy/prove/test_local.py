"""The filter of trusted-local as libseccomp makes it: honest programs hold, and each planted fault is named."""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from policy import data, errors
from policy.compile import seccomp, trusted_local
from policy.decompile import bpf, conditions
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.prove import local
from sandbox.kernel.seccomp import load

ARCH = platform.machine()
NUMBERS = data.syscalls(ARCH).numbers
JEQ, JGE, AND, RETURN = 0x15, 0x35, 0x54, 0x06

TOML = """
[agent]
id = "probe"
name = "probe"
version = "1"
runtime = "python3"
entry = "main.py"
[resources]
{network}
[sandbox]
filesystem = "ephemeral"
{more}
"""
OFF, FULL = 'network = "off"', 'network = "full"'


# Family, type, protocol (linux/socket.h, linux/net.h, linux/in.h), and what each one is.
TCP_AND_UDP = ((1, 1, 0), (1, 2, 0), (1, 5, 0), (2, 1, 0), (2, 1, 6), (2, 0x80802, 17), (10, 1, 6), (10, 2, 0))
SOCKETS = (
    *TCP_AND_UDP,
    *(
        (family, 2, 0) for family in (0, *range(3, 10), *range(11, 64), 1 << 32 | 2, 2**64 - 1)
    ),  # netlink is 16, vsock 40
    (2, 3, 1),  # raw
    (2, 2, 1),  # ping
    (2, 5, 0),  # SCTP
    (2, 1, 132),  # SCTP
    (2, 1, 262),  # MPTCP
    (2, 6, 33),  # DCCP
    (10, 2, 136),  # UDP-Lite
    (10, 5, 6),
)


def manifest(network: str = OFF, *, deny: tuple[str, ...] = ()) -> Manifest:
    more = f"[permissions.syscalls]\ndeny = {list(deny)}" if deny else ""
    return parse.parse(TOML.format(network=network, more=more).encode())


def described(found: Manifest) -> seccomp.DenyFilter:
    return trusted_local.compile(found, arch=ARCH, signed=False).filter


def program(description: seccomp.DenyFilter) -> bytes:
    return load.export(load.prepare(description))


def proved(raw: bytes, found: Manifest) -> None:
    local.prove(raw, local.demanded(found), arch=ARCH)


@pytest.mark.parametrize(
    "found",
    [
        manifest(OFF),
        manifest(FULL),
        manifest(""),
        manifest(OFF, deny=("symlink", "personality", "ioctl", "socket", "clone")),
        manifest(FULL, deny=("socketpair", "bpf")),
    ],
    ids=["off", "full", "unwritten", "own deny list", "own deny list with network"],
)
def test_what_libseccomp_makes_of_our_list_is_what_is_demanded(found: Manifest) -> None:
    proved(program(described(found)), found)


def test_what_is_demanded_is_in_data() -> None:
    demand = local.demanded(manifest(OFF, deny=("symlink",)))
    for name in (*data.deny().names - {"clone3"}, "symlink", "msgget", "semget", "shmget"):
        assert demand.only[name] == conditions.NEVER, name
    assert demand.missing == {"clone3"}
    assert demand.only["socket"] == demand.only["socketpair"] == conditions.any_of([[(0, 2**64 - 1, 1)]])
    assert demand.only["clone"] == conditions.any_of([[(0, 0x7E020000, 0)]])
    assert conditions.holds(demand.refused["ioctl"], [0, 0x5412])
    assert not conditions.holds(demand.refused["ioctl"], [0, 0x5401])
    for network in (FULL, ""):
        free = local.demanded(manifest(network)).only
        assert free["socketpair"] == demand.only["socketpair"]
        assert [one for one in SOCKETS if conditions.holds(free["socket"], one)] == list(TCP_AND_UDP)
    assert "ioctl" not in local.demanded(manifest(deny=("ioctl",))).refused


def test_proof_agrees_with_program_call_by_call() -> None:
    found = manifest()
    raw, demand = program(described(found)), local.demanded(found)
    for name, number in NUMBERS.items():
        for arguments in ((0, 0), (1, 0x5401), (17, 0x5412), (2, 0x5423), (0x10000000, 0), (1 << 40 | 1, 1 << 40)):
            action = bpf.decide(raw, number=number, arch=TAG, arguments=arguments)
            if name in demand.missing:
                expected = 0x00050000 | errno.ENOSYS
            else:
                passes = conditions.holds(demand.only.get(name, conditions.ALWAYS), arguments)
                passes = passes and not conditions.holds(demand.refused.get(name, conditions.NEVER), arguments)
                expected = bpf.ALLOW if passes else 0x00050001
            assert action == expected, (name, arguments)


TAG = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[ARCH]


# --- faults of the list -------------------------------------------------------------------------------


def dropped(name: str, at: int = 0) -> Callable[[seccomp.DenyFilter], seccomp.DenyFilter]:
    def change(whole: seccomp.DenyFilter) -> seccomp.DenyFilter:
        mine = [rule for rule in whole.rules if rule.name == name]
        return structs.replace(whole, rules=tuple(rule for rule in whole.rules if rule is not mine[at]))

    return change


def changed(name: str, **values: Any) -> Callable[[seccomp.DenyFilter], seccomp.DenyFilter]:
    def change(whole: seccomp.DenyFilter) -> seccomp.DenyFilter:
        rules = list(whole.rules)
        at = next(at for at, rule in enumerate(rules) if rule.name == name)
        check = rules[at].check
        if check is not None and not values.keys() & {"number", "name", "error", "check"}:
            rules[at] = structs.replace(rules[at], check=structs.replace(check, **values))
        else:
            rules[at] = structs.replace(rules[at], **values)
        return structs.replace(whole, rules=tuple(rules))

    return change


def added(name: str) -> Callable[[seccomp.DenyFilter], seccomp.DenyFilter]:
    rule = seccomp.DenyRule(name, NUMBERS[name], errno.EPERM)
    return lambda whole: structs.replace(whole, rules=(*whole.rules, rule))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (dropped("bpf"), "does not refuse `bpf`"),
        (dropped("clone"), "does not refuse `clone` with arguments"),
        (dropped("socket"), "does not refuse `socket` with arguments"),
        (dropped("socket", 1), "does not refuse `socket` with arguments"),
        (dropped("ioctl"), "does not refuse `ioctl` with arguments"),
        (dropped("personality", 9), "does not refuse `personality` with arguments"),
        (dropped("clone3"), "does not answer `clone3` with ENOSYS"),
        (changed("clone3", error=errno.EPERM), "does not answer `clone3` with ENOSYS"),
        (changed("bpf", error=errno.ENOSYS), "`bpf` with neither yes nor EPERM"),
        (changed("bpf", error=0), "`bpf` with neither yes nor EPERM"),
        (dropped("socketpair"), "does not refuse `socketpair` with arguments"),
        (changed("ioctl", argument=2), "`ioctl` with arguments"),
        (changed("ioctl", mask=2**64 - 1), "does not refuse `ioctl` with arguments"),
        (changed("ioctl", mask=0xFFFF), "does not let `ioctl` with arguments"),
        (changed("ioctl", value=0x5413), "`ioctl` with arguments"),
        (changed("clone", mask=0x02000000, value=0x02000000), "does not refuse `clone` with arguments"),
        (added("read"), "does not let `read` pass"),
        (added("getppid"), "does not let `getppid` pass"),
        (added("ioctl"), "does not let `ioctl` with arguments"),
    ],
)
def test_fault_of_list_is_named(fault: Callable[..., seccomp.DenyFilter], message: str) -> None:
    found = manifest()
    with pytest.raises(errors.ProofError, match=message):
        proved(program(fault(described(found))), found)


def test_each_dropped_socket_rule_is_named() -> None:
    whole = described(manifest(FULL))
    rules = sum(rule.name == "socket" for rule in whole.rules)
    proved(program(whole), manifest(FULL))
    for at in range(rules):
        with pytest.raises(errors.ProofError, match="does not refuse `socket` with arguments"):
            proved(program(dropped("socket", at)(whole)), manifest(FULL))
    with pytest.raises(errors.ProofError, match="does not let `socket` with arguments"):
        proved(program(added("socket")(whole)), manifest(FULL))


def test_wrong_manifests_filter_is_named() -> None:
    for made, asked, message in [
        (FULL, OFF, "does not refuse `socket"),
        (OFF, FULL, "does not refuse `socket` with arguments"),  # a unix socket of any protocol
    ]:
        with pytest.raises(errors.ProofError, match=message):
            proved(program(described(manifest(made))), manifest(asked))
    with pytest.raises(errors.ProofError, match="does not refuse `symlink`"):
        proved(program(described(manifest())), manifest(deny=("symlink",)))


# --- faults of what makes the program -----------------------------------------------------------------


def edited(raw: bytes, at: int, **fields: int) -> bytes:
    """One instruction changed: its operation, jumps or constant."""
    values = dict(zip(("operation", "if_true", "if_false", "constant"), bpf.parse(raw)[at], strict=True))
    return raw[: at * 8] + struct.pack("<HBBI", *{**values, **fields}.values()) + raw[at * 8 + 8 :]


def find(raw: bytes, operation: int, constant: int) -> int:
    return next(at for at, step in enumerate(bpf.parse(raw)) if step[0] == operation and step[3] == constant)


@pytest.fixture(scope="module")
def honest() -> bytes:
    return program(described(manifest()))


def refuses(raw: bytes, message: str) -> None:
    with pytest.raises((errors.ProofError, errors.ArtefactError), match=message):
        proved(raw, manifest())


def test_foreign_tag_that_passes_is_named(honest: bytes) -> None:
    tag = find(honest, JEQ, TAG)
    refuses(edited(honest, tag, constant=TAG ^ 1), "of architecture 0xc0000")
    refuses(edited(honest, tag, if_false=0), "of architecture 0x")
    refuses(edited(honest, tag, operation=JGE), "of architecture 0x")


def test_x32_that_passes_is_named(honest: bytes) -> None:
    if ARCH != "x86_64":  # no other machine has these calls: there they are numbers like any without a name
        assert bpf.decide(honest, number=0x40000000, arch=TAG) == bpf.ALLOW
        return
    bound = find(honest, JGE, 0x40000000)
    refuses(edited(honest, bound, constant=0x40000001), "call 1073741824 of x32")
    refuses(edited(honest, bound, constant=0x3FFFFFFF), "does not let call 1073741823 pass")
    refuses(edited(honest, bound, if_true=bpf.parse(honest)[bound][2]), "of x32")


def test_each_number_and_each_answer_matters(honest: bytes) -> None:
    caught = 0
    for at, (operation, _, _, constant) in enumerate(bpf.parse(honest)):
        if operation == JEQ and constant in NUMBERS.values() and at < find(honest, JEQ, NUMBERS["clone"]):
            for wrong in (edited(honest, at, constant=600), edited(honest, at, constant=constant ^ 1)):
                refuses(wrong, "does not|neither")
                caught += 1
        if operation == RETURN:
            for action in {bpf.ALLOW, 0x00050001, 0x00050026, 0x00050000, 0x80000000, 0x7FF00000} - {constant}:
                refuses(edited(honest, at, constant=action), "does not|neither")
                caught += 1
    assert caught > 150


def test_each_test_of_argument_matters(honest: bytes) -> None:
    """Masks and values, one bit more and one bit less: clone, personality and ioctl."""
    caught = 0
    for at, (operation, _, _, constant) in enumerate(bpf.parse(honest)):
        if operation == AND or (operation == JEQ and constant not in {TAG, *NUMBERS.values()}):
            less, more = constant & (constant - 1), constant | (constant + 1) & 0xFFFFFFFF
            for wrong in {less, more} - {constant}:
                raw = edited(honest, at, constant=wrong)
                try:
                    proved(raw, manifest())
                except errors.ProofError:
                    caught += 1
                else:
                    assert meaning(raw) == meaning(honest), "only what changes nothing may pass"
    assert caught > 150


def meaning(raw: bytes) -> list[int]:
    """The program run one bit away from what the rules over many values compare with."""
    points = [start ^ 1 << bit for start in (0, 0xFFFFFFFF) for bit in range(40)]
    names = ("clone", "personality")
    return [bpf.decide(raw, number=NUMBERS[name], arch=TAG, arguments=(point,)) for name in names for point in points]


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(errors.ArtefactError):
        proved(b"", manifest())
