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
    """Whoever the token lets in; the caller of this audits a refusal (``refused``).

    Raises:
        errors.AuthenticationError: the token is nobody's, or no longer.
    """
    peer = await server.peers.authenticate(token_b58) if 0 < len(token_b58) <= _LONGEST else None
    if peer is None:
        raise errors.AuthenticationError("the token is nobody's")
    return Caller(
        agent=peer.agent_id,
        operator=peer.agent_id.pubkey == server.identity.agent.pubkey,
        token_prefix=peer.token_prefix,
        transport=transport,
    )


def check(server: Server, caller: Caller) -> None:
    """Whether whoever was let in may still be in: a token that was revoked or has ended ends its open connections too.
    The operator's go on: they outlive a rotation of its token, as in version 1.

    Raises:
        errors.AuthenticationError: no longer.
    """
    if not caller.operator and not server.peers.admits(caller.agent.pubkey, caller.token_prefix):
        raise errors.AuthenticationError("the token was revoked or has ended")


async def refused(server: Server, reason: str, transport: Transport) -> None:
    """Write that somebody was not let in."""
    await server.audit.append("authentication_failed", {"transport": transport, "reason": reason})
