"""The author's text: agent.toml whole and part by part. What is accepted means what it says and nothing wider."""

from __future__ import annotations

import ipaddress
import json
import pathlib
import tomllib
import unicodedata
from collections.abc import Callable
from typing import Any

from pydantic_core import PydanticCustomError

from policy import data, errors, package
from policy.grants import paths as path_grants
from policy.grants.effective import Effective
from policy.grants.network import Network
from policy.grants.sets import access, hostnames
from policy.manifest import hosts, lines, parse, paths, permissions
from policy.manifest.agent import Manifest
from policy.manifest.tools import command
from tests.fuzz.drive import Target

ROOT = pathlib.Path(__file__).resolve().parents[2]
_KEYS = b"""
agent capabilities resources sandbox settlement hermes permissions spawn lifetime id name version runtime
entry role operator required optional cpu_ms_per_task memory_mb disk_mb network pids_max cpu_millis cpu_weight
cpu_time_ms swap_mb io_read_bps net_bps backend filesystem standby priority allowed max_depth max_descendants
on_parent_exit ttl_seconds unlimited on_expiry read write host ports protocol profile allow deny grants
side_effects syscalls executables credentials skills
""".split()
_WORDS = (
    *_KEYS,
    b"\n[permissions.network]\n",
    b"\n[[permissions.network]]\n",
    b"\n[permissions.syscalls]\n",
    b"\n[x]\n",
    b"\n[[x]]\n",
    b'"off"',
    b'"full"',
    b'"outbound-https-only"',
    b'"linux-gvisor"',
    b'"trusted-local"',
    b'"host"',
    b'"ephemeral"',
    b'"python3"',
    b'"tcp"',
    b'"tls"',
    b'"udp"',
    b'"8000-8010"',
    b"[443]",
    b"[1, 65535]",
    b'"*.example.com"',
    b'"10.0.0.0/8"',
    b'"::1"',
    b'"/etc"',
    b'"/srv/a"',
    b'["/usr/bin/cat"]',
    b'["execve"]',
    b'["ptrace"]',
    b"= true",
    b"= false",
    b"= 0",
    b"= []",
    b"= {}",
    b"1979-05-27T07:32:00Z",
    b"inf",
    b"nan",
    b"0x1F",
    b"1e3",
    b'"""',
    b"'''",
    b"\\u0000",
    b"\\U0001F600",
    b"a.b.c = 1",
    b"\n",
    b"# c",
)


def _documents() -> list[bytes]:
    files = sorted((ROOT / "tests" / "golden" / "manifest").glob("*.toml"))
    files += [ROOT / "agents" / name / "agent.toml" for name in ("hello", "librarian", "wordcount")]
    return [path.read_bytes() for path in files]


def manifest(raw: bytes) -> str:
    """agent.toml: read the same way twice, placed in the text, and granting no more than its words name."""
    read = parse.parse(raw)
    again = parse.parse(raw)
    assert again == read
    assert again.written == read.written
    text = raw.decode()
    count = text.count("\n") + 1
    for key in sorted(read.written)[:20]:
        name, _, line = read.where(key).partition(":")
        assert name == "agent.toml"
        assert line == "" or 1 <= int(line) <= count
    _within_the_text(read, tomllib.loads(text.replace("\r\n", "\n")))
    return " ".join(sorted(w for w in read.written if "[" not in w and w.count(".") < 2))


_PROFILES = data.profiles()


