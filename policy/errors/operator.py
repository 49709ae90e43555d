"""Errors that the operator must act on: a call, a key, the trust root, a configuration."""

from __future__ import annotations

from typing import Any

from policy.errors.base import CovenantError, each


class OperatorError(CovenantError):
    """A key, a signature, the trust root, a role or a configuration has to be changed."""


class NoRunError(OperatorError):
    """No live run has this id, or more than one id begins with it."""

    code = "no_such_run"


class WrongStateError(OperatorError):
    """The run's state does not allow the operation; docs/lifecycle.md has the table."""

    code = "wrong_state"


class UsageError(OperatorError):
    """The command was called with wrong arguments."""

    code = "usage"


class HostFactsError(OperatorError):
    """The file is no document of a host's facts: `covenant doctor --export FILE` makes one."""

    code = "host_facts"


class RevisionError(OperatorError):
    """A package of a git revision cannot be read."""

    code = "no_such_revision"


class ContractError(OperatorError):
    """The agent's contract does not fit the way in which it was run."""

    code = "wrong_contract"


class ConfigError(OperatorError):
    """The configuration file is malformed, or another user than root can write it."""

    code = "config_invalid"

    def to_json(self) -> dict[str, Any]:
        """Return the error document, with every fault of the file in ``errors`` where there are several."""
        found = each(self)
        named = [{"message": one.message, "hint": one.hint or None, "where": one.where or None} for one in found]
        return {**super().to_json(), **({"errors": named} if len(found) > 1 else {})}


class HomeError(OperatorError):
    """COVENANT_HOME or COVENANT_STATE is missing, unsafe or has a wrong mode."""

    code = "home_unsafe"


class KeyFileError(OperatorError):
    """A key file is missing, malformed, of a wrong mode, or its passphrase is wrong."""

    code = "key_file"


class AgentError(OperatorError):
    """The ssh-agent is missing, lacks this Ed25519 key, did not sign, or gave an invalid answer."""

    code = "ssh_agent"


class VaultError(OperatorError):
    """The vault is missing, damaged, older than its record says, or does not answer; nothing is read from it."""

    code = "vault_unusable"


class VaultKeyError(VaultError):
    """No key opens the vault: it is missing, wrong, or its file is readable by others."""

    code = "vault_locked"


class SecretError(VaultError):
    """The vault lacks this secret, has it already, or the value cannot be a secret."""

    code = "secret_refused"


class TrustError(OperatorError):
    """The trust root is missing, malformed, expired, or does not allow what was asked."""

    code = "trust_root"


class BackendError(OperatorError):
    """The chosen backend may not run this package."""

    code = "backend_refused"


class CapabilityError(OperatorError):
    """The caller does not hold the capabilities that the manifest requires of it."""

    code = "capability_missing"


class LossError(OperatorError):
    """The target of a compilation would allow more than the manifest, and the loss was not accepted by its id."""

    code = "restriction_lost"

    def to_json(self) -> dict[str, Any]:
        """The error document, with every loss of this manifest on the target in ``losses``."""
        return {**super().to_json(), "losses": list(self.details.get("losses", ()))}


class PublishError(OperatorError):
    """A port of the agent cannot be published at its place. The agent was not started."""

    code = "publish"
