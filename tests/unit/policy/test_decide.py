"""The whole decision: what is asked first, what is asked every time, and what a look is told that a run is refused."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from msgspec import structs

from policy import decide, errors, prove
from policy.compile import plan
from policy.host import GrantedPath
from policy.manifest import parse
from policy.package import Package
from policy.rules import enforceable, nine
from policy.rules.case import Unsigned
from policy.signing import trust
from tests import rules_kit as kit
from tests import signing_kit
from tests.unit.policy.compile import sample

HOST = structs.replace(
    kit.HOST,
    runtimes={"python3": sample.closure("python3", "/usr/bin/python3")},
    granted={"/srv/docs": GrantedPath("/srv/docs", "dir")},
)
SKILL = '"matrix://tool/mcp/fs/read@1.0"'
FULL = kit.text(('network = "off"', 'network = "full"'), more=f"\n[permissions.skills]\nallow = [{SKILL}]\n")


def trusted(document: str = kit.MANIFEST) -> trust.TrustedPackage:
    return signing_kit.verify(kit.signed(document))


def authorise(document: str = kit.MANIFEST, **case: Any) -> decide.Decision:
    known = trusted(document)
    return decide.authorise(known, decide.manifest_of(known.package), host=HOST, now_ms=kit.NOW, **case)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps in the order in which they were taken."""
    steps: list[str] = []

    def watch(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            steps.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    for owner, name in ((enforceable, "check"), (nine, "verdict"), (plan, "compile"), (prove, "prove")):
        watch(owner, name)
    return steps


def test_decision_goes_through_every_step_in_order(asked: list[str]) -> None:
    decision = authorise()
    assert asked == ["check", "verdict", "compile", "prove"]
    assert decision.refusals == ()
    assert decision.policy_digest == decision.artefacts.digest


def test_what_cannot_be_held_is_refused_before_any_rule_is_asked(asked: list[str]) -> None:
    with pytest.raises(errors.NotEnforceableError):
        authorise(FULL)
    assert asked == ["check"]


def test_unsigned_package_is_refused_before_everything(asked: list[str]) -> None:
    package = Package({"agent.toml": kit.MANIFEST.encode()})
    with pytest.raises(errors.UnsignedError):
        decide.authorise(Unsigned(package, True), decide.manifest_of(package), host=HOST, now_ms=kit.NOW)
    assert asked == []


def test_what_was_compiled_and_proved_is_neither_again_and_rules_are_asked_each_time(asked: list[str]) -> None:
    policies = decide.Policies()
    first, second = authorise(policies=policies), authorise(policies=policies)
    assert second.artefacts is first.artefacts
    assert asked == ["check", "verdict", "compile", "prove", "check", "verdict"]
    authorise(kit.text(("memory_mb = 128", "memory_mb = 129")), policies=policies)
    assert asked[6:] == ["check", "verdict", "compile", "prove"]


def test_policy_not_proved_is_not_decided_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **known: object) -> None:
        raise errors.ProofError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(prove, "prove", fails)
        policies = decide.Policies()
        for _ in range(2):
            with pytest.raises(errors.ProofError):
                authorise(policies=policies)


def test_child_is_compiled_below_its_parents_ceiling() -> None:
    document = kit.PARENT_MANIFEST.replace("memory_mb = 1024", "memory_mb = 100")
    above, manifest = kit.parent(document), parse.parse(document.encode())
    own = plan.compile(above.effective, manifest, HOST, package_digest="ab" * 32)
    decision = authorise(parent=structs.replace(above, artefacts=own), on_excess="narrow")
    assert decision.effective.resources.memory_mb == 100
    causes = decision.artefacts.json("provenance.json")["rules"]
    assert causes["cgroup.json:v2/memory.max"]["parent"] == "asked for 128"


