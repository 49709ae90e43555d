"""The loss report: complete, only of what the manifest has, refused unless accepted one by one."""

from __future__ import annotations

import json

import pytest

from policy import errors
from policy.compile.targets import all as targets_all
from policy.compile.targets import loss
from policy.data import target_table
from policy.grants.effective import Effective
from policy.manifest import parse
from policy.manifest.agent import Manifest
from tests.unit.policy.compile import sample
from tests.unit.policy.compile import targets_kit as kit

# What a manifest demands beside the ten domains; `agent.package` stands for the bytes of the package themselves.
BESIDE = {
    "agent.runtime", "agent.operator", "agent.package", "capabilities.required", "sandbox.required", "skills.rules",
    "sandbox.standby", "settlement.budget_credits_per_hour",
}  # fmt: skip
FOREIGN = tuple(name for name in target_table.targets() if name != targets_all.NATIVE)
IO = "io_read_bps = 1\nio_write_bps = 1\nio_read_iops = 1\nio_write_iops = 1"


def fields() -> set[str]:
    """Every field of every domain, as the grants themselves spell them, and what stands beside."""
    # A ceiling asks about nothing.
    found = {f"{domain}.{name}" for domain, table in Effective.top().canonical().items() for name in table}
    return found | BESIDE | {"network.asked", "skills.asked", "inject.asked"}


@pytest.mark.parametrize("target", FOREIGN)
def test_table_has_row_for_every_field_and_for_nothing_else(target: str) -> None:
    assert {row.field for row in target_table.targets()[target].rows} == fields()


@pytest.mark.parametrize("target", FOREIGN)
def test_every_row_names_test_that_exists(target: str) -> None:
    assert {row.when for row in target_table.targets()[target].rows} <= set(loss.TESTS)


def test_every_target_has_compiler_and_every_test_row() -> None:
    assert set(targets_all.COMPILERS) == set(FOREIGN)
    used = {row.when for target in target_table.targets().values() for row in target.rows}
    assert set(loss.TESTS) == used


def test_native_target_loses_nothing() -> None:
    found = kit.manifest(network="full", resources=IO)
    assert loss.report(target_table.targets()[targets_all.NATIVE], kit.effective(found), found) == ()
    with pytest.raises(errors.UsageError, match=r"kubernetes\.image"):
        targets_all.refuse_options(accepted=("kubernetes.image",), image=None)
    with pytest.raises(errors.UsageError, match="--image"):
        targets_all.refuse_options(accepted=(), image=kit.IMAGE)


@pytest.mark.parametrize("target", FOREIGN)
def test_lost_restriction_is_refused_with_every_id(target: str) -> None:
    found = kit.manifest(resources="net_bps = 1")
    wanted = kit.restrictions(target, found)
    assert len(wanted) > 1
    with pytest.raises(errors.LossError) as caught:
        kit.compiled(target, found, accepted=())
    assert caught.value.code == "restriction_lost"
    document = caught.value.to_json()
    assert {one["id"] for one in document["losses"] if one["kind"] == loss.RESTRICTION} == set(wanted)
    assert all(one in caught.value.hint for one in wanted)


@pytest.mark.parametrize("target", FOREIGN)
def test_all_but_one_accepted_is_refused_for_that_one(target: str) -> None:
    found = kit.manifest()
    wanted = kit.restrictions(target, found)
    for left in wanted:
        with pytest.raises(errors.LossError) as caught:
            kit.compiled(target, found, accepted=tuple(one for one in wanted if one != left))
        assert caught.value.hint == f"--accept-loss {left}"


@pytest.mark.parametrize("target", FOREIGN)
@pytest.mark.parametrize("more", ["net-bps", "*", "", "nothing", "write-paths"])
def test_what_is_not_lost_cannot_be_accepted(target: str, more: str) -> None:
    found = kit.manifest(filesystem="host", more='[permissions.filesystem]\nwrite = ["/srv/data"]')
    with pytest.raises(errors.UsageError, match="no restriction"):
        kit.compiled(target, found, accepted=(*kit.restrictions(target, found), f"{target}.{more}"))


