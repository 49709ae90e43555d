"""Every response of the socket and of HTTP: one class a kind, its name the kind in CamelCase.

Kinds and fields are those of Covenant version 1, section 4; what is ours beyond version 1 is marked so. ``KINDS`` is
the closed table. The kinds that answer only what is not served here (``x402_paid``, ``completion_proven``,
``escrow_released``) are there for clients; version 1's page names none of the fields of ``sap_*``.
"""

from __future__ import annotations

from typing import Final

import pydantic

# One class stands in one place: each module is re-exported whole.
from covenant.wire.responses.base import *  # noqa: F403
from covenant.wire.responses.base import Response
from covenant.wire.responses.people import *  # noqa: F403
from covenant.wire.responses.stores import *  # noqa: F403
from covenant.wire.responses.talk import *  # noqa: F403
from covenant.wire.types import Wire
from policy import errors

KINDS: Final[dict[str, type[Response]]] = {
    model.model_fields["kind"].default: model for model in Response.__subclasses__()
}


def parse(raw: bytes) -> Response:
    """The response in the bytes of one frame, as a client of ours reads it.

    Raises:
        errors.DaemonSilentError: it is none.
    """
    try:
        kind = _Kind.model_validate_json(raw).kind
        return KINDS[kind].model_validate_json(raw)
    except (pydantic.ValidationError, KeyError):
        raise errors.DaemonSilentError("the daemon's answer is none of this protocol") from None


class _Kind(Wire):
    kind: str
