"""The document of its own limits, which an agent reads."""

from __future__ import annotations

import json
from typing import Any

from policy import data
from policy.explain import own_limits
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

EVERYTHING = """
[permissions.filesystem]
read = ["/srv/docs"]
[permissions.credentials]
grants = ["db"]
files = true
[spawn]
allowed = true
max_depth = 1
max_descendants = 2
[process]
env = { HIDDEN_NAME = "hidden-value" }
"""


def document(manifest: Manifest) -> Any:
    return json.loads(own_limits.encoded(nine.requested(manifest, roles=data.roles()), manifest))


def test_document_names_grants_and_limits() -> None:
    found = document(sample.manifest(more=EVERYTHING, resources="memory_mb = 77"))
    assert found["agent"] == {"id": "sample", "role": None, "version": "1"}
    assert found["grants"]["filesystem"] == {"mode": "ephemeral", "read": ["/srv/docs"], "write": []}
    assert found["grants"]["credentials"] == {"grants": ["db"]}
    assert (found["limits"]["memory_mb"], found["limits"]["pids_max"]) == (77, 64)
    assert found["denials"] == "/run/covenant/denials.jsonl"
    assert "cut" not in found


def test_document_names_services() -> None:
    found = document(sample.manifest(more=EVERYTHING + sample.entries(("example.org", "[443]", "tls")), network="full"))
    assert found["services"] == [
        {"name": "broker", "at": "descriptor 3", "kinds": ["spawn", "credential"]},
        {"name": "credentials", "at": "/run/credentials", "kinds": ["file"]},
        {"name": "names", "at": "/etc/resolv.conf", "kinds": ["A", "AAAA", "HTTPS"]},
    ]
    assert document(sample.manifest())["services"] == []


def test_document_has_no_environment() -> None:
    manifest = sample.manifest(more=EVERYTHING)
    raw = own_limits.encoded(nine.requested(manifest, roles=data.roles()), manifest)
    assert b"db" in raw
    assert b"hidden" not in raw.lower()


def test_shared_memory_is_a_limit() -> None:
    more = "dev_shm_mb = 16"
    assert document(sample.manifest(more=more))["limits"]["dev_shm_mb"] == 16
    assert document(sample.manifest())["limits"]["dev_shm_mb"] == 0


def test_long_lists_are_cut_and_counted() -> None:
    folder = "/".join(["x" * 200] * 4)
    paths = ", ".join(f'"/srv/{folder}/{number:04}"' for number in range(256))
    hosts = sample.entries(*((f"{'y' * 60}{n}.{'z' * 60}.{'w' * 60}.org", "[443]", "tls") for n in range(256)))
    manifest = sample.manifest(more=f"[permissions.filesystem]\nread = [{paths}]\n{hosts}", network="full")
    effective = nine.requested(manifest, roles=data.roles())
    raw = own_limits.encoded(effective, manifest)
    assert len(raw) <= own_limits.MAX_BYTES
    found = json.loads(raw)
    listed = found["grants"]["filesystem"]["read"]
    assert found["cut"]["grants.filesystem.read"] == 256 - len(listed) > 0
    assert all(one["ports"] == [[443, 443]] for one in found["grants"]["network"]["entries"])
    assert listed
