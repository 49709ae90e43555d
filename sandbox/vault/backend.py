"""Interface of a vault for its users: secrets by agent id and name. An agent can never list them.

Both backends pass one suite of tests (tests/kernel/test_vault_backends.py).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Literal, Protocol

from msgspec import Struct

from policy import errors
from policy.manifest.agent import AGENT_ID
from policy.manifest.permissions import CREDENTIAL_NAME
from sandbox.kernel.proc.secret_memory import Locked

MAX_VALUE_BYTES = 16 * 1024
Action = Literal["created", "put", "rotated", "removed", "rekeyed"]


class SecretEntry(Struct, frozen=True):
    """Public facts about a secret: its agent, its name, its version and its times. Never its size."""

    agent_id: str
    name: str
    version: int
    created_ms: int
    changed_ms: int


class OpenedSecret(Struct, frozen=True):
    """A secret in the clear: ``value`` is overwritten when the vault's context ends."""

    version: int
    value: Locked


class Change(Struct, frozen=True):
    """A change that is about to be made to a vault, for the log. ``version`` is the secret's, 0 for the whole vault."""

    action: Action
    agent_id: str
    name: str
    version: int


# Called when only the disk or the server can still refuse the change; nothing is changed if it raises.
Before = Callable[[Change], None]


class Backend(Protocol):
    """A vault. Every failure is an ``errors.VaultError``. A missing secret is no failure for ``opened``."""

    name: str

    def entries(self, agent_id: str | None = None) -> list[SecretEntry]:
        """List the secrets of one agent or of all, sorted."""

    def put(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> SecretEntry:
        """Add a new secret. Refused if it exists."""

    def rotate(self, agent_id: str, name: str, value: memoryview, *, before: Before) -> SecretEntry:
        """Replace the value of an existing secret."""

    def remove(self, agent_id: str, name: str, *, before: Before) -> SecretEntry:
        """Remove a secret with every older version."""

    def opened(self, agent_id: str, name: str) -> contextlib.AbstractContextManager[OpenedSecret | None]:
        """Open the secret in the clear for the context's duration. None if the agent has no secret of this name."""


def check_place(agent_id: str, name: str) -> None:
    """Refuse an agent id or a name that no manifest can have.

    Raises:
        errors.SecretError: Raised when either is invalid.
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
    """Refuse a value that an agent cannot get as text.

    Raises:
        errors.SecretError: Raised when it is empty, too long, or not UTF-8 without NUL.
    """
    if not 0 < len(value) <= MAX_VALUE_BYTES:
        raise errors.SecretError(
            f"a secret has between 1 and {MAX_VALUE_BYTES} bytes", hint="covenant vault put AGENT NAME < FILE"
        )
    try:
        # INVARIANT: no cause and no context: they quote the bytes.
        is_text = "\0" not in str(value, "utf-8")
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise errors.SecretError("a secret is text in UTF-8, without NUL", hint="encode it, as with base64")


def missing(agent_id: str, name: str) -> errors.SecretError:
    """Return the error of a change to a missing secret."""
    hint = f"covenant vault list shows which there are; a new one: covenant vault put {agent_id} {name}"
    return errors.SecretError(f"agent `{agent_id}` has no secret `{name}`", hint=hint)


def taken(agent_id: str, name: str) -> errors.SecretError:
    """Return the error of a second secret of one name."""
    return errors.SecretError(
        f"agent `{agent_id}` has a secret `{name}` already", hint=f"covenant vault rotate {agent_id} {name}"
    )
