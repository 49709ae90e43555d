"""A signed word of operators about one run, such as an approval of its changes or a lease: its fields, and its proof.

The operators are those who may sign the agent's manifest, for the role of the run.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final, TypeVar

import pydantic
from msgspec import Struct

from policy import errors
from policy.signing import envelope as envelopes
from policy.signing import statement as statements
from policy.signing import strict_json, trust
from policy.signing.root import TrustRoot

MAX_LIFETIME_MS: Final = 30 * statements.DAY_MS


class RunStatement(pydantic.BaseModel):
    """The fields of each word: the run, its policy, and when the word holds. Times are Unix milliseconds."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="rust-regex")

    agent_id: Annotated[str, pydantic.Field(pattern=statements.AGENT_ID_PATTERN)]
    run_id: Annotated[str, pydantic.Field(pattern=r"^[0-9a-f-]{1,64}$")]
    policy_digest: statements.Sha256
    not_before: statements.TimeMs
    expires_at: statements.TimeMs

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> RunStatement:
        if not self.not_before < self.expires_at <= self.not_before + MAX_LIFETIME_MS:
            raise ValueError("`expires_at` is not within 30 days after `not_before`")
        return self

    def encode(self) -> bytes:
        """Return the payload to sign: compact JSON with sorted keys."""
        return strict_json.dumps(self.model_dump(mode="json"))


S = TypeVar("S", bound=RunStatement)


class WordKind(Struct, frozen=True):
    """A kind of word: its name, its payload type, its most bytes, and the command that makes one."""

    name: str
    payload_type: str
    max_bytes: int
    made_by: str


def verify(
    raw: bytes,
    root: TrustRoot,
    kind: WordKind,
    form: type[S],
    *,
    role: str | None,
    now_ms: int,
    greatest_time_ms: int = 0,
) -> tuple[S, tuple[str, ...], str]:
    """Verify a word. Returns its statement, the names of the keys that count, and the SHA-256 of the payload.

    Each bound is judged by the stricter of the two times, as a package's (policy.signing.trust.verify).

    Raises:
        errors.TrustError: the trust root is not valid now.
        errors.SignatureError: it is no such word, a signature does not fit, or too few operators signed.
        errors.UnknownKeyError: no signer is a key of the root that may sign for the agent id and the role.
        errors.RevokedError: the only keys that it names are revoked.
        errors.ExpiredError: it, or the key that signed, is not valid now.
    """
    latest_ms = max(now_ms, greatest_time_ms)
    root.check_time(now_ms)
    root.check_time(latest_ms)
    try:
        if len(raw) > kind.max_bytes:
            raise strict_json.MalformedJsonError(f"it has more than {kind.max_bytes} bytes")
        signed = envelopes.decode(raw)
        if signed.payload_type != kind.payload_type:
            raise strict_json.MalformedJsonError(f"its payload type is `{strict_json.shown(signed.payload_type)}`")
        keys = trust.signing_keys(root, signed, where=kind.name)
        value = strict_json.loads(signed.payload, max_bytes=kind.max_bytes)
        statement = strict_json.validate(form, value)
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(
            f"the {kind.name} is malformed: {e}", hint=f"{kind.made_by} makes one", where=kind.name
        ) from None
    signers = trust.signers_of(keys, statement.agent_id, role, now_ms=now_ms, latest_ms=latest_ms, where=kind.name)
    if not statement.not_before <= now_ms or latest_ms >= statement.expires_at:
        raise errors.ExpiredError(
            f"the {kind.name} is not valid now", hint=f"{kind.made_by} makes a new one", where=kind.name
        )
    return statement, tuple(one.name for one in signers), hashlib.sha256(signed.payload).hexdigest()
