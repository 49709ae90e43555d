"""Delegation end to end in the deciding half: from a parent's effective grants to a child's artefacts, at any depth."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from policy import decide, errors
from policy.compile import plan
from policy.grants.effective import DOMAINS
from policy.host import GrantedPath, HostFacts
from policy.manifest import parse
from policy.rules.parent import Ancestor, Drawn, Parent
from tests import rules_kit
from tests import signing_kit as kit
from tests.unit.policy.compile import sample

CHILD = rules_kit.MANIFEST.replace('read = ["/srv/docs"]', 'read = ["/srv"]').replace(
    "memory_mb = 128", "memory_mb = 512"
)
SPAWNS = CHILD + rules_kit.PARENT_MANIFEST[rules_kit.PARENT_MANIFEST.index("[spawn]") :]


def host() -> HostFacts:
    paths = ("/srv", "/srv/docs")
    return structs.replace(
        rules_kit.HOST,
        runtimes={"python3": sample.closure("python3", "/usr/bin/python3")},
        granted={path: GrantedPath(path, "dir") for path in paths},
    )


def boss(**changes: Any) -> Parent:
    """A root run with the artefacts that it runs under."""
    made = rules_kit.parent()
    manifest = parse.parse(rules_kit.PARENT_MANIFEST.encode())
    artefacts = plan.compile(made.effective, manifest, host(), package_digest="ab" * 32)
    return structs.replace(made, artefacts=artefacts, **changes)


def authorise(document: str, **case: Any) -> decide.Decision:
    trusted = kit.verify(rules_kit.signed(document), None)
    manifest = decide.manifest_of(trusted.package)
    return decide.authorise(trusted, manifest, host=host(), now_ms=rules_kit.NOW, **case)


def test_more_than_parent_has_is_refused_and_told_by_domain() -> None:
    with pytest.raises(errors.ParentViolation) as caught:
        authorise(CHILD, parent=rules_kit.parent())
    report = caught.value.details["domains"]
    assert report["filesystem"] == {
        "requested": ["read /srv"], "granted": ["read /srv/docs"], "removed": ["read /srv"],
    }  # fmt: skip
    assert set(report) <= set(DOMAINS)
    assert caught.value.to_json()["domains"] == report


def test_narrow_compiles_meet_and_tells_same() -> None:
    decision = authorise(CHILD, parent=boss(), on_excess="narrow")
    assert decision.delegation is not None
    report = decision.delegation.report()
    assert report["filesystem"]["removed"] == ["read /srv"]
    assert decision.effective.filesystem.read.paths == ("/srv/docs",)
    mounts = {m["destination"] for m in decision.artefacts.json("mounts.json")["mounts"]}
    assert "/srv/docs" in mounts
    assert "/srv" not in mounts


def test_without_parent_there_is_no_delegation() -> None:
    assert authorise(CHILD).delegation is None


def test_what_parent_has_decides_and_not_what_it_asked_for() -> None:
    """A chain: a grandchild is bounded by what the child got, though the child's manifest asks for more."""
    above = boss()
    child = authorise(CHILD, parent=above, on_excess="narrow")
    middle = replace(child.effective, spawning=above.effective.spawning, lifetime=above.effective.lifetime)
    between = Parent(
        run_id="run-2",
        agent_id="hello",
        payload_digest="ef" * 32,
        effective=middle,
        remaining_seconds=60,
        drawn=Drawn(),
        ancestors=(*above.ancestors, Ancestor("run-2", "hello", 1, middle.spawning, 0)),
        artefacts=plan.compile(middle, parse.parse(SPAWNS.encode()), host(), package_digest="ab" * 32),
    )
    grandchild = authorise(CHILD, parent=between, on_excess="narrow")
    assert grandchild.effective.filesystem.read.paths == ("/srv/docs",)
    assert grandchild.effective.is_subset(child.effective)


def test_parent_without_artefacts_starts_nobody() -> None:
    with pytest.raises(ValueError, match="cannot start agents"):
        authorise(CHILD, parent=rules_kit.parent(), on_excess="narrow")


def test_child_whose_artefacts_are_wider_than_its_parents_is_not_started() -> None:
    """A compiler that goes wrong in the same way for both, so that each proof holds, and differently for the parent."""
    narrow = rules_kit.PARENT_MANIFEST.replace('read = ["/srv/docs"]', "read = []")
    manifest = parse.parse(narrow.encode())
    artefacts = plan.compile(rules_kit.effective_of(narrow), manifest, host(), package_digest="ab" * 32)
    authorise(CHILD, parent=boss(), on_excess="narrow")
    with pytest.raises(errors.ProofError, match="its parent's in filesystem"):
        authorise(CHILD, parent=structs.replace(boss(), artefacts=artefacts), on_excess="narrow")
