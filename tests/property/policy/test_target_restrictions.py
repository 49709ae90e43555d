"""Check for any manifest: each restriction is in a target's output or in its list of lost restrictions.

The tests read the output by its own names, as the kubelet and systemd do, and compare it with the grants.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import data
from policy.compile import cgroup
from policy.compile.targets import loss
from policy.grants.sets import addresses
from policy.manifest.agent import Manifest
from tests.unit.policy.compile import sample
from tests.unit.policy.compile import targets_kit as kit

MIB = 1024 * 1024
NUMBERS = {
    "cpu_ms_per_task": st.integers(1, 100_000),
    "memory_mb": st.integers(1, 4096),
    "disk_mb": st.integers(1, 4096),
    "pids_max": st.integers(1, 1000),
    "cpu_millis": st.integers(10, 8000),
    "cpu_weight": st.integers(1, 10_000),
    "cpu_time_ms": st.integers(1, 100_000),
    "swap_mb": st.integers(0, 100),
    "io_read_bps": st.integers(1, 10**9),
    "io_write_bps": st.integers(1, 10**9),
    "io_read_iops": st.integers(1, 10**6),
    "io_write_iops": st.integers(1, 10**6),
    "net_bps": st.integers(1, 10**9),
}
numbers = st.fixed_dictionaries({}, optional=NUMBERS)
ENTRIES = (("api.ex.com", "tls"), ("*.ex.com", "tcp"), ("8.8.8.0/24", "udp"), ("10.0.0.7", "tcp"), ("9.9.9.9", "tls"))
entries = st.lists(st.tuples(st.sampled_from(ENTRIES), st.integers(1, 65535)), max_size=4, unique=True)
EXTRA = {
    "read": '[permissions.filesystem]\nread = ["/srv/data"]',
    "run": '[permissions.executables]\nallow = ["/usr/bin/cat"]',
    "deny": '[permissions.syscalls]\ndeny = ["clone", "openat"]',
    "ttl": "[lifetime]\nttl_seconds = 7",
    "who": '[capabilities]\nrequired = ["tool.x"]',
}
extras = st.sets(st.sampled_from(sorted(EXTRA)))
modes = st.sampled_from(["read-only-package", "ephemeral"])


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    table = draw(entries)
    mode = draw(st.sampled_from(["off", "outbound-https-only", "full"])) if not table else "full"
    listed = (
        f'[[permissions.network]]\nhost = "{host}"\nports = [{port}]\nprotocol = "{protocol}"'
        for (host, protocol), port in table
    )
    return kit.manifest(
        network=mode,
        filesystem=draw(modes),
        resources="\n".join(f"{name} = {value}" for name, value in draw(numbers).items()),
        more="\n".join([*listed, *(EXTRA[name] for name in sorted(draw(extras)))]),
    )


def read_kubernetes(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the limits of a pod in the grants' own fields and units."""
    spec = json.loads(files["pod.json"])["spec"]
    (container,) = spec["containers"]
    (profile,) = [json.loads(raw) for name, raw in files.items() if name.startswith("covenant-")]
    limits, requests = container["resources"]["limits"], container["resources"]["requests"]
    volumes = {v["name"]: v["emptyDir"]["sizeLimit"] for v in spec["volumes"]}
    scratch = sum(
        int(volumes[m["name"]].removesuffix("Mi")) for m in container["volumeMounts"] if not m.get("readOnly", False)
    )
    return {
        "deadline_ms": spec["activeDeadlineSeconds"] * 1000,
        "memory": int(limits["memory"].removesuffix("Mi")) * MIB,
        "disk_mb": scratch,
        "cpu_millis": int(limits["cpu"].removesuffix("m")),
        "cpu_weight": -(-int(requests["cpu"].removesuffix("m")) // 10),
        "swap_mb": 0 if limits["memory"] == requests["memory"] else None,
        "calls": {call for rule in profile["syscalls"] for call in rule["names"]} - {"clone3"},
        "paths": {v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v},
        "network": bool(json.loads(files["networkpolicy.json"])["spec"]["egress"]),
    }


def read_systemd(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the limits of a unit in the grants' own fields and units."""
    (unit,) = (raw.decode() for name, raw in files.items() if name.endswith(".service"))
    found: dict[str, list[str]] = {}
    for line in unit.splitlines():
        key, _, value = line.partition("=")
        found.setdefault(key, []).append(value)
    size = re.match(r"/tmp:size=(\d+)M", found["TemporaryFileSystem"][0])
    calls = set(found["SystemCallFilter"][0].split()) - {"clone3"}

    def disks(setting: str) -> int | None:
        return int(found[setting][0].rpartition(" ")[2]) if setting in found else None

    return {
        "deadline_ms": int(found["RuntimeMaxSec"][0].removesuffix("ms")),
        "memory": int(found["MemoryMax"][0]),
        "disk_mb": int(size[1]) if size else 0,
        "pids_max": min(int(found["TasksMax"][0]), int(found["LimitNPROC"][0])),
        "cpu_millis": round(float(found["CPUQuota"][0].removesuffix("%")) * 10),
        "cpu_weight": int(found["CPUWeight"][0]),
        "swap_mb": int(found["MemorySwapMax"][0]) // MIB,
        "io_read_bps": disks("IOReadBandwidthMax"),
        "io_write_bps": disks("IOWriteBandwidthMax"),
        "io_read_iops": disks("IOReadIOPSMax"),
        "io_write_iops": disks("IOWriteIOPSMax"),
        "calls": calls,
        "paths": {bind.split('"')[3] for bind in found["BindReadOnlyPaths"]} - OWN,
        "network": "IPAddressAllow" in found,
        "addresses": set(found.get("IPAddressAllow", ())),
        "private": found.get("PrivateNetwork") == ["yes"],
    }


OWN = {"/usr/bin/python3.11", "/usr/lib/libc.so.6", "/lib/libc.so.6", "/usr/bin/cat", "/workspace"}
READERS = {"kubernetes": read_kubernetes, "systemd": read_systemd}


@pytest.mark.parametrize("target", READERS)
@settings(max_examples=60, deadline=None)
@given(found=manifests())
def test_restriction_is_held_or_reported(target: str, found: Manifest) -> None:
    effective = kit.effective(found)
    output = kit.compiled(target, found)
    held = READERS[target](output.files)
    lost = {one.field for one in output.losses if one.kind == loss.RESTRICTION}
    resources = effective.resources

    # (1) every number: at most what was granted, or reported
    for name in NUMBERS:
        granted = getattr(resources, name)
        if name in ("cpu_ms_per_task", "memory_mb") or granted is None:
            continue
        within = held.get(name) is not None and held[name] <= granted
        bound = held["deadline_ms"] * held["cpu_millis"] <= granted * 1000 if name == "cpu_time_ms" else False
        assert within or bound or f"resources.{name}" in lost, name
    scratch = 0 if effective.filesystem.mode == "read-only-package" else resources.disk_mb or 0
    overhead = cgroup.overhead_mb(resources.pids_max or 0) if target == "kubernetes" else 0
    assert held["memory"] == ((resources.memory_mb or 0) + scratch + overhead) * MIB
    assert held["disk_mb"] == scratch

    # (2) the clock: no later than the earliest
    if held["deadline_ms"] > loss.deadline_ms(effective):
        assert "resources.cpu_ms_per_task" in lost

    # (3) calls, programs, paths
    assert held["calls"] <= effective.syscalls.names
    assert held["calls"] == effective.syscalls.names & set(data.syscalls("x86_64").numbers)
    assert held["paths"] <= set(effective.filesystem.read)
    if held["paths"]:
        assert "filesystem.read" in lost
    if effective.executables:
        assert "executables.allow" in lost

    # (4) the network: nothing beyond the addresses; distinctions that systemd cannot make are reported
    if effective.network.mode == "off":
        assert not held["network"]
        assert held.get("private", True)
    if target == "systemd":
        blocks = {str(block) for a, b, _ in effective.network.reach for block in addresses.blocks(a, b)}
        assert held["addresses"] == blocks
        every = ((1, 65535),)
        if any(how.tcp != every or how.udp != every for _, _, how in effective.network.reach):
            assert "network.entries" in lost

    # (5) restrictions that only a caller can check
    assert ("capabilities.required" in lost) == bool(found.capabilities.required)


@given(found=manifests())
@settings(max_examples=40, deadline=None)
def test_output_is_made_only_with_exactly_its_losses(found: Manifest) -> None:
    for target in READERS:
        wanted = kit.restrictions(target, found)
        document = json.loads(kit.compiled(target, found, accepted=wanted, host=sample.host()).files["loss.json"])
        assert document["accepted"] == sorted(wanted)
        assert {one["id"] for one in document["lost_restrictions"]} == set(wanted)
