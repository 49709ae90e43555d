"""Connections, intents, agents and tools."""

from __future__ import annotations

from typing import Any, Literal

from covenant.wire import parts
from covenant.wire.responses.base import Response
from covenant.wire.types import U64, BudgetDebit, Display, SettlementReceipt, ToolSpec, Wire, omitted


# The connection -------------------------------------------------------------------------------------------------
class Pong(Response):
    """To ``ping``."""

    kind: Literal["pong"] = "pong"


class Info(Wire):
    """The protocol and the versions that are spoken; version 2 is streaming, where it is asked for."""

    protocol: Literal["covenant.ipc"] = "covenant.ipc"
    version: U64 = 1
    min_supported: U64 = 1
    max_supported: U64 = 2


class ProtocolDescription(Response):
    """To ``protocol_info``."""

    kind: Literal["protocol_info"] = "protocol_info"
    info: Info = Info()


class Authenticated(Response):
    """To ``authenticate``."""

    kind: Literal["authenticated"] = "authenticated"
    display: Display


class AuthenticationFailed(Response):
    """The reply to a failed or missing authentication; the connection ends."""

    kind: Literal["authentication_failed"] = "authentication_failed"
    reason: str


# Intents --------------------------------------------------------------------------------------------------------


class IntentResult(Response):
    """The result of an intent. Ours: the agent, the supervisor's run and the policy that held it."""

    kind: Literal["intent_result"] = "intent_result"
    intent_id: str
    status: str
    text: str
    sources: tuple[str, ...] = ()
    settlement: SettlementReceipt | None = None
    agent_id: str | None = omitted()
    run_id: str | None = omitted()
    policy_digest: str | None = omitted()


class Debits(Response):
    """To ``recent_debits``."""

    kind: Literal["debits"] = "debits"
    debits: tuple[BudgetDebit, ...]


# Tools ----------------------------------------------------------------------------------------------------------


class ToolList(Response):
    """To ``list_tools``."""

    kind: Literal["tool_list"] = "tool_list"
    tools: tuple[ToolSpec, ...]
    # Ours: the cursor of the next page, if there is one.
    next_cursor: str | None = omitted()


class ToolResult(Response):
    """To ``call_tool``; ``content`` are blocks of the Model Context Protocol."""

    kind: Literal["tool_result"] = "tool_result"
    content: tuple[dict[str, Any], ...]
    is_error: bool = False


# Agents: ours ---------------------------------------------------------------------------------------------------


class AgentDirectory(Response):
    """Ours, to ``list_agents`` and ``reload_agents``. ``truncated``: there are more than one answer takes."""

    kind: Literal["agents"] = "agents"
    agents: tuple[parts.AgentListing, ...]
    truncated: bool = False


class Expiries(Response):
    """Ours, to ``list_expiries``: the first to end first."""

    kind: Literal["expiries"] = "expiries"
    expiries: tuple[parts.Expires, ...]
    clock_behind_ms: U64


class Approvals(Response):
    """Ours, to ``list_approvals``, the oldest first."""

    kind: Literal["approvals"] = "approvals"
    approvals: tuple[parts.Approval, ...]


class ApprovalResolved(Response):
    """Ours, to ``resolve_approval``: how many waiting requests of the run that answered."""

    kind: Literal["approval_resolved"] = "approval_resolved"
    approval_id: str
    choice: str
    resolved: U64
