"""Which handler answers which kind: the tables of all families, joined."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Final

from covenant.respond import (
    agents,
    approvals,
    audit,
    budget,
    capabilities,
    connection,
    denials,
    identity,
    ignore,
    intent,
    intent_results,
    mailbox,
    mailbox_repair,
    memory,
    memory_upkeep,
    peers,
    provenance,
    receipts,
    secrets,
    tools,
    verify,
)
from covenant.respond.server import Handler


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
    connection.HANDLERS,
    intent.HANDLERS,
    intent_results.HANDLERS,
    agents.HANDLERS,
    approvals.HANDLERS,
    memory.HANDLERS,
    memory_upkeep.HANDLERS,
    ignore.HANDLERS,
    verify.HANDLERS,
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
    mailbox.HANDLERS,
    mailbox_repair.HANDLERS,
)
