"""Kill mutants of the rules that no other test detects: the last value that passes, and absent values.

Each test fails for a mutant that every other test let live (docs/mutants.md).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from msgspec import structs

from policy import data, errors
from policy.grants import skill_rules
from policy.grants.effective import Effective
from policy.grants.lifetime import LifetimeGrant
from policy.grants.resources import UNITS, Ceilings
from policy.grants.sets.domain import NameSet
from policy.grants.skills import SkillSet
from policy.grants.spawning import Spawning
from policy.host import CgroupFacts
from policy.manifest import parse
from policy.package import Package
from policy.rules import enforceable, items, never, nine, unsigned
from policy.rules.case import Case, Owner, Unsigned
from policy.rules.parent import Delegation, Drawn, delegate
from tests import rules_kit as kit

LOCAL = ('required = true\nbackend = "linux-gvisor"', 'required = false\nbackend = "trusted-local"')


OBSERVER = ('runtime = "python3"', 'runtime = "python3"\nrole = "observer"')


def wanting(made: Case, **resources: int | None) -> Case:
    """Return the case with other ceilings; None removes a ceiling."""
    asked = dataclasses.replace(made.requested, resources=Ceilings(**{**dict.fromkeys(UNITS), **resources}))
    return dataclasses.replace(made, requested=asked)


def refused(made: Case, rule: int) -> Any:
    return kit.refusals(made).get(rule)


@pytest.mark.parametrize(("seconds", "refuses"), [(None, False), (1, False), (0, True), (-1, True)])
def test_parent_has_time_left_or_no_end(seconds: int | None, refuses: bool) -> None:
    made = kit.case(parent=kit.parent(remaining_seconds=seconds))
    assert (refused(made, 4) is not None) == refuses


def test_excess_is_told_row_by_row() -> None:
    made = kit.case(kit.text(('runtime = "python3"', 'runtime = "python3"\nrole = "observer"'), ("= 128", "= 9000")))
    told = refused(made, 3).details["excess"]
    assert told == [{"domain": "resources", "grant": "resources.memory_mb", "lines": ["memory_mb 9000 MiB"]}]


def test_ancestor_without_limits_refuses_no_number() -> None:
    free = kit.ancestor(spawning=Spawning(None, None), live_descendants=10**6)
    assert refused(kit.case(parent=kit.parent(ancestors=(free,))), 5) is None
    deep = kit.ancestor(run_id="run-0", agent_id="top", depth=0, spawning=Spawning(None, 1), live_descendants=0)
    below = kit.ancestor(depth=31, spawning=Spawning(None, None))
    assert refused(kit.case(parent=kit.parent(ancestors=(deep, below))), 5) is None


def test_child_without_ceiling_does_not_fit_parent_with_one() -> None:
    made = kit.case(parent=kit.parent(), on_excess="narrow")
    granted = dataclasses.replace(made.requested, resources=Ceilings())
    object.__setattr__(made, "delegation", Delegation(made.requested, granted, {}))
    assert refused(made, 5).message.startswith("memory_mb no limit does not fit")


def test_drawn_from_nothing_is_nothing() -> None:
    assert Drawn() == Drawn(0, 0, 0)
    whole = kit.parent().effective.resources
    document = kit.text(("memory_mb = 128", f"memory_mb = {whole.memory_mb}\ncpu_millis = {whole.cpu_millis}"))
    assert refused(kit.case(document, parent=kit.parent()), 5) is None


@pytest.mark.parametrize("more", [1, 0])
def test_last_of_each_ceiling_can_be_drawn_once(more: int) -> None:
    whole = kit.parent().effective.resources
    for name in Drawn.__struct_fields__:
        ceiling = getattr(whole, name)
        document = kit.text(("memory_mb = 128", f"{name} = {ceiling}"))
        made = kit.case(document, parent=kit.parent(drawn=Drawn(**{name: more})))
        error = refused(made, 5)
        assert (error is not None) == bool(more), name


def test_what_is_not_limited_takes_nothing_of_this_host() -> None:
    """An absent ceiling demands nothing of the host: neither 0, which would fail, nor 1."""
    gvisor, local = kit.case(), kit.case(kit.text(LOCAL))
    nothing = structs.replace(kit.HOST, memory_available_mb=64, pids_free=64, cpus=0, disk_free_mb=0)
    assert refused(dataclasses.replace(wanting(gvisor), host=nothing), 6) is None
    none = structs.replace(nothing, memory_available_mb=0, pids_free=0)
    assert refused(dataclasses.replace(wanting(local), host=none), 6) is None
    assert refused(dataclasses.replace(wanting(gvisor), host=none), 6).grant == "resources.memory_mb"


@pytest.mark.parametrize(
    ("name", "fact", "each"), [("memory_mb", "memory_available_mb", 1), ("pids_max", "pids_free", 1)]
)
def test_trusted_local_takes_what_it_asks_for_and_no_more(name: str, fact: str, each: int) -> None:
    made = wanting(kit.case(kit.text(LOCAL)), **{name: 200})
    for free, refuses in ((200, False), (199, True)):
        facts: dict[str, Any] = {fact: free}
        host = structs.replace(kit.HOST, **facts)
        assert (refused(dataclasses.replace(made, host=host), 6) is not None) == refuses


def test_only_sandbox_keeps_scratch_in_memory() -> None:
    document = kit.text(('filesystem = "read-only-package"', 'filesystem = "ephemeral"'))
    host = structs.replace(kit.HOST, memory_available_mb=150)
    local = dataclasses.replace(wanting(kit.case(document.replace(*LOCAL)), memory_mb=100, disk_mb=100), host=host)
    assert refused(local, 6) is None
    gvisor = dataclasses.replace(wanting(kit.case(document), memory_mb=10, disk_mb=100), host=host)
    assert refused(gvisor, 6).grant == "resources.memory_mb"


def test_case_stands_alone_by_default() -> None:
    fields = {f.name: f.default for f in dataclasses.fields(Case)}
    assert fields["on_excess"] == "reject"
    assert fields["package_name"] == ""
    made = kit.case(identities={"hello": (Owner("", "ee" * 32),)})
    assert refused(made, 8) is not None


def test_hermes_needs_no_interpreter_and_no_entry_here() -> None:
    text = '[agent]\nid = "hello"\nname = "h"\nversion = "1"\nruntime = "hermes"\n[resources]\nnetwork = "off"\n'
    found = [f.details["grant"] for f in enforceable.findings(parse.parse(text.encode()), kit.HOST)]
    assert found == ["agent.runtime"]
    package = Package({"agent.toml": text.encode()})
    made = dataclasses.replace(kit.case(), manifest=parse.parse(text.encode()), trusted=Unsigned(package, True))
    assert refused(made, 1) is None


def test_three_controllers_are_needed_and_each_is_named() -> None:
    assert set(enforceable.CONTROLLERS) == {"cpu", "memory", "pids"}
    for name in ("cpu", "memory", "pids"):
        host = structs.replace(kit.HOST, cgroup=CgroupFacts(2, frozenset({"cpu", "memory", "pids"} - {name})))
        messages = [f.message for f in enforceable.findings(kit.manifest(), host)]
        assert any(f"`{name}`" in message for message in messages)
    assert not list(enforceable.findings(kit.manifest(), kit.HOST))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ((), None),
        ((("read = [", 'write = ["/etc/x"]\nread = ['), ('"read-only-package"', '"host"')), errors.NeverGrantableError),
        ((('entry = "main.py"', 'entry = "other.py"'),), errors.SchemaViolation),
        (
            (('runtime = "python3"', 'runtime = "python3"\nrole = "observer"'), ("= 128", "= 9000")),
            errors.RoleViolation,
        ),
        ((('profile = "python3"', 'profile = "python3"\nallow = ["ptrace"]'),), errors.DenyListViolation),
        ((("memory_mb = 128", "memory_mb = 999999"),), None),
    ],
)
def test_target_elsewhere_is_held_to_rules_that_need_no_signature(changes: Any, error: Any) -> None:
    text = kit.text(*changes)
    package = Package({"agent.toml": text.encode(), "main.py": b"1\n"})
    manifest = parse.parse(text.encode())
    if error is None:
        assert unsigned.check(package, manifest, kit.HOST) == nine.requested(manifest, roles=data.roles())
        return
    with pytest.raises(error):
        unsigned.check(package, manifest, kit.HOST)


@pytest.mark.parametrize(("version", "refuses"), [(0, True), (1, False), (2, False)])
def test_controllers_count_only_where_hierarchy_has_them(version: Any, refuses: bool) -> None:
    host = structs.replace(kit.HOST, cgroup=CgroupFacts(version, frozenset(enforceable.CONTROLLERS)))
    keys = [f.details["grant"] for f in enforceable.findings(kit.manifest(), host)]
    assert ("resources" in keys) == refuses


RULE = skill_rules.of([("matrix://tool/mcp/fs/stat@1.0", "path", [skill_rules.ToolCondition("equals", '"/a"')])])
BOUND = """
[permissions.skills]
allow = ["matrix://tool/mcp/fs/read@1.0", "matrix://tool/mcp/fs/stat@1.0"]
[spawn]
allowed = true
max_depth = 2
max_descendants = 5
on_parent_exit = "adopt"
[lifetime]
ttl_seconds = 60
on_expiry = "suspend"
"""


@pytest.mark.parametrize(
    ("domain", "ceiling", "keys"),
    [
        (
            "skills",
            SkillSet.ceiling(NameSet.of(["matrix://tool/mcp/fs/read@1.0"]), NameSet()),
            ["permissions.skills.allow[1]"],
        ),
        (
            "skills",
            SkillSet.ceiling(NameSet(), NameSet()),
            ["permissions.skills.allow[0]", "permissions.skills.allow[1]"],
        ),
        (
            "skills",
            SkillSet(NameSet.top(), NameSet.top(), RULE, None, 599, 60_000, None, None),
            ["permissions.skills.allow[1]", "permissions.skills.calls_per_minute"],
        ),
        (
            "skills",
            SkillSet(NameSet.top(), NameSet.top(), RULE, 9, None, None, None, None),
            ["permissions.skills.allow[1]", "permissions.skills.calls"],
        ),
        ("spawning", Spawning(2, 4, "adopt"), ["spawn.max_descendants"]),
        ("spawning", Spawning(1, 5, "adopt"), ["spawn.max_depth"]),
        ("spawning", Spawning(2, 5), ["spawn.on_parent_exit"]),
        ("spawning", Spawning(), ["spawn.max_depth", "spawn.max_descendants", "spawn.on_parent_exit"]),
        ("lifetime", LifetimeGrant(60), ["lifetime.on_expiry"]),
        ("lifetime", LifetimeGrant(59, "suspend"), ["lifetime.ttl_seconds"]),
    ],
)
def test_each_grant_that_exceeds_is_named_by_its_own_key(domain: str, ceiling: Any, keys: list[str]) -> None:
    manifest = kit.manifest(more=BOUND)
    wanted = nine.requested(manifest, roles=data.roles())
    top = dict(Effective.top().domains()) | {domain: ceiling}
    over = items.excess(manifest, wanted, Effective(**top))
    assert [one.grant for one in over] == keys
    assert {one.domain for one in over} == {domain}


def test_what_exceeds_only_as_whole_is_named_as_whole() -> None:
    """If `allow` also names the calls of an addition, no single key of the manifest contains the excess."""
    manifest = kit.manifest()
    wanted = nine.requested(manifest, roles=data.roles())
    wider = dataclasses.replace(wanted, credentials=type(wanted.credentials).of(["db"]))
    ceiling = dataclasses.replace(Effective.top(), credentials=type(wanted.credentials)())
    assert items.excess(manifest, wider, ceiling) == (items.Excess("credentials", "credentials", ("credential db",)),)


def test_tree_of_this_host_and_its_place_are_given_by_caller() -> None:
    with pytest.raises(errors.NeverGrantableError) as caught:
        never.check("/proc", data.never_grantable())
    assert (caught.value.grant, caught.value.where) == ("", "")


@pytest.mark.parametrize(
    ("path", "tree", "found"),
    [
        ("/", "/a", True), ("/a", "/", False), ("/", "/", True), ("/a/b", "/a", True), ("/a", "/a/b", True),
        ("/a", "/ab", False), ("/ab", "/a", False), ("/a/", "/a/b", True),
    ],
)  # fmt: skip
def test_tree_is_found_by_component(path: str, tree: str, found: bool) -> None:
    assert (never.find(path, {tree: "reason"}) is not None) == found


COMMON: dict[str, Any] = {"host": kit.HOST, "roles": data.roles(), "deny": data.deny(), "now_ms": kit.NOW}


def test_callers_tables_are_ones_asked() -> None:
    made = kit.case()
    table = dataclasses.replace(data.never_grantable(), trees={"/srv": "ours"})
    with pytest.raises(errors.NeverGrantableError, match="ours"):
        nine.check(made.trusted, made.manifest, never=table, **COMMON)
    with pytest.raises(errors.NeverGrantableError, match="state"):
        nine.check(made.trusted, made.manifest, extra_never={"/srv/docs/x": "state"}, **COMMON)
    assert nine.check(made.trusted, made.manifest, **COMMON) == made.requested


def test_unsigned_package_that_demands_sandbox_is_refused_whatever_it_is_given() -> None:
    """The parser refuses such a manifest, but the rule does not rely on it."""
    made = kit.case(kit.text(LOCAL))
    package = Package({"agent.toml": kit.text(LOCAL).encode(), "main.py": b"1\n"})
    required = made.manifest.model_copy(update={"sandbox": made.manifest.sandbox.model_copy(update={"required": True})})
    allowed = dataclasses.replace(made, trusted=Unsigned(package, True))
    assert refused(allowed, 2) is None
    assert isinstance(refused(dataclasses.replace(allowed, manifest=required), 2), errors.UnsignedError)


def test_report_lists_domains_that_have_something_to_say() -> None:
    bare = Effective.bottom()
    parent = kit.parent()
    report = delegate(parent, dataclasses.replace(bare, lifetime=LifetimeGrant(60))).report()
    assert set(report) == {"lifetime"}
    assert report["lifetime"] == {"requested": ["lifetime 60 s"], "granted": ["lifetime 60 s"], "removed": []}


@pytest.mark.parametrize(
    ("listed", "odd"), [((), "b-own"), (("a-own",), "a-own"), (("b-own", "c-own"), "c-own"), (("b-own",), None)]
)
def test_first_section_that_differs_is_named(listed: tuple[str, ...], odd: str | None) -> None:
    document = kit.text(more="\n[b-own]\nx = 1\n")
    error = refused(kit.case(document, statement={"unknown_sections": listed}), 1)
    assert (error.grant if error else None) == odd


def test_unsigned_manifest_may_leave_network_mode_to_its_default() -> None:
    text = kit.text(LOCAL, ('network = "off"\n', ""))
    package = Package({"agent.toml": text.encode(), "main.py": b"1\n"})
    made = dataclasses.replace(kit.case(kit.text(LOCAL)), manifest=parse.parse(text.encode()))
    assert refused(dataclasses.replace(made, trusted=Unsigned(package, True)), 1) is None
    assert refused(made, 1) is not None
