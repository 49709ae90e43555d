"""Bodies of requests as the service gate reads them."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandbox.network.service import server
from sandbox.network.service.shapes import RefusedError

pytestmark = pytest.mark.anyio


def _request(size: int, *, chunk: int = 1 << 20, length: int | None = None) -> Any:
    """A request whose body comes in chunks."""

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, size, chunk):
            yield bytes(min(chunk, size - at))

    content = types.SimpleNamespace(iter_any=parts)
    return types.SimpleNamespace(content=content, content_length=length, body_exists=size > 0)


@pytest.mark.parametrize("size", [0, 5, 4 << 20])
async def test_body_is_read_whole(size: int) -> None:
    assert len(await server.whole_body(_request(size), keep=4 << 20)) == size


async def test_body_beyond_what_is_kept_is_longer_than_that() -> None:
    assert 4 << 20 < len(await server.whole_body(_request(16 << 20), keep=4 << 20)) <= 5 << 20


@pytest.mark.parametrize("length", [None, server.BODY_BYTES + 1])
async def test_body_that_no_service_takes_is_refused(length: int | None) -> None:
    with pytest.raises(RefusedError) as refused:
        await server.whole_body(_request(server.BODY_BYTES + 1, length=length))
    assert refused.value.status == 413


@pytest.mark.parametrize("length", [16 << 20, None])
async def test_bodies_that_fill_the_room_make_the_next_one_wait(length: int | None) -> None:
    """Those that wait are taken in order, one that gives up gives its room back, and one without a body needs none."""
    room, entered, leave = server.BodyRoom(), list[str](), asyncio.Event()

    async def asked(name: str, request: Any) -> None:
        async with room.of(request):
            entered.append(name)
            await leave.wait()

    great = _request(16 << 20, length=length)
    running = [asyncio.create_task(asked(name, great)) for name in ("first", "second", "third", "gives up")]
    running += [asyncio.create_task(asked("small", _request(5, length=5)))]
    running += [asyncio.create_task(asked(name, _request(0))) for name in ("bodiless",)]
    async with asyncio.timeout(60):
        while len(entered) < 3:  # noqa: ASYNC110 - the tasks tell by this list alone
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert entered == ["first", "second", "bodiless"]
    running[3].cancel()
    leave.set()
    await asyncio.gather(*running, return_exceptions=True)
    assert entered == ["first", "second", "bodiless", "third", "small"]
    async with asyncio.timeout(60), room.of(great), room.of(great):
        pass


async def test_body_beyond_the_greatest_takes_no_room() -> None:
    """It is refused, and not read."""
    room = server.BodyRoom()
    large = _request(5, length=server.BODY_BYTES + 1)
    async with asyncio.timeout(60), room.of(_request(16 << 20)), room.of(_request(16 << 20)), room.of(large):
        pass
