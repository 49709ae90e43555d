"""The tables as they ship: roles and their order, the deny list, never-grantable paths; how strictly they are read."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

import pytest

from policy import data, errors
from policy.data import role_table
from policy.grants.effective import Effective
from policy.grants.identity import Identity
from policy.grants.roles import Role

# Computed from the ceilings, and stated here once: a change of a value that changes the order is seen in a review.
BELOW = {
    "observer": {"observer"},
    "reader": {"observer", "reader"},
    "researcher": {"observer", "reader", "researcher"},
    "writer": {"observer", "reader", "writer"},
    "builder": {"observer", "reader", "writer", "builder"},
    "connector": {"observer", "reader", "researcher", "connector"},
    "operator-agent": {"observer", "reader", "researcher", "writer", "builder", "connector", "operator-agent"},
}


def role_rows() -> dict[str, dict[str, Any]]:
    raw = resources.files("policy.data").joinpath("roles.toml").read_text(encoding="utf-8")
    rows: dict[str, dict[str, Any]] = tomllib.loads(raw)["roles"]
    return rows


def test_there_are_at_least_six_roles_in_computed_order() -> None:
    roles = data.roles()
    assert len(roles.by_name) >= 6
    assert {name: set(below) for name, below in roles.below.items() if name != "coordinator"} == BELOW
    assert roles.below["coordinator"] == frozenset(roles.by_name)
    for name, role in roles.by_name.items():
        assert role.reason
        assert role.ceiling.identity.roles.names == roles.below[name]
        for other, theirs in roles.by_name.items():
            assert role.ceiling.is_subset(theirs.ceiling) == (name in roles.below[other])


def test_roles_leave_paths_and_hosts_open_and_bound_kinds_and_sizes() -> None:
    for role in data.roles().by_name.values():
        assert role.ceiling.filesystem.readable().covers("/any/path")
        assert role.ceiling.resources.memory_mb is not None
        assert role.ceiling.resources.pids_max is not None
        assert role.ceiling != Effective.top()
    ceilings = {name: role.ceiling for name, role in data.roles().by_name.items()}
    assert ceilings["observer"].network.mode == "off"
    assert ceilings["researcher"].network.mode == "outbound-https-only"
    assert not ceilings["operator-agent"].spawning.allowed
    assert [name for name, c in ceilings.items() if c.spawning.allowed or c.lifetime.unlimited] == ["coordinator"]


def test_operator_adds_roles_and_cannot_replace_one() -> None:
    roles = data.roles()
    row = {**role_rows()["observer"], "memory_mb": 64, "disk_mb": 1}
    extra = role_table.read(1, {"tiny": row}).by_name["tiny"]
    grown = roles.adding(2, [extra])
    assert grown.version == 2
    assert grown.below["tiny"] == {"tiny"}
    assert "tiny" in grown.below["observer"]
    assert grown.ceiling("observer").identity.roles.names == {"observer", "tiny"}
    with pytest.raises(ValueError, match="two roles have one name"):
        roles.adding(2, [Role("observer", "wider", Effective.top())])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_mb": "lots"}, "`memory_mb` cannot be `lots`"),
        ({"memory_mb": -1}, "`memory_mb` cannot be `-1`"),
        ({"memory_mb": True}, "`memory_mb` cannot be `True`"),
        ({"memory_mb": None}, "`memory_mb` cannot be `None`"),
        ({"read": "all"}, "`read` cannot be `all`"),
        ({"network": "full"}, "`network` cannot be `full`"),
        ({"side_effects": ["shout"]}, "`side_effects` cannot be"),
        ({"reason": " "}, "`reason` cannot be"),
        ({"filesystem": 3}, "`filesystem` cannot be `3`"),
        ({"bonus": 1}, "`bonus` is not a key of a role"),
    ],
)
def test_table_of_roles_is_read_strictly(change: Mapping[str, Any], message: str) -> None:
    row = {key: value for key, value in {**role_rows()["observer"], **change}.items() if value is not None}
    with pytest.raises(role_table.RoleTableError) as caught:
        role_table.read(1, {"observer": row})
    assert message in str(caught.value)


def test_every_key_of_role_is_needed() -> None:
    whole = role_rows()["coordinator"]
    for key in whole:
        with pytest.raises(role_table.RoleTableError):
            role_table.read(1, {"x": {k: v for k, v in whole.items() if k != key}})


def test_deny_list_covers_what_issue_names_and_no_profile_holds_it() -> None:
    denied = data.deny().names
    wanted = (
        "init_module finit_module delete_module kexec_load kexec_file_load reboot ptrace process_vm_readv"
        " process_vm_writev bpf perf_event_open mount umount2 move_mount open_tree fsopen fsmount mount_setattr"
        " pivot_root unshare setns keyctl add_key request_key io_uring_setup io_uring_enter"
        " io_uring_register userfaultfd"
        " settimeofday clock_settime clock_adjtime adjtimex swapon swapoff iopl ioperm execveat memfd_create"
    )
    assert set(wanted.split()) <= denied
    assert all(data.deny().reasons[name] for name in denied)
    for source in (*data.profiles().values(), *data.additions().values()):
        assert not source.names & denied, source.name
    assert all("execve" not in profile.names for profile in data.profiles().values())


def test_never_grantable_covers_what_decisions_name() -> None:
    table = data.never_grantable()
    assert {"/", "/proc", "/sys", "/dev", "/run", "/var/run/docker.sock", "/run/containerd"} <= set(table.trees)
    for path in (*table.trees, *table.write_trees):
        assert path == "/" or (path.startswith("/") and not path.endswith("/") and "//" not in path)
    assert not set(table.trees) & set(table.write_trees)


def test_tables_are_read_once_and_cannot_be_changed() -> None:
    assert data.deny() is data.deny()
    assert data.roles() is data.roles()
    for table in (data.deny().reasons, data.never_grantable().trees, data.roles().by_name, data.roles().below):
        with pytest.raises(TypeError):
            table["x"] = "y"  # type: ignore[index]


def test_unknown_names_of_tables_are_refused() -> None:
    with pytest.raises(KeyError):
        data.profile("../deny")
    with pytest.raises(KeyError):
        data.addition("../deny")
    with pytest.raises(errors.InstallationError):
        data.syscalls("../deny")
    with pytest.raises(KeyError):
        data.roles().ceiling("root")


def test_role_that_no_table_knows_is_below_nothing_but_itself() -> None:
    below = data.roles().below
    ghost, top = Identity.of("ghost", below), Identity.of("coordinator", below)
    assert not ghost.is_subset(top)
    assert not top.is_subset(ghost)
    assert ghost.is_subset(ghost)
    assert Identity.of("observer", below).is_subset(top)
    assert top.is_subset(Identity.of(None, below))
    assert not Identity.of(None, below).is_subset(top)
