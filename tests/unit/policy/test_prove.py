"""The proof itself: what it says and tolerates, what a difference looks like, and children beside their parents."""

from __future__ import annotations

import copy
import functools
import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from msgspec import structs

from policy import errors, prove
from policy.compile.artefacts import Artefacts, canonical
from policy.decompile import read as reading
from policy.grants.effective import DOMAINS
from policy.grants.executables import ExecutableSet
from policy.grants.network import Network
from policy.grants.sets import addresses
from policy.grants.syscalls import SyscallSet
from policy.host import GrantedPath
from tests import proof_kit
from tests.proof_kit import Case
from tests.unit.policy.compile import sample


@functools.cache
def compiled(name: str) -> Case:
    return proof_kit.CASES[name]()


# --- what is said -----


def test_proof_has_line_and_document_domain() -> None:
    proof = compiled("much").prove()
    assert [line.partition(":")[0] for line in proof.lines()] == list(DOMAINS)
    document = proof.document()
    assert document["equal"] is True
    assert list(document["domains"]) == list(DOMAINS)
    assert document["domains"]["filesystem"]["grants"] == ["mode ephemeral", "read /opt/a", "read /usr/share/doc"]
    assert "pinned" in document["domains"]["executables"]["roundings"]


@pytest.mark.parametrize("name", proof_kit.CASES)
def test_every_rounding_used_is_in_table_and_of_its_domain(name: str) -> None:
    for domain, used in compiled(name).prove().roundings.items():
        assert [prove.ROUNDINGS[one].domain for one in used] == [domain] * len(used)


def test_every_rounding_is_used_by_some_policy() -> None:
    # An address grant for every public address beside a name is the one that no case of the kit has.
    public = sample.entries(*((f"{host}", "[443]", "tcp") for host in _public_blocks()), ("example.com", "[80]", "tcp"))
    link = GrantedPath("/opt/l", "dir", real="/opt/a", links=(("/opt/l", "a"),))
    linked = proof_kit.host(granted={"/opt/l": link})
    cases = [
        *(compiled(name) for name in proof_kit.CASES),
        proof_kit.case(sample.manifest(network="full", more=public)),
        # So is a granted path that is a link of the host.
        proof_kit.case(sample.manifest(more='[permissions.filesystem]\nread = ["/opt/l"]\n'), linked),
    ]
    used = {one for case in cases for ids in case.prove().roundings.values() for one in ids}
    assert used == set(prove.ROUNDINGS)


def _public_blocks() -> Iterator[str]:
    for first, last in addresses.PUBLIC:
        yield from (
            str(block[0]) if block.num_addresses == 1 else str(block) for block in addresses.blocks(first, last)
        )


@pytest.mark.parametrize("name", proof_kit.CASES)
def test_what_is_read_has_form_of_grants(name: str) -> None:
    case = compiled(name)
    found = reading.read(case.artefacts.files).grants.canonical()
    assert list(found) == list(case.effective.canonical())
    same = {domain for domain, value in case.effective.canonical().items() if found[domain] == value}
    assert set(found) - same <= {one.domain for one in prove.ROUNDINGS.values()}


# --- what a difference looks like -----


def test_difference_names_domain_direction_and_all_lines() -> None:
    case = compiled("much")
    less = replace(
        case.effective, executables=ExecutableSet.bottom(), syscalls=SyscallSet(frozenset({"read", "mount"}))
    )
    with pytest.raises(errors.ProofError) as wider:
        prove.prove(less, case.artefacts)
    assert wider.value.code == "proof_failed"
    assert wider.value.actor is errors.Actor.MACHINE
    assert wider.value.details["domain"] == "syscalls"
    assert "call execve" in wider.value.details["wider"]
    assert wider.value.details["missing"] == ("call mount",)
    assert {one.domain for one in wider.value.details["differences"]} == {"syscalls", "executables"}


