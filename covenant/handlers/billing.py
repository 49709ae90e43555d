"""Billing of intents: a reservation before the run, a settlement by the measured use, and receipts of both.

An agent has one budget for all callers, under the name ``<id>@agent`` and a key that is derived from the id. No private
key belongs to it; the key only tells buckets apart.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from typing import Final

from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.runtime import supervisor_report
from covenant.runtime.packages import Card
from covenant.runtime.runner import Spent, Usage
from covenant.runtime.supervisor_report import SupervisorReport
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.budget.interface import BudgetLedger
from covenant.wire.types import AgentId, SettlementReceipt
from policy import base58, budget
from policy.data import price_table

_DOMAIN: Final = b"covenant.agent.v1\0"


@dataclass(frozen=True, slots=True)
class Reserved:
    """The reservation of an intent, and the budget that it is of."""

    agent: AgentId
    credits: int


def budget_of(agent_id: str) -> AgentId:
    """Whose bucket it is."""
    return AgentId(
        display=f"{agent_id}@agent", pubkey=base58.encode(hashlib.sha256(_DOMAIN + agent_id.encode()).digest())
    )


async def reserve(server: Server, caller: Caller, card: Card | None, intent_id: str) -> Reserved:
    """Reserve one credit of the agent's budget under the intent's id, or none where it has no budget.

    The reservation is what says after a death of the daemon that there was such an intent (``aftermath``), also where
    it takes nothing, and where no agent does it.

    Version 1 ran an agent without a set budget as if it had none, and said so (``budget_unseeded``). Here the manifest
    sets the budget at that moment, the same row says so, and the intent is under it.

    Raises:
        errors.BudgetExhaustedError: there is none; ``details`` says what there is and when there is enough.
    """
    agent = server.identity.agent if card is None else budget_of(card.id)
    per_hour = 0 if card is None else card.manifest.settlement.budget_credits_per_hour
    reserved = Reserved(agent, budget.DISPATCH_CREDITS if per_hour else 0)
    unseeded = server.budget.tokens(agent) is None
    # Nothing happens where the bucket holds that already; a manifest that was changed holds from now on.
    if per_hour and await server.budget.set_capacity(agent, per_hour):
        about = {"agent_display": agent.display}
        rows = [AuditEntry("budget_capacity_set", {**about, "credits_per_hour": per_hour})]
        if unseeded:
            row = {**about, "intent_id": intent_id, "requested": reserved.credits}
            rows.insert(0, AuditEntry("budget_unseeded", row, caller.agent))
        await server.audit.append_all(rows)
    await server.budget.try_debit(agent, reserved.credits, intent_id, submitter=caller.agent)
    return reserved


def when_enough(server: Server, agent: AgentId, amount: int) -> str:
    """Return when the agent's bucket, which exists, has ``amount`` credits: ``in 30 min``, or ``never``."""
    now_ms = server.now_ms()
    eta_ms = budget.refill_eta_ms(server.budget.buckets()[agent.pubkey], amount, now_ms)
    return budget.wait_in_words(eta_ms, now_ms)


def allowance(ledger: BudgetLedger, card: Card) -> int | None:
    """Return the credits that a run may spend at its service gate: what its agent has left, None without a budget.

    Runs of one agent that live at once may each spend it: what is too much is owed.
    """
    if not card.manifest.settlement.budget_credits_per_hour:
        return None
    return ledger.tokens(budget_of(card.id)) or 0


def cost(usage: Usage, family: SupervisorReport | None = None) -> int:
    """The credits for what a run used, and all below it where the supervisor says that; what is not counted on this
    machine costs nothing."""
    return budget.cost(supervisor_report.billed(usage, family), price_table.prices())


async def release(server: Server, caller: Caller, reserved: Reserved, intent_id: str) -> None:
    """Give the reservation of a run back that never began."""
    agent = reserved.agent
    returned = await server.budget.refund(agent, intent_id)
    if returned:
        row = {"agent_display": agent.display, "intent_id": intent_id, "credits": returned, "paired_receipt": intent_id}
        await server.audit.append("budget_refunded", row, caller.agent)


async def settle(server: Server, reserved: Reserved, intent_id: str, receipt: SettlementReceipt | None) -> None:
    """Take what the run cost beyond its reservation, by its receipt, and close that. The last that is written of an
    intent: until then the next start looks what became of it."""
    cost_ = receipt.credits_consumed if receipt is not None and reserved.credits else 0
    await server.budget.settle(reserved.agent, intent_id, max(0, cost_ - reserved.credits))


def run_receipt(server: Server, caller: Caller, intent_id: str, took: Spent | None) -> SettlementReceipt:
    """Return the receipt, not kept yet, of what a run used with all below it; it has the intent's id. None: nothing was
    run."""
    credits_ = 0 if took is None else cost(took.usage, took.told)
    return SettlementReceipt(
        id=intent_id, payer=caller.agent, resource="compute", credits_consumed=credits_, settled_at=server.now_ms()
    )


def memory_receipt(server: Server, caller: Caller, record_id: str, text: str) -> SettlementReceipt:
    """Return the receipt of a record, which is not kept yet."""
    return SettlementReceipt(
        id=str(uuid.uuid4()),
        payer=caller.agent,
        resource="memory",
        memory_record_id=record_id,
        credits_consumed=budget.storage_cost(len(text.encode()), price_table.prices()),
        settled_at=server.now_ms(),
    )


async def settle_memory(server: Server, caller: Caller, record_id: str, text: str) -> SettlementReceipt:
    """Keep the receipt of a record that was stored."""
    receipt = memory_receipt(server, caller, record_id, text)
    await server.receipts.append(receipt)
    return receipt


def receipt_row(receipt: SettlementReceipt, intent_id: str | None) -> AuditEntry:
    """The row of a receipt, of this intent where there is one."""
    about = {"receipt_id": receipt.id, "resource": receipt.resource, "credits": receipt.credits_consumed}
    return AuditEntry("receipt_written", {**about, "intent_id": intent_id}, receipt.payer)
