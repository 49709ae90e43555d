"""Kill mutants of the grants that no other test detects: limit values, canonical forms and refusals.

Each test fails for a mutant that every other test let live (docs/mutants.md).
"""

from __future__ import annotations

from typing import get_args

import pytest

from policy import data, errors
from policy.grants import lifetime, network, paths, resources, restore, skills, spawning
from policy.grants import syscalls as calls
from policy.grants.effective import RUNTIME_PROFILES, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.identity import Identity
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants, PathSet
from policy.grants.resources import Ceilings
from policy.grants.sets import access, addresses, domain, hostnames
from policy.grants.sets.access import Access
from policy.grants.spawning import Spawning
from policy.grants.syscalls import SyscallSet
from policy.manifest import parse, permissions

HEAD = '[agent]\nid = "a"\nname = "a"\nversion = "1"\n'


def asked(runtime: str, more: str = "", **tables: object) -> Effective:
    entry = "" if runtime == "hermes" else 'entry = "main.py"\n'
    sandbox = '[sandbox]\nbackend = "linux-gvisor"\n' if runtime == "command" else ""
    text = f'{HEAD}runtime = "{runtime}"\n{entry}{more}{sandbox}'
    return Effective.from_manifest(parse.parse(text.encode()), profiles=data.profiles(), **tables)  # type: ignore[arg-type]


def test_tables_are_those_of_manifest() -> None:
    assert get_args(network.Mode) == network.MODES == tuple(network.WITHOUT_TABLE)
    assert get_args(paths.Mode) == paths.MODES
    assert get_args(access.Protocol) == access.PROTOCOLS
    assert get_args(spawning.OnParentExit) == spawning.ON_PARENT_EXIT
    assert get_args(lifetime.OnExpiry) == lifetime.ON_EXPIRY
    assert set(get_args(permissions.SideEffect)) == set(skills.SIDE_EFFECTS)
    assert {"execveat", "memfd_create"} == calls.NEVER_CALLS
    assert calls.EXEC_CALL == "execve"
    assert RUNTIME_PROFILES == {"python3": "python3", "node": "node", "rust-bin": "static", "command": "command"}


@pytest.mark.parametrize(("port", "allowed"), [(0, False), (1, True), (65535, True), (65536, False)])
def test_every_port_is_1_to_65535(port: int, allowed: bool) -> None:
    for protocol in access.PROTOCOLS:
        assert access.EVERYTHING.allows(protocol, port) == allowed
    assert access.HTTPS.allows("tls", port) is False


def test_access_shows_what_it_holds() -> None:
    both = Access(tcp=((1, 2),), udp=((5, 5),))
    assert list(both.by_protocol()) == [("tcp", ((1, 2),)), ("udp", ((5, 5),))]
    assert access.minus(both, Access(tcp=((1, 1),))) == Access(tcp=((2, 2),), udp=((5, 5),))
    assert access.minus(both, access.NOTHING) == both
    assert access.minus(access.NOTHING, both) == access.NOTHING


@pytest.mark.parametrize("address", ["0.0.0.0", "255.255.255.255", "::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"])
def test_everywhere_reaches_first_and_last_address(address: str) -> None:
    assert Network.top().to_address(address) == access.EVERYTHING


def test_line_of_addresses_ends_where_addresses_do() -> None:
    (v4_first, v4_last), (v6_first, v6_last) = addresses.ALL
    assert [str(b) for b in addresses.blocks(v4_first, v4_last)] == ["0.0.0.0/0"]
    assert [str(b) for b in addresses.blocks(v6_first, v6_last)] == ["::/0"]
    assert v4_last + 1 < v6_first


@pytest.mark.parametrize("last", [0, 1, 2, 255])
def test_mapped_ipv4_is_same_address(last: int) -> None:
    assert addresses.parse(f"::ffff:10.0.0.{last}") == addresses.parse(f"10.0.0.{last}")


def test_difference_of_addresses_is_cut_where_other_begins_and_ends() -> None:
    whole, hole = (addresses.parse(h) for h in ("10.0.0.0/8", "10.1.0.0/16"))
    assert whole is not None
    assert hole is not None
    both, tcp = Access(tcp=((1, 9),), udp=((1, 9),)), Access(tcp=((1, 9),))
    udp = Access(udp=((1, 9),))
    left = addresses.minus(((*whole, both),), ((*hole, tcp),))
    assert left == ((whole[0], hole[0] - 1, both), (*hole, udp), (hole[1] + 1, whole[1], both))
    assert addresses.minus(((*whole, tcp),), ((*hole, tcp),)) == (
        (whole[0], hole[0] - 1, tcp),
        (hole[1] + 1, whole[1], tcp),
    )
    # Two holes, and a hole that extends past either end.
    two = tuple((whole[0] + n, whole[0] + n, tcp) for n in (0, 5))
    assert addresses.minus(((whole[0], whole[0] + 5, tcp),), two) == ((whole[0] + 1, whole[0] + 4, tcp),)
    assert addresses.minus(((*hole, tcp),), ((*whole, tcp),)) == ()


