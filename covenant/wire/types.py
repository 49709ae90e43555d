"""The types of version 1 that more than one message or store holds, under the names that go over the wire.

Unknown fields are ignored, as version 1 does. Times are Unix milliseconds, keys and signatures base58.
"""

from __future__ import annotations

import enum
import re
from typing import Annotated, Any, Final, Literal

import pydantic

# Display names on the wire are `local@host` (Covenant version 1, section 3).
_DISPLAY: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}@[A-Za-z0-9_.-]{1,256}\Z")
_BASE58: Final = re.compile(r"[1-9A-HJ-NP-Za-km-z]+\Z")

U64_END: Final = 2**64

U64 = Annotated[int, pydantic.Field(ge=0, lt=U64_END)]


def omitted() -> Any:
    """A field that is None unless it is given, and that is left out of what is written while it is."""
    return pydantic.Field(default=None, exclude_if=lambda value: value is None)


class Wire(pydantic.BaseModel):
    """A value of the wire: frozen, read without coercion, and with unknown fields ignored."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True)


def _is_display(value: str) -> str:
    if not _DISPLAY.match(value):
        raise ValueError("is not `local@host`")
    return value


def _is_base58(value: str) -> str:
    if not _BASE58.match(value) or len(value) > 128:
        raise ValueError("is not base58")
    return value


def _published(pattern: re.Pattern[str], longest: int) -> pydantic.WithJsonSchema:
    """Return the JSON Schema of the check, for the OpenAPI document."""
    anchored = f"^{pattern.pattern.removesuffix(chr(92) + 'Z')}$"
    return pydantic.WithJsonSchema({"type": "string", "pattern": anchored, "maxLength": longest})


Display = Annotated[str, pydantic.AfterValidator(_is_display), _published(_DISPLAY, 513)]
Base58 = Annotated[str, pydantic.AfterValidator(_is_base58), _published(_BASE58, 128)]


class AgentId(Wire):
    """An identity: a name for people, and the Ed25519 public key that decides."""

    display: Display
    pubkey: Base58


class Priority(enum.StrEnum):
    """The intent's priority."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class Tier(enum.StrEnum):
    """The tiers of memory. ``long-term`` and ``long_term`` are read as ``longterm``."""

    WORKING = "working"
    EPISODIC = "episodic"
    LONGTERM = "longterm"

    @classmethod
    def _missing_(cls, value: object) -> Tier | None:
        return cls.LONGTERM if value in ("long-term", "long_term") else None


def _tier(value: Any) -> Any:
    return Tier(value) if isinstance(value, str) and value in {*Tier, "long-term", "long_term"} else value


MemoryTier = Annotated[Tier, pydantic.BeforeValidator(_tier)]


class MemoryRecord(Wire):
    """One record of memory. ``embedding`` may be empty; ``metadata`` is any JSON."""

    id: str
    tier: MemoryTier
    owner: AgentId
    text: str
    embedding: tuple[float, ...] = ()
    metadata: Any = None
    created_at: U64
    parent: str | None = None


class Capability(Wire):
    """A grant of ``action`` over ``scope`` to ``subject``, until ``expires_at``. All five fields are always present."""

    subject: AgentId
    action: str
    scope: Any
    granted_by: AgentId
    expires_at: U64 | None


class SignedCapability(Wire):
    """A capability and the 64 bytes of its Ed25519 signature."""

    capability: Capability
    signature: Base58


Resource = Literal["compute", "memory", "tool", "message", "registration"]


class SettlementReceipt(Wire):
    """The use of one task; settled on a chain once ``batch_id`` and the fields after it are present."""

    id: str
    payer: AgentId
    resource: Resource
    memory_record_id: str | None = omitted()
    credits_consumed: U64
    settled_at: U64
    chain: str | None = None
    cluster: str | None = None
    batch_id: str | None = None
    merkle_root: str | None = None
    tx_sig: str | None = None
    slot: U64 | None = None
    confirmed_at: U64 | None = None
    onchain_sig: str | None = None


class ToolSpec(Wire):
    """A tool as the Model Context Protocol shows it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True, populate_by_name=True)

    name: str
    description: str
    input_schema: dict[str, Any] = pydantic.Field(alias="inputSchema")
    # Ours, of a tool of an entry [[mcp.server]]: the entry's name and prefix, and the state of its session.
    source: str | None = omitted()
    prefix: str | None = omitted()
    state: str | None = omitted()


class PeerSummary(Wire):
    """A peer as an operator sees it: six characters of its token."""

    agent_id: AgentId
    token_prefix: str
    registered_at: U64
    revoked_at: U64 | None = None
    expires_at: U64 | None = omitted()


class Idempotency(Wire):
    """The permission to do a task twice, and the key that equal tasks share."""

    duplicate_safety: Literal["unsafe", "idempotent"]
    key: str


class A2ATask(Wire):
    """A task of one agent for another."""

    id: str
    sender: AgentId
    recipient: AgentId
    intent_text: str
    task_kind: str | None = omitted()
    parent: str | None = omitted()
    deadline_ms: U64 | None = omitted()
    idempotency: Idempotency | None = omitted()


class A2ATaskResult(Wire):
    """The result of a task. ``content`` are blocks of the Model Context Protocol."""

    task_id: str
    status: Literal["ok", "error", "partial"]
    content: tuple[dict[str, Any], ...] = ()
    error_message: str | None = omitted()


class QueueEntry(Wire):
    """A task in the mailbox, queued or leased."""

    state: Literal["queued", "in_flight"]
    task: A2ATask
    lease_id: str | None = omitted()
    leased_to: AgentId | None = omitted()
    leased_at_ms: U64 | None = omitted()
    lease_expires_at_ms: U64 | None = omitted()
    attempt: U64 = 0


class BudgetDebit(Wire):
    """Credits taken from an agent, and the receipt that they stand beside."""

    agent: AgentId
    credits: U64
    paired_receipt: str
    at_ms: U64


class BudgetPauseCheckpoint(Wire):
    """An intent that waits for credits: single use, and only for its submitter."""

    version: Literal[1] = 1
    intent_id: str
    agent: AgentId
    reason: Literal["budget_exhausted", "operator_requested", "shutdown", "maintenance", "projected_overshoot"]
    requested_credits: U64
    tokens_remaining: U64
    refill_eta_ms: U64
    saved_at_ms: U64
    resume_state: dict[str, Any] = pydantic.Field(default_factory=dict)
