"""``policy diff``: rows by risk, counts as people say them, and widening exactly when the order says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from msgspec import structs

from policy.decompile import conditions, read
from policy.explain import diff
from policy.grants.credentials import CredentialSet
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import ExecutableSet
from policy.grants.lifetime import LifetimeGrant
from policy.grants.network import Network
from policy.grants.paths import FilesystemGrants
from policy.grants.resources import UNITS, Ceilings
from policy.grants.skills import SkillSet
from policy.grants.spawning import Spawning
from policy.grants.syscalls import SyscallSet
from tests.property.policy import grants_strategies
from tests.unit.policy.compile import sample

NOTHING = replace(Effective.bottom(), resources=Ceilings(*(1 for _ in UNITS)))
GRANTS = """
[permissions.filesystem]
read = ["/srv/data"]
[permissions.syscalls]
allow = ["getcpu"]
[permissions.executables]
allow = ["/usr/bin/grep"]
"""
PROGRAM = ExecutableSet.of([("/usr/bin/cat", None)])


def test_two_equal_policies_have_no_difference() -> None:
    found = diff.compare(NOTHING, NOTHING)
    assert (found.widens, found.rows, found.summary()) == (False, (), "no difference")


def test_example_of_issue() -> None:
    old = replace(
        NOTHING,
        syscalls=SyscallSet.of(["read"]),
        network=Network.of([("192.0.2.7", [(80, 80)], "tcp"), ("198.51.100.9", [(80, 80)], "tcp")]),
    )
    new = replace(
        NOTHING,
        syscalls=SyscallSet.of(["read", "sync", "getcpu", "mlock"]),
        filesystem=FilesystemGrants.of("read-only-package", write=["/srv/out"]),
    )
    found = diff.compare(old, new)
    assert found.widens
    assert found.summary() == "+3 syscalls, +1 writable path, -2 addresses"
    assert diff.compare(new, old).summary() == "-3 syscalls, -1 writable path, +2 addresses"


@pytest.mark.parametrize(
    ("change", "risk", "summary"),
    [
        ({"executables": PROGRAM}, "runs other code", "+1 program"),
        ({"filesystem": FilesystemGrants.of("ephemeral")}, "uses the machine", "+1 filesystem mode"),
        (
            {"filesystem": FilesystemGrants.of("read-only-package", ["/a"])},
            "reads files of the host",
            "+1 readable path",
        ),
        ({"network": Network.of([("a.org", [(443, 443)], "tls")])}, "reaches the network", "+1 name"),
        ({"credentials": CredentialSet.of(["key"])}, "holds secrets", "+1 credential"),
        ({"skills": SkillSet.of(["matrix://tool/mcp/a/b@1"])}, "acts through tools", "+1 tool"),
        ({"skills": SkillSet.of([], ["read", "write"])}, "acts through tools", "+2 side effect classes"),
        ({"spawning": Spawning(1, 1)}, "starts agents", "+2 spawn limits"),
        ({"lifetime": LifetimeGrant(60)}, "lives longer", "+1 lifetime limit"),
        ({"resources": structs.replace(NOTHING.resources, memory_mb=2)}, "uses the machine", "+1 ceiling"),
    ],
)  # fmt: skip
def test_each_kind_of_grant_is_row_of_its_risk(change: dict[str, object], risk: str, summary: str) -> None:
    wider = replace(NOTHING, **change)  # type: ignore[arg-type]
    found = diff.compare(NOTHING, wider)
    assert (found.widens, found.summary(), found.rows[0].risk) == (True, summary, risk)
    back = diff.compare(wider, NOTHING)
    assert (back.widens, back.summary()) == (False, summary.replace("+", "-"))


def test_ceilings_have_their_unit_on_both_sides() -> None:
    other = Ceilings(memory_mb=128, cpu_ms_per_task=1, pids_max=7, cpu_weight=9, net_bps=None)
    mine = Ceilings(memory_mb=256, cpu_ms_per_task=2, pids_max=None, cpu_weight=10, net_bps=5)
    found = diff.compare(replace(NOTHING, resources=other), replace(NOTHING, resources=mine))
    assert [line for row in found.rows for line in (*row.added, *row.removed)] == [
        "cpu_ms_per_task 2 ms a task, was 1 ms a task",
        "memory_mb 256 MiB, was 128 MiB",
        "pids_max unlimited, was 7 processes and threads",
        "cpu_weight 10, was 9",
        "net_bps unlimited, now 5 bytes a second",
    ]


def test_rows_stand_in_order_of_their_risk() -> None:
    found = diff.compare(Effective.bottom(), Effective.top())
    risks = [diff.RISKS.index(row.risk) for row in found.rows]
    assert risks == sorted(risks)
    assert {row.domain for row in found.rows} == set(DOMAINS)


@settings(max_examples=150)
@given(grants_strategies.effectives, grants_strategies.effectives)
def test_it_widens_exactly_when_line_is_added(old: Effective, new: Effective) -> None:
    found = diff.compare(old, new)
    assert found.widens == (not new.is_subset(old))
    assert found.widens == any(row.added for row in found.rows)
    assert any(row.removed for row in found.rows) == (not old.is_subset(new))


def test_artefacts_are_compared_by_what_they_say() -> None:
    old = sample.compiled(sample.manifest())
    same = sample.compiled(sample.manifest(), sample.host(kernel="6.99"))
    found = diff.compare_artefacts(old, same)
    assert (found.widens, found.rows, found.differs) == (False, (), ())
    new = sample.compiled(sample.manifest(more=GRANTS, resources="memory_mb = 1024"))
    wider = diff.compare_artefacts(old, new)
    assert wider.widens
    summary = [(row.noun, bool(row.added), bool(row.removed)) for row in wider.rows]
    nouns = ("program", "syscall", "readable path", "ceiling")
    assert summary == [(noun, True, False) for noun in nouns]
    assert wider.differs == ()
    assert not diff.compare_artefacts(new, old).widens


def test_argument_rule_that_opens_widens() -> None:
    old = sample.compiled(sample.manifest())
    filters = json.loads(old.files["seccomp.json"])
    narrow = next(entry for entry in filters["syscalls"] if entry["names"] == ["clone"])
    assert narrow["args"]
    found = read.read(old.files)
    opened = structs.replace(
        found, calls=structs.replace(found.calls, allowed={**found.calls.allowed, "clone": conditions.ALWAYS})
    )
    assert diff.arguments(opened, found) == ("call clone with more arguments",)
    assert diff.arguments(found, opened) == ()


def test_another_runtime_is_named() -> None:
    other = sample.closure("python3", "/usr/bin/python3.12")
    found = diff.compare_artefacts(
        sample.compiled(sample.manifest()), sample.compiled(sample.manifest(), sample.host(runtimes={"python3": other}))
    )
    assert found.differs == ("the content of the runtime", "what is started")
    assert not found.widens
