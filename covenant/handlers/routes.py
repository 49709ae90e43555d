"""Which handler answers which kind: the tables of all families, joined."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from covenant.handlers import clock, console, expiry, handshake, identity, receipts, tools
from covenant.handlers.access import secrets
from covenant.handlers.audit import audit, consistency, provenance
from covenant.handlers.grants import capabilities, peers
from covenant.handlers.intents import agents, approvals, budget, denials, results, submit
from covenant.handlers.mailbox import repair, requests
from covenant.handlers.memory import ignore_check, maintenance, records
from covenant.handlers.server import Handler


def joined(*families: Mapping[str, Handler]) -> dict[str, Handler]:
    """One table of several, no kind in two of them.

    Raises:
        ValueError: a kind has two handlers.
    """
    table = {kind: handler for family in families for kind, handler in family.items()}
    if len(table) != sum(map(len, families)):
        kinds = sorted(itertools.chain.from_iterable(families))
        raise ValueError(f"handled twice: {sorted({kind for kind in kinds if kinds.count(kind) > 1})}")
    return table


HANDLERS: Final[Mapping[str, Handler]] = joined(
    handshake.HANDLERS,
    clock.HANDLERS,
    console.HANDLERS,
    expiry.HANDLERS,
    submit.HANDLERS,
    results.HANDLERS,
    agents.HANDLERS,
    approvals.HANDLERS,
    records.HANDLERS,
    maintenance.HANDLERS,
    ignore_check.HANDLERS,
    consistency.HANDLERS,
    receipts.HANDLERS,
    budget.HANDLERS,
    capabilities.HANDLERS,
    peers.HANDLERS,
    identity.HANDLERS,
    secrets.HANDLERS,
    tools.HANDLERS,
    audit.HANDLERS,
    provenance.HANDLERS,
    denials.HANDLERS,
    requests.HANDLERS,
    repair.HANDLERS,
)
