"""The rules that need no signature: what a compilation for another target is held to before anything is written.

Rules 1, 3 and 7: the package fits together, its grants are within its role, no denied call is among them. Rule 2 and
what hangs on it is for the machine that runs the package; a target that cannot check it says so in its losses.
"""

from __future__ import annotations

from policy import data
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules import bounds, deny, nine, schema
from policy.rules.case import Case, Unsigned


def check(package: Package, manifest: Manifest, host: HostFacts) -> Effective:
    """The grants that the manifest asks for, when rules 1, 3 and 7 agree.

    Raises:
        errors.RuleViolation, errors.ManifestError: as the rule does.
    """
    roles = data.roles()
    case = Case(
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
    )
    for rule in (schema.check, bounds.role_subset, deny.check):
        rule(case)
    return case.effective