def test_loss_of_another_target_cannot_be_accepted() -> None:
    found = kit.manifest()
    ours = kit.restrictions("kubernetes", found)
    with pytest.raises(errors.UsageError, match="no restriction"):
        kit.compiled("kubernetes", found, accepted=(*ours, "systemd.package"))


@pytest.mark.parametrize("target", FOREIGN)
def test_accepted_losses_stand_in_output(target: str) -> None:
    found = kit.manifest(resources="net_bps = 1", more='[permissions.credentials]\ngrants = ["token"]')
    document = json.loads(kit.compiled(target, found).files["loss.json"])
    wanted = kit.restrictions(target, found)
    assert document["accepted"] == sorted(wanted)
    assert {one["id"] for one in document["lost_restrictions"]} == set(wanted)
    grants = {name for name, one in kit.losses(target, found).items() if one.kind == "lost-grant"}
    assert {one["id"] for one in document["lost_grants"]} == {f"{target}.{name}" for name in grants}
    assert document["requires"] == list(target_table.targets()[target].requires)


# Manifest -> what it adds to the losses of the plain one, on each target. A row without effect would be no row.
ADDED: dict[str, tuple[Manifest, str, str]] = {
    "read": (
        kit.manifest(more='[permissions.filesystem]\nread = ["/srv/data"]'),
        "read-paths",
        "read-paths read-sockets",
    ),
    "write": (
        kit.manifest(filesystem="host", more='[permissions.filesystem]\nwrite = ["/srv/data"]'),
        "write-paths",
        "write-paths",
    ),
    "executables": (kit.manifest(more='[permissions.executables]\nallow = ["/usr/bin/cat"]'), "executables", ""),
    "pinned": (
        kit.manifest(more=f'[permissions.executables]\nallow = ["/usr/bin/cat@sha256:{"ab" * 32}"]'),
        "executables",
        "executables-digest",
    ),
    "io": (kit.manifest(resources=IO), "io-read-bps io-write-bps io-read-iops io-write-iops", ""),
    "net": (kit.manifest(resources="net_bps = 5"), "net-bps", "net-bps"),
    "swap": (kit.manifest(resources="swap_mb = 5"), "swap-mb", ""),
    "deadline": (kit.manifest(resources="cpu_ms_per_task = 999"), "deadline", ""),
    "no deadline": (kit.manifest(resources="cpu_ms_per_task = 1000"), "", ""),
    "cpu time": (kit.manifest(resources="cpu_time_ms = 29999"), "cpu-time-ms", "cpu-time-ms"),
    "cpu time that cannot be reached": (kit.manifest(resources="cpu_time_ms = 30000"), "", ""),
    "spawn": (
        kit.manifest(more="[spawn]\nallowed = true\nmax_depth = 1\nmax_descendants = 1\n[lifetime]\nttl_seconds = 9"),
        "spawn",
        "spawn",
    ),
    "suspend": (kit.manifest(more='[lifetime]\nttl_seconds = 9\non_expiry = "suspend"'), "suspend", "suspend"),
    "standby": (
        parse.parse(kit.TOML.replace("{more}", "standby = 1").format(**kit.PARTS).encode()),
        "standby",
        "standby",
    ),
    "callers": (kit.manifest(more='[capabilities]\nrequired = ["tool.x"]'), "callers", "callers"),
    "budget": (kit.manifest(more="[settlement]\nbudget_credits_per_hour = 1"), "budget", "budget"),
    "tools": (
        kit.manifest(more='[permissions.skills]\nallow = ["matrix://tool/mcp/fs/read@1"]\nside_effects = ["read"]'),
        "skills side-effects",
        "skills side-effects",
    ),
    "credentials": (kit.manifest(more='[permissions.credentials]\ngrants = ["token"]'), "credentials", ""),
    "network": (
        kit.manifest(network="full", more=kit.NETWORK),
        "names tls names-to-private",
        "names tls ports network-namespace unix-sockets inbound",
    ),
    "https": (
        kit.manifest(network="outbound-https-only"),
        "names tls",
        "names tls ports network-namespace unix-sockets inbound",
    ),
    "public": (kit.manifest(network="full"), "names", "names network-namespace unix-sockets inbound"),
}


