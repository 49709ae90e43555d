"""Whose token it is: asked once a connection by the socket, and once a request by HTTP; audited either way."""

from __future__ import annotations

from typing import Literal

from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from policy import errors

Transport = Literal["ipc", "http"]
# A token is 32 bytes in base58.
_LONGEST = 64


async def admit(server: Server, token_b58: str, transport: Transport) -> Caller:
    """Return the caller that a token admits. The function that calls this audits a refusal (``refused``).

    Raises:
        errors.AuthenticationError: the token is unknown, revoked or expired.
    """
    peer = await server.peers.authenticate(token_b58) if 0 < len(token_b58) <= _LONGEST else None
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
        raise errors.AuthenticationError("the token was revoked or has ended")


async def refused(server: Server, reason: str, transport: Transport) -> None:
    """Write the row of a refused authentication."""
    await server.audit.append("authentication_failed", {"transport": transport, "reason": reason})