def test_name_set_holds_its_names_or_every_name() -> None:
    assert domain.NameSet.of("a").holds("a")
    assert not domain.NameSet.of("a").holds("b")
    assert domain.NameSet.top().holds("b")
    assert not domain.NameSet.bottom().holds("")


def test_no_call_starts_program_without_program() -> None:
    bare = Effective.bottom()
    for name in ("execve", "execveat", "memfd_create"):
        made = Effective(**{**dict(bare.domains()), "syscalls": SyscallSet(frozenset({name, "read"}))})  # type: ignore[arg-type]
        assert made.syscalls.names == {"read"}
    granted = {**dict(bare.domains()), "executables": ExecutableSet.of([("/a", None)])}
    some = Effective(**{**granted, "syscalls": SyscallSet(frozenset({"execve", "execveat", "read"}))})  # type: ignore[arg-type]
    assert some.syscalls.names == {"execve", "read"}


@pytest.mark.parametrize("runtime", RUNTIME_PROFILES)
def test_runtime_brings_its_profile(runtime: str) -> None:
    assert asked(runtime).syscalls.profile == RUNTIME_PROFILES[runtime]
    assert asked(runtime).syscalls.names


def test_hermes_has_no_profile_and_so_no_call() -> None:
    assert asked("hermes").syscalls.names == frozenset()


def test_additions_and_roles_are_asked_for_only_where_they_are_given() -> None:
    networked = '[resources]\nnetwork = "full"\n'
    plain = asked("python3", networked)
    added = asked("python3", networked, additions=data.additions())
    assert plain.syscalls.names < added.syscalls.names
    assert asked("python3", networked, additions={}).syscalls.names == plain.syscalls.names
    role = f'{HEAD}role = "reader"\nruntime = "python3"\nentry = "main.py"\n'
    below = {"reader": frozenset({"reader", "observer"})}
    read = parse.parse(role.encode())
    assert Effective.from_manifest(read, profiles=data.profiles()).identity.roles.names == {"reader"}
    known = Effective.from_manifest(read, profiles=data.profiles(), below=below)
    assert known.identity.roles.names == {"reader", "observer"}


def test_pin_beside_open_path_goes_and_alone_stays() -> None:
    pin = "ab" * 32
    assert ExecutableSet.of([("/a", None), ("/a", pin), ("/b", pin)]).describe() == (
        "execute /a",
        f"execute /b sha256:{pin}",
    )
    assert ExecutableSet.of([("/b", pin)]).canonical() == {"allow": [{"path": "/b", "sha256": pin}]}
    assert ExecutableSet.of([("/b", None)]).canonical() == {"allow": [{"path": "/b", "sha256": None}]}
    assert ExecutableSet.top()
    assert not ExecutableSet.bottom()


@pytest.mark.parametrize(
    ("host", "accepted"),
    [
        ("ab.example", True), ("a.example", True), ("1.example", True), ("a" * 63 + ".example", True),
        ("a" * 64 + ".example", False), ("-a.example", False), ("a-.example", False), ("example.1", False),
        ("example.0x1f", False), ("a..example", False), ("*.example", True), ("a.*.example", False),
    ],
)  # fmt: skip
def test_host_is_labels_of_1_to_63(host: str, accepted: bool) -> None:
    if accepted:
        assert hostnames.check(host) == host
        return
    with pytest.raises(errors.ManifestError):
        hostnames.check(host)


def test_host_has_at_most_253_characters() -> None:
    longest = ".".join(["a" * 61] * 4 + ["abcde"])
    assert len(longest) == 253
    assert hostnames.check(longest) == longest
    with pytest.raises(errors.ManifestError):
        hostnames.check("b" + longest)


@pytest.mark.parametrize(
    ("pattern", "holders"),
    [
        ("*", []), ("a", ["*"]), ("*.a", ["*"]), ("a.b", ["*.b", "*"]), ("*.a.b.c", ["*.b.c", "*.c", "*"]),
        ("a.b.c.d", ["*.b.c.d", "*.c.d", "*.d", "*"]),
    ],
)  # fmt: skip
def test_what_stands_above_pattern(pattern: str, holders: list[str]) -> None:
    assert list(hostnames.above(pattern)) == holders


