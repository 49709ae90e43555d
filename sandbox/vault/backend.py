"""What a vault is to whoever uses it: secrets by agent id and name, and nothing that gives a list to an agent.

Both backends pass one suite of tests (tests/kernel/test_vault_backends.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from policy import errors
from policy.manifest.agent import AGENT_ID
from policy.manifest.permissions import CREDENTIAL_NAME
from sandbox.kernel.proc.secret_memory import Locked

MAX_VALUE_BYTES = 16 * 1024
Action = Literal["created", "put", "rotated", "removed", "rekeyed"]


@dataclass(frozen=True, slots=True)
class Entry:
    """What may be said of a secret: whose it is, its name, how often it was replaced and when. Never its size."""

    agent_id: str
    name: str
    version: int
    created_ms: int
    changed_ms: int


@dataclass(frozen=True, slots=True)
class Opened:
    """A secret in the clear: ``value`` is overwritten when the vault's context ends."""

    version: int
    value: Locked


@dataclass(frozen=True, slots=True)
class Change:
    """What is about to be done to a vault, for the log: ``version`` is the secret's, 0 for the vault as a whole."""

    action: Action
    agent_id: str
    name: str
    version: int


# Called when only the disk or the server can still refuse the change; nothing is changed if it raises.
Before = Callable[[Change], None]


class Backend(Protocol):
    """A vault. Whatever fails is an ``errors.VaultError``; that a secret is not there is no failure to ``opened``."""

    name: str

    def entries(self, agent_id: str | None = None) -> list[Entry]:
        """What there is, of one agent or of all, sorted."""

    def put(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> Entry:
        """A new secret, refused where there is one."""

    def rotate(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> Entry:
        """Another value for a secret that is there."""

    def remove(self, agent_id: str, name: str, *, before: Before) -> Entry:
        """Take a secret away, with every older version."""

    def opened(self, agent_id: str, name: str) -> contextlib.AbstractContextManager[Opened | None]:
        """The secret in the clear for as long as the context lasts, None where there is none of this agent and name."""


def check_place(agent_id: str, name: str) -> None:
    """Refuse what can be no agent's secret.

    Raises:
        errors.SecretError: an agent id or a name that no manifest can have.
    """
    if not re.fullmatch(AGENT_ID, agent_id) or not agent_id.strip("."):
        raise errors.SecretError(f"`{agent_id}` is no agent id", hint="1 to 128 of A-Z a-z 0-9 _ . -")
    if not is_name(name):
        raise errors.SecretError(
            f"`{name}` is no name of a secret", hint="1 to 128 of A-Z a-z 0-9 _ . -, a letter or digit first"
        )


def is_name(name: str) -> bool:
    """Whether a manifest can grant a secret of this name."""
    return re.fullmatch(CREDENTIAL_NAME, name) is not None


def check_value(value: memoryview) -> None:
    """Refuse what cannot be handed to an agent as text.

    Raises:
        errors.SecretError: it is empty, too long, or not UTF-8 without NUL.
    """
    if not 0 < len(value) <= MAX_VALUE_BYTES:
        raise errors.SecretError(f"a secret has between 1 and {MAX_VALUE_BYTES} bytes")
    try:
        # INVARIANT: no cause and no context: they quote the bytes.
        is_text = "\0" not in str(value, "utf-8")
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise errors.SecretError("a secret is text in UTF-8, without NUL", hint="encode it, as with base64")


def missing(agent_id: str, name: str) -> errors.SecretError:
    """The error of a change to what is not there."""
    return errors.SecretError(
        f"agent `{agent_id}` has no secret `{name}`", hint=f"covenant vault put {agent_id} {name}"
    )


def taken(agent_id: str, name: str) -> errors.SecretError:
    """The error of a second secret of one name."""
    return errors.SecretError(
        f"agent `{agent_id}` has a secret `{name}` already", hint=f"covenant vault rotate {agent_id} {name}"
    )
