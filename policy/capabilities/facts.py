"""Facts about a request, as far as a scope can bound it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct


class RequestFacts(Struct, frozen=True, kw_only=True):
    """A field that is None is not named by the request; a scope that bounds it then refuses.

    ``tiers`` where a request touches several; neither ``tier`` nor ``tiers`` means all three. ``before_ms`` is the
    greatest cut-off of the request, ``created_at`` the time of the one record that it touches. ``filtered`` says that
    the caller of the check shows each record only if ``scopes.admits_record`` says so.
    """

    tier: str | None = None
    tiers: Sequence[str] | None = None
    record_id: str | None = None
    before_ms: int | None = None
    apply: bool | None = None
    tool: str | None = None
    arguments: Any = None
    peer_pubkey_b58: str | None = None
    manifest_sha256: str | None = None
    task_id: str | None = None
    lease_id: str | None = None
    duplicate_risk: str | None = None
    token_prefix: str | None = None
    self_revoke: bool | None = None
    force: bool | None = None
    limit: int | None = None
    resource: str | None = None
    batch_id: str | None = None
    payer_pubkey_b58: str | None = None
    window: int | None = None
    created_at: int | None = None
    mint: str | None = None
    cluster: str | None = None
    secret_name: str | None = None
    filtered: bool = False


NONE = RequestFacts()
