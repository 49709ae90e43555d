"""Everything that the nine rules look at, and what comes out of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from policy.data.types import DenyList, NeverGrantable
from policy.grants.effective import Effective
from policy.grants.roles import Roles
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules.parent import Delegation, OnExcess, Parent, delegate
from policy.signing.statement import Statement
from policy.signing.trust import TrustedPackage


class Unsigned(Struct, frozen=True):
    """A package without an envelope. ``allowed`` is the operator's ``allow_unsigned_trusted_local``."""

    package: Package
    allowed: bool


class Owner(Struct, frozen=True):
    """A package that holds an agent id on this host: in the agents directory, in the store, or in a live run.

    ``package`` is where it lies, as the operator knows it; ``payload_digest`` that of its signed statement. ``shown``
    says that the receiver of a refusal may know where that is. ``run_id`` is empty for one that does not run.
    ``serial`` is that of its signed statement, None where it says nothing beside others: the package is not signed, or
    a local key of `covenant dev` signed it. ``signers`` are the ids of the keys that count for it.
    """

    package: str
    payload_digest: str
    shown: bool = True
    run_id: str = ""
    serial: int | None = None
    signers: frozenset[str] = frozenset()


class Claimant(Struct, frozen=True):
    """A signed package that asks for an agent id which others may have.

    ``signers`` are the ids of the keys that count for it, ``listed`` those of the keys that the trust root lets sign
    for the agent id now, ``above`` the ids of the runs above the one that is asked for.
    """

    serial: int
    signers: frozenset[str]
    listed: frozenset[str]
    above: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Case:
    """The inputs of one decision.

    ``requested`` is what the manifest asks for; ``package_name`` where the package lies, in the words of
    ``Owner.package``; ``extra_never`` are further never-grantable trees of this host with their reasons. ``claimant``
    is what rule 8 compares with the serials of owners, None for a package whose serial says nothing beside them.
    """

    trusted: TrustedPackage | Unsigned
    manifest: Manifest
    requested: Effective
    host: HostFacts
    roles: Roles
    deny: DenyList
    never: NeverGrantable
    parent: Parent | None
    identities: Mapping[str, Collection[Owner]]
    now_ms: int
    on_excess: OnExcess = "reject"
    package_name: str = ""
    extra_never: Mapping[str, str] = field(default_factory=dict)
    claimant: Claimant | None = None
    delegation: Delegation | None = field(init=False)

    def __post_init__(self) -> None:
        outcome = None if self.parent is None else delegate(self.parent, self.requested)
        object.__setattr__(self, "delegation", outcome)

    @property
    def effective(self) -> Effective:
        """Return the grants of the agent if every rule agrees."""
        return self.requested if self.delegation is None else self.delegation.granted

    @property
    def statement(self) -> Statement | None:
        """The signed statement, None for an unsigned package."""
        return self.trusted.statement if isinstance(self.trusted, TrustedPackage) else None

    def where(self, grant: str) -> str:
        """``agent.toml:LINE`` of a dotted key."""
        return self.manifest.where(grant)


class Verdict(Struct, frozen=True):
    """All nine rules agreed. ``delegation`` tells what rule 4 took, None without a parent."""

    effective: Effective
    delegation: Delegation | None
