"""Connections, intents, agents and tools."""

from __future__ import annotations

from typing import Any, Literal

import pydantic

from covenant.wire.parts import Limit
from covenant.wire.requests.base import Request
from covenant.wire.types import Priority

# The connection -------------------------------------------------------------------------------------------------


class Ping(Request):
    """Is anybody there."""

    kind: Literal["ping"] = "ping"


class ProtocolInfo(Request):
    """Which protocol and versions; the only request before ``authenticate``, any number of times."""

    kind: Literal["protocol_info"] = "protocol_info"


class Authenticate(Request):
    """Authenticate this connection with a token."""

    kind: Literal["authenticate"] = "authenticate"
    token_b58: str


# Intents --------------------------------------------------------------------------------------------------------


class SubmitIntent(Request):
    """Do this. Ours: ``agent`` names who, ``priority`` may only lower the manifest's, and with the same
    ``idempotency_key`` the same caller gets the same answer without a second run."""

    kind: Literal["submit_intent"] = "submit_intent"
    text: str
    prefer_stream: bool = False
    agent: str | None = None
    priority: Priority | None = None
    idempotency_key: str | None = pydantic.Field(default=None, min_length=1, max_length=256)


class ResumeIntent(Request):
    """Go on with an intent that waited for credits."""

    kind: Literal["resume_intent"] = "resume_intent"
    intent_id: str


class GetIntentResult(Request):
    """Ours on the socket, version 1's over HTTP: what came of an intent of the caller's."""

    kind: Literal["get_intent_result"] = "get_intent_result"
    intent_id: str


class RecentDebits(Request):
    """The newest debits of the budget."""

    kind: Literal["recent_debits"] = "recent_debits"
    limit: Limit = 10


# Tools ----------------------------------------------------------------------------------------------------------


class ListTools(Request):
    """Which tools there are, by name. ``limit`` and ``cursor`` are ours: a page after the name that a response gave."""

    kind: Literal["list_tools"] = "list_tools"
    limit: Limit | None = None
    cursor: str | None = None


class CallTool(Request):
    """Call one. Version 1's clients decode blocks of text and JSON only; with ``extended`` (ours) others come as they
    are."""

    kind: Literal["call_tool"] = "call_tool"
    name: str
    arguments: Any = None
    extended: bool = False


# Agents: ours ---------------------------------------------------------------------------------------------------


class ListAgents(Request):
    """Ours: the packages, and what is wrong with those that cannot be routed to."""

    kind: Literal["list_agents"] = "list_agents"
    # Verify their signatures too, for the operator; the files of every package are read.
    signatures: bool = False


class ListExpiries(Request):
    """Ours: what ends, and when: envelopes of packages, grants and tokens. For the operator."""

    kind: Literal["list_expiries"] = "list_expiries"


class ReloadAgents(Request):
    """Ours: look at the packages anew."""

    kind: Literal["reload_agents"] = "reload_agents"
    signatures: bool = False


class ListApprovals(Request):
    """Ours: what runs at a Hermes API wait for the operator's word about."""

    kind: Literal["list_approvals"] = "list_approvals"


class ResolveApproval(Request):
    """Ours: answer one of them with a choice that it offers."""

    kind: Literal["resolve_approval"] = "resolve_approval"
    approval_id: str
    choice: str


# What is not served ---------------------------------------------------------------------------------------------


class Unsupported(Request):
    """A kind of version 1 that is not served here."""
