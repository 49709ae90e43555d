"""The daemon's signature over a caller's message, behind a tag that names its purpose."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.keys import identity
from covenant.wire import requests, responses
from policy import base58, errors

# Reading base58 takes time with the square of its length, on the loop.
MAX_MESSAGE_BYTES: Final = 8 * 1024
# A client's clock may differ from the daemon's by this much; an attestation that bears another time says what is wrong.
MAX_SKEW_MS: Final = 5 * 60 * 1000


def attested(message: bytes, ts: int) -> bytes:
    """Return the signed bytes behind the tag of ``Domain.ATTESTATION``: the time (u64, big-endian) and the message."""
    return ts.to_bytes(8) + message


async def sign_attestation(
    server: Server, caller: Caller, asked: requests.SignAttestation
) -> responses.IdentityAttestation:
    """Sign for the operator, or under a grant of ``identity.sign``. It is in the log before it is signed.

    Raises:
        errors.AttestationError: the message is too long or no base58, or the time is not now.
        errors.CapabilityMissingError: the caller may not.
    """
    if not caller.operator:
        await authorization.require(server, caller, "identity.sign", agent_id="identity:sign")
    message = _decoded(asked.message_b58)
    if abs(asked.ts - server.now_ms()) > MAX_SKEW_MS:
        raise errors.AttestationError("`ts` is more than five minutes from the daemon's time")
    row = {"message_hash_hex": hashlib.sha256(message).hexdigest(), "timestamp_ms": asked.ts}
    await server.audit.append("identity_signed", row, issuer=caller.agent)
    if not caller.operator:
        await authorization.still_holds(server, caller, "identity.sign", agent_id="identity:sign")
    signature = server.identity.sign(identity.Domain.ATTESTATION, attested(message, asked.ts))
    return responses.IdentityAttestation(
        signature_b58=base58.encode(signature), pubkey_b58=server.identity.agent.pubkey, ts=asked.ts
    )


def _decoded(text: str) -> bytes:
    try:
        return base58.decode_any(text, max_length=MAX_MESSAGE_BYTES)
    except ValueError:
        raise errors.AttestationError(
            f"the message is no base58, or of more than {MAX_MESSAGE_BYTES} bytes", hint="attest to its digest"
        ) from None


HANDLERS: Final[Mapping[str, Handler]] = {"sign_attestation": sign_attestation}
