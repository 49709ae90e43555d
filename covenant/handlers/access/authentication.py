"""Whose token it is: asked once a connection by the socket, and once a request by HTTP; audited either way."""

from __future__ import annotations

from typing import Final, Literal

from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import requests, responses
from policy import base58, errors

Transport = Literal["ipc", "http"]
_TOKEN_BYTES = 32
# The refusal of a caller who was admitted and is not any more.
ENDED: Final = "the token was revoked or has ended"
# 32 bytes have at most 44 digits in base58.
_LONGEST = 64


async def admit(server: Server, token_b58: str, transport: Transport) -> Caller:
    """Return the caller that a token admits. The function that calls this audits a refusal (``refused``).

    The reasons begin with version 1's words: missing, malformed, unknown. A revoked token is unknown, so the reason
    tells a client only the form of its own text.

    Raises:
        errors.AuthenticationError: the token is missing, malformed, unknown, revoked or expired.
    """
    if not token_b58:
        raise errors.AuthenticationError("missing token")
    if not _is_token(token_b58):
        raise errors.AuthenticationError("malformed token")
    peer = await server.peers.authenticate(token_b58)
    if peer is None:
        raise errors.AuthenticationError("unknown token")
    return Caller(
        agent=peer.agent_id,
        operator=peer.agent_id.pubkey == server.identity.agent.pubkey,
        token_prefix=peer.token_prefix,
        transport=transport,
    )


def check(server: Server, caller: Caller) -> None:
    """Refuse an admitted caller whose token was revoked or has expired. Its open connections end too.

    Connections of the operator outlive a rotation of its token, as in version 1.

    Raises:
        errors.AuthenticationError: the token is not valid any more.
    """
    if not caller.operator and not server.peers.admits(caller.agent.pubkey, caller.token_prefix):
        raise errors.AuthenticationError(ENDED)


async def respond(server: Server, caller: Caller, request: requests.Request) -> responses.Response:
    """Return the response to a request of an admitted caller. It is a refusal if the caller's token has ended before
    the answer, but by this request: a call may take minutes.
    """
    answer = await server.respond(caller, request)
    try:
        if not isinstance(request, requests.RevokePeer):
            check(server, caller)
    except errors.AuthenticationError as e:
        return responses.Error.of(e)
    return answer


def _is_token(text: str) -> bool:
    """Whether the text is 32 bytes in base58."""
    try:
        return len(text) <= _LONGEST and bool(base58.decode(text, length=_TOKEN_BYTES))
    except ValueError:
        return False


async def refused(server: Server, reason: str, transport: Transport) -> None:
    """Write the row of a refused authentication."""
    await server.audit.append("authentication_failed", {"transport": transport, "reason": reason})
