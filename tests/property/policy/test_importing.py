"""No import grants what its source does not allow: checked by a model of the source that shares no code with it."""

from __future__ import annotations

import ipaddress
import json
import pathlib
import tomllib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import data, errors
from policy.importing import formats
from policy.importing.vocabulary import Context
from policy.manifest import parse

BASE = "/srv/base"
_PARTS = st.sampled_from(["srv", "opt", "a", "b", "base", ".env", "x y", "..", "*", "**", "home", "etc"])
_PATHS = st.builds(
    lambda root, parts, end: f"{root}{'/'.join(parts)}{end}",
    st.sampled_from(["/", "", "./", "~/"]),
    st.lists(_PARTS, min_size=1, max_size=4),
    st.sampled_from(["", "/", "/**"]),
)
_HOSTS = st.builds(
    lambda star, labels: star + ".".join(labels),
    st.sampled_from(["", "", "*.", "*"]),
    st.lists(st.sampled_from(["a", "b", "evil", "example", "org", "Com", "127", "localhost"]), min_size=1, max_size=4),
)
_SRT = st.fixed_dictionaries(
    {},
    optional={
        "network": st.fixed_dictionaries(
            {}, optional={key: st.lists(_HOSTS, max_size=4) for key in ("allowedDomains", "deniedDomains")}
        ),
        "filesystem": st.fixed_dictionaries(
            {},
            optional={
                key: st.lists(_PATHS, max_size=4) for key in ("allowRead", "denyRead", "allowWrite", "denyWrite")
            },
        ),
    },
)


def made(source: str, raw: bytes) -> dict[str, Any]:
    """The manifest as plain TOML, which the parser takes as well."""
    text = formats.read(source, raw, Context("p", "main", BASE, "/home/ann")).manifest_text
    parse.parse(text.encode())
    return tomllib.loads(text)


def real(path: str) -> str:
    """Where a path of the source lies."""
    told = f"/home/ann{path[1:]}" if path.startswith("~/") else path
    return str(pathlib.PurePosixPath(BASE, told.removesuffix("/**")))


def literal(paths: list[str]) -> set[str]:
    return {real(path) for path in paths if not set(path.removesuffix("/**")) & set("*%") and ".." not in path}


def touches(path: str, denied: list[str]) -> bool:
    """Whether a denial that is no pattern is the path, above it, or below it."""
    mine = pathlib.PurePosixPath(path)
    return any(mine.is_relative_to(two) or pathlib.PurePosixPath(two).is_relative_to(mine) for two in literal(denied))


@settings(max_examples=150, deadline=None)
@given(_SRT)
def test_srt_grants_lie_in_its_allow_lists(source: dict[str, dict[str, list[str]]]) -> None:
    manifest = made("srt", json.dumps(source).encode())
    network, files = source.get("network", {}), source.get("filesystem", {})
    allowed = {host.lower() for host in network.get("allowedDomains", [])}
    granted = [entry["host"] for entry in manifest.get("permissions", {}).get("network", [])]
    for host in granted:
        assert host in allowed
        for other in (one.lower() for one in network.get("deniedDomains", [])):
            assert other != host
            assert not (other.startswith("*.") and host.endswith(other[1:]))
            assert not (host.startswith("*.") and other.endswith(host[1:]))
    assert (manifest["resources"]["network"] == "off") == (not granted)
    written = manifest.get("workspace", {}).get("from", [])
    assert set(written) <= literal(files.get("allowWrite", []))
    for path in written:
        assert not touches(path, files.get("denyWrite", []) + files.get("denyRead", []))
    paths = manifest.get("permissions", {}).get("filesystem", {})
    assert "write" not in paths
    assert set(paths.get("read", [])) <= literal(files.get("allowRead", []))
    for path in paths.get("read", []):
        below = pathlib.PurePosixPath(path)
        assert not any(pathlib.PurePosixPath(two).is_relative_to(below) for two in literal(files.get("denyRead", [])))


_ABSOLUTE = st.lists(st.sampled_from(["srv", "opt", "a", "b", "home", "ann", "%i", "*"]), min_size=1, max_size=3).map(
    lambda parts: "/" + "/".join(parts)
)
_ADDRESSES = st.sampled_from(["any", "localhost", "10.0.0.0/8", "192.0.2.7", "127.0.0.1", "2001:db8::/32", "::/0"])
_CALLS = st.sampled_from(
    ["read", "write", "ptrace", "mount", "@system-service", "@process", "@new", "~@setuid", "~kill"]
)
_SETTING = st.one_of(
    st.tuples(
        st.sampled_from(["ReadWritePaths", "ReadOnlyPaths", "InaccessiblePaths"]),
        st.lists(_ABSOLUTE, max_size=3).map(" ".join),
    ),
    st.tuples(st.just("IPAddressAllow"), st.lists(_ADDRESSES, max_size=3).map(" ".join)),
    st.tuples(st.just("SystemCallFilter"), _CALLS),
    st.tuples(st.just("TasksMax"), st.integers(1, 200).map(str)),
    st.tuples(st.just("MemoryMax"), st.integers(1, 4000).map(lambda n: f"{n}M")),
    st.tuples(st.sampled_from(["PrivateNetwork", "ProtectHome"]), st.sampled_from(["yes", "no"])),
)


