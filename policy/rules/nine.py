"""The nine validation rules of the OctantOS seed, in its order: what decides whether an agent may start.

    (1) schema          the documents fit together (policy.rules.schema); within the manifest: its parser
    (2) signature       a trusted operator signed it, for this agent, role and operator name, and it has not ended
    (3) role            the grants are within the named role's ceiling
    (4) parent          the grants are within the parent's effective grants, or narrowed to them when it asked so
    (5) spawn budget    depth and live descendants on every ancestor; the children's sums within the parent's
    (6) resources       this host has what is asked
    (7) deny list       no permanently denied system call in the allow set, and no unknown one
    (8) identity        the agent id belongs to one package; a newer serial of it wins (policy.rules.succession)
    (9) lifetime        one without end was approved by an operator who signed and whose scope allows that

Each rule stands alone: it takes the whole case, looks at nothing that another rule has done, and raises its own
class with the rule's number, the dotted key, the place and the mend. Source: seeds/octantos-capability-manifests.txt,
"Validation Rules", and decisions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from policy import data, errors
from policy.data.types import DenyList, NeverGrantable
from policy.grants import source
from policy.grants.effective import Effective
from policy.grants.roles import Roles
from policy.host import HostFacts
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.rules import bounds, budget, schema, succession
from policy.rules import deny as deny_list
from policy.rules.case import Case, Claimant, Owner, Unsigned, Verdict
from policy.rules.parent import OnExcess, Parent
from policy.signing import trust
from policy.signing.trust import TrustedPackage

__all__ = ["RULES", "Case", "Owner", "Parent", "Unsigned", "Verdict", "check", "decide", "requested", "verdict"]


def requested(
    manifest: Manifest, *, roles: Roles, profiles: Mapping[str, source.ProfileCalls] | None = None
) -> Effective:
    """Return the requested grants, with this program's profiles and additions and the computed order of roles.

    Raises:
        errors.ManifestError: the profile is not known.
    """
    return Effective.from_manifest(
        manifest, profiles=profiles or data.profiles(), additions=data.additions(), below=roles.below
    )


def verdict(
    trusted: TrustedPackage | Unsigned,
    manifest: Manifest,
    *,
    host: HostFacts,
    roles: Roles,
    deny: DenyList,
    now_ms: int,
    profiles: Mapping[str, source.ProfileCalls] | None = None,
    wanted: Effective | None = None,
    parent: Parent | None = None,
    identities: Mapping[str, Collection[Owner]] | None = None,
    on_excess: OnExcess = "reject",
    package_name: str = "",
    never: NeverGrantable | None = None,
    extra_never: Mapping[str, str] | None = None,
    claimant: Claimant | None = None,
) -> Verdict:
    """The effective grants and what a delegation took, when all nine rules agree; arguments as those of ``Case``.

    ``wanted`` replaces what the manifest asks for in a delegation that asks for less: it must lie within the
    manifest's own grants, which are the ones that were signed.

    Raises:
        errors.RuleViolation: rules 1 and 3 to 9, each its own class, with ``rule`` and ``grant``.
        errors.SignatureError: rule 2.
        errors.ManifestError: rule 1 for an unknown profile, rule 7 for an unknown system call.
    """
    signed = requested(manifest, roles=roles, profiles=profiles)
    case = Case(
        trusted=trusted,
        manifest=manifest,
        requested=signed if wanted is None else signed.meet(wanted),
        host=host,
        roles=roles,
        deny=deny,
        never=never or data.never_grantable(),
        parent=parent,
        identities=identities or {},
        now_ms=now_ms,
        on_excess=on_excess,
        package_name=package_name,
        extra_never=extra_never or {},
        claimant=claimant,
    )
    return decide(case)


def check(trusted: TrustedPackage | Unsigned, manifest: Manifest, **case: Any) -> Effective:
    """The effective grants alone. Arguments and errors as ``verdict``."""
    return verdict(trusted, manifest, **case).effective


def decide(case: Case) -> Verdict:
    """The nine rules in order. Raises as ``check``."""
    for rule in RULES:
        rule(case)
    return Verdict(case.effective, case.delegation)


def signature(case: Case) -> None:
    """(2) The bytes were verified by ``trust.verify``, which alone makes a TrustedPackage; here: for this manifest.

    Raises:
        errors.SignatureError: it is not signed, has ended, or its signers may not sign this agent, role or operator.
    """
    trusted, manifest = case.trusted, case.manifest
    if isinstance(trusted, Unsigned):
        if manifest.sandbox.required or manifest.sandbox.backend != "trusted-local" or not trusted.allowed:
            raise errors.UnsignedError("the package is not signed", hint="covenant manifest sign PACKAGE --key NAME")
        return
    assert isinstance(trusted, TrustedPackage)
    if case.now_ms >= trusted.statement.expires_at:
        raise errors.ExpiredError("the envelope has expired", hint="sign the package again")
    trust.authorise(trusted, agent_id=manifest.agent.id, role=manifest.agent.role, operator=manifest.agent.operator)


def identity_uniqueness(case: Case) -> None:
    """(8) An agent id belongs to one package; live runs of it are told apart by run id (decisions.md, Serials).

    Raises:
        errors.IdentityViolation: another package has the id.
    """
    agent_id = case.manifest.agent.id
    mine = case.trusted.payload_digest if isinstance(case.trusted, TrustedPackage) else None
    refuse_other_owners(
        case.identities.get(agent_id, ()),
        agent_id,
        payload_digest=mine,
        package_name=case.package_name or None,
        where=case.where,
        claimant=case.claimant,
    )


def refuse_other_owners(
    owners: Collection[Owner],
    agent_id: str,
    *,
    payload_digest: str | None,
    package_name: str | None,
    where: Callable[[str], str],
    claimant: Claimant | None = None,
) -> None:
    """Rule 8 for owners that were found: asked once more when a run's own label can be seen by others. ``where`` says
    where a key stands, which takes a scan of the file and is asked for a refusal alone.

    Raises:
        errors.IdentityViolation: one of them is another package that this one does not supersede.
        errors.SerialError: one of them has a higher serial, or the same: it was accepted meanwhile.
    """
    for owner in owners:
        found = succession.beside(owner, claimant, payload_digest=payload_digest, package_name=package_name)
        if found in (succession.Beside.SAME, succession.Beside.SUPERSEDES):
            continue
        if found is succession.Beside.OLDER and claimant and owner.serial is not None:
            accepted = trust.Accepted(owner.serial, owner.payload_digest)
            trust.check_rollback(agent_id, claimant.serial, payload_digest or "", accepted)
        package = text.quote(owner.package) if owner.shown else "another package"
        above = found is succession.Beside.ABOVE
        raise errors.IdentityViolation(
            f"agent id `{agent_id}` belongs to {package}" + (", which runs above this one" if above else ""),
            grant="agent.id",
            hint="start the newer version from outside of that run" if above else "give one of the two another id",
            where=where("agent.id"),
        )


def lifetime_approval(case: Case) -> None:
    """(9) Asked of what the manifest requests: a parent that happens to end does not replace the approval.

    Raises:
        errors.LifetimeViolation: it asks for no end, without the approval of a key that may give it.
    """
    signed = case.trusted if isinstance(case.trusted, TrustedPackage) else None
    if not case.requested.lifetime.unlimited:
        return
    if signed is not None and trust.approves_unlimited(signed, role=case.manifest.agent.role):
        return
    said = signed is not None and signed.statement.approve_unlimited
    raise errors.LifetimeViolation(
        "no signer may approve an unlimited lifetime" if said else "an unlimited lifetime is not approved",
        grant="lifetime.unlimited",
        hint="let a key with approve_unlimited in the trust root sign as well, or write ttl_seconds"
        if said
        else "covenant manifest sign --approve-unlimited, or write ttl_seconds",
        where=case.where("lifetime.unlimited"),
    )


# INVARIANT: the order of the seed; a rule's number is its place here plus one.
RULES: tuple[Callable[[Case], None], ...] = (
    schema.check,
    signature,
    bounds.role_subset,
    bounds.parent_intersection,
    budget.spawn_budget,
    budget.resource_availability,
    deny_list.check,
    identity_uniqueness,
    lifetime_approval,
)
