"""Tables of the older iptables as the kernel has them, judged as nftables' are."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from policy.decompile import host_rules
from policy.decompile.documents import dumps
from sandbox.kernel.net import netns, old_tables
from tests.kernel import planted_iptables as ipt
from tests.kernel.test_host_rules import RUN

# `-m addrtype --dst-type LOCAL`: struct xt_addrtype_info; RTN_LOCAL is 2.
LOCAL, UNICAST = 1 << 2, 1 << 1
ADDRTYPE = struct.pack("=H29sBHHII4x", 48, b"addrtype", 0, 0, LOCAL, 0, 0)


def addrtype(destination: int, flags: int) -> bytes:
    """Revision 1, which the program iptables-legacy sends: the flag 2 inverts the destination."""
    return struct.pack("=H29sBHHI", 40, b"addrtype", 1, 0, destination, flags)


def changed(rule: bytes, *parts: tuple[int, bytes]) -> bytes:
    """A rule with other bytes of struct ipt_entry: masks with holes, and inversions."""
    whole = bytearray(rule)
    for at, part in parts:
        whole[at : at + len(part)] = part
    return bytes(whole)


DESTINATION_MASK, DEVICE_MASK, INVERTED = 12, 48, 83
INVERT_DEVICE, INVERT_DESTINATION = b"\x01", b"\x10"


@pytest.fixture
def space() -> Iterator[int]:
    (fd,) = netns.make()
    yield fd
    os.close(fd)


def listed(space: int) -> list[dict[str, Any]]:
    return netns.within(space, old_tables.listed)


def touching(space: int, *rules: bytes, chains: tuple[bytes, ...] = ()) -> frozenset[str]:
    netns.within(space, lambda: ipt.load_nat(*rules, chains=chains))
    return host_rules.touching(dumps({"nftables": listed(space)}), RUN)


def test_namespace_without_table_has_no_rules(space: int) -> None:
    assert listed(space) == []


def test_empty_table_touches_nobody(space: int) -> None:
    assert touching(space) == frozenset()
    assert [item["chain"]["name"] for item in listed(space) if "chain" in item] == [
        "prerouting", "input", "output", "postrouting", "chain ERROR",
    ]  # fmt: skip


TO = ipt.dnat("10.8.8.8")
TOUCHING = {
    "every packet": ipt.rule(TO),
    "a granted address": ipt.rule(TO, destination="93.184.216.34/32"),
    "a network with granted addresses": ipt.rule(TO, destination="10.0.0.0/24"),
    "the run's address": ipt.rule(TO, source="198.19.0.40/32"),
    "the run's device": ipt.rule(TO, device="cv-12345678"),
    "the devices of all runs": ipt.rule(TO, device="cv-*"),
    "an accept for the run's device": ipt.rule(ipt.verdict(-2), device="cv-12345678"),
    "no address of the host, revision 0": ipt.rule(
        TO, match=struct.pack("=H29sBHHII4x", 48, b"addrtype", 0, 0, LOCAL, 0, 1)
    ),
    "no address of the host": ipt.rule(TO, match=addrtype(LOCAL, 2)),
    "an address of another host": ipt.rule(TO, match=addrtype(UNICAST, 0)),
    "a mask with holes": changed(ipt.rule(TO, destination="10.0.0.0/8"), (DESTINATION_MASK, b"\xff\0\xff\0")),
    "an inverted mask with holes": changed(
        ipt.rule(TO, destination="10.0.0.0/8"),
        (DESTINATION_MASK, b"\xff\0\xff\0"),
        (INVERTED, INVERT_DESTINATION),
    ),
    "a device by a mask shorter than its name": changed(
        ipt.rule(TO, device="cv-99999999"), (DEVICE_MASK + 3, bytes(13))
    ),
    "a device by a mask with holes": changed(ipt.rule(TO, device="xv-12345678"), (DEVICE_MASK, b"\0")),
    "an inverted device by a mask with holes": changed(
        ipt.rule(TO, device="cv-12345678"), (DEVICE_MASK + 5, b"\0"), (INVERTED, INVERT_DEVICE)
    ),
    "every device but another": changed(ipt.rule(TO, device="docker0"), (INVERTED, INVERT_DEVICE)),
}
OTHERS = {
    "an address that is not granted": ipt.rule(TO, destination="8.8.8.8/32"),
    "another source": ipt.rule(TO, source="172.17.0.0/16"),
    "another device": ipt.rule(TO, device="docker0"),
    "another run's device": ipt.rule(TO, device="cv-99999999"),
    "the host's own addresses, revision 0": ipt.rule(TO, match=ADDRTYPE),
    "the host's own addresses": ipt.rule(TO, match=addrtype(LOCAL, 0)),
    "every device but the run's": changed(ipt.rule(TO, device="cv-12345678"), (INVERTED, INVERT_DEVICE)),
    "every address but the granted network": changed(
        ipt.rule(TO, destination="0.0.0.0/1"), (INVERTED, INVERT_DESTINATION)
    ),
    "an accept that names nobody": ipt.rule(ipt.verdict(-2)),
    "a drop for the run's device": ipt.rule(ipt.verdict(-5), device="cv-12345678"),
}


@pytest.mark.parametrize("name", TOUCHING)
def test_old_rule_that_touches_run_is_told(space: int, name: str) -> None:
    assert [text.startswith("ip nat (iptables) prerouting") for text in touching(space, TOUCHING[name])] == [True]


@pytest.mark.parametrize("name", OTHERS)
def test_old_rule_about_others_is_not_told(space: int, name: str) -> None:
    assert touching(space, OTHERS[name]) == frozenset()


def test_another_target_of_rule_is_another_rule(space: int) -> None:
    assert touching(space, ipt.rule(TO)) != touching(space, ipt.rule(ipt.dnat("10.8.8.9")))


# The first rules, the four policies of 152 bytes each, and then the user's chains.
JUMP, POLICIES = len(ipt.rule(ipt.verdict(0))), 4 * len(ipt.rule(ipt.verdict(0)))
HEAD = len(ipt.rule(ipt.error("")))
RETURN = ipt.rule(ipt.verdict(-5))


def user_chain(name: str, *rules: bytes) -> tuple[bytes, ...]:
    return (ipt.rule(ipt.error(name)), *rules, RETURN)


@pytest.mark.parametrize("name", ["aside", "prerouting", "input"])
def test_jump_into_users_chain_is_followed(space: int, name: str) -> None:
    jump = ipt.rule(ipt.verdict(JUMP + POLICIES + HEAD))
    found = touching(space, jump, chains=user_chain(name, ipt.rule(TO)))
    assert [text.startswith(f"ip nat (iptables) chain {name}: ") for text in found] == [True]


def test_users_chain_named_like_hook_hides_no_rule(space: int) -> None:
    found = touching(space, ipt.rule(TO), chains=user_chain("prerouting"))
    assert [text.startswith("ip nat (iptables) prerouting: ") for text in found] == [True]


def test_users_chain_that_nobody_calls_touches_nobody(space: int) -> None:
    assert touching(space, chains=user_chain("prerouting", ipt.rule(TO))) == frozenset()


def test_rule_that_only_counts_leads_to_next(space: int) -> None:
    counts = ipt.rule(ipt.verdict(JUMP))
    assert len(touching(space, counts, ipt.rule(TO))) == 1
    assert touching(space, counts) == frozenset()


def test_jump_into_middle_of_chain_is_refused(space: int) -> None:
    jump = ipt.rule(ipt.verdict(JUMP + POLICIES + HEAD + JUMP))
    with pytest.raises(errors.KernelError, match="table nat of the older iptables"):
        touching(space, jump, chains=user_chain("aside", ipt.rule(ipt.verdict(-2)), ipt.rule(TO)))
