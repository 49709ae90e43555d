"""The limit of calls to other agents: the 601st of a minute is 429 with the time to wait, cards and calls together."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from sandbox.network.service.a2a import server
from sandbox.network.service.a2a.server import AgentEndpoint
from sandbox.network.service.book import Book

pytestmark = pytest.mark.anyio

CARD = "/other/.well-known/agent-card.json"
CALL = json.dumps({"jsonrpc": "2.0", "id": "mine", "method": "tasks/get", "params": {"id": "x"}}).encode()


async def body(request: web.BaseRequest) -> bytes:
    return CALL


async def asked(endpoint: AgentEndpoint, method: str, path: str) -> web.Response:
    given = make_mocked_request(method, path, headers={"Content-Type": "application/json"})
    return cast("web.Response", await endpoint.handle(given))


async def test_call_too_many_of_a_minute_is_429() -> None:
    now = [1000.0]
    # Without a server of agents each call that is counted fails, and reaches no daemon.
    endpoint = AgentEndpoint(["other"], [], cast("Book", None), body, clock=lambda: now[0])
    denied: list[str] = []
    endpoint.denied = lambda target, code: denied.append(code)
    for number in range(server.CALLS_PER_MINUTE):
        given: Any = ("GET", CARD) if number % 2 else ("POST", "/other")
        assert (await asked(endpoint, *given)).status == 502
    # Refused for another reason, and not counted.
    assert (await asked(endpoint, "POST", "/none")).status == 403
    now[0] += 20
    for given in (("GET", CARD), ("POST", "/other")):
        refused = await asked(endpoint, *given)
        assert (refused.status, refused.headers["Retry-After"]) == (429, "41")
        assert refused.body is not None
        said = json.loads(cast("bytes", refused.body))
        assert said["id"] == (None if given[0] == "GET" else "mine")
        assert "600" in said["error"]["message"]
    assert denied[-2:] == [denied[-1]] * 2
    now[0] += 40.1
    assert (await asked(endpoint, "POST", "/other")).status == 502
