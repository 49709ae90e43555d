"""Bodies of requests as the service gate reads them."""

from __future__ import annotations

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

    return types.SimpleNamespace(content=types.SimpleNamespace(iter_any=parts), content_length=length)


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