def _within_the_text(read: Manifest, document: dict[str, Any]) -> None:
    try:
        asked = Effective.from_manifest(read, profiles=_PROFILES)
    except errors.ManifestError:
        assert read.permissions.syscalls.profile not in _PROFILES
        return
    table = document.get("permissions", {})
    named = table.get("filesystem", {})
    assert set(asked.filesystem.write) <= set(named.get("write", []))
    assert set(asked.filesystem.read) <= set(named.get("read", []))
    profile = _PROFILES.get(asked.syscalls.profile)
    base = profile.names if profile else frozenset()
    assert asked.syscalls.names <= base | set(table.get("syscalls", {}).get("allow", []))
    assert not asked.syscalls.names & set(table.get("syscalls", {}).get("deny", []))
    programs = [entry.partition("@sha256:")[0] for entry in table.get("executables", {}).get("allow", [])]
    assert set(asked.executables.paths) <= set(programs)
    assert asked.credentials.names == frozenset(table.get("credentials", {}).get("grants", []))
    commands = [one["name"] for one in document.get("tools", {}).get("command", [])]
    assert sorted(name for name, _ in asked.skills.commands) == sorted(commands)
    tools = {name for name in asked.skills.allow.names if not name.startswith(command.PREFIX)}
    assert tools == {one for one in table.get("skills", {}).get("allow", []) if not one.startswith(command.PREFIX)}
    said = {entry["host"] for entry in table.get("network", [])}
    if "network" in table:
        assert {
            entry.host for entry in asked.network.entries if not entry.host[0].isdigit() and ":" not in entry.host
        } <= said
    assert asked.network.mode == "off" or document.get("resources", {}).get("network", "outbound-https-only") != "off"
    assert asked.spawning.allowed <= bool(document.get("spawn", {}).get("allowed"))
    assert asked.lifetime.unlimited == bool(document.get("lifetime", {}).get("unlimited"))


def places(raw: bytes) -> str:
    """The scanner that places findings: never raises, never points outside, places what tomllib reads."""
    text = raw.decode("utf-8", "replace").replace("\r\n", "\n")
    scan = lines.scan(text)
    rows = text.split("\n")
    for place in (*scan.keys.values(), *scan.values.values()):
        assert 1 <= place.line <= len(rows)
        assert 1 <= place.column <= len(rows[place.line - 1]) + 1
    try:
        document = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError):
        return "of broken text"
    for key in document:
        assert (key,) in scan.keys, key
    return f"of {min(len(scan.keys), 50)} keys"


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _of_field(check: Callable[[str], str]) -> Callable[[bytes], str]:
    """A validator of one string; what it raises carries a message and a hint that are shown to people."""

    def attempt(raw: bytes) -> str:
        value = _text(raw)
        try:
            return check(value)
        except PydanticCustomError as e:
            context = e.context or {}
            raise errors.ManifestError(str(context["message"]), hint=str(context["hint"])) from None

    return attempt


def _host(value: str) -> str:
    assert hosts.check(value) == value
    assert value.isascii()
    kind = hosts.kind(value)
    made = Network.of([(value, [(443, 443)], "tls")])
    assert made.mode == "outbound-https-only"
    if kind in ("address", "cidr"):
        block = ipaddress.ip_network(value)
        assert not made.names
        assert value in (str(block), str(block.network_address))
        assert sum(last - first + 1 for first, last, _ in made.reach) == block.num_addresses
        assert block.prefixlen > 0
    else:
        assert not made.reach
        assert dict(made.names) == {value: access.HTTPS}
        assert hostnames.check(value) == value
        assert made.to_name(value.replace("*.", "x.")).allows("tls", 443)
        assert not made.to_name("x." + value.removeprefix("*.") + ".example").allows("tls", 443)
        for label in value.removeprefix("*.").split("."):
            assert 1 <= len(label) <= 63
    return kind


def ports(raw: bytes) -> str:
    """`ports` of a network entry, as JSON's arrays give it: the same numbers, sorted, once each."""
    value = json.loads(raw)
    try:
        pairs = hosts.port_ranges(value)
    except PydanticCustomError as e:
        raise errors.ManifestError(str((e.context or {})["message"])) from None
    said = set[int]()
    for item in value:
        low, _, high = str(item).partition("-")
        said.update(range(int(low), int(high or low) + 1))
    listed = [port for low, high in pairs for port in range(low, high + 1)]
    assert listed == sorted(said)
    assert said <= set(range(1, 65536))
    return f"{len(pairs)} spans"


def _absolute(value: str) -> str:
    assert paths.absolute(value) == value
    assert path_grants.check_normalised(value) == value
    assert value.isprintable()
    assert unicodedata.normalize("NFC", value) == value
    assert value != "/"
    grant = path_grants.PathSet.of([value])
    assert grant.covers(value)
    assert grant.covers(value + "/x")
    assert not grant.covers(value + "x")
    assert not grant.covers(value.rpartition("/")[0] or "/")
    return f"{value.count('/')} deep"


