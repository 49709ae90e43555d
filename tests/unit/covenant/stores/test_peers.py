"""The registry of peers: one suite for what is in memory and what is on the disk."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from covenant.stores.peers.durable import DurablePeers
from covenant.stores.peers.in_memory import InMemoryPeers
from tests.capability_kit import ADA, BOB, DAEMON
from tests.server_kit import Clock

pytestmark = pytest.mark.anyio


@pytest.fixture
def clock() -> Clock:
    return Clock(1000)


@pytest.fixture(params=["in memory", "durable"])
async def peers(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[InMemoryPeers]:
    tmp_path.chmod(0o700)
    kept = (
        InMemoryPeers(DAEMON.agent, clock)
        if request.param == "in memory"
        else await DurablePeers.open(tmp_path / "peers", DAEMON.agent, clock)
    )
    yield kept
    await kept.close()


async def test_operator_is_there_from_start(peers: InMemoryPeers) -> None:
    found = await peers.authenticate(peers.operator_token)
    assert found is not None
    assert (found.agent_id, found.token_prefix) == (DAEMON.agent, peers.operator_token[:6])


async def test_token_lets_in_whose_it_is(peers: InMemoryPeers) -> None:
    made = await peers.enroll(ADA, None)
    found = await peers.authenticate(made.token)
    assert found is not None
    assert (found.agent_id, found.token_prefix, found.registered_at) == (ADA, made.token[:6], 1000)
    assert len(made.token) in range(42, 45)
    assert made.token not in repr(made)
    assert peers.admits(ADA.pubkey, made.token[:6])
    assert not peers.admits(BOB.pubkey, made.token[:6])


@pytest.mark.parametrize("wrong", ["", "x", "é" * 20, "\ud800", "1" * 44])
async def test_what_is_nobodys(peers: InMemoryPeers, wrong: str) -> None:
    assert await peers.authenticate(wrong) is None


async def test_close_to_token_is_not_token(peers: InMemoryPeers) -> None:
    token = (await peers.enroll(ADA, None)).token
    for close in (token[:-1], token + "1", "1" + token, token.swapcase(), f" {token}", token[:6]):
        assert await peers.authenticate(close) is None


async def test_revoked(peers: InMemoryPeers, clock: Clock) -> None:
    made = await peers.enroll(ADA, None)
    clock.at_ms = 2000
    await peers.revoke(made.entry)
    assert await peers.authenticate(made.token) is None
    assert not peers.admits(ADA.pubkey, made.token[:6])
    assert made.entry.summary().revoked_at == 2000
    clock.at_ms = 3000
    await peers.revoke(made.entry)
    assert made.entry.summary().revoked_at == 2000


async def test_ended(peers: InMemoryPeers, clock: Clock) -> None:
    peers.newly_expired()
    made = await peers.enroll(ADA, 1500)
    clock.at_ms = 1500
    assert await peers.authenticate(made.token) is not None
    assert peers.newly_expired() == []
    clock.at_ms = 1501
    assert await peers.authenticate(made.token) is None
    assert peers.newly_expired() == [made.entry]
    assert peers.newly_expired() == []
    assert peers.named(ADA.display) == []


async def test_rotation(peers: InMemoryPeers) -> None:
    old = peers.operator_token
    ada = await peers.enroll(ADA, None)
    made = await peers.rotate_operator()
    assert (made.old_prefix, made.new_prefix) == (old[:6], made.token[:6])
    assert made.token == peers.operator_token
    assert made.token not in repr(made)
    assert await peers.authenticate(old) is None
    assert await peers.authenticate(made.token) is not None
    assert await peers.authenticate(ada.token) is not None


async def test_matching(peers: InMemoryPeers) -> None:
    first, second = await peers.enroll(ADA, None), await peers.enroll(ADA, None)
    assert peers.matching(first.token[:6]) == [first.entry]
    assert peers.matching(first.token) == [first.entry]
    # Seven characters are neither what is kept nor a whole token.
    assert peers.matching(first.token[:7]) == []
    assert [entry.token_prefix for entry in peers.matching("")][:2] == [second.token[:6], first.token[:6]]


async def test_listing(peers: InMemoryPeers, clock: Clock) -> None:
    made = [await peers.enroll(ADA if n % 2 else BOB, 1400 if n == 3 else None) for n in range(4)]
    await peers.revoke(made[0].entry)
    clock.at_ms = 1500

    def shown(*asked: object) -> tuple[list[str], bool]:
        found = peers.listing(*asked)  # type: ignore[arg-type]
        return [entry.token_prefix for entry in found.entries], found.truncated

    of = [one.token[:6] for one in made]
    operator = peers.operator_token[:6]
    assert shown(10, None, None) == ([of[3], of[2], of[1], of[0], operator], False)
    assert shown(10, None, "live") == ([of[2], of[1], operator], False), "what has ended is not live"
    assert shown(10, None, "revoked") == ([of[0]], False)
    assert shown(1, BOB.pubkey[:8], None) == ([of[2]], True)
    assert shown(2, BOB.pubkey, None) == ([of[2], of[0]], False)
    assert shown(0, None, None) == ([], True)


async def test_purge(peers: InMemoryPeers, clock: Clock) -> None:
    gone, ended, held = await peers.enroll(ADA, None), await peers.enroll(ADA, 1200), await peers.enroll(BOB, None)
    await peers.revoke(gone.entry)
    assert await peers.purge(1000) == 0
    assert await peers.purge(9000) == 1, "what holds is not over because a cut-off lies in the future"
    clock.at_ms = 5000
    assert await peers.purge(1000) == 0
    assert await peers.purge(1201) == 1
    assert peers.matching(gone.token) == peers.matching(ended.token) == []
    assert await peers.authenticate(gone.token) is None
    assert await peers.authenticate(held.token) is not None
    assert await peers.authenticate(peers.operator_token) is not None
