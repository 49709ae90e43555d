"""When envelopes of packages, grants and tokens end: for the metrics, ``doctor``, and the daemon's log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import anyio

from covenant.handlers import paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.runtime import packages
from covenant.wire import parts, requests, responses
from policy import errors
from policy.signing import expiry
from policy.signing.expiry import Expiry

_LOG: Final = logging.getLogger(__name__)

_MOST_PEERS: Final = 1000
_MOST_GRANTS: Final = 1000
_WARN_SECONDS: Final = 6 * 3600.0
# The pause after a look that failed.
_AGAIN_SECONDS: Final = 60.0


async def found(server: Server) -> list[Expiry]:
    """Return what ends and has not ended for more than two weeks, the first to end first."""
    now_ms = server.now_ms()
    ends = await packages.ends(server.agents.cards())
    ending = [Expiry("envelope", agent_id, moment) for agent_id, moment in ends.items() if moment is not None]
    holders = {server.identity.agent.pubkey}
    for entry in server.peers.listing(_MOST_PEERS, None, "live").entries:
        holders.add(entry.agent_id.pubkey)
        if entry.expires_at_ms is not None:
            ending.append(Expiry("token", entry.agent_id.display, entry.expires_at_ms))
    for pubkey in sorted(holders):
        ending += [
            Expiry("grant", f"{grant.subject_display} {grant.token.action}", grant.token.expires_at)
            for grant in server.capabilities.usage(_MOST_GRANTS, pubkey)
            if grant.token.expires_at is not None and grant.revoked_at_ms is None
        ]
    kept = (one for one in ending if one.expires_at_ms > now_ms - expiry.SOON_MS)
    return sorted(kept, key=lambda one: (one.expires_at_ms, one.what, one.name))


async def list_expiries(server: Server, caller: Caller, asked: requests.ListExpiries) -> responses.Expiries:
    """Return what ends, as much as an answer takes.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
    """
    await authorization.require_operator(server, caller, None, "see what ends")
    rows = (
        parts.Expires.model_validate({"what": one.what, "name": one.name, "expires_at": one.expires_at_ms})
        for one in await found(server)
    )
    return responses.Expiries(expiries=paging.that_fit(rows), clock_behind_ms=server.clock.behind_ms)


async def warn(server: Server) -> None:
    """Log what ends within two weeks, four times a day, until cancelled."""
    while True:
        now_ms = server.now_ms()
        try:
            ends = await found(server)
        except errors.CovenantError as e:
            # No descriptor may be left, for example: that must not end the daemon.
            _LOG.error("what ends soon cannot be read: %s", e)
            await anyio.sleep(_AGAIN_SECONDS)
            continue
        for one in expiry.soon(ends, now_ms):
            if one.expires_at_ms > now_ms:
                _LOG.warning("%s: renew it", one.line(now_ms))
        await anyio.sleep(_WARN_SECONDS)


HANDLERS: Final[Mapping[str, Handler]] = {"list_expiries": list_expiries}
