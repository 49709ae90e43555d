"""The request that takes the daemon's clock back, after the machine's clock was ahead (ADR 0098)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.wire import requests, responses


async def set_clock(server: Server, caller: Caller, asked: requests.SetClock) -> responses.ClockSet:
    """Take the clock, and every store's times that are ahead of it, back to the machine's clock; for the operator.

    The file of the clock is written last, so that a daemon that dies in between needs the request again.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
        errors.StoreError: a store cannot be written; ask again.
    """
    await authorization.require_operator(server, caller, None, "set the daemon's clock")
    if not server.clock.behind_ms:
        now_ms = server.clock()
        return responses.ClockSet(changed=False, from_ms=now_ms, to_ms=now_ms)
    row = {"from_ms": server.clock(), "to_ms": server.clock() - server.clock.behind_ms, "agents": []}
    await server.audit.append("clock_set", row, issuer=caller.agent)
    before, now_ms = server.clock.set()
    await server.audit.set_clock(now_ms)
    await server.budget.set_clock(now_ms)
    await server.mailbox.set_clock(now_ms)
    server.capabilities.set_clock(now_ms)
    server.peers.set_clock(now_ms)
    await server.clock.write()
    return responses.ClockSet(changed=True, from_ms=before, to_ms=now_ms)


HANDLERS: Final[Mapping[str, Handler]] = {"set_clock": set_clock}
