"""The trust root: which operator keys there are, what each may sign, and how one version follows another.

A trust root is a DSSE envelope of a type of its own, so that no signature on a package can be taken for one on
a root. Version 1 is trusted because of where it lies (a directory that only the supervisor can write); version
N + 1 because the thresholds of N and of N + 1 both signed it, and because it takes back no revocation of N. Every
root ends. How many signers are enough is ``policy.signing.threshold``, for packages and for roots alike.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import pydantic
from msgspec import Struct

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import revocation, strict_json, threshold
from policy.signing import statement as statements

PAYLOAD_TYPE = "application/vnd.covenant.trust-root.v1+json"
MAX_BYTES = 1024 * 1024
MAX_KEYS = 64
# The keys of two versions sign one envelope: with more, a change of all of them could not be written.
MAX_ROOT_THRESHOLD = envelopes.MAX_SIGNATURES // 2

_ROLE_PATTERN = r"^(\*|[a-z0-9][a-z0-9_-]{0,63})$"
# An id, or the start of one and a star. One star at the end needs no matcher that could be made to backtrack.
_AGENT_PATTERN = r"^(\*|[A-Za-z0-9_.-]{1,128}\*?)$"


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)


class Scope(_Closed):
    """The scope of a key: agent ids (exact, or a prefix and ``*``) and roles (names, or ``*``).

    ``approve_unlimited``: whether a statement's approval of a lifetime without an end counts with this signature.
    """

    agents: Annotated[
        tuple[Annotated[str, pydantic.Field(pattern=_AGENT_PATTERN)], ...],
        pydantic.Field(strict=False, max_length=256),
    ]
    roles: Annotated[
        tuple[Annotated[str, pydantic.Field(pattern=_ROLE_PATTERN)], ...],
        pydantic.Field(strict=False, max_length=256),
    ]
    approve_unlimited: bool

    def covers_agent(self, agent_id: str) -> bool:
        """Whether the id is one that the key may sign."""
        return any(agent_id.startswith(p[:-1]) if p.endswith("*") else agent_id == p for p in self.agents)

    def covers_role(self, role: str | None) -> bool:
        """Whether the role is one that the key may sign. No role is no ceiling, so only ``*`` covers it."""
        return "*" in self.roles or (role is not None and role in self.roles)


class OperatorKey(_Closed):
    """One key of the root: its name, scope, validity, and among how many signers it counts.

    ``threshold`` 1 means that this key alone suffices; with 2, another key whose scope covers the package must
    have signed as well, and count. ``root`` keys sign the trust root itself and so give out scopes: a key is marked
    so, and it is never derived. A key whose scope is empty signs roots only.
    """

    name: Annotated[str, pydantic.Field(pattern=revocation.NAME_PATTERN)]
    public: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
    scope: Scope
    root: bool
    threshold: Annotated[int, pydantic.Field(ge=1, le=envelopes.MAX_SIGNATURES)]
    not_before: statements.TimeMs
    expires_at: statements.TimeMs

    @pydantic.model_validator(mode="after")
    def _usable(self) -> OperatorKey:
        envelopes.public_key(bytes.fromhex(self.public))
        if self.expires_at <= self.not_before:
            raise ValueError("`expires_at` is not after `not_before`")
        if not self.root and not (self.scope.agents and self.scope.roles):
            raise ValueError("the key may sign nothing")
        return self

    @property
    def key(self) -> envelopes.PublicKey:
        """The public key; its id is computed, never read."""
        return envelopes.public_key(bytes.fromhex(self.public))


class Signer(Struct, frozen=True):
    """A key of the root that signed a package, was valid, and whose scope covers the agent id."""

    name: str
    keyid: str
    scope: Scope
    threshold: int


class RootDocument(_Closed):
    """The payload of a trust root. ``threshold`` of its ``root_keys`` must sign the root itself and its successor."""

    version: Annotated[int, pydantic.Field(ge=1, le=2**31)]
    not_before: statements.TimeMs
    expires_at: statements.TimeMs
    threshold: Annotated[int, pydantic.Field(ge=1, le=MAX_ROOT_THRESHOLD)]
    keys: Annotated[tuple[OperatorKey, ...], pydantic.Field(strict=False, min_length=1, max_length=MAX_KEYS)]
    revoked: revocation.Revocations

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> RootDocument:
        if self.expires_at <= self.not_before:
            raise ValueError("`expires_at` is not after `not_before`")
        if len({k.name for k in self.keys}) != len(self.keys):
            raise ValueError("two keys have one name")
        if len({k.public for k in self.keys}) != len(self.keys):
            raise ValueError("one key is listed twice")
        revoked = {k.keyid for k in self.revoked.keys}
        for key in self.keys:
            if key.key.keyid in revoked:
                raise ValueError(f"the key of `{key.name}` is listed and revoked")
        if any(k.threshold > MAX_ROOT_THRESHOLD for k in self.root_keys):
            raise ValueError(f"a root key has a threshold over {MAX_ROOT_THRESHOLD}")
        if len(threshold.counting(self.root_keys)) < self.threshold:
            raise ValueError("the root keys cannot meet the root's threshold")
        return self

    @property
    def root_keys(self) -> tuple[OperatorKey, ...]:
        """The keys that may sign a trust root."""
        return tuple(k for k in self.keys if k.root)

    def root_keys_at(self, now_ms: int) -> tuple[OperatorKey, ...]:
        """Those that hold then; of a root that has ended, those that held at its last moment, who name what follows."""
        # A key that ended before the root did is not revived by the root's own end.
        moment = min(now_ms, self.expires_at - 1)
        return tuple(k for k in self.root_keys if k.not_before <= moment < k.expires_at)

    def encode(self) -> bytes:
        """The payload to sign."""
        return strict_json.dumps(self.model_dump(mode="json"))


class TrustRoot(Struct, frozen=True):
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

        Raises:
            errors.TrustError: it is malformed, or its own keys did not sign it.
        """
        document, signed = decode(raw)
        if not enough(document, document.root_keys, signed):
            raise errors.TrustError("the trust root is not signed by its own keys")
        return cls(document, raw, hashlib.sha256(signed.payload).hexdigest())

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

        (1) it is one closed document and one version on;
        (2) it repeats every revocation of this version;
        (3) enough keys of this version that may sign roots now signed it, and
        (4) enough of its own;
        (5) it is valid now.

        A revocation holds from the version that says it: a key may sign its own. An ended root still says who may
        follow it, or a missed date could never be mended.

        Raises:
            errors.TrustError: one of these does not hold.
        """
        # (1) one version on
        document, signed = decode(raw)
        # (2) revocations
        self.check_follows(document)
        # (3) this version's keys, (4) its own
        for side in (self.document, document):
            if not enough(side, side.root_keys_at(now_ms), signed):
                raise errors.TrustError(
                    f"version {document.version} is not signed by the keys of version {side.version}"
                )
        root = TrustRoot(document, raw, hashlib.sha256(signed.payload).hexdigest())
        # (5) its time
        root.check_time(now_ms)
        return root

    def check_follows(self, document: RootDocument) -> None:
        """Refuse a document that could not follow this version with any signatures.

        Raises:
            errors.TrustError: another version than the next, or a revocation is missing.
        """
        if document.version != self.version + 1:
            message = f"trust root version {document.version} cannot follow {self.version}"
            following = self.version + 1
            hint = f"a newer one is here: make the change again, on version {self.version}"
            if document.version > following:
                export = f"covenant trust export FILE --version {following}"
                hint = f"import version {following} first; on a host that has it: {export}"
            raise errors.TrustError(message, hint=hint)
        dropped = self.document.revoked.dropped_by(document.revoked)
        if dropped is not None:
            raise errors.TrustError(
                f"version {document.version} takes back a revocation of version {self.version}: {dropped}",
                hint="what was revoked stays so; sign with a new key, or sign the package again",
            )


def decode(raw: bytes) -> tuple[RootDocument, envelopes.Envelope]:
    """The document of a trust root and its envelope. Nothing about it has been verified.

    Raises:
        errors.TrustError: not one closed trust root within the limits.
    """
    try:
        if len(raw) > MAX_BYTES:
            raise strict_json.MalformedJsonError(f"larger than {MAX_BYTES} bytes")
        signed = envelopes.decode(raw)
        if signed.payload_type != PAYLOAD_TYPE:
            raise strict_json.MalformedJsonError(f"the payload type is `{strict_json.shown(signed.payload_type)}`")
        value = strict_json.loads(signed.payload, max_bytes=MAX_BYTES)
        return strict_json.validate(RootDocument, value), signed
    except strict_json.MalformedJsonError as e:
        raise errors.TrustError(f"the trust root is malformed: {e}") from None


def made(keys: tuple[OperatorKey, ...], signed: envelopes.Envelope) -> tuple[OperatorKey, ...]:
    """Those of the keys that signed, each once."""
    signers = set(envelopes.signers(signed, (k.key for k in keys)))
    return tuple(k for k in keys if k.key in signers)


def enough(document: RootDocument, keys: tuple[OperatorKey, ...], signed: envelopes.Envelope) -> bool:
    """Whether as many of ``keys`` signed, and count, as the document wants for a root."""
    return len(threshold.counting(made(keys, signed))) >= document.threshold