@pytest.mark.parametrize("target", FOREIGN)
@pytest.mark.parametrize("name", ADDED)
def test_each_demand_adds_its_own_losses(name: str, target: str) -> None:
    found, kubernetes, systemd = ADDED[name]
    added = {"kubernetes": kubernetes, "systemd": systemd}[target]
    assert set(kit.losses(target, found)) - set(kit.losses(target, kit.manifest())) == set(added.split())


def test_details_name_what_is_lost_and_show_no_control_characters() -> None:
    found = kit.manifest(more='[permissions.filesystem]\nread = ["/srv/data", "/srv/`x`"]')
    (one,) = [one for name, one in kit.losses("kubernetes", found).items() if name == "read-paths"]
    assert one.details == ("/srv/\\x60x\\x60", "/srv/data")


def test_many_details_are_counted() -> None:
    listed = ", ".join(f'"/srv/{i:02}"' for i in range(20))
    found = kit.manifest(more=f"[permissions.filesystem]\nread = [{listed}]")
    one = kit.losses("kubernetes", found)["read-paths"]
    assert len(one.details) == 17
    assert one.details[-1] == "and 4 more"


def test_another_backend_has_no_target() -> None:
    found = kit.manifest()
    changed = found.model_copy(update={"sandbox": found.sandbox.model_copy(update={"backend": "trusted-local"})})
    with pytest.raises(errors.NotEnforceableError):
        kit.compiled("kubernetes", changed)


def test_unknown_target_is_refused() -> None:
    found = kit.manifest()
    order = targets_all.Order(kit.effective(found), found, sample.host(), kit.PACKAGE)
    with pytest.raises(errors.UsageError, match="not known"):
        targets_all.compile("nomad", order)


def test_kubernetes_wants_image() -> None:
    with pytest.raises(errors.UsageError, match="image"):
        kit.compiled("kubernetes", kit.manifest(), image=None)


TABLE = {"requires": ["x"], "rows": [{"field": "a.b", "how": "held", "says": "so"}]}


@pytest.mark.parametrize(
    "row",
    [
        {"field": "a.b", "how": "kept", "says": "so"},
        {"field": "a.b", "how": "held"},
        {"field": "ab", "how": "held", "says": "so"},
        {"field": "a.b", "how": "held", "says": "so", "id": "x"},
        {"field": "a.b", "how": "held", "says": "so", "when": "granted"},
        {"field": "a.b", "how": "lost-grant", "says": "so"},
        {"field": "a.b", "how": "lost-restriction", "says": "so", "id": "X"},
        {"field": "a.b", "how": "lost-restriction", "says": "so", "id": "x", "when": "A"},
        {"field": "a.b", "how": "lost-restriction", "says": "so", "id": "x", "more": "y"},
        {"field": "a.b", "how": "held", "says": 1},
        "held",
    ],
)
def test_malformed_row_is_refused(row: object) -> None:
    with pytest.raises(target_table.TargetTableError):
        target_table.read({"kubernetes": {**TABLE, "rows": [row]}})


def test_table_with_one_id_twice_or_without_rows_is_refused() -> None:
    lost = {"field": "a.b", "how": "lost-grant", "says": "so", "id": "x"}
    assert target_table.read({"kubernetes": {**TABLE, "rows": [lost]}})["kubernetes"].rows[0].id == "x"
    tables: list[dict[str, object]] = [
        {**TABLE, "rows": [lost, lost]},
        {**TABLE, "rows": []},
        {"rows": []},
        {**TABLE, "requires": [1]},
    ]
    for table in tables:
        with pytest.raises(target_table.TargetTableError):
            target_table.read({"kubernetes": table})
