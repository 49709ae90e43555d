"""The rules that need no signature, no parent and no other run: 1, 3, 6 and 7.

``covenant manifest check``, ``policy why`` and ``denials`` judge a manifest by them as a run does. A compilation for
another target is held to 1, 3 and 7 before anything is written: the host that runs it is another. Rule 2 and what hangs
on it is for the machine that runs the package; a target that cannot check it says so in its losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from policy import data, errors
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules import bounds, budget, deny, nine, schema
from policy.rules.case import Case, Unsigned

# In the order of policy.rules.nine.RULES.
_RULES = (schema.check, bounds.role_subset, budget.resource_availability, deny.check)


def check(package: Package, manifest: Manifest, host: HostFacts) -> Effective:
    """The grants that the manifest asks for, when rules 1, 3 and 7 agree.

    Raises:
        errors.RuleViolation, errors.ManifestError: as the rule does.
    """
    case = _case(package, manifest, host, {})
    for rule in (schema.check, bounds.role_subset, deny.check):
        rule(case)
    return case.effective


def refusals(
    package: Package, manifest: Manifest, host: HostFacts, *, extra_never: Mapping[str, str]
) -> Iterator[errors.OperatorError | errors.ManifestError]:
    """Yield what each rule refuses first, in the order of a run."""
    try:
        case = _case(package, manifest, host, extra_never)
    except errors.ManifestError as e:  # no rule can be asked: the profile is not known
        yield e
        return
    for rule in _RULES:
        try:
            rule(case)
        except (errors.OperatorError, errors.ManifestError) as e:
            yield e


def _case(package: Package, manifest: Manifest, host: HostFacts, extra_never: Mapping[str, str]) -> Case:
    roles = data.roles()
    return Case(
        trusted=Unsigned(package, False),
        manifest=manifest,
        requested=nine.requested(manifest, roles=roles),
        host=host,
        roles=roles,
        deny=data.deny(),
        never=data.never_grantable(),
        parent=None,
        identities={},
        now_ms=0,
        extra_never=extra_never,
    )
