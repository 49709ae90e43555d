"""The policy that a verb examines: a package compiled as by ``run``, or a directory from ``policy compile``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common

if TYPE_CHECKING:
    from policy import errors
    from policy.compile.artefacts import Artefacts
    from policy.explain.other_host import HostDocument
    from policy.grants.effective import Effective
    from policy.host import HostFacts
    from policy.manifest.agent import Manifest
    from policy.package import Package
    from sandbox.config import Config


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
    what the package will want and is not granted; ``other`` the host that was asked about, and ``unknown`` what was
    assumed of it. ``supervised`` are the errors that ``run`` would raise under covenant-supervisor alone.
    """

    manifest: Manifest
    files: tuple[str, ...]
    host: HostFacts
    refusals: tuple[errors.CovenantError, ...]
    never: Mapping[str, str]
    hints: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    other: OtherHost | None = None
    supervised: tuple[errors.CovenantError, ...] = ()


@dataclass(frozen=True, slots=True)
class OtherHost:
    """The value of ``--host``: a document of facts, or ``none`` for a host that has what the manifest grants."""

    name: str
    document: HostDocument | None

    @classmethod
    def of(cls, option: str | None) -> OtherHost | None:
        """Read the option. None is this host.

        Raises:
            errors.HostFactsError: the file cannot be read, or is no such document.
        """
        if option is None or option == "none":
            return None if option is None else cls(option, None)
        from policy import errors
        from policy.explain import other_host

        try:
            raw = Path(option).read_bytes()
        except OSError as e:
            raise errors.HostFactsError(
                f"`{option}` cannot be read: {e.strerror}", hint="covenant doctor --export FILE; or: --host none"
            ) from e
        return cls(option, other_host.decode(raw, option))


@dataclass(frozen=True, slots=True)
class Host:
    """The facts of a host for one package, the trees that are never granted there, and what was assumed."""

    facts: HostFacts
    never: Mapping[str, str]
    unknown: tuple[str, ...] = ()


HOST = click.option(
    "--host",
    metavar="FILE|none",
    help="Facts of another host, from `covenant doctor --export` there; none assumes what the manifest grants.",
)


def look(path: Path, *, parent: Path | None = None, other: OtherHost | None = None) -> Looked:
    """Return the policy at ``path``; a package is compiled as a child of ``parent``. No signature is required.

    ``other`` is the host in whose place this one answers.

    Raises:
        errors.CovenantError: the package cannot be compiled here, or the directory cannot be read.
    """
    from sandbox.storage import artefact_reader

    return _directory(path) if artefact_reader.holds(path) else package(path, parent=parent, other=other)


def package(path: Path, *, parent: Path | None = None, other: OtherHost | None = None) -> LookedPackage:
    """Compile a package for this host or ``other``, alone or as a child of the package ``parent``.

    Raises:
        errors.CovenantError: it cannot be compiled.
    """
    from policy import data, decide
    from policy.rules import host_network, nine
    from policy.why import hints
    from sandbox.storage import package_reader as packages

    common.check_package(path)
    read = packages.read(path)
    manifest = decide.manifest_of(read)
    ceiling = None if parent is None else child_ceiling(package(parent, other=other).effective)
    narrowed = None if ceiling is None else ceiling.meet(nine.requested(manifest, roles=data.roles()))
    host = host_of(read, manifest, narrowed, other)
    decision = decide.compile_unsigned(read, manifest, host=host.facts, ceiling=ceiling, extra_never=host.never)
    supervised = host_network.refusals(decision.effective, host.facts, where=manifest.where)
    return LookedPackage(
        path,
        decision.artefacts,
        decision.effective,
        manifest,
        tuple(read.digests),
        host.facts,
        decision.refusals,
        host.never,
        tuple(hints.of(read.files, manifest)),
        host.unknown,
        other,
        tuple(supervised) if host.facts.isolates_runs else (),
    )


