"""Secrets by name, to who holds a grant that names them; absent and not granted are one answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from covenant.handlers.access import authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Handler, Server
from covenant.providers.secrets_file import SECRET_NAME
from covenant.wire import requests, responses
from policy import errors
from policy.capabilities.facts import RequestFacts

ACTION: Final = "secret.access"


async def get_secret(server: Server, caller: Caller, asked: requests.GetSecret) -> responses.Secret:
    """A secret that a grant of ``secret.access`` names, or for which ``secret.access.<name>`` was granted.

    The rows of all refusals are issued by the daemon: the caller's own feed does not say which of the reasons it was.

    Raises:
        errors.SecretDeniedError: it is absent, or not granted to the caller.
    """
    named = SECRET_NAME.match(asked.name) is not None
    # Looked up whether it is granted or not, so that both take as long.
    value = _text(server.secrets.get(asked.name)) if named else None
    try:
        (signed,) = await authorization.require_all(
            server,
            caller,
            [_action(server, caller, asked.name) if named else ACTION],
            agent_id=caller.agent.display,
            facts=RequestFacts(secret_name=asked.name),
            hidden=True,
            concealed=value is None,
        )
    except (errors.CapabilityMissingError, errors.CapabilityScopeError) as e:
        await _denied(server, caller, asked.name, e.message)
        raise _refusal() from None
    if value is None:
        await _denied(server, caller, asked.name, "there is no such secret, or it is no text")
        raise _refusal()
    row = {"agent_id": caller.agent.display, "secret_name": asked.name, "signature_b58": signed.signature}
    await server.audit.append("secret_access_granted", row, issuer=caller.agent)
    # INVARIANT: nothing waits from here on. Rows were written since the decision: the grant may have been revoked
    # meanwhile, and the revoking caller have its answer.
    if not authorization.holds(
        server, caller, _action(server, caller, asked.name), RequestFacts(secret_name=asked.name)
    ):
        await _denied(server, caller, asked.name, "the grant was taken back, or ended, while its rows were written")
        raise _refusal()
    return responses.Secret(name=asked.name, value=value)


def _action(server: Server, caller: Caller, name: str) -> str:
    own = f"{ACTION}.{name}"
    return own if server.capabilities.find(caller.agent.pubkey, own, server.now_ms()) is not None else ACTION


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None


async def _denied(server: Server, caller: Caller, name: str, reason: str) -> None:
    row: dict[str, Any] = {"agent_id": caller.agent.display, "secret_name": name[:256], "reason": reason}
    await server.audit.append("secret_access_denied", row, issuer=server.identity.agent)


def _refusal() -> errors.SecretDeniedError:
    return errors.SecretDeniedError(
        "there is no secret of that name for the caller", hint="the operator finds the reason in the audit log"
    )


HANDLERS: Final[Mapping[str, Handler]] = {"get_secret": get_secret}
