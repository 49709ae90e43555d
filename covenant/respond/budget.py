"""What was taken from budgets, and the upkeep of their files.

An intent that waits for credits is resumed by ``covenant.respond.intent``; capacities and debits are set and taken by
``covenant.respond.accounting``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from covenant.respond.caller import Caller
from covenant.respond.server import Handler, Server
from covenant.stores.budget import interface
from covenant.wire import requests, responses

# How long debits stay in the file that one can look them up in; the audit log has them for ever.
KEPT_MS: Final = 30 * 24 * 3_600_000


async def recent_debits(server: Server, caller: Caller, asked: requests.RecentDebits) -> responses.Debits:
    """The newest debits of all agents; for everybody who is let in, as in version 1: budgets are shared."""
    return responses.Debits(debits=tuple(await server.budget.recent(min(asked.limit, interface.MOST_RECENT))))


async def compact(server: Server, before_ms: int) -> interface.Compacted:
    """Put buckets in the place of the rows before ``before_ms``, and drop the checkpoints that were used.

    No client asks for it: the daemon does at its start, with ``KEPT_MS``.
    """
    outcome: interface.Compacted = await server.budget.compact(before_ms)
    await server.checkpoints.compact()
    if outcome.dropped:
        row = {"before_ms": before_ms, "dropped": outcome.dropped}
        await server.audit.append("budget_compacted", row)
    return outcome


HANDLERS: Final[Mapping[str, Handler]] = {"recent_debits": recent_debits}
