"""The whole decision in one place: verify, parse, nine rules, effective, compile. Pure; every input is an argument.

    (1) verify the envelope and the bytes                     policy.signing.trust.verify
    (2) parse agent.toml from those same bytes                policy.manifest.parse
    (3) what this version cannot enforce is refused           policy.rules.enforceable
    (4) the nine rules, which give the effective grants       policy.rules.nine
    (5) compile the effective grants                          policy.compile.plan

The supervisor probes the host between (2) and (3), because which files a manifest names is known only then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from policy import data, errors
from policy.compile import plan
from policy.compile.artefacts import Artefacts
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules import enforceable, nine
from policy.rules.case import Owner, Unsigned
from policy.rules.parent import Parent
from policy.signing import trust

MANIFEST = "agent.toml"


@dataclass(frozen=True, slots=True)
class Decision:
    """What may start. ``trusted`` is None only for a look without a signature (``policy compile``)."""

    trusted: trust.TrustedPackage | None
    manifest: Manifest
    effective: Effective
    artefacts: Artefacts

    @property
    def policy_digest(self) -> str:
        """The one digest over everything that confines the agent."""
        return self.artefacts.digest


def manifest_of(package: Package) -> Manifest:
    """(2) The manifest in the package's bytes.

    Raises:
        errors.PackageError: there is none.
        errors.ManifestError: it is not acceptable.
    """
    raw = package.files.get(MANIFEST)
    if raw is None:
        raise errors.PackageError(f"the package has no `{MANIFEST}`", hint="see agents/hello for one to copy")
    return parse.parse(raw, file=MANIFEST)


def rules(
    trusted: trust.TrustedPackage | Unsigned,
    manifest: Manifest,
    *,
    host: HostFacts,
    now_ms: int,
    identities: Mapping[str, Collection[Owner]] | None = None,
    parent: Parent | None = None,
    package_name: str = "",
    extra_never: Mapping[str, str] | None = None,
) -> Effective:
    """(4) The nine rules with this program's tables; the arguments are those of ``policy.rules.case.Case``.

    Raises:
        errors.RuleViolation, errors.SignatureError: with the rule's number
    """
    return nine.check(
        trusted,
        manifest,
        host=host,
        roles=data.roles(),
        deny=data.deny(),
        parent=parent,
        identities=identities,
        now_ms=now_ms,
        package_name=package_name,
        extra_never=extra_never,
    )


def authorise(
    trusted: trust.TrustedPackage | Unsigned, manifest: Manifest, *, host: HostFacts, now_ms: int, **case: Any
) -> Decision:
    """(3) to (5) for the linux-gvisor backend; ``case`` as for ``rules``.

    Raises:
        errors.NotYetEnforceableError, errors.NotEnforceableError: (3), (5)
        errors.RuleViolation, errors.SignatureError: (4), with the rule's number
    """
    if isinstance(trusted, Unsigned):
        raise errors.UnsignedError("the package is not signed", hint="covenant manifest sign PACKAGE --key NAME")
    enforceable.check(manifest, host)
    effective = rules(trusted, manifest, host=host, now_ms=now_ms, **case)
    artefacts = plan.compile(effective, manifest, host, package_digest=trusted.package.digest)
    return Decision(trusted, manifest, effective, artefacts)


def compile_unsigned(package: Package, manifest: Manifest, *, host: HostFacts) -> Decision:
    """(3) and (5) without a signature: for people who look, never for a run.

    Raises:
        errors.BackendError: the package is for trusted-local, which these artefacts would not confine.
        errors.NotYetEnforceableError, errors.NotEnforceableError: as ``authorise``.
    """
    if manifest.sandbox.backend != "linux-gvisor":
        raise errors.BackendError(
            f"backend `{manifest.sandbox.backend}` compiles to no sandbox, there is nothing to show",
            hint='write backend = "linux-gvisor"; covenant run says what trusted-local does not enforce',
            where=manifest.where("sandbox.backend"),
        )
    enforceable.check(manifest, host)
    effective = nine.requested(manifest, roles=data.roles())
    return Decision(None, manifest, effective, plan.compile(effective, manifest, host, package_digest=package.digest))
