"""Debits of budgets, and the maintenance of their files.

An intent that waits for credits is resumed by ``covenant.handlers.intents.submit``; capacities and debits are set and
taken by ``covenant.handlers.billing``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

import anyio

from covenant.handlers import paging
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.stores.budget import interface
from covenant.wire import requests, responses
from policy import errors

# How long debits stay in the file of look-ups. The audit log has them for ever.
KEPT_MS: Final = 30 * 24 * 3_600_000
_DAY_SECONDS: Final = 24 * 3600

_LOG: Final = logging.getLogger(__name__)


async def recent_debits(server: Server, caller: Caller, asked: requests.RecentDebits) -> responses.Debits:
    """The newest debits: of all agents for the operator, for their own runs and of their own budget for everybody else.

    Version 1 showed all to everybody. Budgets are shared, but which agents others ask, when and for how much is theirs.
    """
    own = None if caller.operator else caller.agent.pubkey
    found = await server.budget.recent(min(asked.limit, interface.MOST_RECENT), of=own)
    return responses.Debits(debits=paging.that_fit(found))


async def compact(server: Server, before_ms: int) -> interface.BudgetCompaction:
    """Put buckets in the place of the rows before ``before_ms``, and drop the checkpoints that were used."""
    outcome: interface.BudgetCompaction = await server.budget.compact(before_ms)
    await server.checkpoints.compact()
    if outcome.dropped:
        row = {"before_ms": before_ms, "dropped": outcome.dropped}
        await server.audit.append("budget_compacted", row)
    return outcome


async def upkeep(server: Server) -> None:
    """At the start and once a day, until cancelled: debits older than ``KEPT_MS`` leave the file."""
    while True:
        try:
            await compact(server, max(0, server.now_ms() - KEPT_MS))
        except errors.CovenantError as e:
            _LOG.error("the budget's files cannot be made shorter: %s", e)
        await anyio.sleep(_DAY_SECONDS)


HANDLERS: Final[Mapping[str, Handler]] = {"recent_debits": recent_debits}
