"""Check grants by example: the rules of the seeds and decisions, and the traps beside them. Laws: tests/property."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from policy import data, errors
from policy.decompile import supervision
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants, PathSet
from policy.grants.resources import Ceilings
from policy.grants.sets import access, addresses
from policy.grants.skills import SkillSet
from policy.grants.spawning import Spawning
from policy.grants.syscalls import SyscallSet
from policy.rules import nine
from tests import rules_kit as kit

HTTPS = [(443, 443)]


def test_paths_go_by_component() -> None:
    data_ = PathSet.of(["/data"])
    assert PathSet.of(["/data/x", "/data"]).paths == ("/data",)
    assert data_.covers("/data/x/y")
    assert not data_.covers("/data2")
    assert not data_.covers("/dat")
    assert data_.meet(PathSet.of(["/data/x", "/data2"])).paths == ("/data/x",)
    assert PathSet.of(["/"]).covers("/")
    assert PathSet.of(["/"]).meet(data_) == data_


def test_paths_sort_by_component_so_that_neighbours_of_prefix_cannot_hide_it() -> None:
    # In byte order `/a-b` comes between `/a` and `/a/b`.
    assert PathSet.of(["/a/b", "/a-b", "/a"]).paths == ("/a", "/a-b")


@pytest.mark.parametrize("path", ["", "a", "/a/", "//a", "/a//b", "/a/./b", "/a/..", "/..", "a/b", "/a\0", "//"])
def test_two_spellings_of_one_place_are_not_two_grants(path: str) -> None:
    with pytest.raises(errors.ManifestError):
        PathSet.of([path])


def test_what_is_written_is_not_listed_as_read_again() -> None:
    both = FilesystemGrants.of("host", ["/a", "/a/w/x", "/r"], ["/a/w"])
    assert both.read.paths == ("/a", "/r")
    assert both.write.paths == ("/a/w",)
    assert both.describe() == ("mode host", "read /a", "read /r", "write /a/w")
    # A child may read a path that its parent can write, but not write a path that its parent only reads.
    assert FilesystemGrants.of("host", ["/a/w/x"]).is_subset(both)
    assert not FilesystemGrants.of("host", [], ["/r"]).is_subset(both)
    assert both.meet(FilesystemGrants.of("host", [], ["/a"])) == FilesystemGrants.of("host", ["/a"], ["/a/w"])


def test_modes_of_file_system_are_ordered() -> None:
    low, mid, high = (FilesystemGrants(mode) for mode in ("read-only-package", "ephemeral", "host"))
    assert low.is_subset(mid)
    assert mid.is_subset(high)
    assert not high.is_subset(mid)
    assert high.meet(mid).mode == "ephemeral"
    assert high.difference(mid).mode == "host"


def test_mode_without_table_meets_one_with_table() -> None:
    table = Network.of([("api.example.com", HTTPS, "tls"), ("10.0.0.5", [(5432, 5432)], "tcp")])
    https, full = Network.without_table("outbound-https-only"), Network.without_table("full")
    only_name = Network.of([("api.example.com", HTTPS, "tls")])
    assert https.meet(table) == only_name
    # A private address is granted by an entry of its own on both sides, never by `full` (decisions.md).
    assert full.meet(table) == only_name
    assert Network.top().meet(table) == table
    assert not table.is_subset(full)
    assert full.meet(https) == https
    assert Network.without_table("off").meet(table) == Network.bottom()


@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "168.63.129.16", "100.100.100.200",
    "0.0.0.0", "224.0.0.1", "255.255.255.255", "::1", "fe80::1", "fd00:ec2::254", "::ffff:10.0.0.1", "64:ff9b::a00:1",
    "2002:a00:1::", "2001:0:a00:1::", "ff02::1", "2001:db8::1", "fec0::1", "::",
])  # fmt: skip
def test_any_public_address_is_no_private_one(address: str) -> None:
    full = Network.without_table("full")
    assert not full.to_address(address)
    assert Network.top().to_address(address).allows("tcp", 80)
    named = Network.of([(address, [(80, 80)], "tcp")])
    assert named.to_address(address).allows("tcp", 80)
    assert not named.is_subset(full)


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "172.32.0.1", "192.169.0.1", "2606:4700::1111", "2a00::1"])
def test_public_addresses_are_public(address: str) -> None:
    assert Network.without_table("full").to_address(address).allows("udp", 53)
    assert Network.without_table("outbound-https-only").to_address(address).allows("tls", 443)
    assert not Network.without_table("outbound-https-only").to_address(address).allows("tcp", 443)


def test_names_by_wildcard_and_addresses_by_block() -> None:
    wild = Network.of([("*.example.com", HTTPS, "tls")])
    for inside in ("a.example.com", "b.a.example.com", "*.a.example.com"):
        assert Network.of([(inside, HTTPS, "tls")]).is_subset(wild), inside
    for outside in ("example.com", "badexample.com", "example.com.evil.org", "*.com", "a.example.org"):
        assert not Network.of([(outside, HTTPS, "tls")]).is_subset(wild), outside
    block = Network.of([("10.0.0.0/8", HTTPS, "tcp")])
    assert Network.of([("10.255.0.0/16", HTTPS, "tls")]).is_subset(block)
    assert not Network.of([("10.0.0.0/7", HTTPS, "tcp")]).is_subset(block)
    # Name rules decide about a name, for any address that it resolves to.
    assert not Network.of([("ten.example.com", HTTPS, "tls")]).is_subset(block)


def test_two_ways_to_write_one_set_are_one_grant() -> None:
    halves = [("10.0.0.0/9", [(80, 81)], "tcp"), ("10.128.0.0/9", [(80, 80), (81, 81)], "tcp")]
    assert Network.of(halves) == Network.of([("10.0.0.0/8", [(80, 81)], "tcp")])  # type: ignore[arg-type]
    assert Network.of([("::ffff:10.0.0.0/104", HTTPS, "tcp")]) == Network.of([("10.0.0.0/8", HTTPS, "tcp")])
    twice = Network.of([("a.b", HTTPS, "tls"), ("a.b", HTTPS, "tcp"), ("*.b", HTTPS, "tls")])
    assert [str(e) for e in twice.entries] == ["*.b tls 443", "a.b tcp 443"]


def test_blocks_that_end_or_begin_together_add_up() -> None:
    nested = Network.of([
        ("10.0.0.0/24", [(80, 80)], "tcp"), ("10.0.0.255", HTTPS, "tcp"), ("10.0.0.0", [(22, 22)], "udp"),
    ])  # fmt: skip
    assert nested.to_address("10.0.0.255") == access.Access(tcp=((80, 80), (443, 443)))
    assert nested.to_address("10.0.0.0") == access.Access(tcp=((80, 80),), udp=((22, 22),))
    assert nested.to_address("10.0.0.254") == nested.to_address("10.0.0.1") == access.Access(tcp=((80, 80),))
    assert not nested.to_address("10.0.1.0")
    assert not nested.to_address("9.255.255.255")


def test_line_of_addresses_does_not_run_from_one_family_into_other() -> None:
    edge = Network.of([("255.255.255.255", HTTPS, "tcp"), ("::", HTTPS, "tcp")])
    assert len(edge.reach) == 2
    assert [str(e) for e in edge.entries] == ["255.255.255.255/32 tcp 443", "::/128 tcp 443"]
    assert len(addresses.PUBLIC) > 10


@pytest.mark.parametrize("host", [
    "", "*", "*.", ".a", "a..b", "A.b", "a.b.", "a_b..c", "1.2.3", "0x7f.1", "127.1", "10.0.0.1/8", "10.0.0.0/33",
    "::/0", "10.0.0.0/255.0.0.0", "fe80::1%eth0", "ex ample.com", "exämple.com", "-a.b",
    "a" * 64 + ".b", "*.*.b", "a.*.b", "1.2.3.4.", "0177.0.0.1",
])  # fmt: skip
def test_hosts_that_could_be_read_in_two_ways_are_refused(host: str) -> None:
    with pytest.raises(errors.ManifestError):
        Network.of([(host, HTTPS, "tls")])


def test_lengths_of_names_are_those_of_dns() -> None:
    label = "a" * 63
    longest = ".".join((label, label, label, "a" * 61))
    assert len(longest) == 253
    assert Network.of([(longest, HTTPS, "tls")]).to_name(longest)
    for too_long in (f"{longest}a", "a" * 64 + ".b"):
        with pytest.raises(errors.ManifestError):
            Network.of([(too_long, HTTPS, "tls")])


def test_mapped_addresses_are_addresses_that_packets_carry() -> None:
    assert Network.of([("::ffff:0:0/96", HTTPS, "tcp")]) == Network.of([("0.0.0.0/0", HTTPS, "tcp")])
    with pytest.raises(errors.ManifestError):
        Network.of([("::fffe:0:0/95", HTTPS, "tcp")])


def test_pinned_program_lies_under_same_path_without_pin() -> None:
    one, two, open_ = (ExecutableSet.of([("/usr/bin/cat", d)]) for d in ("a1" * 32, "b2" * 32, None))
    assert one.is_subset(open_)
    assert not open_.is_subset(one)
    assert one.meet(open_) == one
    assert one.meet(two) == ExecutableSet.bottom()
    assert open_.difference(one) == open_
    assert ExecutableSet.of([("/usr/bin/cat", None), ("/usr/bin/cat", "a1" * 32)]) == open_
    assert open_.paths == ("/usr/bin/cat",)


def test_no_ceiling_is_above_every_ceiling() -> None:
    none, some = Ceilings(memory_mb=None), Ceilings(memory_mb=64)
    assert some.is_subset(none)
    assert not none.is_subset(some)
    assert none.meet(some).memory_mb == 64
    assert Ceilings(memory_mb=0).meet(some).memory_mb == 0
    assert "memory_mb not limited" in none.describe()


def test_limit_of_no_children_is_not_allowed_to_have_any() -> None:
    assert Spawning(3, 0) == Spawning(0, 3) == Spawning.bottom()
    assert not Spawning(3, 0).allowed
    assert Spawning(1, 5).for_child() == Spawning.bottom()
    assert Spawning(2, 5).for_child() == Spawning(1, 5)
    assert Spawning.top().for_child() == Spawning.top()
    assert Spawning(2, 5).describe() == ("spawn depth 2", "spawn descendants 5")
    assert Spawning.top().describe()[:2] == ("spawn depth not limited", "spawn descendants not limited")


def test_end_with_task_is_shortest_life() -> None:
    task, ttl, ever = LifetimeGrant(0), LifetimeGrant(60), LifetimeGrant(None)
    assert task.is_subset(ttl)
    assert ttl.is_subset(ever)
    assert ever.meet(ttl) == ttl
    assert (task.with_task, ttl.unlimited, ever.unlimited) == (True, False, True)


def test_any_set_has_no_names_that_reader_could_take_for_all_of_it() -> None:
    assert SyscallSet(frozenset({"read"}), any=True).names == frozenset()
    assert SyscallSet.top().listing() == ["*"]
    # The names in a set decide, not the profile that they came from.
    mine = SyscallSet(frozenset({"read", "write"}), profile="python3")
    assert mine.meet(SyscallSet.top()).profile == "python3"
    assert mine.meet(SyscallSet(frozenset({"read"}))).names == {"read"}


def test_from_manifest_grants_what_is_written_and_nothing_else() -> None:
    effective = kit.effective_of(kit.MANIFEST)
    assert effective.filesystem.read.paths == ("/srv/docs",)
    assert effective.network.mode == "off"
    assert effective.syscalls.names == data.profile("python3").names
    assert effective.syscalls.profile == "python3"
    assert effective.resources.memory_mb == 128
    assert effective.resources.pids_max == 64
    assert effective.resources.net_bps is None
    assert effective.identity.roles.any
    for name in ("executables", "credentials", "skills", "spawning", "lifetime"):
        assert getattr(effective, name) == DOMAINS[name].bottom()


def test_absent_profile_is_runtimes_own_and_deny_wins() -> None:
    bare = kit.text(('\n[permissions.syscalls]\nprofile = "python3"\n', ""))
    assert kit.effective_of(bare).syscalls == kit.effective_of(kit.MANIFEST).syscalls
    rust = bare.replace('runtime = "python3"', 'runtime = "rust-bin"')
    assert kit.effective_of(rust).syscalls.names == data.profile("static").names
    less = kit.effective_of(kit.MANIFEST + 'allow = ["socket"]\ndeny = ["openat"]\n').syscalls.names
    assert less == (data.profile("python3").names | {"socket"}) - {"openat"}


def test_grants_bring_their_calls_and_only_they_do() -> None:
    network = kit.effective_of(kit.text(('network = "off"', 'network = "full"')))
    assert data.addition("network").names <= network.syscalls.names
    programs = kit.effective_of(kit.MANIFEST + '\n[permissions.executables]\nallow = ["/usr/bin/cat"]\n')
    assert "execve" in programs.syscalls.names
    neither = kit.effective_of(kit.MANIFEST + 'allow = ["execve"]\n')
    assert "execve" not in neither.syscalls.names
    # A child that keeps `execve` but loses every program loses the call too.
    assert (
        "execve" not in programs.meet(dataclasses.replace(programs, executables=ExecutableSet.bottom())).syscalls.names
    )


def test_unknown_profile_is_refused_with_its_line() -> None:
    document = kit.text(('profile = "python3"', 'profile = "python9"'))
    with pytest.raises(errors.ManifestError) as caught:
        nine.requested(kit.manifest(('profile = "python3"', 'profile = "python9"')), roles=data.roles())
    assert caught.value.where == kit.line_of(document, "profile")
    assert "python3" in caught.value.hint


def test_child_gets_one_level_less_and_what_is_left_of_time() -> None:
    mine = dataclasses.replace(Effective.top(), spawning=Spawning(2, 9), lifetime=LifetimeGrant(60))
    child = mine.for_child(remaining_seconds=7)
    assert child.spawning == Spawning(1, 9)
    assert child.lifetime == LifetimeGrant(7)
    assert dataclasses.replace(child, spawning=mine.spawning, lifetime=mine.lifetime) == mine


def test_order_of_manifests_lists_changes_nothing() -> None:
    one = kit.effective_of(
        kit.text(('read = ["/srv/docs"]', 'read = ["/srv/a", "/srv/b"]')) + 'allow = ["bind", "accept"]\n'
    )
    two = kit.effective_of(
        kit.text(('read = ["/srv/docs"]', 'read = ["/srv/b", "/srv/a"]')) + 'allow = ["accept", "bind"]\n'
    )
    assert one == two
    assert one.canonical() == two.canonical()
    assert one.describe() == two.describe()


def test_grants_cannot_be_changed_after_they_were_decided() -> None:
    top = Effective.top()
    for value in (top, *(domain for _, domain in top.domains()), top.filesystem.read, top.skills.allow, access.HTTPS):
        kind: Any = type(value)
        with pytest.raises(AttributeError, match=r"immutable|cannot assign"):
            setattr(value, kind.__match_args__[0], None)


def test_entries_count_although_nobody_says_that_table_was_written() -> None:
    # A Manifest that the parser did not make has no record of the written keys; its entries still bound it.
    parsed = kit.manifest(
        ('network = "off"', 'network = "full"'),
        more='\n[[permissions.network]]\nhost = "a.example"\nports = [443]\nprotocol = "tls"\n',
    )
    remade = type(parsed).model_construct(**dict(parsed))
    assert not remade.wrote("permissions.network")
    assert nine.requested(remade, roles=data.roles()) == nine.requested(parsed, roles=data.roles())


def _calls(calls: int | None) -> SkillSet:
    limits = {"calls": calls, "calls_per_minute": 60, "call_ms": 1, "argument_bytes": 2, "answer_bytes": 2}
    return SkillSet.of([_TOOL], ["read"], limits=limits)


_TOOL = "matrix://tool/mcp/fs/read@1.0"


def test_budget_of_calls_is_within_larger_and_none_is_within_none() -> None:
    assert _calls(5).is_subset(_calls(6))
    assert _calls(5).is_subset(_calls(None))
    assert not _calls(6).is_subset(_calls(5))
    assert not _calls(None).is_subset(_calls(5))
    assert _calls(6).meet(_calls(5)) == _calls(None).meet(_calls(5)) == _calls(5)
    assert "tools: 6 calls a run" in _calls(6).difference(_calls(5)).describe()
    assert "tools: any number of calls a run" in _calls(None).difference(_calls(5)).describe()
    assert _calls(5).difference(_calls(None)).calls == 0


@pytest.mark.parametrize("calls", [5, None])
def test_budget_of_calls_is_read_back_and_no_other_form(calls: int | None) -> None:
    written = _calls(calls).canonical()
    assert ("calls" in written["limits"]) == (calls is not None), "as artefacts were before there was a budget"
    assert supervision.read_skills(written, "here") == _calls(calls)
    for wrong in ({"calls": None}, {"calls": "5"}, {"calls": True}, {"calls": -1}, {"call": 5}):
        with pytest.raises(errors.ArtefactError):
            supervision.read_skills({**written, "limits": {**written["limits"], **wrong}}, "here")
