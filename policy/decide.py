"""The whole decision in one place: verify, parse, nine rules, effective, compile, prove. Pure; every input is an
argument.

    (1) verify the envelope and the bytes                     policy.signing.trust.verify
    (2) parse agent.toml from those same bytes                policy.manifest.parse
    (3) what this version cannot enforce is refused           policy.rules.enforceable
    (4) the nine rules, which give the effective grants       policy.rules.nine
    (5) compile the effective grants                          policy.compile.plan
    (6) read the artefacts back: they are those grants        policy.prove
    (7) of a child: they lie within those of its parent       policy.prove.within

The supervisor probes the host between (2) and (3), because which files a manifest names is known only then.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from policy import data, errors, prove
from policy.compile import plan
from policy.compile.artefacts import Artefacts
from policy.compile.cache import Cache
from policy.decompile import read as reading
from policy.grants.effective import Effective
from policy.host import HostFacts
from policy.manifest import parse, text
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules import enforceable, nine, unsigned
from policy.rules.case import Unsigned, Verdict
from policy.rules.parent import Delegation, Parent
from policy.signing import trust

MANIFEST = "agent.toml"


class Decision(Struct, frozen=True):
    """A decision on one package. ``trusted`` is None only for a look without a signature (``policy compile``).

    ``refusals`` are those that a run would meet, for such a look; a decision that may start has none. ``delegation``
    is the effect of rule 4 where there is a parent: requested, granted and removed by domain.
    """

    trusted: trust.TrustedPackage | None
    manifest: Manifest
    effective: Effective
    artefacts: Artefacts
    refusals: tuple[errors.CovenantError, ...] = ()
    delegation: Delegation | None = None

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
    return _parsed(raw)


@functools.lru_cache(maxsize=8)
def _parsed(raw: bytes) -> Manifest:
    """Parse a manifest. The result is frozen and depends on the bytes alone, so it is cached."""
    return parse.parse(raw, file=MANIFEST)


def rules(
    trusted: trust.TrustedPackage | Unsigned, manifest: Manifest, *, host: HostFacts, now_ms: int, **case: Any
) -> Verdict:
    """(4) The nine rules with this program's tables; ``case`` as the arguments of ``policy.rules.nine.verdict``.

    Raises:
        errors.RuleViolation, errors.SignatureError: with the rule's number
    """
    return nine.verdict(trusted, manifest, host=host, roles=data.roles(), deny=data.deny(), now_ms=now_ms, **case)


def _proved(
    effective: Effective, manifest: Manifest, host: HostFacts, package_digest: str, artefacts: Artefacts
) -> None:
    """(6)"""
    prove.prove(effective, artefacts, known=prove.Facts.of(manifest, host, package_digest))


class Policies:
    """Compiled and proved policies of (5) and (6), kept for later decisions of the same process."""

    def __init__(self) -> None:
        self._cache = Cache(_proved)

    def compile(self, effective: Effective, manifest: Manifest, host: HostFacts, **rest: Any) -> Artefacts:
        """As ``plan.compile``, and proved. Raises as ``authorise`` for (5) and (6)."""
        return self._cache.compile(effective, manifest, host, **rest)


def authorise(
    trusted: trust.TrustedPackage | Unsigned,
    manifest: Manifest,
    *,
    host: HostFacts,
    now_ms: int,
    policies: Policies | None = None,
    **case: Any,
) -> Decision:
    """(3) to (7) for the linux-gvisor backend; ``case`` as for ``rules``.

    ``policies`` spares (5) and (6) what was compiled and proved from the same before; (3) and (4) are asked each time.

    Raises:
        errors.NotYetEnforceableError, errors.NotEnforceableError: (3), (5)
        errors.RuleViolation, errors.SignatureError: (4), with the rule's number
        errors.ParentViolation: (7), for a link that leads out of the parent's grants
        errors.ProofError, errors.ArtefactError: (6), (7), a fault of this program
    """
    if isinstance(trusted, Unsigned):
        raise errors.UnsignedError("the package is not signed", hint="covenant manifest sign PACKAGE --key NAME")
    enforceable.check(manifest, host)
    verdict = rules(trusted, manifest, host=host, now_ms=now_ms, **case)
    effective = verdict.effective
    parent: Parent | None = case.get("parent")
    artefacts = (policies or Policies()).compile(
        effective,
        manifest,
        host,
        package_digest=trusted.package.digest,
        parent=None if parent is None else parent.ceiling,
    )
    if parent is not None:
        _within(artefacts, parent, _links(effective, host))
    return Decision(trusted, manifest, effective, artefacts, delegation=verdict.delegation)


def _links(effective: Effective, host: HostFacts) -> dict[str, str]:
    """Each granted path that leads through links of the host, with the place that it leads to."""
    found = {path: host.granted[path] for path in effective.filesystem.read if path in host.granted}
    return {path: one.place for path, one in found.items() if one.links}


def _within(artefacts: Artefacts, parent: Parent, links: Mapping[str, str]) -> None:
    """(7) Rule 4 decided on grants; this shows it of what the kernel gets. Where links lead, rule 4 cannot know."""
    if parent.artefacts is None:
        raise ValueError(f"run {parent.run_id} has no artefacts: it cannot start agents")
    if links:
        found, given = (reading.read(one.files).grants for one in (artefacts, parent.artefacts))
        mine, above = found.filesystem.readable(), given.filesystem.readable().union(given.may_grant.read)
        for path, place in links.items():
            if mine.covers(place) and not above.covers(place):
                raise errors.ParentViolation(
                    f"read path {text.quote(path)} leads to {text.quote(place)}, which the parent was not granted",
                    grant="permissions.filesystem.read",
                    hint=f"grant `{place}` to the parent, or take `{path}` out of the child's manifest",
                )
    prove.within(artefacts, parent.artefacts, remaining_seconds=parent.remaining_seconds)


def refusals(
    package: Package, manifest: Manifest, host: HostFacts, *, extra_never: Mapping[str, str] | None = None
) -> tuple[errors.CovenantError, ...]:
    """Return what a run on this host would be refused for by (3) and (4), for every asker but a run.

    Left out is what only a run knows: its signature, its parent, and the runs beside it.
    """
    never = extra_never or {}
    found = unsigned.refusals(package, manifest, host, extra_never=never)
    return (*enforceable.findings(manifest, host), *found)


def judged(
    package: Package, manifest: Manifest, host: HostFacts, *, extra_never: Mapping[str, str] | None = None
) -> tuple[errors.CovenantError, ...]:
    """Return ``refusals``, and the error of (5) and (6) where the package does not compile here."""
    try:
        return compile_unsigned(package, manifest, host=host, extra_never=extra_never).refusals
    except errors.CovenantError as e:
        found = refusals(package, manifest, host, extra_never=extra_never)
        # A lack of this host may be named by both.
        return found if str(e) in map(str, found) else (*found, e)


def compile_unsigned(
    package: Package,
    manifest: Manifest,
    *,
    host: HostFacts,
    ceiling: Effective | None = None,
    extra_never: Mapping[str, str] | None = None,
) -> Decision:
    """(5) and (6) without a signature: for people who look, never for a run. What (3) and (4) refuse is told, and not
    raised.

    ``ceiling`` is what a parent would leave: the grants are narrowed to it, as a spawn that asks for it would be.

    Raises:
        errors.BackendError: the package is for trusted-local, which these artefacts would not confine.
        errors.NotEnforceableError: this host lacks what the artefacts are made of: a runsc, a program, a path.
        errors.ProofError, errors.ArtefactError: (6), a fault of this program
    """
    if manifest.sandbox.backend != "linux-gvisor":
        raise errors.BackendError(
            f"backend `{manifest.sandbox.backend}` compiles to no sandbox, there is nothing to show",
            hint='write backend = "linux-gvisor"; covenant run says what trusted-local does not enforce',
            where=manifest.where("sandbox.backend"),
        )
    effective = nine.requested(manifest, roles=data.roles())
    if ceiling is not None:
        effective = ceiling.meet(effective)
    artefacts = plan.compile(effective, manifest, host, package_digest=package.digest, parent=ceiling)
    _proved(effective, manifest, host, package.digest, artefacts)
    found = refusals(package, manifest, host, extra_never=extra_never)
    return Decision(None, manifest, effective, artefacts, found)
