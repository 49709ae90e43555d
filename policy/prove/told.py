"""Documents for people, which nothing enforces: effective.json, provenance.json and the index of network.json.

They hold the decision and its facts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from policy import errors
from policy.decompile import cgroup, config, documents, mounts
from policy.decompile import read as reading
from policy.decompile.documents import Files, closed, fixed, refuse, shown
from policy.decompile.network import network, reach
from policy.decompile.read import Decompiled
from policy.grants.effective import Effective

EFFECTIVE = "effective.json"
PROVENANCE = "provenance.json"
_KINDS: Final = ("built-in", "default", "manifest")
_OPTIONAL: Final = ("parent", "reason")
# The artefacts for whose every rule there must be a cause, and for nothing else. The others' rules are numbered lines
# of one text, which commands.explain.report pairs with their causes.
_PAIRED: Final = tuple(f"{name}:" for name in (reading.BPF, cgroup.CGROUP, mounts.MOUNTS, config.RUNTIME))


def check(files: Files, effective: Effective, found: Decompiled) -> str:
    """Hold them to what was decided and found. The digest of the package that effective.json names.

    Raises:
        errors.ProofError: effective.json or the index tells of other grants, or provenance.json of other rules.
        errors.ArtefactError: one of them is malformed.
    """
    document = closed(
        documents.load(files, EFFECTIVE),
        EFFECTIVE,
        {"arch": str, "grants": dict, "package_digest": str, "version": int},
    )
    fixed(document["version"], f"{EFFECTIVE}:version", 1)
    fixed(document["arch"], f"{EFFECTIVE}:arch", found.arch)
    told = effective.canonical()
    closed(document["grants"], f"{EFFECTIVE}:grants", dict.fromkeys(told, dict))
    for name, domain in ((name, domain) for name, domain in effective.domains() if name in told):
        if documents.dumps(document["grants"][name]) != documents.dumps(domain.canonical()):
            raise errors.ProofError(f"effective.json tells of other grants in {name}", where=EFFECTIVE, domain=name)
    if reach.with_common(found.reached.listed) != found.grants.network:
        raise errors.ProofError("network.json lists other destinations", where=network.NETWORK, domain="network")
    _causes(files, found)
    return config.digest(document["package_digest"], f"{EFFECTIVE}:package_digest")


def _causes(files: Files, found: Decompiled) -> None:
    whole = closed(documents.load(files, PROVENANCE), PROVENANCE, {"rules": dict, "version": int})
    fixed(whole["version"], f"{PROVENANCE}:version", 2)
    for rule, cause in whole["rules"].items():
        _cause(f"{PROVENANCE}:{shown(rule)}", cause)
        if rule.partition(":")[0] not in files:
            raise refuse(PROVENANCE, f"{shown(rule)} is a rule of no artefact")
    told = {rule for rule in whole["rules"] if rule.startswith(_PAIRED)}
    there = set(_rules(found))
    for odd, says in ((told - there, "there is no such rule"), (there - told, "the rule has no cause")):
        if odd:
            raise errors.ProofError(f"provenance.json: {says}: {shown(min(odd))}", where=PROVENANCE)


def _cause(where: str, value: Any) -> None:
    if type(value) is not dict or not {"key", "kind"} <= value.keys() <= {"key", "kind", *_OPTIONAL}:
        raise refuse(where, "it is no cause")
    documents.one_of(value["kind"], where, _KINDS)
    if any(type(part) is not str for part in value.values()):
        raise refuse(where, "a part of the cause is no text")


def _rules(found: Decompiled) -> Iterator[str]:
    """The rules that the paired artefacts were found to hold, by the names that provenance has for them."""
    yield f"{reading.BPF}:default"
    for name in (*found.calls.allowed, *found.calls.missing):
        yield f"{reading.BPF}:{name}"
    for version, names in found.cgroup_files:
        yield from (f"{cgroup.CGROUP}:{version}/{name}" for name in names)
    yield from (f"{mounts.MOUNTS}:{place}" for place in found.seen.mounted)
    yield from (f"{mounts.MOUNTS}:link{path}" for path in found.seen.links)
    yield from (f"{mounts.MOUNTS}:closure/{closure.name}" for closure in (found.seen.runtime, *found.seen.programs))
    yield from (f"{mounts.MOUNTS}:layer/{name}" for name, _ in found.seen.image.layers)
    yield from (f"{mounts.MOUNTS}:programs/{tree}" for tree in found.seen.image.trees)
    if found.grants.filesystem.shared:
        yield f"{mounts.MOUNTS}:shared"
    if found.seen.workspace is not None:
        yield from (f"{mounts.MOUNTS}:workspace/{term}" for term in mounts.WORKSPACE_TERMS)
    yield from (f"{config.RUNTIME}:{flag}" for flag in found.runsc.flags)
