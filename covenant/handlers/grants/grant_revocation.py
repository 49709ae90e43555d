"""End the runs under a revoked grant. A revocation that only refused later requests would leave an agent at work.

The supervisor stops the whole tree and kills it (``covenant kill --tree``); a run that is not there yet ends with the
request that asks for it. Nothing in it is a condition: what cannot be ended is said, and ends with its request too.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Container
from typing import TYPE_CHECKING

import anyio

from covenant.handlers.intents import agent_selection
from covenant.runtime.runner import LiveIntent
from policy import errors

if TYPE_CHECKING:
    from covenant.handlers.server import Server

_LOG = logging.getLogger(__name__)


async def enforce(server: Server, lacked: Container[str], write: Callable[[], Awaitable[object]]) -> None:
    """End the runs whose intent needs a grant that its caller lost, but not those that ``lacked`` it before.

    The latter have a grant that expired during the run. Meanwhile ``write`` writes the revocation to the log: a tree
    may take time to end, and the caller or the daemon may be gone by then.

    Raises:
        errors.CovenantError: what ``write`` raised, once they have ended.
    """
    ending: list[LiveIntent] = []
    for intent_id, action in agent_selection.lacking(server).items():
        live = server.runners.live[intent_id]
        if intent_id not in lacked and not live.withdrawn:
            # INVARIANT: before anything waits. An answer that comes meanwhile is not given.
            live.withdrawn = f"the grant of `{action}`"
            ending.append(live)
    unwritten: errors.CovenantError | None = None
    # This is done also when the caller has left.
    with anyio.CancelScope(shield=True):
        async with anyio.create_task_group() as group:
            for live in ending:
                group.start_soon(_end, server, live)
            try:
                await write()
            except errors.CovenantError as e:
                unwritten = e
    if unwritten is not None:
        raise unwritten


async def _end(server: Server, live: LiveIntent) -> None:
    try:
        await server.runners.withdraw(live)
    except errors.CovenantError as e:
        _LOG.warning("intent %s was ended with its request, since its run could not be: %s", live.intent_id, e)
