"""Select the agent of an intent, and check whether its caller would be refused. This module writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from covenant.handlers import billing
from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.intents.text_router import Router
from covenant.runtime.packages import Card
from covenant.wire.types import AgentId, Tier
from policy import budget, errors

if TYPE_CHECKING:
    from covenant.handlers.server import Server

WRITE: Final = "memory.write"

_ROUTER: Final = Router()


def find(server: Server, text: str, agent: str | None) -> tuple[Card | None, int | None]:
    """The agent that is named, or the one that the text means and how well; None for version 1's echo.

    Raises:
        errors.NoAgentError, errors.AgentIdTakenError: the one that is named is not there.
    """
    if agent is not None:
        return server.agents.find(agent), None
    match = _ROUTER.route(text, server.agents.cards())
    return (None, None) if match is None else (server.agents.find(match.agent_id), match.score)


def others(card: Card | None) -> list[str]:
    """Return the capabilities that the agent requires of its caller, beside those of every intent."""
    return [] if card is None else [one for one in card.manifest.capabilities.required if one != WRITE]


def missing(server: Server, caller: Caller, card: Card | None) -> list[authorization.Decision]:
    """The actions that an intent needs and that the caller has no grant of which admits it."""
    return [one for one in _decided(server, caller.agent, card) if one.grant is None]


def lacking(server: Server) -> dict[str, str]:
    """Return the running intents, by id, with an action that each needs and that its caller holds no more."""
    found = {}
    for live in server.runners.live.values():
        gone = [one.action for one in _decided(server, live.caller, live.card) if one.grant is None]
        action = gone[0] if gone else live.lacks()
        if action is not None:
            found[live.intent_id] = action
    return found


def foreseen(server: Server, caller: Caller, text: str, agent: str | None) -> errors.CovenantError | None:
    """Why the intent would be refused as things are now; None where it would begin."""
    try:
        card, _ = find(server, text, agent)
        decided = _decided(server, caller.agent, card)
        server.capabilities.left([one.grant.signature for one in decided if one.grant is not None])
    except errors.CovenantError as e:
        return e
    for one in decided:
        if one.grant is None and one.reason is None:
            return errors.CapabilityMissingError(
                f"no grant of `{one.action}` is held",
                hint=f"covenant capabilities grant {one.action}",
                missing=[one.action],
            )
        if one.grant is None:
            return errors.CapabilityScopeError(f"`{one.action}`: {one.reason}")
    said = None if card is None else server.refusals.why_unstartable(caller, card.digest)
    if card is not None and said is not None:
        return errors.restored(
            {
                "code": said.code,
                "message": f"agent `{card.id}` could not be started before, and so many requests of yours were refused "
                f"that it is not tried now: {said.message}",
                "hint": "ask again in a minute",
                "where": said.where,
            }
        )
    tokens = None if card is None else server.budget.tokens(billing.budget_of(card.id))
    if card is None or tokens is None or not card.manifest.settlement.budget_credits_per_hour:
        return None
    if tokens >= budget.DISPATCH_CREDITS:
        return None
    return errors.BudgetExhaustedError(
        f"budget exhausted: agent `{card.id}` has no credits, and so many intents of yours were refused that this"
        " one does not wait",
        hint=f"there are enough {billing.when_enough(server, billing.budget_of(card.id), budget.DISPATCH_CREDITS)}",
    )


def _decided(server: Server, agent: AgentId, card: Card | None) -> list[authorization.Decision]:
    now_ms, working = server.now_ms(), authorization.RequestFacts(tier=Tier.WORKING)
    asked = [(WRITE, working), *((action, authorization.NONE) for action in others(card))]
    return [authorization.decide(server.capabilities, agent.pubkey, one, facts, now_ms) for one, facts in asked]
