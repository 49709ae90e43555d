"""Check that a peer with any number of requests leaves places to other peers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from covenant.fair_share import Shares

pytestmark = pytest.mark.anyio

OPERATOR, ALICE, BOB, CAROL = "operator", "alice", "bob", "carol"


class World:
    """Runs that end when the test says so."""

    def __init__(self, most: int, group: anyio.abc.TaskGroup) -> None:
        self.shares = Shares(most, operator=OPERATOR)
        self.running: list[str] = []
        self._group, self._ends = group, dict[str, list[anyio.CancelScope]]()

    async def ask(self, whom: str, count: int = 1) -> None:
        """Ask for ``count`` runs and wait until as many as possible have begun."""
        for _ in range(count):
            self._group.start_soon(self._run, whom)
        await anyio.wait_all_tasks_blocked()

    async def end(self, whom: str) -> None:
        """End one live run of this peer."""
        self._ends[whom].pop(0).cancel()
        await anyio.wait_all_tasks_blocked()

    async def _run(self, whom: str) -> None:
        async with self.shares.place(whom):
            self.running.append(whom)
            with anyio.CancelScope() as scope:
                self._ends.setdefault(whom, []).append(scope)
                await anyio.sleep_forever()
            self.running.remove(whom)


@asynccontextmanager
async def world(most: int = 24) -> AsyncIterator[World]:
    async with anyio.create_task_group() as group:
        yield World(most, group)
        group.cancel_scope.cancel()


async def test_one_peer_that_asks_without_end_leaves_half_to_others() -> None:
    async with world() as here:
        await here.ask(ALICE, 200)
        assert here.running == [ALICE] * 12
        await here.ask(BOB, 3)
        assert here.running.count(BOB) == 3
        # Alice's waiting requests delay only her own, and no other peer's.
        await here.ask(CAROL)
        assert here.running.count(CAROL) == 1
        await here.end(ALICE)
        assert here.running.count(ALICE) == 12


async def test_however_many_peers_there_are_operator_finds_place() -> None:
    async with world() as here:
        for one in range(9):
            await here.ask(f"peer-{one}", 3)
        assert len(here.running) == 18
        await here.ask(OPERATOR, 30)
        assert here.running.count(OPERATOR) == 6
        await here.end("peer-0")
        # The next peer or the operator takes the freed place: all places are in use again.
        assert len(here.running) == 24


async def test_operator_alone_has_all() -> None:
    async with world() as here:
        await here.ask(OPERATOR, 30)
        assert here.running == [OPERATOR] * 24


async def test_whoever_goes_away_while_they_wait_takes_no_place_along() -> None:
    async with world(2) as here:
        await here.ask(ALICE)
        with anyio.move_on_after(0):
            async with here.shares.place(ALICE):
                pytest.fail("there is one place for her")
        await here.end(ALICE)
        assert here.running == []
        assert here.shares._peers == {}
        await here.ask(ALICE, 2)
        assert here.running == [ALICE]


async def test_place_now_is_there_or_refused() -> None:
    shares = Shares(8, operator=OPERATOR, of_one=2)
    with contextlib.ExitStack() as held:
        for whom, count in ((ALICE, 2), (BOB, 2), (CAROL, 1), (OPERATOR, 2)):
            for _ in range(count):
                held.enter_context(shares.place_now(whom))
            with pytest.raises(anyio.WouldBlock), shares.place_now(whom):
                pytest.fail("it has its share")
        held.enter_context(shares.place_now("dave"))
        with pytest.raises(anyio.WouldBlock), shares.place_now("erin"):
            pytest.fail("the last places are the operator's")
    with shares.place_now(ALICE), shares.place_now(ALICE):
        pass


async def test_peers_that_collude_leave_places_to_others() -> None:
    """As many as an entry `[[mcp.server]]` has: three shares of 16 are all 48 that are not the operator's."""
    shares = Shares(64, operator=OPERATOR, of_one=16)
    with contextlib.ExitStack() as held:
        for whom in (ALICE, BOB, CAROL):
            _take_all(shares, whom, held)
        assert _take_all(shares, "dave", held) == 4
        assert _take_all(shares, "erin", held) == 2
        assert _take_all(shares, "frank", held) == 1
        assert _take_all(shares, OPERATOR, held) == 16


async def test_peer_alone_has_its_whole_share() -> None:
    shares = Shares(64, operator=OPERATOR, of_one=16)
    with contextlib.ExitStack() as held:
        assert [_take_all(shares, whom, held) for whom in (ALICE, BOB)] == [16, 16]


def _take_all(shares: Shares, whom: str, held: contextlib.ExitStack) -> int:
    taken = 0
    with contextlib.suppress(anyio.WouldBlock):
        while True:
            held.enter_context(shares.place_now(whom))
            taken += 1
    return taken
