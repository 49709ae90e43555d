"""The line of the service gate to its reader of pages, whose other end is the test."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sandbox.network.service.web.pages import PageReader
from sandbox.network.service.web.reader import LENGTH

pytestmark = pytest.mark.anyio


async def test_asker_leaves_and_next_page_is_read() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        async with asyncio.timeout(30):
            await _leave(PageReader(ours), theirs)


async def _leave(reader: PageReader, theirs: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    asked = [asyncio.create_task(reader.text(page)) for page in (b"first", b"waits", b"second")]
    assert await loop.sock_recv(theirs, 100) == LENGTH.pack(5) + b"first"
    for one in asked[:2]:
        one.cancel()
    await asyncio.wait(asked[:2])
    # The answer comes in two parts when the asker is gone.
    for part in (LENGTH.pack(3), b"one"):
        await loop.sock_sendall(theirs, part)
    assert await loop.sock_recv(theirs, 100) == LENGTH.pack(6) + b"second"
    await loop.sock_sendall(theirs, LENGTH.pack(3) + b"two")
    assert await asked[2] == b"two"
