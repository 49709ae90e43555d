"""Every request of the socket and of HTTP: one class for each kind, named after the kind in CamelCase.

Kinds and fields are those of Covenant version 1, section 4 (`a2_a` is its spelling of A2A). Unknown fields are ignored,
as in version 1; additions of ours are marked so. ``KINDS`` is the closed table.
"""

from __future__ import annotations

from typing import Final

import pydantic

# One class stands in one place: each module is re-exported whole.
from covenant.wire.requests.base import *  # noqa: F403
from covenant.wire.requests.base import Request
from covenant.wire.requests.people import *  # noqa: F403
from covenant.wire.requests.stores import *  # noqa: F403
from covenant.wire.requests.talk import *  # noqa: F403
from covenant.wire.requests.talk import Unsupported
from policy import errors, wire_json
from policy.signing import strict_json

# What version 1 has and this daemon answers `unsupported`; no field of theirs is read.
_UNSUPPORTED: Final = (
    "authorize_spend",
    "get_reputation",
    "pay_x402",
    "prove_completion",
    "record_escrow_release",
    "rwa_preview",
    "rwa_trade",
    "sap_publish_agent",
    "sap_publish_attestation",
    "sap_publish_audit_root",
    "sap_status",
    "settle_spend",
    "spend_grant_charge",
    "spend_grant_settle",
)

KINDS: Final[dict[str, type[Request]]] = {
    **{model.model_fields["kind"].default: model for model in Request.__subclasses__() if model is not Unsupported},
    **dict.fromkeys(_UNSUPPORTED, Unsupported),
}


def parse(raw: bytes) -> Request:
    """The request in the bytes of one frame.

    Raises:
        errors.MalformedRequestError: not one JSON object, a key twice, too deep, or a field that is missing or wrong.
        errors.UnknownKindError: a kind that is none of ``KINDS``.
    """
    document = wire_json.read(raw)
    if not isinstance(document, dict):
        raise errors.MalformedRequestError("a request is a JSON object")
    kind = document.get("kind")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        shown = strict_json.shown(kind) if isinstance(kind, str) else "none"
        raise errors.UnknownKindError(f"no request has the kind `{shown}`", hint="send protocol_info")
    try:
        return model.model_validate_json(raw)
    except pydantic.ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        place = strict_json.shown(".".join(str(part) for part in first["loc"])) or kind
        said = first["msg"].removeprefix("Value error, ")
        reason = said[:1].lower() + said[1:]
        raise errors.MalformedRequestError(f"`{place}`: {reason}", where=str(kind)) from None
