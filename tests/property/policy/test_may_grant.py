"""Rights that an agent may give and not use: they are within its role, never its own, and only narrow below it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from policy import data
from policy.grants.effective import DOMAINS, Effective
from policy.grants.spawning import MayGrant, Spawning
from policy.rules.parent import delegate
from tests import rules_kit as kit
from tests.property.policy import grants_strategies as gs

GIVEN = {"network", "filesystem", "credentials", "syscalls", "may_grant", "spawning", "lifetime"}
spawners = gs.effectives.map(lambda one: replace(one, spawning=Spawning(3, 5, "adopt")))


def _child(above: Effective, asked: Effective) -> Effective:
    return delegate(kit.parent(effective=above, remaining_seconds=9), asked).granted


@given(spawners, gs.effectives)
def test_child_has_own_or_given_rights(above: Effective, asked: Effective) -> None:
    got, given_ = _child(above, asked), above.may_grant
    assert got.network.is_subset(above.network.union(given_.network))
    assert got.filesystem.read.is_subset(above.filesystem.readable().union(given_.read))
    assert got.credentials.names <= above.credentials.names | given_.credentials.names or (
        above.credentials.any or given_.credentials.any
    )
    assert got.syscalls.is_subset(above.syscalls.union(given_.syscalls))
    for name in DOMAINS.keys() - GIVEN:
        assert getattr(got, name).is_subset(getattr(above, name)), name


@given(spawners, gs.effectives, gs.effectives)
def test_grandchild_has_no_more_than_child_may(above: Effective, child: Effective, below: Effective) -> None:
    middle = replace(_child(above, child), spawning=Spawning(2, 5, "adopt"))
    ceiling, lower = above.for_child(remaining_seconds=9), middle.for_child(remaining_seconds=9)
    got = _child(middle, below)
    for name in DOMAINS.keys() - {"spawning", "lifetime"}:
        assert getattr(lower, name).is_subset(getattr(ceiling, name)), name
        assert getattr(got, name).is_subset(getattr(ceiling, name)), name


@given(gs.effectives, gs.rights)
def test_right_to_give_grants_the_agent_nothing(own: Effective, more: MayGrant) -> None:
    giving = replace(own, may_grant=more)
    for name, mine in giving.domains():
        assert name == "may_grant" or mine == getattr(own, name)
    bare = replace(own, may_grant=MayGrant.bottom())
    assert (giving.linked, giving.served) == (bare.linked, bare.served)


@given(st.sampled_from(sorted(data.roles().by_name)), gs.effectives, gs.effectives)
def test_child_of_a_role_stays_in_the_role(role: str, above: Effective, asked: Effective) -> None:
    ceiling = data.roles().ceiling(role)
    held = above.meet(ceiling)
    got = _child(replace(held, spawning=Spawning(3, 5, "adopt")), asked)
    for name in ("network", "filesystem", "credentials", "syscalls", "executables"):
        assert getattr(got, name).is_subset(getattr(ceiling, name)), name


@given(gs.rights, gs.rights)
def test_union_holds_both_and_no_more(a: MayGrant, b: MayGrant) -> None:
    both = a.union(b)
    assert a.is_subset(both)
    assert b.is_subset(both)
    assert both.meet(a) == a
    assert both.union(a) == both