def listed(found: list[tuple[str, str]], key: str) -> list[str]:
    """The words of a list as systemd adds them up."""
    words: list[str] = []
    for name, value in found:
        if name == key:
            words = [*words, *value.split()] if value else []
    return words


@settings(max_examples=150, deadline=None)
@given(st.lists(_SETTING, max_size=8))
def test_systemd_grants_lie_in_its_allow_lists(found: list[tuple[str, str]]) -> None:
    unit = "[Service]\nExecStart=/usr/bin/main\n" + "".join(f"{key}={value}\n" for key, value in found)
    manifest = made("systemd", unit.encode())
    last = dict(found)
    permissions = manifest.get("permissions", {})
    files = permissions.get("filesystem", {})
    closed = listed(found, "InaccessiblePaths") + (["/home", "/root"] if last.get("ProtectHome") == "yes" else [])
    assert set(files.get("write", [])) <= literal(listed(found, "ReadWritePaths"))
    assert set(files.get("read", [])) <= literal(listed(found, "ReadOnlyPaths"))
    for path in files.get("write", []) + files.get("read", []):
        assert not touches(path, closed)
    for path in files.get("write", []):
        below = pathlib.PurePosixPath(path)
        assert not any(pathlib.PurePosixPath(two).is_relative_to(below) for two in listed(found, "ReadOnlyPaths"))
    hosts = {entry["host"] for entry in permissions.get("network", [])}
    assert hosts <= set(listed(found, "IPAddressAllow"))
    assert not any(ipaddress.ip_network(host).is_loopback or host == "::/0" for host in hosts)
    assert not (hosts and last.get("PrivateNetwork") == "yes")
    _limits(manifest["resources"], last)
    _calls(set(permissions.get("syscalls", {}).get("deny", [])), found)


def _limits(resources: dict[str, Any], last: dict[str, str]) -> None:
    assert "TasksMax" not in last or resources["pids_max"] == int(last["TasksMax"])
    assert "MemoryMax" not in last or resources["memory_mb"] == int(last["MemoryMax"][:-1])


def _calls(denied: set[str], found: list[tuple[str, str]]) -> None:
    """Single calls alone: a refused one is not left, and of a list of allowed ones no other is."""
    left = data.profile("command").names - denied
    filters = [value for key, value in found if key == "SystemCallFilter"]
    if "~kill" in filters and not {"@process", "@system-service"} & set(filters[filters.index("~kill") :]):
        assert "kill" not in left
    if filters and not any(one.startswith(("@", "~")) for one in filters):
        assert "openat" not in left
        assert "write" not in left or "write" in filters


_KEYS = st.one_of(
    st.sampled_from(
        [
            "network",
            "filesystem",
            "allowedDomains",
            "allowRead",
            "allowWrite",
            "denyRead",
            "permissions",
            "allow",
            "deny",
        ]
    ),
    st.sampled_from(
        ["ask", "sandbox", "enabled", "env", "services", "image", "command", "volumes", "tmpfs", "deploy", "resources"]
    ),
    st.sampled_from(
        ["limits", "memory", "cpus", "environment", "mem_limit", "networks", "read_only", "servers", "tools", "agent"]
    ),
)
_WORDS = st.one_of(
    st.sampled_from(
        ["Read(//srv/**)", "Bash(/bin/x:*)", "WebFetch(domain:a.example.org)", "/srv/a:/srv/a", "*", "~", ""]
    ),
    st.text(max_size=8),
)
_JSON = st.recursive(
    st.one_of(_WORDS, st.booleans(), st.integers(), st.none(), st.floats(allow_nan=False, allow_infinity=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=4)),
    max_leaves=12,
)
_LINES = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.sampled_from(["[Service]", "ExecStart=/bin/x \\", "ReadWritePaths=/srv", 'ReadOnlyPaths="', "CPUQuota=9%"]),
        st.sampled_from(
            ["docker run -v /a:/a -m 1g i", "docker run", "--mount type=bind,src=/a", "-p", "sandbox_mode = 1"]
        ),
    ),
    max_size=6,
).map("\n".join)


@pytest.mark.parametrize("source", formats.NAMES)
@settings(max_examples=60, deadline=None)
@given(
    raw=st.one_of(_JSON.map(lambda value: json.dumps(value).encode()), _LINES.map(str.encode), st.binary(max_size=40))
)
def test_any_source_is_refused_or_parses(source: str, raw: bytes) -> None:
    refusal: errors.ImportSourceError | None = None
    try:
        made(source, raw)
    except errors.ImportSourceError as e:
        refusal = e
    assert refusal is None or (refusal.where and refusal.hint)
