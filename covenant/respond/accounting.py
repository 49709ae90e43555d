"""What an intent costs: reserved before its run, settled by what was measured after it, and receipts of both.

An agent's budget is its own, whoever asks: it is kept under the name ``<id>@agent`` and a key that is made of the id.
No private key belongs to that; it only tells buckets apart.
"""

from __future__ import annotations

import hashlib
import uuid
from typing import Final

from covenant.respond.caller import Caller
from covenant.respond.server import Server
from covenant.runtime.packages import Card
from covenant.runtime.running import Usage
from covenant.stores.audit.interface import Entry
from covenant.wire.types import AgentId, SettlementReceipt
from policy import base58, budget, errors
from policy.data import price_table

_DOMAIN: Final = b"covenant.agent.v1\0"


def budget_of(agent_id: str) -> AgentId:
    """Whose bucket it is."""
    return AgentId(
        display=f"{agent_id}@agent", pubkey=base58.encode(hashlib.sha256(_DOMAIN + agent_id.encode()).digest())
    )


async def reserve(server: Server, caller: Caller, card: Card, intent_id: str) -> AgentId | None:
    """Reserve one credit of the agent's budget under the intent's id; whose it is, None where it has no budget.

    Version 1 ran an agent whose budget nobody had set as if it had none; here its manifest sets it.

    Raises:
        errors.BudgetExhaustedError: there is none; ``details`` says what there is and when there is enough.
    """
    if not card.manifest.settlement.budget_credits_per_hour:
        return None
    agent = budget_of(card.id)
    # Nothing happens where the bucket holds that already; a manifest that was changed holds from now on.
    per_hour = card.manifest.settlement.budget_credits_per_hour
    if await server.budget.set_capacity(agent, per_hour):
        row = {"agent_display": agent.display, "credits_per_hour": per_hour}
        await server.audit.append("budget_capacity_set", row)
    await server.budget.try_debit(agent, budget.DISPATCH_CREDITS, intent_id)
    return agent


def cost(usage: Usage) -> int:
    """The credits for what a run used; what is not counted on this machine costs nothing."""
    used = budget.Usage.of_peak(
        cpu_ms=usage.cpu_ms or 0, memory_peak_bytes=usage.memory_peak_bytes or 0, wall_ms=usage.wall_ms
    )
    return budget.cost(used, price_table.prices())


async def release(server: Server, caller: Caller, agent: AgentId, intent_id: str) -> None:
    """Give the reservation of a run back that never began."""
    returned = await server.budget.refund(agent, intent_id)
    row = {"agent_display": agent.display, "intent_id": intent_id, "credits": returned, "paired_receipt": intent_id}
    await server.audit.append("budget_refunded", row, caller.agent)


async def settle_run(
    server: Server, caller: Caller, agent: AgentId | None, intent_id: str, usage: Usage
) -> SettlementReceipt:
    """Take what the run cost beyond its reservation, and keep the receipt of it, which has the intent's id."""
    credits_ = cost(usage)
    if agent is not None:
        await server.budget.settle(agent, intent_id, credits_ - budget.DISPATCH_CREDITS)
    receipt = SettlementReceipt(
        id=intent_id, payer=caller.agent, resource="compute", credits_consumed=credits_, settled_at=server.now_ms()
    )
    await server.receipts.append(receipt)
    return receipt


async def settle_memory(server: Server, caller: Caller, record_id: str, text: str) -> SettlementReceipt:
    """Keep the receipt of a record that was stored."""
    receipt = SettlementReceipt(
        id=str(uuid.uuid4()),
        payer=caller.agent,
        resource="memory",
        memory_record_id=record_id,
        credits_consumed=budget.storage_cost(len(text.encode()), price_table.prices()),
        settled_at=server.now_ms(),
    )
    await server.receipts.append(receipt)
    return receipt


def receipt_row(receipt: SettlementReceipt, intent_id: str | None) -> Entry:
    """The row of a receipt, of this intent where there is one."""
    about = {"receipt_id": receipt.id, "resource": receipt.resource, "credits": receipt.credits_consumed}
    return Entry("receipt_written", {**about, "intent_id": intent_id}, receipt.payer)


async def settle_unseen(server: Server) -> None:
    """At the start: runs that the last daemon did not see end took their reservation, and their intents failed.

    The supervisor ended them when that daemon's connections closed; what they used nobody was told.
    """
    for debit in server.budget.unsettled():
        row = {
            "intent_id": debit.paired_receipt,
            "matched_agent": debit.agent.display.removesuffix("@agent"),
            "run_id": None,
            "stage": "run",
            "code": errors.CutOffError.code,
            "message": "the daemon ended while it ran",
        }
        await server.audit.append("intent_failed", row)
        await server.budget.settle(debit.agent, debit.paired_receipt, 0)
