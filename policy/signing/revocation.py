"""Revocations of a trust root: keys by id, signed payloads by digest, an agent's serials up to a number.

The lists are part of the root, so they are signed, versioned and carried as it is. They only grow: version N + 1
repeats each entry of version N, or it cannot follow. A revoked key signs nothing, neither packages nor roots, and is
never listed again; what it signed before does not count either, since nothing proves when that was.
"""

from __future__ import annotations

from typing import Annotated

import pydantic

from policy.signing import statement as statements

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$"
MAX_KEYS = 256
MAX_MANIFESTS = 512
MAX_SERIALS = 256

# Shown to people: no controls, no format or bidi characters, no line ends. The length stands beside the pattern and not
# in it, where it makes an automaton of 18 MiB that takes a tenth of a second to build.
Reason = Annotated[str, pydantic.Field(pattern=r"^[^\p{C}\p{Zl}\p{Zp}]+$", max_length=200)]


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="rust-regex")


class RevokedKey(_Closed):
    """A key that signs nothing any more. ``name`` is what the root called it, null when it was never listed."""

    keyid: statements.Sha256
    name: Annotated[str, pydantic.Field(pattern=NAME_PATTERN)] | None
    at: statements.TimeMs
    reason: Reason


class RevokedManifest(_Closed):
    """One signed statement, by the SHA-256 of its payload."""

    payload_digest: statements.Sha256
    at: statements.TimeMs
    reason: Reason


class RevokedSerials(_Closed):
    """Every statement of an agent id whose serial is at most ``serial_at_most``."""

    agent_id: Annotated[str, pydantic.Field(pattern=statements.AGENT_ID_PATTERN)]
    serial_at_most: statements.TimeMs
    at: statements.TimeMs
    reason: Reason


class Revocations(_Closed):
    """The three lists, each sorted by what it names and without repeats."""

    keys: Annotated[tuple[RevokedKey, ...], pydantic.Field(strict=False, max_length=MAX_KEYS)]
    manifests: Annotated[tuple[RevokedManifest, ...], pydantic.Field(strict=False, max_length=MAX_MANIFESTS)]
    serials: Annotated[tuple[RevokedSerials, ...], pydantic.Field(strict=False, max_length=MAX_SERIALS)]

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Revocations:
        named = {
            "keys": [k.keyid for k in self.keys],
            "manifests": [m.payload_digest for m in self.manifests],
            "serials": [s.agent_id for s in self.serials],
        }
        for name, ids in named.items():
            if ids != sorted(set(ids)):
                raise ValueError(f"`revoked.{name}` is not sorted and without repeats")
        return self

    def key(self, keyid: str) -> RevokedKey | None:
        """The entry of a key id."""
        return next((k for k in self.keys if k.keyid == keyid), None)

    def package(self, payload_digest: str, agent_id: str, serial: int) -> str | None:
        """Return why a statement itself is revoked, with any signers; None when it is not."""
        for manifest in self.manifests:
            if manifest.payload_digest == payload_digest:
                return f"the signed manifest was revoked: {manifest.reason}"
        for entry in self.serials:
            if entry.agent_id == agent_id and serial <= entry.serial_at_most:
                return f"serials of agent `{agent_id}` up to {entry.serial_at_most} were revoked: {entry.reason}"
        return None

    def retired(self, agent_id: str, *, now_ms: int) -> str:
        """Return the fix where the serial of a new signature, which is the time, is revoked too; else nothing."""
        for entry in self.serials:
            if entry.agent_id == agent_id and now_ms <= entry.serial_at_most:
                return (
                    f"serials of new signatures are below {entry.serial_at_most} too: give the agent another id in "
                    "agent.toml, and sign it"
                )
        return ""

    def dropped_by(self, later: Revocations) -> str | None:
        """The first entry that ``later`` does not repeat, in words; None when it repeats all.

        An agent's serials may be revoked further up, never less far.
        """
        for key in self.keys:
            if later.key(key.keyid) != key:
                return f"key {key.keyid}"
        kept = set(later.manifests)
        for manifest in self.manifests:
            if manifest not in kept:
                return f"manifest {manifest.payload_digest}"
        highest = {s.agent_id: s.serial_at_most for s in later.serials}
        for entry in self.serials:
            if highest.get(entry.agent_id, -1) < entry.serial_at_most:
                return f"serials of agent `{entry.agent_id}` up to {entry.serial_at_most}"
        return None


NONE = Revocations(keys=(), manifests=(), serials=())
