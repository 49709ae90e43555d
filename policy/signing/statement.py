"""The signed statement of a package: an in-toto Statement v1 over each of its files.

The statement is closed: an unknown key anywhere in it is refused, and no key has a default. So the signed fields are
the fields that are read. Times are Unix milliseconds. Source: in-toto Statement v1; shared design, "One signature".
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

import pydantic

from policy import errors, package
from policy.signing import strict_json

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
# A TypeURI needs no page behind it; `.invalid` can never become a real domain (RFC 2606).
# INVARIANT: a change of the predicate's meaning is a new version here, never another reading of this one.
PREDICATE_TYPE = "https://covenant.invalid/agent-package/v1"

# In base64 it is within the envelope.
MAX_BYTES = package.MAX_ENVELOPE_BYTES * 3 // 4
MAX_TIME_MS = 2**53 - 1
DAY_MS = 24 * 60 * 60 * 1000
DEFAULT_LIFETIME_MS = 90 * DAY_MS

AGENT_ID_PATTERN = r"^[A-Za-z0-9_.-]{1,128}$"
AUDIENCE_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$"

Sha256 = Annotated[str, pydantic.Field(pattern=r"^[0-9a-f]{64}$")]
# The digest of a file, or that of a link's text (``policy.package.Package.digests``).
Content = Annotated[str, pydantic.Field(pattern=r"^(link:)?[0-9a-f]{64}$")]
TimeMs = Annotated[int, pydantic.Field(ge=0, le=MAX_TIME_MS)]


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="rust-regex")


class _Digest(_Closed):
    sha256: Sha256


class _LinkDigest(_Closed):
    """The digest of a symbolic link's text. A reader that does not know links refuses it."""

    symlinkSha256: Sha256  # noqa: N815  as in-toto spells its algorithms


class _Subject(_Closed):
    name: str
    digest: _Digest | _LinkDigest

    def content(self) -> str:
        """The digest as a package has it."""
        if isinstance(self.digest, _LinkDigest):
            return package.LINK_PREFIX + self.digest.symlinkSha256
        return self.digest.sha256


class Predicate(_Closed):
    """The claims about a package, beside its bytes.

    ``audience`` None means any host; ``parent_digest`` is the payload digest of the one parent that may spawn
    the agent, None for any that the other rules allow. The versions are those of the role table and the deny
    list that the signer saw.
    """

    agent_id: Annotated[str, pydantic.Field(pattern=AGENT_ID_PATTERN)]
    serial: TimeMs
    not_before: TimeMs
    expires_at: TimeMs
    audience: Annotated[str, pydantic.Field(pattern=AUDIENCE_PATTERN)] | None
    roles_version: Annotated[int, pydantic.Field(ge=0, le=MAX_TIME_MS)]
    deny_version: Annotated[int, pydantic.Field(ge=0, le=MAX_TIME_MS)]
    parent_digest: Sha256 | None
    approve_unlimited: bool
    unknown_sections: Annotated[tuple[str, ...], pydantic.Field(strict=False, max_length=256)]

    @pydantic.model_validator(mode="after")
    def _ordered(self) -> Predicate:
        if self.expires_at <= self.not_before:
            raise ValueError("`expires_at` is not after `not_before`")
        if list(self.unknown_sections) != sorted(set(self.unknown_sections)):
            raise ValueError("`unknown_sections` is not a sorted list without repeats")
        return self


class Statement(Predicate):
    """A whole statement: the predicate, and ``subjects``, the digest of each file and link by its path."""

    subjects: Annotated[Mapping[str, Content], pydantic.Field(min_length=1, max_length=package.MAX_FILES)]

    @pydantic.field_validator("subjects", mode="after")
    @classmethod
    def _plain_paths(cls, value: Mapping[str, str]) -> Mapping[str, str]:
        try:
            package.check_paths(value)
        except errors.PackageError as e:
            raise ValueError(e.message) from None
        return MappingProxyType(dict(value))

    def encode(self) -> bytes:
        """The payload: in-toto's form as compact JSON with sorted keys and subjects."""
        predicate = {name: getattr(self, name) for name in Predicate.model_fields}
        document = {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": path, "digest": _wire(self.subjects[path])} for path in sorted(self.subjects)],
            "predicateType": PREDICATE_TYPE,
            "predicate": predicate,
        }
        return strict_json.dumps(document)


def _wire(content: str) -> dict[str, str]:
    if content.startswith(package.LINK_PREFIX):
        return {"symlinkSha256": content.removeprefix(package.LINK_PREFIX)}
    return {"sha256": content}


class _Wire(_Closed):
    """The in-toto form."""

    type_: Annotated[Literal["https://in-toto.io/Statement/v1"], pydantic.Field(alias="_type")]
    subject: Annotated[tuple[_Subject, ...], pydantic.Field(strict=False, min_length=1, max_length=package.MAX_FILES)]
    predicateType: Literal["https://covenant.invalid/agent-package/v1"]  # noqa: N815  in-toto's own spelling
    predicate: Predicate


def make(values: Mapping[str, Any]) -> Statement:
    """A statement from field values, for the signer.

    Raises:
        errors.SignatureError: a value is outside what a statement may say.
    """
    try:
        return strict_json.validate(Statement, dict(values))
    except strict_json.MalformedJsonError as e:
        raise errors.SignatureError(f"the statement cannot be signed: {e}") from None


def parse(payload: bytes) -> Statement:
    """The statement in a payload whose signature has been verified.

    Raises:
        strict_json.MalformedJsonError: not one closed in-toto Statement v1 with our predicate.
    """
    wire = strict_json.validate(_Wire, strict_json.loads(payload, max_bytes=MAX_BYTES))
    subjects = {s.name: s.content() for s in wire.subject}
    if len(subjects) != len(wire.subject):
        raise strict_json.MalformedJsonError("a subject is named twice")
    predicate = {name: getattr(wire.predicate, name) for name in Predicate.model_fields}
    return strict_json.validate(Statement, {**predicate, "subjects": subjects})