def test_name_that_its_pattern_covers_is_not_listed_again() -> None:
    ports = [(80, 90)]
    wide = Network.of([("*.example", ports, "tcp")])
    assert Network.of([("*.example", ports, "tcp"), ("a.example", ports, "tcp")]) == wide
    assert Network.of([("*.example", ports, "tcp"), ("a.example", [(85, 85)], "tls")]) == wide
    more = Network.of([("*.example", ports, "tcp"), ("a.example", [(80, 91)], "tcp")])
    assert dict(more.names)["a.example"] == Access(tcp=((91, 91),))
    assert more.to_name("a.example") == Access(tcp=((80, 91),))
    assert wide.is_subset(more)
    assert not more.is_subset(wide)
    # A plain name below nothing, beside a pattern of another name.
    apart = Network.of([("*.other", ports, "tcp"), ("a.example", ports, "tcp")])
    assert apart.meet(wide) == Network.of([("a.example", ports, "tcp")])


@pytest.mark.parametrize("name", ["*", "*.a", "*a"])
def test_only_exact_name_can_be_asked_for(name: str) -> None:
    with pytest.raises(errors.ManifestError, match="no exact name"):
        Network.top().to_name(name)


@pytest.mark.parametrize("address", ["10.0.0.0/8", "10.0.0.0/31", "2001:db8::/127", "a.example", ""])
def test_only_address_can_be_asked_for(address: str) -> None:
    with pytest.raises(errors.ManifestError, match="no address"):
        Network.top().to_address(address)


def test_address_is_its_own_and_not_its_neighbours() -> None:
    one = Network.of([("10.0.0.7", [(1, 1)], "tcp")])
    reached = {n: bool(one.to_address(f"10.0.0.{n}")) for n in (6, 7, 8)}
    assert reached == {6: False, 7: True, 8: False}


def test_canonical_form_has_its_keys() -> None:
    made = Network.of([("10.0.0.0/8", [(1, 2), (9, 9)], "udp")])
    entry = {"host": "10.0.0.0/8", "protocol": "udp", "ports": [[1, 2], [9, 9]]}
    assert made.canonical() == {"mode": "full", "entries": [entry]}
    assert Network.without_table("full").canonical()["entries"][0]["host"] == network.ANY_PUBLIC


def test_any_public_host_is_line_only_when_all_of_them_are_reached() -> None:
    public = Network.any(access.HTTPS, addresses.PUBLIC)
    assert [e.host for e in public.entries] == [network.ANY_PUBLIC]
    without_names = Network((), public.reach)
    assert network.ANY_PUBLIC not in [e.host for e in without_names.entries]
    without_addresses = Network(public.names, ())
    assert [e.host for e in without_addresses.entries] == ["*"]
    most = Network(public.names, public.reach[1:])
    assert network.ANY_PUBLIC not in [e.host for e in most.entries]


def test_paths_are_kept_once_and_root_is_written_as_slash() -> None:
    assert tuple(PathSet.of(["/a", "/b", "/b/c", "/b/c/d", "/a/x"])) == ("/a", "/b")
    assert tuple(PathSet.of(["/a", "/b"]).union(PathSet.of(["/b/c", "/c", "/c/d"]))) == ("/a", "/b", "/c")
    assert tuple(PathSet.of(["/"]).difference(PathSet.of(["/a"]))) == ("/",)
    assert tuple(PathSet.of(["/", "/a"])) == ("/",)
    assert repr(PathSet.of(["/a"])) == "PathSet(paths=('/a',))"
    with pytest.raises(TypeError):
        PathSet(("/a",), ("x",))  # type: ignore[call-arg]


def test_what_is_written_is_not_listed_as_read_again() -> None:
    both = FilesystemGrants.of("host", ["/a", "/a/b", "/c"], ["/a"])
    assert tuple(both.read) == ("/c",)
    assert tuple(FilesystemGrants.of("host", ["/a"], []).read) == ("/a",)
    assert tuple(FilesystemGrants.of("host", [], ["/a"]).write) == ("/a",)
    assert FilesystemGrants().mode == "read-only-package"


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("cpu_ms_per_task", "ms a task"), ("memory_mb", "MiB"), ("disk_mb", "MiB"), ("swap_mb", "MiB"),
        ("pids_max", "processes and threads"), ("cpu_millis", "thousandths of one core"), ("cpu_weight", "weight"),
        ("cpu_time_ms", "ms of processor time"), ("io_read_bps", "bytes a second"), ("io_write_bps", "bytes a second"),
        ("io_read_iops", "operations a second"), ("io_write_iops", "operations a second"),
        ("net_bps", "bytes a second"),
    ],
)  # fmt: skip
def test_ceiling_is_told_in_its_unit(name: str, unit: str) -> None:
    assert resources.UNITS[name] == unit
    nothing = dict.fromkeys(resources.UNITS, 0)
    assert Ceilings(**{**nothing, name: 7}).describe() == (f"{name} 7 {unit}",)
    unlimited = Ceilings(**{**nothing, name: None})
    assert unlimited.describe() == (f"{name} not limited",)