def test_what_is_missing_is_failure_too() -> None:
    case = compiled("least")
    more = replace(case.effective, network=Network.of([("example.com", [(443, 443)], "tls")]))
    with pytest.raises(errors.ProofError, match="less than the grants in network") as found:
        prove.prove(more, case.artefacts)
    assert found.value.details["missing"] == ("connect example.com tls 443",)
    assert not found.value.details["wider"]


def test_mode_without_line_of_its_own_is_difference() -> None:
    case = compiled("least")
    files = replace(case.effective.filesystem, mode="ephemeral")
    with pytest.raises(errors.ProofError) as found:
        prove.prove(replace(case.effective, filesystem=files), case.artefacts)
    assert found.value.details["missing"] == ("mode ephemeral",)


def test_execve_that_was_left_in_is_seen_although_grants_could_not_hold_it() -> None:
    # Effective takes execve away without a program; what is read back must not.
    case, other = compiled("least"), compiled("much")
    files = dict(case.artefacts.files)
    wider = {name: other.artefacts.files[name] for name in ("seccomp.json", "seccomp.bpf")}
    config = case.artefacts.json("config.json")
    config["linux"]["seccomp"] = other.artefacts.json("seccomp.json")
    with pytest.raises(errors.ProofError) as found:
        case.prove(Artefacts({**files, **wider, "config.json": canonical(config)}))
    assert "call execve" in found.value.details["wider"]


def test_argument_rule_of_another_grant_is_difference() -> None:
    # The same calls, but sockets of other families: only the rule for the argument differs.
    case, other = compiled("network"), compiled("https")
    assert case.effective.syscalls.names == other.effective.syscalls.names
    off = replace(case.effective, network=Network.bottom())
    with pytest.raises(errors.ProofError) as found:
        prove.prove(off, case.artefacts)
    assert any(one.domain == "syscalls" and "socket" in str(one.wider) for one in found.value.details["differences"])


def test_artefacts_of_another_package_are_refused_where_it_is_known() -> None:
    case = compiled("much")
    prove.prove(case.effective, case.artefacts)
    with pytest.raises(errors.ProofError, match="as package"):
        prove.prove(case.effective, case.artefacts, known=structs.replace(case.known, package_digest="e" * 64))


# --- anything changed anywhere -----

# What a change may leave equal, and why. Everything else that is changed must be found.
EQUAL = {
    "provenance.json": "causes are told and not enforced; policy.explain.report pairs each with its rule",
    "seccomp.bpf": "a field that an instruction does not have, or a jump to other instructions that answer the same",
    "firewall.nft": "the last refusal of a chain whose policy refuses as well",
    "network.json:grants/N/id": "a name for a grant, which nothing looks up",
    "network.json:grants": "the order of grants",
    "gates.json:tls/names": "names beside addresses that are served for any name",
}


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The place of every value below ``value``."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from paths(one, (*at, key))


def others(value: Any) -> list[Any]:
    """Values to stand where ``value`` stood."""
    if isinstance(value, bool):
        return [not value, int(value), None]
    if isinstance(value, int):
        return [value + 1, value - 1, value * 2, -value - 1, str(value), None, 2**70]
    if isinstance(value, str):
        return [value + "x", "", value[:-1], None, value.upper() + "!", [value], value + "\n", "*"]
    if isinstance(value, list):
        return [[*value, *value[-1:]], value[:-1], value[1:], value[::-1], [], {}, None]
    if isinstance(value, dict):
        return [{}, [], None, {**value, "x": 1}]
    return [0, 1, [], {}, "", "x"]


def changed(document: Any, rng: random.Random) -> Any:
    """The document with one place changed, taken out or renamed."""
    made = copy.deepcopy(document)
    place = rng.choice(list(paths(made))[1:])
    above = functools.reduce(lambda value, key: value[key], place[:-1], made)
    old = above[place[-1]]
    how = rng.choice(["other", "other", "other", "gone", "renamed"])
    if how == "other":
        above[place[-1]] = rng.choice(others(old))
    else:
        del above[place[-1]]
        if how == "renamed" and isinstance(above, dict):
            above[f"{place[-1]}x"] = old
    return made


