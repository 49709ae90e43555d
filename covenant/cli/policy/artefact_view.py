"""The policy that a verb examines: a package compiled as by ``run``, or a directory from ``policy compile``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from covenant.cli import common

if TYPE_CHECKING:
    from policy import errors
    from policy.compile.artefacts import Artefacts
    from policy.grants.effective import Effective
    from policy.host import Closure
    from policy.manifest.agent import Manifest


@dataclass(frozen=True, slots=True)
class Looked:
    """The artefacts at a path, and the grants that they claim."""

    path: Path
    artefacts: Artefacts
    effective: Effective


@dataclass(frozen=True, slots=True)
class LookedPackage(Looked):
    """Artefacts of a package, with its context.

    ``files`` are the package's; ``closures`` those of its runtime and programs; ``refusals`` are the errors that
    ``run`` would raise; ``never`` the trees that are never granted on this host.
    """

    manifest: Manifest
    files: tuple[str, ...]
    closures: tuple[Closure, ...]
    refusals: tuple[errors.MachineError, ...]
    never: Mapping[str, str]


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
    from sandbox import config
    from sandbox.host import facts as host_facts
    from sandbox.storage import package_reader as packages

    read = packages.read(path)
    manifest = decide.manifest_of(read)
    settings = config.load(common.readable_state())
    # Never grantable, even if the state is not ours.
    own = (str(common.home()), os.path.abspath(os.environ.get("COVENANT_STATE") or settings.state))
    ceiling = None if parent is None else child_ceiling(package(parent).effective)
    facts = host_facts.for_manifest(
        host_facts.probe(settings),
        manifest,
        config=settings,
        package=read.files,
        extra_never=own,
        effective=None if ceiling is None else ceiling.meet(nine.requested(manifest, roles=data.roles())),
    )
    decision = decide.compile_unsigned(read, manifest, host=facts, ceiling=ceiling)
    return LookedPackage(
        path,
        decision.artefacts,
        decision.effective,
        manifest,
        tuple(read.files),
        (*facts.runtimes.values(), *facts.executables.values()),
        decision.refusals,
        host_facts.never_granted(settings, own),
    )


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
    for refusal in looked.refusals if isinstance(looked, LookedPackage) else ():
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
