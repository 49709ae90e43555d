"""Check a child's policy below its parent's ceiling: each remaining grant names its line and the parent's cut."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from policy import data, errors
from policy.compile import plan
from policy.explain import report
from policy.grants.effective import Effective
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants
from policy.grants.spawning import Spawning
from policy.grants.syscalls import SyscallSet
from policy.host import GrantedPath
from policy.manifest.agent import Manifest
from policy.rules import nine
from tests.unit.policy.compile import sample

TOP = Effective.top()
CHILD = """
[permissions.filesystem]
read = ["/srv/data", "/opt"]
[permissions.executables]
allow = ["/usr/bin/cat", "/usr/bin/grep"]
[permissions.credentials]
grants = ["db", "mail"]
[permissions.skills]
allow = ["matrix://tool/mcp/fs/read@1.0", "matrix://tool/mcp/fs/write@1.0"]
side_effects = ["read", "write"]
[permissions.syscalls]
allow = ["getcpu", "sync"]
[spawn]
allowed = true
max_depth = 3
max_descendants = 9
on_parent_exit = "adopt"
[lifetime]
ttl_seconds = 600
on_expiry = "suspend"
"""
NETWORK = sample.entries(
    ("*.example.com", "[443]", "tls"), ("10.0.0.0/8", '["5000-6000"]', "tcp"), ("192.0.2.7", "[80]", "tcp")
)
HOST = sample.host(granted={p: GrantedPath(p, "dir", 8) for p in ("/srv/data", "/srv/data/in", "/opt", "/opt/a")})


def child(**changes: str) -> Manifest:
    values: dict[str, Any] = {"network": "full", "more": CHILD + NETWORK, "resources": "memory_mb = 512\nnet_bps = 9"}
    return sample.manifest(**(values | changes))


def ceiling(**domains: Any) -> Effective:
    return dataclasses.replace(TOP, **domains)


def causes(found: Manifest, bound: Effective) -> dict[str, report.Explained]:
    artefacts = sample.compiled(found, HOST, ceiling=bound)
    return {f"{row.artefact}:{row.rule}": row for row in report.explain(artefacts, where=found.where)}


def narrowed(found: Manifest, bound: Effective) -> dict[str, str]:
    return {rule: row.parent for rule, row in causes(found, bound).items() if row.parent}


def test_parent_that_takes_nothing_is_not_named() -> None:
    assert narrowed(child(), TOP) == {}
    assert sample.compiled(child(), HOST, ceiling=TOP).digest == sample.compiled(child(), HOST).digest


@pytest.mark.parametrize(
    ("bound", "rules"),
    [
        (
            {"resources": structs.replace(TOP.resources, memory_mb=64)},
            {"cgroup.json:v1/memory.limit_in_bytes": "asked for 512", "cgroup.json:v2/memory.max": "asked for 512"},
        ),
        (
            # A default that the manifest does not contain is narrowed as well.
            {"resources": structs.replace(TOP.resources, pids_max=8)},
            {
                "cgroup.json:v1/pids.max": "asked for 64",
                "cgroup.json:v2/pids.max": "asked for 64",
                "config.json:process/rlimits/RLIMIT_NPROC": "asked for 64",
            },
        ),
        (
            {"filesystem": FilesystemGrants.of("host", ["/srv/data/in", "/opt"])},
            {"mounts.json:/srv/data/in": "asked for /srv/data"},
        ),
        (
            {"filesystem": FilesystemGrants.of("read-only-package", ["/srv/data", "/opt"])},
            {"mounts.json:/tmp": "asked for ephemeral"},
        ),
        (
            {"executables": ExecutableSet.of([("/usr/bin/cat", "a" * 64), ("/usr/bin/grep", None)])},
            {"mounts.json:closure//usr/bin/cat": "asked for any content"},
        ),
        (
            {"spawning": Spawning(1, 4, "wind-down")},
            {
                "supervision.json:spawn/max_depth": "asked for 3",
                "supervision.json:spawn/max_descendants": "asked for 9",
                "supervision.json:spawn/on_parent_exit": "asked for adopt",
            },
        ),
        (
            {"lifetime": LifetimeGrant(60, "terminate")},
            {
                "supervision.json:lifetime/ttl_seconds": "asked for 600",
                "supervision.json:lifetime/on_expiry": "asked for suspend",
            },
        ),
        ({"identity": Identity.of("reader", data.roles().below)}, {"supervision.json:roles": "asked for more roles"}),
        ({"resources": structs.replace(TOP.resources, net_bps=4)}, {
            "network.json:net_bps": "asked for 9",
            "firewall.nft:chain/upward/0": "asked for 9", "firewall.nft:chain/downward/0": "asked for 9",
            "firewall.nft:chain/forward/0": "asked for 9", "firewall.nft:chain/forward/1": "asked for 9",
            "firewall.nft:chain/input/0": "asked for 9", "firewall.nft:chain/output/0": "asked for 9",
        }),
    ],
)  # fmt: skip
def test_what_parent_took_is_told_where_it_shows(bound: dict[str, Any], rules: dict[str, str]) -> None:
    assert narrowed(child(), ceiling(**bound)) == rules


def test_narrower_path_keeps_line_of_wider_one() -> None:
    found = child()
    row = causes(found, ceiling(filesystem=FilesystemGrants.of("host", ["/srv/data/in"])))["mounts.json:/srv/data/in"]
    assert (row.kind, row.key, row.where) == (
        "manifest",
        "permissions.filesystem.read[0]",
        found.where("permissions.filesystem.read"),
    )


def test_what_would_be_written_and_is_only_read_keeps_its_line() -> None:
    found = child(filesystem="host", more='[permissions.filesystem]\nwrite = ["/srv/data"]\n' + NETWORK)
    row = causes(found, ceiling(filesystem=FilesystemGrants.of("host", ["/srv"])))["mounts.json:/srv/data"]
    assert (row.key, row.parent) == ("permissions.filesystem.write[0]", "asked to write it")
    assert row.says.startswith("bind of /srv/data, ro,")


def test_narrower_destinations_keep_line_of_entry_that_covers_them() -> None:
    found = child()
    bound = Network.of([
        ("api.example.com", ((443, 443),), "tcp"), ("10.1.0.0/16", ((5432, 5432),), "tcp"),
        ("192.0.2.7", ((80, 80),), "tcp"),
    ])  # fmt: skip
    artefacts = sample.compiled(found, HOST, ceiling=ceiling(network=bound))
    rows = causes(found, ceiling(network=bound))
    grants = {grant["host"]: grant for grant in artefacts.json("network.json")["grants"]}
    told = {host: rows[f"network.json:grant/{grant['id']}"] for host, grant in grants.items()}
    assert {host: (row.key, row.parent) for host, row in told.items()} == {
        "api.example.com": ("permissions.network[0]", "asked for more"),
        "10.1.0.0/16": ("permissions.network[1]", "asked for more"),
        "192.0.2.7": ("permissions.network[2]", ""),
    }
    assert grants["api.example.com"]["protocol"] == "tls"


def test_mode_without_table_below_parents_table_has_modes_line() -> None:
    found = child(more="", network="full")
    bound = Network.of([("api.example.com", ((443, 443),), "tls"), ("9.9.9.9", ((53, 53),), "udp")])
    artefacts = sample.compiled(found, HOST, ceiling=ceiling(network=bound))
    rows = causes(found, ceiling(network=bound))
    for grant in artefacts.json("network.json")["grants"]:
        row = rows[f"network.json:grant/{grant['id']}"]
        assert (row.key, row.where, row.parent) == ("resources.network", "agent.toml:8", "asked for more")


def test_lists_and_calls_keep_what_parent_leaves() -> None:
    bound = ceiling(
        credentials=type(TOP.credentials).of(["mail"]),
        skills=type(TOP.skills).of(["matrix://tool/mcp/fs/read@1.0"], ["read"]),
        # The meet is the parent's own value, so its profile is not the child's.
        syscalls=SyscallSet(frozenset({"read", "write", "sync"}), profile="node", profile_names=frozenset({"read"})),
    )
    found = child()
    artefacts, rows = sample.compiled(found, HOST, ceiling=bound), causes(found, bound)
    assert artefacts.json("credentials.json")["names"] == ["mail"]
    assert rows["credentials.json:mail"].key == "permissions.credentials.grants[1]"
    assert artefacts.json("supervision.json")["skills"] == {
        "allow": ["matrix://tool/mcp/fs/read@1.0"],
        "side_effects": ["read"],
    }
    assert rows["seccomp.bpf:sync"].key == "permissions.syscalls.allow[1]"
    assert rows["seccomp.bpf:read"].reason == "profile python3"


@pytest.mark.parametrize(
    "wider",
    [
        {"filesystem": FilesystemGrants.of("host", ["/srv/other"])},
        {"filesystem": FilesystemGrants.of("host", ["/srv"])},
        {"filesystem": FilesystemGrants.of("host", [], ["/srv/data"])},
        {"executables": ExecutableSet.top()},
        {"executables": ExecutableSet.of([("/usr/bin/vi", None)])},
        {"credentials": type(TOP.credentials).of(["root"])},
        {"credentials": TOP.credentials},
        {"skills": TOP.skills},
    ],
)
def test_what_no_key_covers_is_not_compiled(wider: dict[str, Any]) -> None:
    found = child()
    own = nine.requested(found, roles=data.roles())
    plan.compile(own, found, HOST, package_digest="d" * 64)
    facts = structs.replace(
        HOST,
        granted={p: GrantedPath(p, "dir") for p in ("/srv/other", "/srv", "/srv/data", "/opt")},
        executables={**HOST.executables, "/usr/bin/vi": sample.closure("/usr/bin/vi", "/usr/bin/vi")},
    )
    with pytest.raises(errors.UnexplainedError, match="no key of the manifest covers"):
        plan.compile(dataclasses.replace(own, **wider), found, facts, package_digest="d" * 64)