def host_of(read: Package, manifest: Manifest, effective: Effective | None, other: OtherHost | None) -> Host:
    """Return what this host, or ``other``, has for a package.

    Raises:
        errors.CovenantError: a granted path or program is refused, or the configuration cannot be read.
    """
    if other is not None:
        return _elsewhere(other, read, manifest, effective)
    from sandbox import config
    from sandbox.host import facts as host_facts

    settings = config.load(common.readable_state())
    own = own_places(settings)
    probed = host_facts.probe(settings)
    facts = host_facts.for_manifest(
        probed, manifest, config=settings, package=read.files, extra_never=own, effective=effective
    )
    return Host(facts, host_facts.never_granted(settings, own))


def own_places(settings: Config) -> tuple[str, str]:
    """Return the home and the state. They are never granted, even if the state is not ours."""
    return str(common.home()), os.path.abspath(os.environ.get("COVENANT_STATE") or settings.state)


def _elsewhere(other: OtherHost, read: Package, manifest: Manifest, effective: Effective | None) -> Host:
    from policy.explain import other_host

    known = other.document
    base = other_host.nothing_known(manifest) if known is None else known.facts
    done = other_host.complete(base, manifest, read.files, effective)
    return Host(done.facts, {} if known is None else known.never, done.unknown)


def judged(
    read: Package, manifest: Manifest, other: OtherHost | None
) -> tuple[tuple[errors.CovenantError, ...], tuple[str, ...]]:
    """Return the errors that ``run`` would raise on this host or ``other`` for a signed package, and what was assumed.

    An agent without a sandbox is judged by the rules alone; one of another program (hermes) by none. If this host
    refuses a granted path or program, the rules are asked as for a host that has everything.
    """
    from policy import decide, errors
    from policy.explain import other_host
    from policy.rules import unsigned

    if manifest.agent.runtime == "hermes":
        return (), ()
    try:
        host = host_of(read, manifest, None, other)
    except errors.CovenantError as e:
        rules = unsigned.refusals(read, manifest, other_host.nothing_known(manifest), extra_never={})
        return (*errors.each(e), *rules), ()
    if manifest.sandbox.backend == "linux-gvisor":
        return decide.judged(read, manifest, host.facts, extra_never=host.never), host.unknown
    return tuple(unsigned.refusals(read, manifest, host.facts, extra_never=host.never)), host.unknown


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
        **({"supervised_refusals": [one.to_json() for one in known.supervised]} if known and known.supervised else {}),
        **({"unknown": list(known.unknown)} if known and known.unknown else {}),
    }


def say_head(looked: Looked) -> None:
    """Print the same fields as text."""
    name = looked.manifest.agent.id if isinstance(looked, LookedPackage) else str(looked.path)
    common.say(f"{common.visible(name)}: policy {looked.artefacts.digest}")


def say_refusals(looked: Looked) -> None:
    """Print the errors that ``run`` would raise, and what is not known of the host, as notes."""
    if isinstance(looked, LookedPackage):
        say_errors(looked.refusals)
        say_errors(looked.supervised, by="run under covenant-supervisor")
        say_unknown(looked.unknown)


def notes(looked: Looked) -> list[str]:
    """Return the same as lines."""
    if not isinstance(looked, LookedPackage):
        return []
    refused = [f"run refuses this: {refusal} [{refusal.code}]" for refusal in looked.refusals]
    served = [f"run under covenant-supervisor refuses this: {one} [{one.code}]" for one in looked.supervised]
    return [*refused, *served, *(f"unknown: {line}" for line in looked.unknown)]


def say_errors(refusals: Iterable[errors.CovenantError], *, by: str = "run") -> None:
    """Print errors that ``run`` would raise, as notes, each with its fix."""
    for refusal in map(common.placed, refusals):
        common.say(f"note: {by} refuses this: {common.visible(str(refusal))} [{refusal.code}]", err=True)
        if refusal.hint:
            common.say(f"  fix: {common.visible(refusal.hint)}", err=True)


def say_unknown(lines: Iterable[str]) -> None:
    """Print what was assumed of another host, as notes."""
    for line in lines:
        common.say(f"unknown: {common.visible(line)}", err=True)


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
