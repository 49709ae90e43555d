"""The gate's loop: what waits is woken once, by what it waits for or by its time."""

from __future__ import annotations

import os
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from sandbox.network.dns.loop import READ, WRITE, Future, Loop


def run(loop: Loop, *coroutines: Coroutine[Any, Any, None]) -> None:
    """Run them until nothing is left to wait for."""
    for one in coroutines:
        loop.spawn(one)
    loop.run()


def test_descriptor_wakes_who_waits_for_it() -> None:
    loop = Loop()
    seen: list[bool | bytes] = []
    reads, writes = os.pipe()

    async def reader() -> None:
        seen.append(await loop.ready(reads, READ, time.monotonic() + 30))
        seen.append(os.read(reads, 10))

    async def writer() -> None:
        assert await loop.ready(writes, WRITE, time.monotonic() + 30)
        os.write(writes, b"x")

    loop.spawn(reader())
    loop.spawn(writer())
    while len(seen) < 2:
        loop.turn(1)
    os.close(reads)
    os.close(writes)
    assert seen == [True, b"x"]


def test_time_that_runs_out_wakes_as_well() -> None:
    loop, seen = Loop(), []
    reads, writes = os.pipe()
    never = Future()

    async def waits() -> None:
        seen.append(await loop.ready(reads, READ, time.monotonic() + 0.01))
        seen.append(await loop.result(never, time.monotonic() + 0.01))

    run(loop, waits())
    never.set("too late")
    os.close(reads)
    os.close(writes)
    assert seen == [False, None]


def test_time_that_nobody_waits_for_any_more_is_not_kept() -> None:
    """An agent that sends a question byte by byte has the gate wait again for each; the others' times still come."""
    loop = Loop()
    seen: list[int | None] = []
    reads, writes = os.pipe()

    async def dribbles() -> None:
        for _ in range(5000):
            os.write(writes, b"x")
            assert await loop.ready(reads, READ, time.monotonic() + 30)
            os.read(reads, 1)
        seen.append(len(loop._timers))

    async def waits() -> None:
        seen.append(await loop.result(Future(), time.monotonic() + 0.05))

    loop.spawn(waits())
    loop.spawn(dribbles())
    while len(seen) < 2:
        loop.turn(1)
    os.close(reads)
    os.close(writes)
    assert max(one for one in seen if one is not None) <= 1024


def test_value_comes_once() -> None:
    loop, seen = Loop(), []
    future = Future()

    async def waits() -> None:
        seen.append(await future)
        seen.append(await future)

    loop.spawn(waits())
    future.set(1)
    future.set(2)
    assert seen == [1, 1]


def test_what_is_forgotten_is_not_called() -> None:
    loop = Loop()
    called: list[str] = []
    reads, writes = os.pipe()
    os.write(writes, b"x")

    def act() -> None:
        called.append("once")
        loop.forget(reads)

    loop.on_readable(reads, act)
    loop.run()
    loop.forget(reads)
    os.close(reads)
    os.close(writes)
    assert called == ["once"]


def test_error_ends_loop() -> None:
    """And with it the gate, and with that the run: nothing goes on half."""
    loop = Loop()

    async def fails() -> None:
        await loop.result(Future(), time.monotonic() + 0.01)
        raise KeyError("a mistake")

    with pytest.raises(KeyError):
        run(loop, fails())
