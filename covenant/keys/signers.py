"""What an operator signs with: a key file or a key in ssh-agent, behind one form, unlocked only when it signs.

INVARIANT: a door is handed DSSE's pre-authentication encoding and nothing else. A statement and a trust root differ in
the payload type within it, a checkpoint and a capability token do not begin like it: a signature through this door
is none of those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from covenant.keys import keystore
from policy import errors
from policy.signing import envelope as envelopes


@dataclass(frozen=True, slots=True)
class Door:
    """A key that can be asked to sign. ``name`` is how the operator calls it."""

    name: str
    key: envelopes.PublicKey
    sign: Callable[[bytes], bytes]

    def signature(self, envelope: envelopes.Envelope) -> envelopes.Signature:
        """This key's signature over the envelope's payload and type.

        Raises:
            errors.KeyFileError: the key cannot be unlocked, or it did not sign.
            errors.AgentError: the agent did not sign.
        """
        message = envelope.pae()
        made = self.sign(message)
        if not self.key.verifies(made, message):
            raise errors.KeyFileError(f"key `{self.name}` made a signature that does not verify")
        return envelopes.Signature(self.key.keyid, made)


def key_file(home: Path, name: str, passphrase: Callable[[], bytes]) -> Door:
    """The door of a key file; the passphrase is asked for when it signs.

    Raises:
        errors.KeyFileError: there is no such key, or its file is unsafe.
    """
    key = keystore.entry(home, name).file.key
    return Door(name, key, lambda message: keystore.load(home, name, passphrase).sign(message))


def agent_key(wanted: str) -> Door:
    """The door of an Ed25519 key in the agent that SSH_AUTH_SOCK names: by comment, fingerprint or key id.

    Raises:
        errors.AgentError: there is no agent, or no such key in it.
    """
    from covenant.keys import ssh_agent

    with ssh_agent.Agent() as agent:
        identity = agent.find(wanted)

    def sign(message: bytes) -> bytes:
        with ssh_agent.Agent() as agent:
            return agent.sign(identity, message)

    return Door(identity.comment or identity.fingerprint, identity.key, sign)
