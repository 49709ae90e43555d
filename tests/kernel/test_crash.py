"""kill -9 at fifty points of a run and thirty of a vault: ``make crash`` has every step of much more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import scenes, vaults
from tests.crash.campaign import Campaign, Foreign, Point, Tally
from tests.crash.server import Server
from tests.crash.steps import Target
from tests.kernel.internet import Internet

SEED = 20_251_122
POINTS = {"plain": 10, "family": 8, "networked": 8, "served": 8, "standby": 8, "secrets": 8}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


@pytest.mark.parametrize("name", POINTS)
def test_a_run_that_is_killed_anywhere_leaves_nothing_after_the_next_start(
    name: str, tmp_path: Path, warm: Path, server: Server
) -> None:
    tally, chance = Tally(), random.Random(SEED)
    with scenes.made(tmp_path, name, warm=warm) as (scene,), Foreign(scene) as foreign:
        campaign = Campaign(scene, server, tally)
        campaign.calibrate()
        # How many steps a main loop takes is a matter of time: some points lie behind its end, and others are drawn.
        tried = 0
        while tried < POINTS[name] or (_fired(tally) <= POINTS[name] // 2 and tried < 4 * POINTS[name]):
            campaign.attempt(campaign.random(chance))
            tried += 1
        if name == "plain":
            for point in _around_each_row(campaign):
                campaign.attempt(point)
        if scene.internet is not None:
            _beside_a_strangers_device(campaign, scene.internet)
        assert tally.wrong == []
        assert campaign.verified() == []
        assert foreign.touched() == []
    # The control: most of them did kill something.
    assert _fired(tally) > POINTS[name] // 2


def _fired(tally: Tally) -> int:
    """How many of the points did kill something."""
    return sum(count for kind, count in tally.tried.items() if "over before" not in kind)


def test_a_vault_that_is_killed_anywhere_has_what_was_acknowledged_and_goes_on(tmp_path: Path, server: Server) -> None:
    tally, chance = Tally(), random.Random(SEED)
    with vaults.made(tmp_path / "vault", server, tally) as campaign:
        # The first ones are those of the key and of the empty vault.
        for step in (*range(18, 26), *chance.sample(range(26, campaign.steps), 25)):
            campaign.attempt(step)
        assert tally.wrong == []
        assert campaign.verified() == []
    assert tally.tried == {"the vault's writer": 33}


def _around_each_row(campaign: Campaign) -> Iterator[Point]:
    """Just before the start's row is acknowledged and just after, and the same of the end's."""
    for _, kind, _, _, last in campaign.calm.rows:
        if kind in ("run_started", "run_ended"):
            yield from (Point(Target(0, last)), Point(Target(0, last + 1)), Point(Target(0, last + 3)))


def _beside_a_strangers_device(campaign: Campaign, net: Internet) -> None:
    """It looks like one of ours, and is another supervisor's as far as anybody can tell: it stays, and so does the
    table that its packets may need, until it is gone and a run of ours is the last."""
    (last,) = (last for _, kind, _, _, last in campaign.calm.rows if kind == "run_started")
    net.run("host", "ip", "link", "add", "cv-feedface", "type", "veth", "peer", "name", "stranger0")
    try:
        killed = campaign.subject("run", Target(0, (last + campaign.steps[0]) // 2))
        assert killed.status == -9
        assert campaign.subject("recover", None).status == 0
        links = [one for one in net.leftovers() if ": cv-" in one]
        assert len(links) == 1
        assert ": cv-feedface@" in links[0]
        assert campaign.server.settle() == []
    finally:
        net.run("host", "ip", "link", "delete", "cv-feedface")
    assert campaign.subject("run", None).status == 0
    assert net.leftovers() == []
