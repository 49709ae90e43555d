"""Tables of the older iptables as the kernel has them, judged as nftables' are."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from policy.decompile import host_rules
from policy.decompile.documents import dumps
from sandbox.kernel.net import netns, old_tables
from tests.kernel import planted_iptables as ipt
from tests.kernel.test_host_rules import RUN

# `-m addrtype --dst-type LOCAL`: struct xt_addrtype_info; RTN_LOCAL is 2.
ADDRTYPE = struct.pack("=H29sBHHII4x", 48, b"addrtype", 0, 0, 1 << 2, 0, 0)


@pytest.fixture
def space() -> Iterator[int]:
    (fd,) = netns.make()
    yield fd
    os.close(fd)


def listed(space: int) -> list[dict[str, Any]]:
    return netns.within(space, old_tables.listed)


def touching(space: int, *rules: bytes) -> frozenset[str]:
    netns.within(space, lambda: ipt.load_nat(*rules))
    return host_rules.touching(dumps({"nftables": listed(space)}), RUN)


def test_namespace_without_a_table_has_no_rules(space: int) -> None:
    assert listed(space) == []


def test_empty_table_touches_nobody(space: int) -> None:
    assert touching(space) == frozenset()
    assert [item["chain"]["name"] for item in listed(space) if "chain" in item] == [
        "prerouting", "input", "output", "postrouting", "ERROR",
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
}
OTHERS = {
    "an address that is not granted": ipt.rule(TO, destination="8.8.8.8/32"),
    "another source": ipt.rule(TO, source="172.17.0.0/16"),
    "another device": ipt.rule(TO, device="docker0"),
    "another run's device": ipt.rule(TO, device="cv-99999999"),
    "the host's own addresses": ipt.rule(TO, match=ADDRTYPE),
    "an accept that names nobody": ipt.rule(ipt.verdict(-2)),
    "a drop for the run's device": ipt.rule(ipt.verdict(-5), device="cv-12345678"),
}


@pytest.mark.parametrize("name", TOUCHING)
def test_old_rule_that_touches_the_run_is_told(space: int, name: str) -> None:
    assert [text.startswith("ip nat (iptables) prerouting") for text in touching(space, TOUCHING[name])] == [True]


@pytest.mark.parametrize("name", OTHERS)
def test_old_rule_about_others_is_not_told(space: int, name: str) -> None:
    assert touching(space, OTHERS[name]) == frozenset()


def test_another_target_of_a_rule_is_another_rule(space: int) -> None:
    assert touching(space, ipt.rule(TO)) != touching(space, ipt.rule(ipt.dnat("10.8.8.9")))