def test_least_of_each_is_what_value_is_without_more() -> None:
    assert (Spawning().max_depth, Spawning().max_descendants, Spawning().on_parent_exit) == (0, 0, "terminate")
    assert (LifetimeGrant().ttl_seconds, LifetimeGrant().on_expiry) == (0, "terminate")
    assert LifetimeGrant().with_task
    assert not LifetimeGrant(1).with_task
    assert Spawning(1, 1).difference(Spawning.top()) == Spawning.bottom()
    assert Spawning(2, 3, "adopt").difference(Spawning(1, 9)) == Spawning(2, 3, "adopt")
    assert Spawning(1, 3).for_child() == Spawning.bottom()
    assert Spawning(2, 3).for_child() == Spawning(1, 3)
    assert Spawning(None, 3).for_child() == Spawning(None, 3)


@pytest.mark.parametrize(
    ("table", "wanted"),
    [
        ("", LifetimeGrant()),
        ("ttl_seconds = 60\n", LifetimeGrant(60)),
        ("unlimited = true\n", LifetimeGrant(None)),
        ('ttl_seconds = 60\non_expiry = "suspend"\n', LifetimeGrant(60, "suspend")),
    ],
)
def test_life_is_as_long_as_it_says(table: str, wanted: LifetimeGrant) -> None:
    made = asked("python3", f"[lifetime]\n{table}" if table else "").lifetime
    assert made == wanted
    assert made.canonical() == {
        "ttl_seconds": wanted.ttl_seconds,
        "unlimited": wanted.ttl_seconds is None,
        "on_expiry": wanted.on_expiry,
    }


@pytest.mark.parametrize(
    ("inner", "outer", "within"),
    [
        (("host", ["/a"], []), ("host", ["/a"], []), True),
        (("host", ["/a"], []), ("host", ["/b"], []), False),
        (("host", ["/a"], []), ("host", [], ["/a"]), True),
        (("host", [], ["/a"]), ("host", ["/a"], []), False),
        (("host", [], ["/a/b"]), ("host", ["/a"], ["/a/b"]), True),
        (("ephemeral", [], []), ("read-only-package", [], []), False),
    ],
)
def test_file_system_lies_within_another_in_mode_and_reading_and_writing(
    inner: tuple[paths.Mode, list[str], list[str]], outer: tuple[paths.Mode, list[str], list[str]], within: bool
) -> None:
    assert FilesystemGrants.of(*inner).is_subset(FilesystemGrants.of(*outer)) is within


@pytest.mark.parametrize(
    ("domain", "key", "value"),
    [
        ("filesystem", "mode", "everything"), ("resources", "memory_mb", -1), ("resources", "memory_mb", True),
        ("resources", "memory_mb", 1.0), ("spawning", "max_depth", -1), ("lifetime", "ttl_seconds", -1),
        ("lifetime", "on_expiry", "never"), ("spawning", "on_parent_exit", "stay"), ("credentials", "grants", [1]),
    ],
)  # fmt: skip
def test_written_grants_hold_no_value_that_no_grant_has(domain: str, key: str, value: object) -> None:
    document = Effective.top().canonical()
    assert restore.effective(document) == Effective.top()
    with pytest.raises(errors.ArtefactError):
        restore.effective({**document, domain: {**document[domain], key: value}})


def test_what_is_for_people_makes_no_difference() -> None:
    role = Identity.of("a", {})
    assert role == Identity(role.roles, "another")
    assert hash(role) == hash(Identity(role.roles, "another"))
    one, two = (SyscallSet(frozenset({"read"}), profile=name, profile_names=frozenset({name})) for name in ("x", "y"))
    assert one == two
    assert hash(one) == hash(two)
    assert "profile_names" not in repr(one)


def test_every_call_stays_every_call_without_some() -> None:
    assert SyscallSet.top().without(frozenset({"read"})) == SyscallSet.top()
    some = SyscallSet(frozenset({"read", "write"}))
    assert some.without(frozenset({"read"})).names == {"write"}
    assert some.without(frozenset({"openat"})) is some
