"""Turns at the resolvers: in order, the manifest's own names first, and a bounded queue."""

from __future__ import annotations

from sandbox.network.dns.loop import Loop
from sandbox.network.dns.turns import Turns


def _ask(loop: Loop, turns: Turns, name: str, seen: list[str], *, first: bool = False) -> None:
    async def question() -> None:
        seen.append(name if await turns.mine(first=first) else f"no turn: {name}")

    loop.spawn(question())


def test_burst_goes_at_once_and_the_rest_in_turn() -> None:
    loop, seen = Loop(), list[str]()
    turns = Turns(loop, 1000, 2)
    for name in ("a", "b", "c", "d"):
        _ask(loop, turns, name, seen)
    _ask(loop, turns, "granted", seen, first=True)
    assert seen == ["a", "b"]
    loop.run()
    assert seen == ["a", "b", "granted", "c", "d"]


def test_full_queue_gives_no_turn() -> None:
    loop, seen = Loop(), list[str]()
    turns = Turns(loop, 1000, 1, most=1)
    for name in ("a", "b", "c"):
        _ask(loop, turns, name, seen)
    # The queue of the manifest's own names is another one.
    _ask(loop, turns, "granted", seen, first=True)
    assert seen == ["a", "no turn: c"]
    loop.run()
    assert seen == ["a", "no turn: c", "granted", "b"]
