"""The request for a link to the web console (ADR 0110)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.wire import requests, responses
from policy import errors


async def open_console(server: Server, caller: Caller, asked: requests.OpenConsole) -> responses.ConsoleOpened:
    """Make a link that logs one browser in as the caller; for the operator.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
        errors.SettingError: the daemon serves no HTTP.
    """
    await authorization.require_operator(server, caller, None, "open the web console")
    if not server.console.address:
        raise errors.SettingError(
            "this daemon serves no HTTP, and so no console",
            hint="start it with COVENANT_HTTP_PORT=8421, or without that variable",
        )
    expires_at = server.console.expiry()
    await server.audit.append("console_link_made", {"expires_at": expires_at}, issuer=caller.agent)
    code = server.console.invite(caller, expires_at)
    return responses.ConsoleOpened(url=f"{server.console.address}/#code={code}", expires_at=expires_at)


HANDLERS: Final[Mapping[str, Handler]] = {"open_console": open_console}
