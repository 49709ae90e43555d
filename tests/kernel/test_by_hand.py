"""Each change that root can make by hand at a live run: found by its layer, or standing for a reason of the table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel.cgroup import cgroup
from tests.kernel import by_hand, by_hand_beside, internet
from tests.kernel.hands import Change
from tests.kernel.internet import NetworkedWorld
from tests.kernel.live_runs import live
from tests.kernel.test_attest_network import Hand

GRANTS = internet.entries(
    ("93.184.216.34", "[80]", "tcp"), ("2606:4700::1111", "[80]", "tcp"), ("db.example.com", "[5432]", "tcp"),
    ("api.example.com", "[443]", "tls"),
)  # fmt: skip


@pytest.fixture(scope="module")
def hand(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[Hand]:
    """One run for all of them: each finds it as the one before left it, which must hold."""
    with internet.made() as net:
        net_world = NetworkedWorld(tmp_path_factory.mktemp("by-hand"), warm=warm)
        world = internet.configured(net_world, net, attest_seconds=3600, on_drift="alarm")
        with live(world, network="full", more=GRANTS) as one:
            yield Hand(one, net)
        assert net.leftovers() == []


# What this machine's cgroups have no file for is tried on a machine of the other version.
OTHERS = by_hand_beside.OF_VERSION[2 if cgroup.Hierarchies.read().version == 1 else 1]
CHANGES = {
    f"{title}: {name}": one
    for title, changes in by_hand.GROUPS.items()
    for name, one in changes.items()
    if name not in OTHERS
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_found_or_stands_as_table_says(hand: Hand, name: str) -> None:
    change: Change = CHANGES[name]
    assert [layer for layer in hand.one.report().layers if not layer.holds] == [], "control: before"
    with change.make(hand):
        found = {layer.name: layer.found for layer in hand.one.report().layers if not layer.holds}
    assert tuple(found) == change.layers, found
    assert [layer for layer in hand.one.report().layers if not layer.holds] == [], "control: after"


def test_table_names_enough_and_gives_reason_for_each() -> None:
    assert len(CHANGES) >= 82
    assert all(one.layers or one.why for one in CHANGES.values())


def test_page_has_table() -> None:
    assert by_hand.page() in by_hand.PAGE.read_text()