def falsified(case: Case, name: str, rng: random.Random) -> bytes:
    raw = case.artefacts.files[name]
    if name.endswith(".json") and rng.random() < 0.7:
        return canonical(changed(case.artefacts.json(name), rng))
    at = rng.randrange(len(raw))
    byte = rng.choice([rng.randrange(256), rng.choice(b'0123456789abcdef"{}[],:\n -')])
    return raw[:at] + bytes([byte]) + raw[at + 1 :]


def _keys(value: Any) -> Iterator[Any]:
    return iter(value) if isinstance(value, dict) else iter(range(len(value))) if isinstance(value, list) else iter(())


def place_of(name: str, old: bytes, new: bytes) -> str:
    """The file, and for a document the nearest place that holds all that is changed in it."""
    if not name.endswith(".json"):
        return name
    here, there = json.loads(old), json.loads(new)
    place = []
    while isinstance(here, dict | list) and list(_keys(here)) == list(_keys(there)):
        odd = [key for key in _keys(here) if here[key] != there[key]]
        if len(odd) != 1:
            break
        place.append("N" if isinstance(odd[0], int) else odd[0])
        here, there = here[odd[0]], there[odd[0]]
    return f"{name}:{'/'.join(place)}"


@pytest.mark.parametrize("name", ["least", "much", "https", "rest"])
def test_whatever_is_changed_is_found_or_is_same_policy(name: str) -> None:
    case, rng = compiled(name), random.Random(f"changes of {name}")
    files = [file for file, raw in case.artefacts.files.items() if raw]
    told = re.compile("|".join(f"{re.escape(place)}$" for place in EQUAL) + "|provenance.json:.*")
    for _ in range(160):
        file = rng.choice(files)
        raw = falsified(case, file, rng)
        if raw == case.artefacts.files[file]:
            continue
        try:
            proof = case.prove(Artefacts({**case.artefacts.files, file: raw}))
        except (errors.ProofError, errors.ArtefactError):
            continue
        place = place_of(file, case.artefacts.files[file], raw)
        assert told.match(place), place
        assert proof.found.grants == case.prove().found.grants


# --- children -----

PARENT = {
    "network": "full",
    "filesystem": "ephemeral",
    "resources": "memory_mb = 512\npids_max = 32\ncpu_millis = 500\ncpu_time_ms = 9000\n",
    "more": proof_kit.FILES
    + proof_kit.PROGRAMS
    + proof_kit.SUPERVISED.replace('"suspend"', '"terminate"')
    + sample.entries(("*.example.org", '[80, "8000-8010"]', "tcp"), ("10.0.0.0/8", "[5432]", "tcp")),
}
SMALL = "memory_mb = 64\npids_max = 8\ncpu_millis = 100\ncpu_time_ms = 900\n"
LIFE = "[lifetime]\nttl_seconds = 60\n"


@functools.cache
def parent() -> Artefacts:
    return proof_kit.case(sample.manifest(**PARENT)).artefacts


def child(more: str = "", **changes: str) -> Artefacts:
    life = "" if "[lifetime]" in more else LIFE
    return proof_kit.case(sample.manifest(**{"resources": SMALL, **changes}, more=more + life)).artefacts


INSIDE: dict[str, Callable[[], Artefacts]] = {
    "nothing": child,
    "less of each": lambda: child(
        '[permissions.filesystem]\nread = ["/opt/a"]\n'
        + sample.entries(("www.example.org", "[80]", "tls"), ("10.1.0.0/16", "[5432]", "tcp"))
        + '[permissions.credentials]\ngrants = ["db"]\n',
        network="full",
    ),
    "a level of spawning less": lambda: child("[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 5\n"),
}


@pytest.mark.parametrize("name", INSIDE)
def test_child_that_was_narrowed_lies_within_its_parent(name: str) -> None:
    prove.within(INSIDE[name](), parent(), remaining_seconds=60)


