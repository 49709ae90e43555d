"""The authority of a live run, in a form that outlives the process that verified it, for a later revocation.

A run rests on its own signed statement and on those of the runs above it. A run that an agent started ends when the
manifest of that agent is revoked, also when the agent has ended meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Annotated

import pydantic

from policy.signing import revocation, revoked, strict_json
from policy.signing import statement as statements
from policy.signing.root import Scope, Signer, TrustRoot
from policy.signing.trust import TrustedPackage

# A line of ancestors with the signers of each; far more than the deepest that the rules let be.
MAX_BYTES = 256 * 1024


class _Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True, regex_engine="rust-regex")


class _SignedBy(_Closed):
    name: Annotated[str, pydantic.Field(pattern=revocation.NAME_PATTERN)]
    keyid: statements.Sha256
    threshold: Annotated[int, pydantic.Field(ge=1)]
    approve_unlimited: bool

    def signer(self) -> Signer:
        """As ``revocation.revoked`` compares it; what it may sign was decided when the run started."""
        scope = Scope(agents=(), roles=(), approve_unlimited=self.approve_unlimited)
        return Signer(self.name, self.keyid, scope, self.threshold)


class Authority(_Closed):
    """One accepted statement and the signers who counted for it. ``run_id`` is the run that was started by it."""

    run_id: str
    payload_digest: statements.Sha256
    agent_id: Annotated[str, pydantic.Field(pattern=statements.AGENT_ID_PATTERN)]
    serial: statements.TimeMs
    approve_unlimited: bool
    signers: Annotated[tuple[_SignedBy, ...], pydantic.Field(strict=False, min_length=1)]

    @classmethod
    def of(cls, run_id: str, trusted: TrustedPackage, signers: Iterable[Signer]) -> Authority:
        """Return the own authority of a run that is about to start; ``signers`` as ``trust.authorise`` gave them."""
        statement = trusted.statement
        by = tuple(
            _SignedBy(name=s.name, keyid=s.keyid, threshold=s.threshold, approve_unlimited=s.scope.approve_unlimited)
            for s in signers
        )
        return cls(
            run_id=run_id,
            payload_digest=trusted.payload_digest,
            agent_id=statement.agent_id,
            serial=statement.serial,
            approve_unlimited=statement.approve_unlimited,
            signers=by,
        )

    def revoked(self, root: TrustRoot) -> str | None:
        """Why it must not go on under ``root``; None when it may (``revocation.revoked``)."""
        return revoked.revoked(root, self.payload_digest, self, (one.signer() for one in self.signers))


class _Line(_Closed):
    line: Annotated[tuple[Authority, ...], pydantic.Field(strict=False)]


def encode(line: Sequence[Authority]) -> str:
    """The line of a run, from the first ancestor down to itself, as one string."""
    return _encoded(tuple(line))


@functools.lru_cache(maxsize=64)
def _encoded(line: tuple[Authority, ...]) -> str:
    # An instance of standby makes its label twice (sandbox.standby). What the same statements say is the same.
    return strict_json.dumps(_Line(line=line).model_dump()).decode("ascii")


def decode(text: str) -> tuple[Authority, ...]:
    """Read the text that ``encode`` wrote.

    Raises:
        strict_json.MalformedJsonError: the text has another form.
    """
    return strict_json.validate(_Line, strict_json.loads(text.encode(), max_bytes=MAX_BYTES)).line
