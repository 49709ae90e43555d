"""Facts of another host: a document that gives the same policy, and assumptions that are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec import structs

from policy import decide, errors
from policy.explain import other_host
from policy.host import GrantedPath, HostFacts
from policy.manifest import parse
from policy.manifest.agent import Manifest
from policy.package import Package
from policy.rules import unsigned
from tests.unit.policy.compile import sample

CASES = Path(__file__).resolve().parents[3] / "golden/manifest"
GRANTS = """
[permissions.filesystem]
read = ["/srv/data"]
[permissions.executables]
allow = ["/usr/bin/grep"]
"""


def _document(**changes: object) -> other_host.HostDocument:
    granted = {"/srv/data": GrantedPath("/srv/data", "dir")}
    facts = sample.host(
        granted=granted, executables={"/usr/bin/grep": sample.closure("/usr/bin/grep", "/usr/bin/grep")}
    )
    return other_host.HostDocument(1, structs.replace(facts, **changes), {"/srv/state": "it is the state"})


def test_document_is_read_as_it_was_written() -> None:
    document = _document()
    raw = other_host.encode(document)
    assert other_host.decode(raw, "facts.json") == document
    assert other_host.encode(other_host.decode(raw, "facts.json")) == raw


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{}",
        b'{"kind":"host_facts","version":2,"facts":{},"never":{}}',
        b'{"kind":"other","version":1,"facts":{},"never":{}}',
        b"[" * 100_000,
        b"\xff",
        b"[" + b"0," * (1 << 20) + b"0]",
    ],
)
def test_other_documents_are_refused(raw: bytes) -> None:
    with pytest.raises(errors.HostFactsError) as found:
        other_host.decode(raw, "facts.json")
    assert found.value.where == "facts.json"
    assert "covenant doctor --export" in (found.value.hint or "")


def test_unknown_key_is_refused() -> None:
    fields = json.loads(other_host.encode(_document()))
    with pytest.raises(errors.HostFactsError):
        other_host.decode(json.dumps({**fields, "more": 1}).encode(), "facts.json")


def _policy(manifest: Manifest, facts: HostFacts) -> str:
    package = Package({"agent.toml": b"", "main.py": b""}, None)
    return decide.compile_unsigned(package, manifest, host=facts).artefacts.digest


def test_policy_on_exported_facts_is_that_of_host() -> None:
    manifest, document = sample.manifest(more=GRANTS), _document()
    done = other_host.complete(other_host.decode(other_host.encode(document), "").facts, manifest, {})
    assert done.unknown == ()
    assert _policy(manifest, done.facts) == _policy(manifest, document.facts)


def test_what_facts_lack_is_assumed_and_named() -> None:
    manifest = sample.manifest(more=GRANTS)
    done = other_host.complete(_document(granted={}, executables={}, runtimes={}).facts, manifest, {})
    assert [line.split(":")[0] for line in done.unknown] == [
        "program `/usr/bin/grep`",
        "runtime python3",
        "path `/srv/data`",
    ]
    assert _policy(manifest, done.facts)


@pytest.mark.parametrize("runtime", ["python3", "node", "rust-bin", "command"])
def test_policy_compiles_where_nothing_is_known(runtime: str) -> None:
    write = '[permissions.filesystem]\nwrite = ["/srv/out", "volume:notes:/notes"]\n'
    manifest = sample.manifest(runtime=runtime, more=write, filesystem="host")
    done = other_host.complete(other_host.nothing_known(manifest), manifest, {})
    assert len(done.unknown) == 3
    package = Package({"agent.toml": b"", "main.py": b""}, None)
    decision = decide.compile_unsigned(package, manifest, host=done.facts)
    assert decision.refusals == ()


def test_exported_refusal_stays() -> None:
    """A path that nothing bounds, and a host without runsc: the facts say no, and no assumption says yes."""
    manifest = sample.manifest()
    facts = other_host.complete(_document(runsc=None).facts, manifest, {}).facts
    with pytest.raises(errors.NotEnforceableError):
        _policy(manifest, facts)


def test_never_grantable_paths_stay_so() -> None:
    manifest = sample.manifest(more='[permissions.filesystem]\nread = ["/root/.ssh"]\n')
    done = other_host.complete(other_host.nothing_known(manifest), manifest, {})
    package = Package({"agent.toml": b"", "main.py": b""}, None)
    refused = decide.compile_unsigned(package, manifest, host=done.facts).refusals
    assert [type(one) for one in refused] == [errors.NeverGrantableError]


def test_manifest_with_every_key_is_judged_where_nothing_is_known() -> None:
    """Its role refuses a path; no part of a host is missing."""
    manifest = parse.parse((CASES / "full.toml").read_bytes())
    done = other_host.complete(other_host.nothing_known(manifest), manifest, {})
    package = Package({"agent.toml": b"", manifest.agent.entry: b""}, None)
    refused = unsigned.refusals(package, manifest, done.facts, extra_never={})
    assert [str(one) for one in refused if isinstance(one, errors.NotEnforceableError)] == []
