"""The trust root: which operator keys there are, what each may sign, and how one version follows another.

A trust root is a DSSE envelope of a type of its own, so that no signature on a package can be taken for one on
a root. Version 1 is trusted because of where it lies (a directory that only the supervisor can write); version
N + 1 because the thresholds of N and of N + 1 both signed it. Every root ends.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

import pydantic

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import statement as statements
from policy.signing import strict_json

PAYLOAD_TYPE = "application/vnd.covenant.trust-root.v1+json"
MAX_BYTES = 1024 * 1024
MAX_KEYS = 64

_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$"
_ROLE_PATTERN = r"^(\*|[a-z0-9][a-z0-9_-]{0,63})$"
# An id, or the start of one and a star. One star at the end needs no matcher that could be made to backtrack.
_AGENT_PATTERN = r"^(\*|[A-Za-z0-9_.-]{1,128}\*?)$"


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Scope(_Closed):
    """What a key may sign: agent ids (exact, or a prefix and ``*``) and roles (names, or ``*``)."""

    agents: Annotated[
        tuple[Annotated[str, pydantic.Field(pattern=_AGENT_PATTERN)], ...],
        pydantic.Field(strict=False, min_length=1, max_length=256),
    ]
    roles: Annotated[
        tuple[Annotated[str, pydantic.Field(pattern=_ROLE_PATTERN)], ...],
        pydantic.Field(strict=False, min_length=1, max_length=256),
    ]

    def covers_agent(self, agent_id: str) -> bool:
        """Whether the id is one that the key may sign."""
        return any(agent_id.startswith(p[:-1]) if p.endswith("*") else agent_id == p for p in self.agents)

    def covers_role(self, role: str | None) -> bool:
        """Whether the role is one that the key may sign. No role is no ceiling, so only ``*`` covers it."""
        return "*" in self.roles or (role is not None and role in self.roles)


class OperatorKey(_Closed):
    """One key of the root: its name, scope, validity, and how many signers make its signature enough.

    ``threshold`` 1 means that this key alone suffices; with 2, another key whose scope covers the package must
    have signed as well.
    """

    name: Annotated[str, pydantic.Field(pattern=_NAME_PATTERN)]
    public: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
    scope: Scope
    threshold: Annotated[int, pydantic.Field(ge=1, le=envelopes.MAX_SIGNATURES)]
    not_before: statements.TimeMs
    expires_at: statements.TimeMs

    @pydantic.model_validator(mode="after")
    def _usable(self) -> OperatorKey:
        envelopes.public_key(bytes.fromhex(self.public))
        if self.expires_at <= self.not_before:
            raise ValueError("`expires_at` is not after `not_before`")
        return self

    @property
    def key(self) -> envelopes.PublicKey:
        """The public key; its id is computed, never read."""
        return envelopes.public_key(bytes.fromhex(self.public))


class RootDocument(_Closed):
    """The payload of a trust root. ``threshold`` of its ``root_keys`` must sign the root itself and its successor."""

    version: Annotated[int, pydantic.Field(ge=1, le=2**31)]
    not_before: statements.TimeMs
    expires_at: statements.TimeMs
    threshold: Annotated[int, pydantic.Field(ge=1, le=envelopes.MAX_SIGNATURES)]
    keys: Annotated[tuple[OperatorKey, ...], pydantic.Field(strict=False, min_length=1, max_length=MAX_KEYS)]

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> RootDocument:
        if self.expires_at <= self.not_before:
            raise ValueError("`expires_at` is not after `not_before`")
        if len({k.name for k in self.keys}) != len(self.keys):
            raise ValueError("two keys have one name")
        if len({k.public for k in self.keys}) != len(self.keys):
            raise ValueError("one key is listed twice")
        if self.threshold > len(self.root_keys):
            raise ValueError("the threshold is higher than the number of keys")
        return self

    @property
    def root_keys(self) -> tuple[OperatorKey, ...]:
        """The keys that may sign a trust root: those of unlimited scope, or the only one that there is.

        Whoever signs the next version gives out scopes; a key of a narrow one would give itself what it has not.
        """
        if len(self.keys) == 1:
            return self.keys
        return tuple(k for k in self.keys if "*" in k.scope.agents and "*" in k.scope.roles)

    def encode(self) -> bytes:
        """The payload to sign."""
        return strict_json.dumps(self.model_dump(mode="json"))


@dataclass(frozen=True, slots=True)
class TrustRoot:
    """A root that its own threshold signed; ``load`` gives one that is valid at a time."""

    document: RootDocument
    raw: bytes
    payload_digest: str

    @property
    def version(self) -> int:
        """The number that only ever goes up by one."""
        return self.document.version

    @property
    def keys(self) -> tuple[OperatorKey, ...]:
        """The operator keys, in the order of the document."""
        return self.document.keys

    @classmethod
    def load(cls, raw: bytes, now_ms: int) -> TrustRoot:
        """The root in ``raw``, which lies where only its owner can write.

        This is the one document that is parsed before it is verified, since it brings its own keys.

        Raises:
            errors.TrustError: malformed, not signed by its own threshold, not yet valid, or ended.
        """
        root = cls.parse(raw)
        root.check_time(now_ms)
        return root

    @classmethod
    def parse(cls, raw: bytes) -> TrustRoot:
        """As ``load``, at no time: to show a root that has ended, or to let it name its successor.

        ``trust.verify`` looks at the time itself, so this opens no way around it.
        """
        root, signed = _open_root(raw)
        if len(_made(root.document.root_keys, signed)) < root.document.threshold:
            raise errors.TrustError("the trust root is not signed by its own keys")
        return root

    def check_time(self, now_ms: int) -> None:
        """Refuse a root that is not valid at ``now_ms``.

        Raises:
            errors.TrustError: not yet valid, or ended.
        """
        if now_ms < self.document.not_before:
            raise errors.TrustError("the trust root is not valid yet", hint="check this machine's clock")
        if now_ms >= self.document.expires_at:
            raise errors.TrustError("the trust root has ended", hint="install the next version of the trust root")

    def successor(self, raw: bytes, now_ms: int) -> TrustRoot:
        """Version N + 1, signed by the thresholds of this version and of its own.

        An ended root still says who may follow it, or a missed date could never be mended.

        Raises:
            errors.TrustError: as ``load``, another version, or too few signatures of either side.
        """
        root, signed = _open_root(raw)
        if root.version != self.version + 1:
            raise errors.TrustError(f"trust root version {root.version} cannot follow {self.version}")
        for side in (self, root):
            made = _made(_root_keys_at(side.document, now_ms), signed)
            # A key that needs a second signer on a package needs one here as well.
            least = max(side.document.threshold, min((k.threshold for k in made), default=1))
            if len(made) < least:
                raise errors.TrustError(f"version {root.version} is not signed by the keys of version {side.version}")
        root.check_time(now_ms)
        return root


def _open_root(raw: bytes) -> tuple[TrustRoot, envelopes.Envelope]:
    try:
        if len(raw) > MAX_BYTES:
            raise strict_json.MalformedError(f"larger than {MAX_BYTES} bytes")
        signed = envelopes.decode(raw)
        if signed.payload_type != PAYLOAD_TYPE:
            raise strict_json.MalformedError(f"the payload type is `{signed.payload_type}`")
        value = strict_json.loads(signed.payload, max_bytes=MAX_BYTES)
        document = strict_json.validate(RootDocument, value)
    except strict_json.MalformedError as e:
        raise errors.TrustError(f"the trust root is malformed: {e}") from None
    return TrustRoot(document, raw, hashlib.sha256(signed.payload).hexdigest()), signed


def _made(keys: tuple[OperatorKey, ...], signed: envelopes.Envelope) -> tuple[OperatorKey, ...]:
    """Those of the keys that signed."""
    made = set(envelopes.signers(signed, (k.key for k in keys)))
    return tuple(k for k in keys if k.key in made)


def _root_keys_at(document: RootDocument, now_ms: int) -> tuple[OperatorKey, ...]:
    """The root keys that have not ended before the root itself did; with the root, all end and name who follows."""
    ended = now_ms >= document.expires_at
    return tuple(k for k in document.root_keys if ended or k.not_before <= now_ms < k.expires_at)
