"""Change every value of every artefact, one at a time: only the compiled form is ever proved.

test_planted_faults.py shows typical faults; this module is complete: the reader skips no key, item or value of a JSON
artefact. Artefacts that may have several forms (filters, rules, causes) have their own tests.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from policy import data, errors, prove
from policy.compile.artefacts import NAMES, Artefacts, canonical
from policy.grants.effective import Effective
from policy.host import CgroupFacts
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

MORE = (
    sample.entries(
        ("*.example.com", "[443]", "tls"),
        ("10.0.0.0/8", '[22, "80-90"]', "tcp"),
        ("2001:db8::/32", "[53]", "udp"),
        ("192.0.2.7", "[443]", "tls"),
    )
    + """
[permissions.filesystem]
read = ["/usr/share/doc"]
write = ["/srv/data"]
[permissions.executables]
allow = ["/usr/bin/cat"]
[permissions.credentials]
grants = ["db"]
[permissions.skills]
allow = ["matrix://tool/mcp/fs/read@1.0.0"]
side_effects = ["read"]
[[permissions.skills.rule]]
tool = "matrix://tool/mcp/fs/read@1.0.0"
argument = "path"
one_of = ["/a", 1]
[[permissions.skills.rule]]
tool = "matrix://tool/mcp/fs/read@1.0.0"
argument = "mode"
matches = "r+"
[spawn]
allowed = true
max_depth = 2
max_descendants = 3
[lifetime]
ttl_seconds = 60
"""
)
SIZES = "memory_mb = 100\nnet_bps = 100000\ncpu_weight = 50\nio_read_bps = 1000\nswap_mb = 8\ncpu_time_ms = 900"
V2 = CgroupFacts(2, frozenset({"cpu", "io", "memory", "pids"}), swap_accounting=True)
POLICIES: dict[str, Callable[[], Manifest]] = {
    "least": lambda: sample.manifest(filesystem="read-only-package"),
    "much": lambda: sample.manifest(more=MORE, network="full", resources=SIZES, filesystem="host"),
}
DOCUMENTS = tuple(name for name in NAMES if name.endswith(".json") and name != "provenance.json")
# Names of grants, which only people read; and two lists that the readers treat as sets.
UNREAD = {("network.json", "id")}
SETS = {("network.json", ("grants",)), ("gates.json", ("tls", "addresses"))}
MOST = 250  # changes of one document; of a longer list every second, third, ...


@functools.cache
def compiled(policy: str) -> tuple[Effective, Mapping[str, bytes], prove.Facts]:
    found, host = POLICIES[policy](), sample.host(cgroup=V2, room_mb=8)
    facts = prove.Facts.of(found, host, "d" * 64)
    return nine.requested(found, roles=data.roles()), sample.compiled(found, host).files, facts


def others(value: Any) -> Iterator[Any]:
    """Yield other values: near ones, and values of another kind."""
    if type(value) is bool:
        yield from (not value, int(value))
    elif type(value) is int:
        yield from (value + 1, value - 1, str(value), float(value))
    elif type(value) is str:
        yield from (value + "x", value[:-1] if value else "y", None)
    elif value is None:
        yield from (0, "", [])
    elif type(value) is list:
        yield from ([*value, None], [*value, *value[-1:]] if value else [[]], value[::-1], value[1:], {})
    elif type(value) is dict:
        yield from ({**value, "unknown": None}, [value])


def changes(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield each place of a document with each new value for it, and each container without one of its entries."""
    for other in others(document):
        if other != document or type(other) is not type(document):
            yield path, other
    if isinstance(document, dict):
        for key, value in document.items():
            yield path, {k: v for k, v in document.items() if k != key}
            yield from changes(value, (*path, key))
    elif isinstance(document, list):
        for at, value in enumerate(document):
            yield path, [v for i, v in enumerate(document) if i != at]
            yield from changes(value, (*path, at))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    out = copy.copy(document)
    out[path[0]] = changed(document[path[0]], path[1:], value)
    return out


def proved(policy: str, name: str, raw: bytes) -> bool:
    effective, files, facts = compiled(policy)
    try:
        prove.prove(effective, Artefacts({**files, name: raw}), known=facts)
    except (errors.ArtefactError, errors.ProofError):
        return False
    return True


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_other_document_is_proved(policy: str, name: str) -> None:
    document = json.loads(compiled(policy)[1][name])
    assert proved(policy, name, canonical(document))
    passed = [(path, value) for path, value, raw in _tried(name, document) if proved(policy, name, raw)]
    assert passed == []


def _tried(name: str, document: Any) -> list[tuple[tuple[Any, ...], Any, bytes]]:
    tried = {}
    for path, value in changes(document):
        before = functools.reduce(lambda part, key: part[key], path, document)
        if (name, path[-1] if path else "") in UNREAD or ((name, path) in SETS and _set(value) == _set(before)):
            continue
        tried[canonical(changed(document, path, value))] = (path, value)
    listed = [(path, value, raw) for raw, (path, value) in tried.items()]
    assert len(listed) > 5
    return listed[:: -(-len(listed) // MOST)]


def _set(value: Any) -> set[str]:
    return {json.dumps(one, sort_keys=True) for one in value}


@pytest.mark.parametrize("policy", POLICIES)
def test_no_document_is_proved_in_another_spelling_or_missing(policy: str) -> None:
    files = compiled(policy)[1]
    for name in DOCUMENTS:
        document = json.loads(files[name])
        for raw in (files[name][:-1], files[name] + b"\n", json.dumps(document).encode(), b"", b"\xff", b"[" * 3000):
            assert not proved(policy, name, raw), (name, raw[:20])
    for name in NAMES:
        with pytest.raises(ValueError, match="exactly"):
            Artefacts({key: raw for key, raw in files.items() if key != name})