BEYOND: dict[str, Callable[[], Artefacts]] = {
    "filesystem": lambda: child('[permissions.filesystem]\nread = ["/opt/b"]\n'),
    "filesystem above": lambda: child('[permissions.filesystem]\nread = ["/usr/share/doc", "/srv/data"]\n'),
    "network port": lambda: child(sample.entries(("www.example.org", "[81]", "tcp")), network="full"),
    "network name": lambda: child(sample.entries(("example.org", "[80]", "tcp")), network="full"),
    "network address": lambda: child(sample.entries(("11.0.0.1", "[5432]", "tcp")), network="full"),
    "network protocol": lambda: child(sample.entries(("10.0.0.1", "[5432]", "udp")), network="full"),
    "syscalls": lambda: child('[permissions.syscalls]\nallow = ["sync"]\n'),
    "executables": lambda: proof_kit.case(*_cat_of_other_content()).artefacts,
    "resources": lambda: child(resources=SMALL.replace("64", "513")),
    "resources without end": lambda: child(resources=SMALL.replace("cpu_time_ms = 900\n", "")),
    "credentials": lambda: child('[permissions.credentials]\ngrants = ["root"]\n'),
    "skills": lambda: child('[permissions.skills]\nside_effects = ["write"]\n'),
    "spawning": lambda: child("[spawn]\nallowed = true\nmax_depth = 2\nmax_descendants = 5\n"),
    "lifetime": lambda: child(LIFE.replace("60", "61")),
    "lifetime suspended": lambda: child(LIFE + 'on_expiry = "suspend"\n'),
}


def _cat_of_other_content() -> tuple[Any, Any]:
    """A program that the parent has too, at the same path, with other bytes."""
    facts = proof_kit.host()
    cat = sample.closure("/usr/bin/cat", "/usr/bin/cat")
    other = replace(cat, files=tuple(replace(f, sha256="f" * 64) for f in cat.files))
    manifest = sample.manifest(more='[permissions.executables]\nallow = ["/usr/bin/cat"]\n' + LIFE, resources=SMALL)
    return manifest, structs.replace(facts, executables={**facts.executables, "/usr/bin/cat": other})


@pytest.mark.parametrize("name", BEYOND)
def test_what_child_has_beyond_its_parent_is_found(name: str) -> None:
    with pytest.raises(errors.ProofError, match="more than its parent's") as found:
        prove.within(BEYOND[name](), parent(), remaining_seconds=60)
    assert found.value.details["domain"] == name.partition(" ")[0]
    assert found.value.details["wider"]


def test_child_passes_arguments_that_its_parent_does_not() -> None:
    # Without a network its parent may make sockets of one family alone; the names of the calls are the same.
    offline = proof_kit.case(
        sample.manifest(
            **{**PARENT, "network": "off", "more": proof_kit.SUPERVISED.partition("[permissions.skills]")[0]}
        )
    ).artefacts
    online = child(sample.entries(("www.example.org", "[80]", "tcp")), network="full")
    with pytest.raises(errors.ProofError) as found:
        prove.within(online, offline, remaining_seconds=60)
    assert {one.domain for one in found.value.details["differences"]} == {"network", "syscalls"}


def test_child_of_another_machine_is_not_within() -> None:
    other = proof_kit.case(sample.manifest(more=LIFE, resources=SMALL), proof_kit.host(arch="aarch64")).artefacts
    with pytest.raises(errors.ProofError, match="syscalls"):
        prove.within(other, parent(), remaining_seconds=60)


def test_live_children_share_what_their_parent_has() -> None:
    four = [child()] * 4
    prove.within_sums(four, parent())
    prove.within_sums(four[:3], parent(), own={"pids_max": 8, "memory_mb": 256})
    for own, named in (({"pids_max": 1}, "pids_max 33 of 32"), ({"memory_mb": 257}, "memory_mb 513 of 512")):
        with pytest.raises(errors.ProofError, match=named):
            prove.within_sums(four, parent(), own=own)
    with pytest.raises(errors.ProofError, match="cpu_millis 600 of 500"):
        prove.within_sums([child(resources=SMALL.replace("pids_max = 8", "pids_max = 1"))] * 6, parent())
