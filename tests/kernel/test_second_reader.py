"""pyroute2 as the second reader of a run's network: `covenant attest` finds where the two readers differ."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.attest import live_runs as attest_live_runs
from sandbox.kernel.net import dump, netns, second_reader
from sandbox.network import addresses, namespaces
from tests.kernel import internet
from tests.kernel.internet import NetworkedWorld
from tests.kernel.live_runs import Live, live
from tests.kernel.test_by_hand import GRANTS


@pytest.fixture
def spaces() -> Iterator[namespaces.Spaces]:
    with namespaces.made() as made:
        namespaces.connect(made)
        namespaces.open_link(made)
        yield made


@pytest.mark.parametrize("place", ["agent", "gateway"])
def test_both_readers_see_same(spaces: namespaces.Spaces, place: str) -> None:
    fd = getattr(spaces, place)
    theirs = netns.within(fd, second_reader.lines)
    assert {line.partition(" ")[0] for line in theirs} == {"device", "address", "neighbour", "route", "rule"}
    assert netns.within(fd, second_reader.differences) == []


def test_second_reader_sees_what_was_to_be_made(spaces: namespaces.Spaces) -> None:
    theirs = netns.within(spaces.gateway, second_reader.lines)
    assert f"address {addresses.GATEWAY4}/{addresses.PREFIX4} at device 2" in theirs
    assert f"neighbour {addresses.AGENT4} {addresses.AGENT_MAC} at device 2" in theirs


BLIND = {
    "address": (dump._ADDRESS, f"address {addresses.GATEWAY4}/"),
    "route": (dump._ROUTE, "route unicast "),
    "rule": (dump._RULE, "rule 2: "),
    "device": (dump._LINK, "device 2 "),
}


@pytest.mark.parametrize("what", BLIND)
def test_fault_of_our_reader_is_found(spaces: namespaces.Spaces, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kind, line = BLIND[what]
    monkeypatch.setattr(dump, "_TABLE", tuple(one for one in dump._TABLE if one[0] != kind))
    found = netns.within(spaces.gateway, second_reader.differences)
    assert any(one.startswith(f"only by pyroute2: {line}") for one in found), found


def test_network_that_never_stands_still_is_not_judged(
    spaces: namespaces.Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = iter(range(1000))
    monkeypatch.setattr(dump, "lines", lambda: frozenset({f"rule 2 {next(count)}"}))
    with pytest.raises(errors.KernelError, match="changes while it is read"):
        netns.within(spaces.agent, second_reader.differences)


def _answer(one: Live) -> Any:
    started = {one.made.run_id: one.made.policy_digest}
    found = attest_live_runs.answer(one.world.state, one.made.run_id, started)
    assert found is not None
    return found


def test_attest_of_run_asks_both_readers(tmp_path: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with internet.made() as net:
        world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net, attest_seconds=3600, on_drift="alarm")
        with live(world, network="full", more=GRANTS) as one:
            assert _answer(one).holds, "control"
            theirs = second_reader.lines
            monkeypatch.setattr(second_reader, "lines", lambda: theirs() | {"address 10.9.9.9/32 at device 2"})
            found = [(layer.name, layer.standing, layer.found) for layer in _answer(one).layers if not layer.holds]
        assert found == [("network", "unreadable", "only by pyroute2: address 10.9.9.9/32 at device 2")] * 2
        assert net.leftovers() == []
