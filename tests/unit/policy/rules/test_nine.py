"""The nine rules: their order, and for each the cases that break it and nothing else.

Every case is run through all nine rules alone. One that a second rule refuses as well proves nothing about the first.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from msgspec import structs

from policy import data, errors
from policy.grants.effective import Effective
from policy.package import Package
from policy.rules import nine
from policy.rules.case import Case, Owner, Unsigned
from policy.rules.parent import Drawn
from tests import rules_kit as kit
from tests import signing_kit

READER = ('runtime = "python3"', 'runtime = "python3"\nrole = "observer"')
WRITES = ('filesystem = "read-only-package"', 'filesystem = "host"')
READS = 'read = ["/srv/docs"]'
LOCAL = 'required = false\nbackend = "trusted-local"'
UNSIGNED_TEXT = kit.text(('required = true\nbackend = "linux-gvisor"', LOCAL), (READS, "read = []"))

MID = kit.ancestor(run_id="run-2", agent_id="mid", depth=1)
MID2 = kit.ancestor(run_id="run-2", agent_id="mid", depth=2)


def unsigned(document: str = UNSIGNED_TEXT, *, allowed: bool = True) -> Case:
    package = Package({"agent.toml": document.encode(), "main.py": b"1\n"})
    made = kit.case(document)
    return dataclasses.replace(made, trusted=Unsigned(package, allowed))


def calls(**lists: list[str]) -> str:
    lines = "".join(f"{key} = {value}\n" for key, value in lists.items()).replace("'", '"')
    return kit.text(('profile = "python3"\n', 'profile = "python3"\n' + lines))


def spawned(document: str = kit.MANIFEST, **changes: Any) -> Case:
    return kit.case(document, parent=kit.parent(**changes))


def with_denied_profile() -> Case:
    made = kit.case()
    calls_ = dataclasses.replace(made.requested.syscalls, names=made.requested.syscalls.names | {"ptrace"})
    return dataclasses.replace(made, requested=dataclasses.replace(made.requested, syscalls=calls_))


NETWORK_FULL = ('network = "off"', 'network = "full"')
ENTRY = '\n[[permissions.network]]\nhost = "api.example.com"\nports = [443]\nprotocol = "tls"\n'

# name: (rule, error, dotted grant, start of the line it stands on, message as a pattern, the case)
CASES: dict[str, tuple[int, type[errors.CovenantError], str, str, str, kit.Build]] = {
    # (1) schema
    "entry-missing": (
        1, errors.SchemaViolation, "agent.entry", "entry", "entry `main.py` is not a file of the package",
        lambda: kit.case(files={"agent.toml": kit.MANIFEST.encode()}),
    ),
    "network-not-written": (
        1, errors.SchemaViolation, "resources.network", "[resources]", "`resources.network` is missing",
        lambda: kit.case(kit.text(('network = "off"\n', ""))),
    ),
    "roles-from-the-future": (
        1, errors.SchemaViolation, "agent.role", "[agent]", "signed with roles version 9, this host has 1",
        lambda: kit.case(statement={"roles_version": 9}),
    ),
    "role-of-an-older-table": (
        1, errors.SchemaViolation, "agent.role", "role", "signed with roles version 0, this host has 1",
        lambda: kit.case(kit.text(READER), statement={"roles_version": 0}),
    ),
    "deny-list-from-the-future": (
        1, errors.SchemaViolation, "permissions.syscalls", "[permissions.syscalls]", "signed with deny list version 9",
        lambda: kit.case(statement={"deny_version": 9}),
    ),
    "unknown-section-not-signed": (
        1, errors.SchemaViolation, "elsewhere", "[elsewhere]", "unknown section `elsewhere` is not as the signed",
        lambda: kit.case(kit.text(more="\n[elsewhere]\nx = 1\n")),
    ),
    "execve-without-a-program": (
        1, errors.SchemaViolation, "permissions.syscalls.allow[1]", "allow", "`execve` is allowed while no executable",
        lambda: kit.case(calls(allow=["socket", "execve"])),
    ),
    "never-the-root-of-proc": (
        1, errors.NeverGrantableError, "permissions.filesystem.read[1]", "read", "`/proc/self` lies in `/proc`",
        lambda: kit.case(kit.text((READS, 'read = ["/srv/docs", "/proc/self"]'))),
    ),
    "never-what-contains-run": (
        1, errors.NeverGrantableError, "permissions.filesystem.read[0]", "read", "`/var` contains `/var/",
        lambda: kit.case(kit.text((READS, 'read = ["/var"]'))),
    ),
    "never-write-to-programs": (
        1, errors.NeverGrantableError, "permissions.filesystem.write[0]", "write", "`/usr/local/bin` lies in `/usr`",
        lambda: kit.case(kit.text(WRITES, (READS, 'write = ["/usr/local/bin"]'))),
    ),
    "never-a-program-of-dev": (
        1, errors.NeverGrantableError, "permissions.executables.allow[0]", "allow", "`/dev/shm/x` lies in `/dev`",
        lambda: kit.case(kit.text(more='\n[permissions.executables]\nallow = ["/dev/shm/x"]\n')),
    ),
    "never-this-hosts-state": (
        1, errors.NeverGrantableError, "permissions.filesystem.read[0]", "read", "`/srv/docs` contains `/srv/docs/st",
        lambda: kit.case(extra_never={"/srv/docs/state": "it decides what may start"}),
    ),
    # (2) signature
    "operator-did-not-sign": (
        2, errors.SignatureError, "", "", "`agent.operator` names `mallory`, who did not sign",
        lambda: kit.case(kit.text(('runtime = "python3"', 'runtime = "python3"\noperator = "mallory"'))),
    ),
    "signer-not-for-this-role": (
        2, errors.UnknownKeyError, "", "", "no signer may sign for role `observer`",
        lambda: kit.case(
            kit.text(READER),
            root=signing_kit.root(signing_kit.operator(scope=signing_kit.scope(roles=("writer",)))),
        ),
    ),
    "statement-of-another-agent": (
        2, errors.SignatureError, "", "", "the manifest is of agent `hello`, the signed statement of `other`",
        lambda: kit.case(statement={"agent_id": "other"}),
    ),
    "ended-since-it-was-verified": (
        2, errors.ExpiredError, "", "", "the envelope has expired",
        lambda: kit.case(now_ms=kit.NOW + 91 * signing_kit.DAY),
    ),
    "unsigned-where-not-allowed": (
        2, errors.UnsignedError, "", "", "the package is not signed", lambda: unsigned(allowed=False),
    ),
    "unsigned-under-gvisor": (
        2, errors.UnsignedError, "", "", "the package is not signed",
        lambda: unsigned(kit.text(("required = true\n", "required = false\n"))),
    ),
    # (3) role
    "role-unknown": (
        3, errors.RoleViolation, "agent.role", "role", "role `obserwer` is not known",
        lambda: kit.case(kit.text((READER[0], 'runtime = "python3"\nrole = "obserwer"'))),
    ),
    "role-write-path": (
        3, errors.RoleViolation, "permissions.filesystem.write[0]", "write", "`write /srv/out` is not within role",
        lambda: kit.case(kit.text(READER, WRITES, (READS, 'write = ["/srv/out"]'))),
    ),
    "role-mode": (
        3, errors.RoleViolation, "sandbox.filesystem", "filesystem", "`mode ephemeral` is not within role `observer`",
        lambda: kit.case(kit.text(READER, ('"read-only-package"', '"ephemeral"'))),
    ),
    "role-network": (
        3, errors.RoleViolation, "permissions.network[0]", "[[perm", "`connect api.example.com tls 443` is not within",
        lambda: kit.case(kit.text(READER, NETWORK_FULL, more=ENTRY)),
    ),
    "role-network-without-table": (
        3, errors.RoleViolation, "resources.network", "network", "`connect any public host tcp 1-65535; ",
        lambda: kit.case(kit.text(READER, NETWORK_FULL)),
    ),
    "role-memory": (
        3, errors.RoleViolation, "resources.memory_mb", "memory_mb", "`memory_mb 513 MiB` is not within role",
        lambda: kit.case(kit.text(READER, ("memory_mb = 128", "memory_mb = 513"))),
    ),
    "role-program": (
        3, errors.RoleViolation, "permissions.executables.allow[0]", "allow", "`execute /usr/bin/cat` is not within",
        lambda: kit.case(kit.text(READER, more='\n[permissions.executables]\nallow = ["/usr/bin/cat"]\n')),
    ),
    "role-credential": (
        3, errors.RoleViolation, "permissions.credentials.grants[0]", "grants", "`credential db` is not within role",
        lambda: kit.case(kit.text(READER, more='\n[permissions.credentials]\ngrants = ["db"]\n')),
    ),
    "role-skill": (
        3, errors.RoleViolation, "permissions.skills.side_effects[0]", "side", "`side effect shell` is not within",
        lambda: kit.case(kit.text(READER, more='\n[permissions.skills]\nside_effects = ["shell"]\n')),
    ),
    "role-spawn": (
        3, errors.RoleViolation, "spawn.max_depth", "max_depth", "is not within role `observer`",
        lambda: kit.case(kit.text(READER, more="\n[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n")),
    ),
    "role-lifetime": (
        3, errors.RoleViolation, "lifetime.ttl_seconds", "ttl", "`lifetime 3601 s` is not within role `observer`",
        lambda: kit.case(kit.text(READER, more="\n[lifetime]\nttl_seconds = 3601\n")),
    ),
    # (4) parent
    "parent-path": (
        4, errors.ParentViolation, "permissions.filesystem.read[0]", "read", "`read /srv/docs2` is not within parent",
        lambda: spawned(kit.text((READS, 'read = ["/srv/docs2"]'))),
    ),
    "parent-lifetime": (
        4, errors.ParentViolation, "lifetime.ttl_seconds", "ttl", "`lifetime 600 s` is not within parent `boss`",
        lambda: kit.case(kit.text(more="\n[lifetime]\nttl_seconds = 600\n"), parent=kit.parent(remaining_seconds=599)),
    ),
    "parent-depth": (
        4, errors.ParentViolation, "spawn.max_depth", "max_depth", "is not within parent `boss`",
        lambda: spawned(kit.text(more="\n[spawn]\nallowed = true\nmax_depth = 2\nmax_descendants = 1\n")),
    ),
    "parent-role": (
        4, errors.ParentViolation, "agent.role", "[agent]", "`any role` is not within parent `boss`",
        lambda: kit.case(
            parent=kit.parent(kit.PARENT_MANIFEST.replace(*READER).replace("observer", "coordinator"))
        ),
    ),
    "parent-without-time": (
        4, errors.ParentViolation, "lifetime", "", "agent `boss` has no time left",
        lambda: kit.case(parent=kit.parent(remaining_seconds=0)),
    ),
    "child-with-a-workspace": (
        4, errors.ParentViolation, "workspace.mode", "mode", "has no caller whose directory it could be",
        lambda: spawned(kit.text(
            ('filesystem = "read-only-package"', 'filesystem = "ephemeral"'),
            more='\n[workspace]\nmode = "overlay"\nfrom = ["/srv"]\nmax_mb = 8\n',
        )),
    ),
    "signed-for-another-parent": (
        4, errors.ParentViolation, "", "", "was signed for one parent and is started by agent `boss`",
        lambda: kit.case(statement={"parent_digest": "ef" * 32}, parent=kit.parent()),
    ),
    "signed-for-a-parent-and-has-none": (
        4, errors.ParentViolation, "", "", "was signed for one parent and is started by no parent",
        lambda: kit.case(statement={"parent_digest": "ef" * 32}),
    ),
    # (5) spawn budget
    "budget-no-spawning": (
        5, errors.SpawnBudgetViolation, "spawn.allowed", "", "agent `boss` may not start agents",
        lambda: kit.case(parent=kit.parent(kit.PARENT_MANIFEST.partition("\n[spawn]")[0])),
    ),
    "budget-depth-of-an-ancestor": (
        5, errors.SpawnBudgetViolation, "spawn.max_depth", "", "would be 3 levels below agent `boss`, which allows 2",
        lambda: spawned(run_id="run-2", ancestors=(kit.ancestor(), MID2)),
    ),
    "budget-descendants-of-an-ancestor": (
        5, errors.SpawnBudgetViolation, "spawn.max_descendants", "", "agent `boss` has 3 live descendants and may",
        lambda: spawned(run_id="run-2", ancestors=(kit.ancestor(live_descendants=3), MID)),
    ),
    "budget-memory-of-the-children": (
        5, errors.SpawnBudgetViolation, "resources.memory_mb", "memory_mb", "memory_mb 128 does not fit agent `boss`",
        lambda: spawned(drawn=Drawn(memory_mb=897)),
    ),
    "budget-pids-of-the-children": (
        5, errors.SpawnBudgetViolation, "resources.pids_max", "[resources]", "pids_max 64 does not fit agent `boss`",
        lambda: spawned(drawn=Drawn(pids_max=1)),
    ),
    # (6) resources of this host: the sentry's own share counts
    "host-memory": (
        6, errors.ResourceViolation, "resources.memory_mb", "memory_mb", "needs 224 MiB and this host has 223",
        lambda: kit.case(host=structs.replace(kit.HOST, memory_available_mb=223)),
    ),
    "host-memory-for-scratch": (
        6, errors.ResourceViolation, "resources.memory_mb", "memory_mb", "memory_mb needs 240 MiB",
        lambda: kit.case(
            kit.text(('"read-only-package"', '"ephemeral"')),
            host=structs.replace(kit.HOST, memory_available_mb=239),
        ),
    ),
    "host-pids": (
        6, errors.ResourceViolation, "resources.pids_max", "[resources]", "pids_max needs 192 tasks",
        lambda: kit.case(host=structs.replace(kit.HOST, pids_free=191)),
    ),
    "host-cores": (
        6, errors.ResourceViolation, "resources.cpu_millis", "cpu_millis", "needs 2001 thousandths of a core",
        lambda: kit.case(kit.text(("disk_mb = 16", "disk_mb = 16\ncpu_millis = 2001"))),
    ),
    "host-disk": (
        6, errors.ResourceViolation, "resources.disk_mb", "disk_mb", "disk_mb needs 16 MiB and this host has 15",
        lambda: kit.case(
            kit.text(WRITES, (READS, 'write = ["/srv/out"]')), host=structs.replace(kit.HOST, disk_free_mb=15)
        ),
    ),
    # (7) deny list
    "denied-call": (
        7, errors.DenyListViolation, "permissions.syscalls.allow[1]", "allow", "`ptrace` is permanently denied: ",
        lambda: kit.case(calls(allow=["socket", "ptrace"])),
    ),
    "denied-call-that-the-lattice-drops": (
        7, errors.DenyListViolation, "permissions.syscalls.allow[0]", "allow", "`execveat` is permanently denied: ",
        lambda: kit.case(calls(allow=["execveat"])),
    ),
    "denied-call-of-a-profile": (
        7, errors.DenyListViolation, "permissions.syscalls.profile", "profile", "`ptrace` is permanently denied: ",
        with_denied_profile,
    ),
    "unknown-call": (
        7, errors.UnknownSyscallError, "", "allow", "system call `opnat` is not known",
        lambda: kit.case(calls(allow=["opnat"])),
    ),
    "unknown-call-denied": (
        7, errors.UnknownSyscallError, "", "deny", "system call `sokcet` is not known",
        lambda: kit.case(calls(deny=["sokcet"])),
    ),
    # (8) identity
    "id-of-another-package": (
        8, errors.IdentityViolation, "agent.id", "id", "agent id `hello` belongs to `agents/hullo`",
        lambda: kit.case(identities={"hello": (Owner("agents/hullo", "ee" * 32),)}, package_name="agents/hello"),
    ),
    "id-of-a-package-without-a-place": (
        8, errors.IdentityViolation, "agent.id", "id", "agent id `hello` belongs to ",
        lambda: kit.case(identities={"hello": (Owner("", "ee" * 32),)}),
    ),
    # (9) lifetime
    "unlimited-not-approved": (
        9, errors.LifetimeViolation, "lifetime.unlimited", "unlimited", "an unlimited lifetime is not approved",
        lambda: kit.case(kit.text(more="\n[lifetime]\nunlimited = true\n")),
    ),
    "unlimited-by-a-signer-who-may-not": (
        9, errors.LifetimeViolation, "lifetime.unlimited", "unlimited", "no signer may approve an unlimited lifetime",
        lambda: kit.case(
            kit.text(more="\n[lifetime]\nunlimited = true\n"),
            statement={"approve_unlimited": True},
            root=signing_kit.root(signing_kit.operator(scope=signing_kit.scope(unlimited=False))),
        ),
    ),
    "unlimited-and-unsigned": (
        9, errors.LifetimeViolation, "lifetime.unlimited", "unlimited", "an unlimited lifetime is not approved",
        lambda: unsigned(UNSIGNED_TEXT + "\n[lifetime]\nunlimited = true\n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_case_breaks_one_rule_alone(name: str) -> None:
    rule, kind, grant, start, message, build = CASES[name]
    made = build()
    refused = kit.refusals(made)
    assert set(refused) == {rule}
    error = refused[rule]
    assert type(error) is kind
    assert re.search(re.escape(message), error.message), error.message
    assert getattr(error, "grant", "") == grant
    assert error.message == error.message.strip()
    assert "\n" not in error.message
    if start:
        document = made.manifest._source.text
        assert error.where == kit.line_of(document, start)
    if isinstance(error, errors.RuleViolation):
        assert error.rule == rule
    with pytest.raises(kind):
        nine.decide(made)


def test_every_rule_has_case_and_class_of_its_own() -> None:
    assert {case[0] for case in CASES.values()} == set(range(1, 10))
    violations = {
        number: {case[1] for case in CASES.values() if case[0] == number and issubclass(case[1], errors.RuleViolation)}
        for number in range(1, 10)
    }
    assert all(violations[n] for n in range(1, 10) if n != 2)
    assert len(nine.RULES) == 9


@pytest.mark.parametrize(
    "accepted",
    [
        kit.case,
        lambda: kit.case(kit.text(READER)),
        lambda: kit.case(kit.text(READER, ("memory_mb = 128", "memory_mb = 512"))),
        lambda: kit.case(kit.text(more="\n[lifetime]\nunlimited = true\n"), statement={"approve_unlimited": True}),
        lambda: kit.case(kit.text(more="\n[elsewhere]\nx = 1\n"), statement={"unknown_sections": ("elsewhere",)}),
        lambda: kit.case(statement={"deny_version": 0, "roles_version": 0}),
        spawned,
        lambda: spawned(drawn=Drawn(memory_mb=896, cpu_millis=0, pids_max=0)),
        lambda: spawned(run_id="run-2", ancestors=(kit.ancestor(live_descendants=2), MID)),
        lambda: kit.case(statement={"parent_digest": "cd" * 32}, parent=kit.parent()),
        lambda: kit.case(kit.text((READS, 'read = ["/srv/docs/deep"]')), parent=kit.parent()),
        lambda: kit.case(host=structs.replace(kit.HOST, memory_available_mb=224, pids_free=192)),
        lambda: kit.case(calls(allow=["socket"], deny=["ptrace"])),
        lambda: kit.case(identities={"hello": (Owner("agents/hello", "ee" * 32),)}, package_name="agents/hello"),
        lambda: kit.case(identities={"other": (Owner("agents/other", "ee" * 32),)}),
        unsigned,
        lambda: kit.case(kit.text(('runtime = "python3"', 'runtime = "python3"\noperator = "op1"'))),
        # Where programs lie may be read and started from, only not written to.
        lambda: kit.case(kit.text((READS, 'read = ["/usr/share/doc"]'))),
        lambda: kit.case(kit.text(more='\n[permissions.executables]\nallow = ["/usr/bin/cat"]\n')),
    ],
    ids=range(19),
)
def test_what_stands_just_inside_is_accepted(accepted: kit.Build) -> None:
    """The positive controls: each is one step from a refused case."""
    made = accepted()
    assert kit.refusals(made) == {}
    assert nine.decide(made).effective.is_subset(made.requested)


def test_copy_of_same_package_elsewhere_is_same_package() -> None:
    made = kit.case()
    assert not isinstance(made.trusted, Unsigned)
    same = Owner("agents/copy", made.trusted.payload_digest)
    assert kit.refusals(dataclasses.replace(made, identities={"hello": (same,)})) == {}
    other = Owner("agents/second", "ee" * 32)
    both = dataclasses.replace(made, identities={"hello": (same, other)})
    assert set(kit.refusals(both)) == {8}


def test_rules_are_asked_in_order_and_first_refusal_counts() -> None:
    """One case that breaks rules 1 to 9, mended one rule at a time: each refusal is that of the lowest left."""
    broken = "memory_mb = 3000\ncpu_millis = 3000"
    document = kit.text(READER, ("memory_mb = 128", broken), more="\n[lifetime]\nunlimited = true\n")
    document = document.replace('profile = "python3"\n', 'profile = "python3"\nallow = ["reboot"]\n')
    wide = kit.PARENT_MANIFEST.replace("memory_mb = 1024", "memory_mb = 9000\ncpu_millis = 9000")
    made = kit.case(
        document,
        statement={"roles_version": 9, "agent_id": "other"},
        parent=kit.parent(wide, ancestors=(kit.ancestor(live_descendants=3),)),
        identities={"hello": (Owner("agents/hullo", "ee" * 32),)},
    )
    good = kit.case(document)
    mended = kit.manifest(("memory_mb = 128", broken), more="\n[lifetime]\nunlimited = true\n")
    mends: list[dict[str, object]] = [
        {"trusted": kit.case(document, statement={"agent_id": "other"}).trusted},
        {"trusted": good.trusted},
        {"manifest": kit.case(document.replace(READER[1], READER[0])).manifest},
        {"on_excess": "narrow"},
        {"parent": kit.parent(wide)},
        {"host": structs.replace(kit.HOST, memory_available_mb=9000, cpus=9)},
        {"manifest": mended, "requested": nine.requested(mended, roles=made.roles)},
        {"identities": {}},
    ]
    for rule, mend in enumerate(mends, 1):
        assert min(kit.refusals(made)) == rule
        with pytest.raises(type(kit.refusals(made)[rule])):
            nine.decide(made)
        made = dataclasses.replace(made, **mend)  # type: ignore[arg-type]
    assert set(kit.refusals(made)) == {9}


def test_narrow_gives_meet_and_reports_what_was_taken() -> None:
    document = kit.text((READS, 'read = ["/srv/docs/a", "/srv/other"]'), ("memory_mb = 128", "memory_mb = 1500"))
    made = kit.case(document, parent=kit.parent(), on_excess="narrow")
    verdict = nine.decide(made)
    assert verdict.effective.filesystem.read.paths == ("/srv/docs/a",)
    assert verdict.effective.resources.memory_mb == 1024
    assert verdict.delegation is not None
    report = verdict.delegation.report()
    assert report["filesystem"]["requested"] == ["read /srv/docs/a", "read /srv/other"]
    assert report["filesystem"]["granted"] == ["read /srv/docs/a"]
    assert report["filesystem"]["removed"] == ["read /srv/other"]
    assert report["resources"]["removed"] == ["memory_mb 1500 MiB"]
    assert report["syscalls"]["removed"] == []


def test_reject_reports_same_and_lists_every_excess() -> None:
    document = kit.text((READS, 'read = ["/srv/docs/a", "/srv/other"]'), ("memory_mb = 128", "memory_mb = 1500"))
    with pytest.raises(errors.ParentViolation) as caught:
        nine.decide(kit.case(document, parent=kit.parent()))
    rows = caught.value.details["excess"]
    assert [row["grant"] for row in rows] == ["permissions.filesystem.read[1]", "resources.memory_mb"]
    assert caught.value.details["domains"]["filesystem"]["removed"] == ["read /srv/other"]
    assert "it allows in filesystem: read /srv/docs" in caught.value.hint
    assert caught.value.hint.endswith("; grant it to the parent too, or take it out")


def test_narrowed_resources_are_what_later_rules_see() -> None:
    document = kit.text(("memory_mb = 128", "memory_mb = 4000"))
    assert set(kit.refusals(kit.case(document, parent=kit.parent()))) == {4}
    assert kit.refusals(kit.case(document, parent=kit.parent(), on_excess="narrow")) == {}


def test_check_gives_effective_grants_and_asks_for_no_more_than_was_signed() -> None:
    made = kit.case()
    assert not isinstance(made.trusted, Unsigned)
    common = {"host": kit.HOST, "roles": data.roles(), "deny": data.deny(), "now_ms": kit.NOW}
    effective = nine.check(made.trusted, made.manifest, **common)
    assert effective == made.requested
    assert nine.check(made.trusted, made.manifest, wanted=Effective.top(), **common) == effective
    less = dataclasses.replace(effective, resources=structs.replace(effective.resources, memory_mb=64))
    assert nine.check(made.trusted, made.manifest, wanted=less, **common).resources.memory_mb == 64


def test_what_is_left_of_budget_is_told() -> None:
    assert kit.refusals(spawned(drawn=Drawn(memory_mb=897)))[5].hint == "at most 127 are left"
    assert kit.refusals(spawned(drawn=Drawn(memory_mb=2000)))[5].hint == "at most 0 are left"


def test_who_is_behind_has_to_act() -> None:
    older, newer = (
        kit.refusals(kit.case(kit.text(READER), statement={"roles_version": version}))[1].hint for version in (0, 9)
    )
    assert (older, newer) == ("sign the package again", "update covenant on this host")


def test_did_you_mean_is_given() -> None:
    wrong = kit.refusals(kit.case(calls(allow=["opnat"])))[7]
    assert wrong.hint == "did you mean `openat`?"
    role = kit.refusals(kit.case(kit.text((READER[0], 'runtime = "python3"\nrole = "raeder"'))))[3]
    assert role.hint == "did you mean `reader`?"


def test_parent_stands_among_ancestors_asked() -> None:
    for ancestors in ((), (MID,)):
        with pytest.raises(ValueError, match="the last ancestor is not run run-1"):
            kit.parent(ancestors=ancestors)
