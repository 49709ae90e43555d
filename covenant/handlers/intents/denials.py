"""Denials of agents that worked on intents: rows of the daemon's log, beside those of the supervisor's log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from covenant.handlers import paging
from covenant.runtime.runner import Spent
from covenant.stores.audit.interface import AuditEntry
from covenant.wire import parts, requests, responses

if TYPE_CHECKING:
    from covenant.handlers.caller import Caller
    from covenant.handlers.server import Handler, Server

MOST: Final = 1000


def rows(took: Spent, agent_id: str, caller: Caller) -> list[AuditEntry]:
    """The rows of what the supervisor said was denied to a run, in the shape that its own log has."""
    about = {"run_id": took.run_id or "", "agent_id": agent_id, "operator": None}
    return [
        AuditEntry(
            "denied",
            {
                **about,
                "denial": row.denial.id,
                "layer": row.denial.layer,
                "target": row.denial.target,
                "code": row.denial.code,
                "grant": row.denial.grant,
                "count": row.count,
            },
            caller.agent,
        )
        for row in took.denials
    ]


async def recent_denials(server: Server, caller: Caller, asked: requests.RecentDenials) -> responses.Denials:
    """The newest first: everybody's for the operator, of their own runs for everybody else."""

    def wanted(row: parts.AuditEvent) -> bool:
        return row.kind["type"] == "denied" and asked.run_id in (None, row.kind.get("run_id"))

    issuer = None if caller.operator else caller.agent.pubkey
    found = await server.audit.scan(wanted, min(asked.limit, MOST), issuer_pubkey=issuer)
    return responses.Denials(denials=paging.that_fit(map(_denial, found.events)))


def _denial(row: parts.AuditEvent) -> parts.Denial:
    kind = row.kind
    return parts.Denial(
        event_id=row.id,
        timestamp_ms=row.timestamp_ms,
        run_id=kind.get("run_id"),
        agent_id=kind.get("agent_id"),
        layer=kind["layer"],
        target=kind["target"],
        code=kind["code"],
        count=kind["count"],
    )


HANDLERS: Final[Mapping[str, Handler]] = {"recent_denials": recent_denials}
