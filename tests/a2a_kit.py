"""Clients of A2A: the official SDK over one version and binding, and plain JSON-RPC."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as types

__all__ = ["asks", "client", "http", "rpc", "types"]


def http(token: str, **headers: str) -> httpx.AsyncClient:
    """Return an HTTP client with this token."""
    return httpx.AsyncClient(headers={"Authorization": f"Bearer {token}", **headers}, timeout=60, trust_env=False)


@asynccontextmanager
async def client(
    url: str, token: str, *, version: str = "1.0", binding: str = "JSONRPC", **config: Any
) -> AsyncIterator[Any]:
    """Yield the SDK's client over one interface of the card at ``url``."""
    async with http(token) as session:
        card = await A2ACardResolver(session, url).get_agent_card()
        kept = [i for i in card.supported_interfaces if (i.protocol_version, i.protocol_binding) == (version, binding)]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(kept)
        made = ClientFactory(ClientConfig(httpx_client=session, supported_protocol_bindings=[binding], **config))
        yield made.create(card)


def asks(text: str, name: str, **configuration: Any) -> Any:
    """Return the request of a message to an agent."""
    message = types.Message(message_id=name, role=types.ROLE_USER, parts=[types.Part(text=text)])
    return types.SendMessageRequest(message=message, configuration=types.SendMessageConfiguration(**configuration))


async def rpc(url: str, token: str, method: str, params: Any, **headers: str) -> dict[str, Any]:
    """Return the reply to a message of JSON-RPC, and its HTTP status under ``status``."""
    async with http(token, **headers) as session:
        document = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
        # Not httpx's own encoding, which refuses half a surrogate.
        body = json.dumps(document).encode()
        answer = await session.post(url, content=body, headers={"Content-Type": "application/json"})
        return {**answer.json(), "status": answer.status_code}
