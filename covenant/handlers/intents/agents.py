"""The requests about agents: which there are, and a look for what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import anyio

from covenant.handlers import billing, paging
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.runtime import packages
from covenant.runtime.agents import Change
from covenant.runtime.packages import Card, Listed
from covenant.stores.audit.interface import AuditEntry
from covenant.wire import parts, requests, responses
from policy import errors

# Each reads and hashes a package's files.
_VERIFIED_AT_ONCE: Final = 4

Cause = Literal["start", "request", "inotify"]


async def list_agents(server: Server, caller: Caller, asked: requests.ListAgents) -> responses.AgentDirectory:
    """Every package, with its error where it cannot be routed to; as many as an answer takes, and whether more are."""
    shown, truncated = paging.cut(map(_shown, server.agents.listing()))
    if asked.signatures and caller.operator:
        shown = await _verified(server, shown)
    return responses.AgentDirectory(agents=shown, truncated=truncated)


async def _verified(server: Server, shown: Sequence[parts.AgentListing]) -> tuple[parts.AgentListing, ...]:
    """Return the listings with what their signatures are worth now."""
    by_id = {card.id: card for card in server.agents.cards()}
    ends = await packages.ends(tuple(by_id.values()))
    found: dict[str, parts.AgentListing] = {}
    limit = anyio.CapacityLimiter(_VERIFIED_AT_ONCE)

    async def look(one: parts.AgentListing, card: Card) -> None:
        async with limit:
            told: dict[str, Any] = {"signature": "ok", "expires_at": ends.get(card.id)}
            try:
                await server.runners.check_signature(card)
            except (errors.NoSupervisorError, errors.ServiceError) as e:
                told |= {"signature": "unknown", "signature_error": str(e)}
            except errors.CovenantError as e:
                told |= {"signature": e.code, "signature_error": str(e)}
            found[card.id] = one.model_copy(update=told)

    async with anyio.create_task_group() as group:
        for one in shown:
            if one.id in by_id and one.routable:
                group.start_soon(look, one, by_id[one.id])
    return tuple(found.get(one.id or "", one) if one.routable else one for one in shown)


async def reload_agents(server: Server, caller: Caller, asked: requests.ReloadAgents) -> responses.AgentDirectory:
    """Read the agents again; for the operator alone, since it walks through the home.

    Raises:
        errors.OperatorOnlyError: the caller is not the operator.
    """
    await authorization.require_operator(server, caller, None, "reload agents")
    await server.agents.reload(lambda change: noted(server, change, "request", caller))
    return await list_agents(server, caller, requests.ListAgents(signatures=asked.signatures))


async def noted(server: Server, change: Change, cause: Cause, caller: Caller | None = None) -> None:
    """The row of what was found, durable before it takes effect."""
    fields = {
        "cause": cause,
        "added": list(change.added),
        "changed": list(change.changed),
        "removed": list(change.removed),
        "refused": [{"directory": d, "code": code} for d, code in change.refused],
    }
    await server.audit.append_all([AuditEntry("agents_reloaded", fields, None if caller is None else caller.agent)])


def _shown(one: Listed) -> parts.AgentListing:
    error = None if one.error is None else str(one.error)
    fix = (one.error and one.error.hint) or None
    if one.card is None:
        return parts.AgentListing(directory=one.directory, routable=False, error=error, fix=fix)
    manifest = one.card.manifest
    about: dict[str, Any] = {
        "id": one.card.id,
        "pubkey": billing.budget_of(one.card.id).pubkey,
        "name": manifest.agent.name,
        "description": manifest.agent.description,
        "version": manifest.agent.version,
        "runtime": manifest.agent.runtime,
        "required": manifest.capabilities.required,
        "optional": manifest.capabilities.optional,
        "budget_credits_per_hour": manifest.settlement.budget_credits_per_hour,
        "tools_allowed": manifest.hermes.tools_allowed,
    }
    return parts.AgentListing(directory=one.directory, routable=error is None, error=error, fix=fix, **about)


HANDLERS: Final[Mapping[str, Handler]] = {"list_agents": list_agents, "reload_agents": reload_agents}
