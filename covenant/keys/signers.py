"""The operator's signing keys: a key file or a key in ssh-agent, behind one interface, unlocked only to sign.

INVARIANT: a door signs only DSSE's pre-authentication encoding. A statement and a trust root differ in the payload type
within it. A checkpoint and a capability token begin differently: no signature through this door is valid for one of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from covenant.keys import keystore
from policy import errors
from policy.signing import envelope as envelopes


@dataclass(frozen=True, slots=True)
class Signer:
    """A key that can sign. ``name`` is the operator's name for it."""

    name: str
    key: envelopes.PublicKey
    sign: Callable[[bytes], bytes]

    def signature(self, envelope: envelopes.Envelope) -> envelopes.Signature:
        """Return this key's signature over the envelope's payload and type.

        Raises:
            errors.KeyFileError: the key cannot be unlocked, or it did not sign.
            errors.AgentError: the agent did not sign.
        """
        message = envelope.pae()
        made = self.sign(message)
        if not self.key.verifies(made, message):
            raise errors.KeyFileError(f"key `{self.name}` made a signature that does not verify")
        return envelopes.Signature(self.key.keyid, made)


def key_file(home: Path, name: str, passphrase: Callable[[], bytes]) -> Signer:
    """Return the door of a key file; it asks for the passphrase to sign.

    Raises:
        errors.KeyFileError: there is no such key, or its file is unsafe.
    """
    key = keystore.entry(home, name).file.key
    return Signer(name, key, lambda message: keystore.load(home, name, passphrase).sign(message))


def agent_key(wanted: str) -> Signer:
    """Return the door of an Ed25519 key in the agent at SSH_AUTH_SOCK: by comment, fingerprint or key id.

    Raises:
        errors.AgentError: there is no agent, or no such key in it.
    """
    from covenant.keys import ssh_agent

    with ssh_agent.Agent() as agent:
        identity = agent.find(wanted)

    def sign(message: bytes) -> bytes:
        with ssh_agent.Agent() as agent:
            return agent.sign(identity, message)

    return Signer(identity.comment or identity.fingerprint, identity.key, sign)
