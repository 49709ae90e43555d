"""The requests that touch no store, and those of version 1 that are not served here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.wire import requests, responses
from policy import errors


async def ping(server: Server, caller: Caller, asked: requests.Ping) -> responses.Pong:
    """Answer that the daemon is there."""
    return _PONG


async def protocol_info(server: Server, caller: Caller, asked: requests.ProtocolInfo) -> responses.ProtocolDescription:
    """Which protocol and versions."""
    return _INFO


async def authenticate(server: Server, caller: Caller, asked: requests.Authenticate) -> responses.Authenticated:
    """Refuse a second authentication: a connection has one caller as long as it lasts.

    Raises:
        errors.AuthenticationError: always.
    """
    raise errors.AuthenticationError("this connection is authenticated already", hint="open another")


async def unsupported(server: Server, caller: Caller, asked: requests.Unsupported) -> responses.Response:
    """Refused: payments, chains' own programs and markets (decisions.md, Wire).

    Raises:
        errors.UnsupportedError: always.
    """
    raise errors.UnsupportedError(f"`{asked.kind}` is not served by this daemon")


_PONG: Final = responses.Pong()
_INFO: Final = responses.ProtocolDescription()

HANDLERS: Final[Mapping[str, Handler]] = {
    "ping": ping,
    "protocol_info": protocol_info,
    "authenticate": authenticate,
    **{kind: unsupported for kind, model in requests.KINDS.items() if model is requests.Unsupported},
}