def test_link_out_of_the_parents_grants_is_refused() -> None:
    """The child's name is in a directory that its parent reads, and leads out of it."""
    document = kit.PARENT_MANIFEST.replace("memory_mb = 1024", "memory_mb = 100")
    above, manifest = kit.parent(document), parse.parse(document.encode())
    name, links = "/srv/docs/link", (("/srv/docs/link", "../other"),)
    asked = kit.text(('read = ["/srv/docs"]', f'read = ["{name}"]'))
    known = trusted(asked)

    def child(real: str) -> decide.Decision:
        linked = GrantedPath(name, "dir", real=real, links=links)
        host = structs.replace(HOST, granted={**HOST.granted, name: linked})
        own = plan.compile(above.effective, manifest, HOST, package_digest="ab" * 32)
        parent = structs.replace(above, artefacts=own)
        found = decide.manifest_of(known.package)
        return decide.authorise(known, found, host=host, now_ms=kit.NOW, parent=parent, on_excess="narrow")

    # Control: a link that stays within what the parent reads.
    links = (("/srv/docs/link", "other"),)
    assert child("/srv/docs/other").effective.filesystem.read.paths == (name,)
    links = (("/srv/docs/link", "../other"),)
    with pytest.raises(
        errors.ParentViolation, match="leads to `/srv/other`, which the parent was not granted"
    ) as refusal:
        child("/srv/other")
    assert "grant `/srv/other` to the parent" in refusal.value.hint


def test_look_is_told_what_run_is_refused() -> None:
    package = kit.signed(FULL)
    manifest = decide.manifest_of(package)
    decision = decide.compile_unsigned(package, manifest, host=HOST)
    assert decision.trusted is None
    assert [(type(e), e.details["grant"]) for e in decision.refusals] == [
        (errors.NotEnforceableError, "resources.network"),
        (errors.NotEnforceableError, "permissions.skills.allow"),
        (errors.NotEnforceableError, "permissions.skills.allow[0]"),
    ]
    prove.prove(decision.effective, decision.artefacts)
    assert decide.compile_unsigned(kit.signed(kit.MANIFEST), kit.manifest(), host=HOST).refusals == ()


def test_look_is_proved_too_with_what_compiler_was_told(asked: list[str]) -> None:
    package = kit.signed(kit.MANIFEST)
    decide.compile_unsigned(package, kit.manifest(), host=HOST)
    assert asked == ["compile", "prove"]


def test_look_with_closure_of_another_runtime_is_no_look(monkeypatch: pytest.MonkeyPatch) -> None:
    real = plan.compile
    other = structs.replace(HOST, runtimes={"python3": sample.closure("python3", "/opt/python3")})

    def faulty(effective: Any, manifest: Any, host: Any, **rest: Any) -> Any:
        return real(effective, manifest, other, **rest)

    monkeypatch.setattr(plan, "compile", faulty)
    with pytest.raises(errors.ProofError, match="python3"):
        decide.compile_unsigned(kit.signed(kit.MANIFEST), kit.manifest(), host=HOST)


def test_look_below_ceiling_is_what_child_would_be() -> None:
    package = kit.signed(kit.MANIFEST)
    ceiling = kit.parent(kit.PARENT_MANIFEST.replace("memory_mb = 1024", "memory_mb = 100")).ceiling
    decision = decide.compile_unsigned(package, decide.manifest_of(package), host=HOST, ceiling=ceiling)
    assert decision.effective.resources.memory_mb == 100


def test_backend_no_sandbox_is_not_shown_as_one() -> None:
    document = kit.text(
        ("required = true", "required = false"), ('backend = "linux-gvisor"', 'backend = "trusted-local"')
    )
    with pytest.raises(errors.BackendError):
        decide.compile_unsigned(kit.signed(document), decide.manifest_of(kit.signed(document)), host=HOST)


def test_package_without_manifest_is_no_package() -> None:
    with pytest.raises(errors.PackageError):
        decide.manifest_of(Package({"main.py": b""}))


def test_same_bytes_are_read_once_and_others_are_others() -> None:
    raw = kit.signed(FULL).files["agent.toml"]
    manifest, same = (decide.manifest_of(Package({"agent.toml": bytes(bytearray(raw))})) for _ in range(2))
    assert manifest is same
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        manifest.agent.id = "another"  # type: ignore[misc]
    more = decide.manifest_of(Package({"agent.toml": raw + b"# more\n"}))
    assert more is not manifest
    for _ in range(2):
        with pytest.raises(errors.ManifestSyntaxError):
            decide.manifest_of(Package({"agent.toml": raw + b"= 1\n"}))
