"""The policy that a verb examines: a package compiled as by ``run``, or a directory from ``policy compile``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covenant.cli import common

if TYPE_CHECKING:
    from policy import errors
    from policy.compile.artefacts import Artefacts
    from policy.grants.effective import Effective
    from policy.host import HostFacts
    from policy.manifest.agent import Manifest
    from policy.package import Package


@dataclass(frozen=True, slots=True)
class Looked:
    """The artefacts at a path, and the grants that they claim."""

    path: Path
    artefacts: Artefacts
    effective: Effective


@dataclass(frozen=True, slots=True)
class LookedPackage(Looked):
    """Artefacts of a package, with its context.

    ``files`` are the package's; ``host`` is what this host has for it; ``refusals`` are the errors that ``run`` would
    raise; ``never`` the trees that are never granted on this host; ``hints``
    what the package will want and is not granted.
    """

    manifest: Manifest
    files: tuple[str, ...]
    host: HostFacts
    refusals: tuple[errors.CovenantError, ...]
    never: Mapping[str, str]
    hints: tuple[str, ...] = ()


def look(path: Path, *, parent: Path | None = None) -> Looked:
    """Return the policy at ``path``; a package is compiled as a child of ``parent``. No signature is required.

    Raises:
        errors.CovenantError: the package cannot be compiled here, or the directory cannot be read.
    """
    from sandbox.storage import artefact_reader

    return _directory(path) if artefact_reader.holds(path) else package(path, parent=parent)


def package(path: Path, *, parent: Path | None = None) -> LookedPackage:
    """Compile a package for this host, alone or as a child of the package ``parent``.

    Raises:
        errors.CovenantError: it cannot be compiled.
    """
    from policy import data, decide
    from policy.rules import nine
    from policy.why import hints
    from sandbox.storage import package_reader as packages

    read = packages.read(path)
    manifest = decide.manifest_of(read)
    ceiling = None if parent is None else child_ceiling(package(parent).effective)
    narrowed = None if ceiling is None else ceiling.meet(nine.requested(manifest, roles=data.roles()))
    facts, never = host_of(read, manifest, narrowed)
    decision = decide.compile_unsigned(read, manifest, host=facts, ceiling=ceiling, extra_never=never)
    return LookedPackage(
        path,
        decision.artefacts,
        decision.effective,
        manifest,
        tuple(read.files),
        facts,
        decision.refusals,
        never,
        tuple(hints.of(read.files, manifest)),
    )


def host_of(read: Package, manifest: Manifest, effective: Effective | None) -> tuple[HostFacts, Mapping[str, str]]:
    """Return what this host has for a package, and the trees that are never granted here.

    Raises:
        errors.CovenantError: a granted path or program is refused, or the configuration cannot be read.
    """
    from sandbox import config
    from sandbox.host import facts as host_facts

    settings = config.load(common.readable_state())
    # Never grantable, even if the state is not ours.
    own = (str(common.home()), os.path.abspath(os.environ.get("COVENANT_STATE") or settings.state))
    probed = host_facts.probe(settings)
    facts = host_facts.for_manifest(
        probed, manifest, config=settings, package=read.files, extra_never=own, effective=effective
    )
    return facts, host_facts.never_granted(settings, own)


def judged(read: Package, manifest: Manifest) -> tuple[errors.CovenantError, ...]:
    """Return the errors that ``run`` would raise on this host for a signed package.

    An agent without a sandbox is judged by the rules alone; one of another program (hermes) by none.
    """
    from policy import decide, errors
    from policy.rules import unsigned

    if manifest.agent.runtime == "hermes":
        return ()
    try:
        facts, never = host_of(read, manifest, None)
    except errors.CovenantError as e:
        return (e,)
    if manifest.sandbox.backend == "linux-gvisor":
        return decide.judged(read, manifest, facts, extra_never=never)
    return tuple(unsigned.refusals(read, manifest, facts, extra_never=never))


def child_ceiling(effective: Effective) -> Effective:
    """Return the grants that an agent can pass to a child at the start of its own life."""
    return effective.for_child(remaining_seconds=effective.lifetime.ttl_seconds)


def head(looked: Looked) -> dict[str, Any]:
    """Return the first fields of every JSON document about a policy; artefacts alone do not name their agent."""
    known = looked if isinstance(looked, LookedPackage) else None
    return {
        "agent_id": known.manifest.agent.id if known else None,
        "policy_digest": looked.artefacts.digest,
        "refusals": [refusal.to_json() for refusal in known.refusals] if known else [],
    }


def say_head(looked: Looked) -> None:
    """Print the same fields as text."""
    name = looked.manifest.agent.id if isinstance(looked, LookedPackage) else str(looked.path)
    common.say(f"{common.visible(name)}: policy {looked.artefacts.digest}")


def say_refusals(looked: Looked) -> None:
    """Print the errors that ``run`` would raise, as notes."""
    say_errors(looked.refusals if isinstance(looked, LookedPackage) else ())


def say_errors(refusals: Iterable[errors.CovenantError]) -> None:
    """Print errors that ``run`` would raise, as notes."""
    for refusal in refusals:
        common.say(f"note: run refuses this: {common.visible(str(refusal))} [{refusal.code}]", err=True)


def _directory(path: Path) -> Looked:
    from policy.grants import restore
    from sandbox.storage import artefact_reader

    artefacts = artefact_reader.read(path)
    return Looked(path, artefacts, restore.effective(_json(artefacts)["grants"]))


def _json(artefacts: Artefacts) -> Mapping[str, object]:
    """Parse effective.json of an untrusted directory."""
    from policy import errors
    from policy.decompile import documents

    document = documents.load(artefacts.files, "effective.json")
    if type(document) is not dict or "grants" not in document:
        raise errors.ArtefactError("effective.json has no grants", where="effective.json")
    return document