def _relative(value: str) -> str:
    inside = paths.relative(value)
    if inside != package.ENVELOPE_NAME and inside.count("/") < package.MAX_DEPTH and len(inside.encode()) <= 1024:
        package.check_path(inside)
    assert inside in (value, value[2:])
    assert ".." not in inside.split("/")
    assert not inside.startswith(("/", "-"))
    return f"{inside.count('/')} deep"


def normalised(raw: bytes) -> str:
    """A path as the grants take it."""
    value = _text(raw)
    kept = path_grants.check_normalised(value)
    assert kept == value
    one = path_grants.PathSet.of([value])
    assert tuple(one) == (value,)
    assert one.meet(path_grants.PathSet.top()) == one
    return "root" if value == "/" else "path"


def names(raw: bytes) -> str:
    """A list of hosts as the grants take it: what parses as no address is a name, and both meet themselves."""
    listed = [line for line in _text(raw).split("\n") if line][:8]
    made = Network.of([(host, [(1, 9)], "tcp") for host in listed])
    assert made.meet(made) == made
    assert made.is_subset(Network.top())
    # What is printed can be read again, and is the same grant.
    again = Network.of([(e.host, e.ports, e.protocol) for e in made.entries])
    assert again == made, made.entries
    return f"{len(made.names)} names {min(len(made.reach), 9)} spans"


def _executable(value: str) -> str:
    entry = permissions._executable(value)
    path, at, digest = value.partition("@sha256:")
    assert entry.path == path
    assert entry.sha256 == (digest if at else None)
    assert entry.sha256 is None or len(entry.sha256) == 64
    return "pinned" if at else "open"


def package_paths(raw: bytes) -> str:
    """The names of a package's files, one a line: plain, and apart on every file system."""
    listed = list(dict.fromkeys(_text(raw).split("\n")))[:40]
    package.check_paths(listed)
    assert len({unicodedata.normalize("NFKC", p).casefold() for p in listed}) == len(listed)
    for path in listed:
        assert all(part not in ("", ".", "..") for part in path.split("/"))
        path.encode()
    return f"{len(listed)} files"


_HOSTS = (
    b"api.example.com",
    b"*.example.com",
    b"10.1.0.0/16",
    b"10.1.2.3",
    b"2001:db8::/32",
    b"2001:db8::1",
    b"xn--bcher-kva.example",
)
_PATHS = (b"/srv/data", b"/usr/share/doc", "/srv/bücher".encode(), b"/a b/c", b"/x/y/z/w")

TARGETS = (
    Target("agent.toml", manifest, _documents, _WORDS, share=16),
    Target("places", places, _documents, _WORDS, share=8),
    Target("host", _of_field(_host), lambda: _HOSTS, (*_HOSTS, b"/8", b"/33", b"%eth0", b"0x", b"[::1]"), share=16),
    Target(
        "ports",
        ports,
        lambda: (b"[443]", b'[80,"8000-8010"]', b'["1-65535"]', b"[1,2,3]"),
        (b'"1-2"', b"65536", b'"01-2"', b"true"),
        refusals=(errors.CovenantError, json.JSONDecodeError, UnicodeDecodeError),
        share=12,
        json=True,
    ),
    Target("path", _of_field(_absolute), lambda: _PATHS, _PATHS, share=14),
    Target(
        "entry",
        _of_field(_relative),
        lambda: (b"main.py", b"./bin/run", b"lib/a.js"),
        (b"./", b"../", b"C:", b"-"),
        share=10,
    ),
    Target("grant path", normalised, lambda: (*_PATHS, b"/"), _PATHS, share=12),
    Target("grant hosts", names, lambda: (b"\n".join(_HOSTS), b"a.b\n*.a.b\n*.b"), (*_HOSTS, b"\n"), share=8),
    Target(
        "executable",
        _of_field(_executable),
        lambda: (b"/usr/bin/cat", b"/usr/bin/cat@sha256:" + b"0123456789abcdef" * 4),
        (b"@sha256:", b"@sha512:", b"@"),
        share=10,
    ),
    Target(
        "package names",
        package_paths,
        lambda: (b"agent.toml\nmain.py", b"a/b\na/c\nd", "lib/é\nlib/x".encode()),
        (b"\n", b"A", b"a/"),
        share=10,
    ),
)
