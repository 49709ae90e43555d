"""The laws of the lattice, for each of the ten domains and for their product (policy/grants/sets/domain.py).

`is_subset` and `meet` are written apart in most domains, so each is the other's oracle.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.grants.effective import DOMAINS, Effective
from tests.property.policy import grants_strategies as gs

CASES: list[tuple[str, Any, Any]] = [(name, DOMAINS[name], gs.BY_DOMAIN[name]) for name in DOMAINS]
CASES.append(("product", Effective, gs.effectives))
each_domain = pytest.mark.parametrize(("kind", "values"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])


@each_domain
@given(data=st.data())
def test_meet_is_commutative_associative_idempotent(kind: Any, values: Any, data: st.DataObject) -> None:
    a, b, c = (data.draw(values) for _ in range(3))
    assert a.meet(b) == b.meet(a)
    assert a.meet(b).meet(c) == a.meet(b.meet(c))
    assert a.meet(a) == a


@each_domain
@given(data=st.data())
def test_bottom_absorbs_and_top_is_neutral(kind: Any, values: Any, data: st.DataObject) -> None:
    a = data.draw(values)
    bottom, top = kind.bottom(), kind.top()
    assert a.meet(bottom) == bottom.meet(a) == bottom
    assert a.meet(top) == top.meet(a) == a
    assert bottom.is_subset(a)
    assert a.is_subset(top)
    assert bottom != top
    assert not top.is_subset(bottom)


@each_domain
@given(data=st.data())
def test_meet_is_greatest_never_wider_than_either(kind: Any, values: Any, data: st.DataObject) -> None:
    a, b, c = (data.draw(values) for _ in range(3))
    both = a.meet(b)
    assert both.is_subset(a)
    assert both.is_subset(b)
    below = c.meet(both) if data.draw(st.booleans()) else c
    if below.is_subset(a) and below.is_subset(b):
        assert below.is_subset(both)


@each_domain
@given(data=st.data())
def test_order_is_that_of_meet(kind: Any, values: Any, data: st.DataObject) -> None:
    a, b = data.draw(values), data.draw(values)
    # Random pairs are rarely ordered; a pair that is ordered by construction keeps the law from being vacuous.
    for x, y in ((a, b), (a.meet(b), b), (a, a.meet(b)), (a, a)):
        assert x.is_subset(y) == (x.meet(y) == x)
        if x.is_subset(y) and y.is_subset(x):
            assert x == y
            assert hash(x) == hash(y)


@each_domain
@given(data=st.data())
def test_order_is_transitive_and_meet_monotone_at_depth(kind: Any, values: Any, data: st.DataObject) -> None:
    chain = [data.draw(values)]
    for _ in range(data.draw(st.integers(1, 5))):
        chain.append(chain[-1].meet(data.draw(values)))
    assert all(later.is_subset(earlier) for i, earlier in enumerate(chain) for later in chain[i:])
    other = data.draw(values)
    assert chain[-1].meet(other).is_subset(chain[0].meet(other))


@pytest.mark.parametrize(("kind", "values"), [c[1:] for c in CASES[:-1]], ids=list(DOMAINS))
@given(data=st.data())
def test_difference_is_what_is_not_covered(kind: Any, values: Any, data: st.DataObject) -> None:
    a, b = data.draw(values), data.draw(values)
    left = a.difference(b)
    assert left.is_subset(a)
    assert (left == kind.bottom()) == a.is_subset(b)
    assert a.difference(a) == kind.bottom()
    assert a.difference(a.meet(b)).is_subset(a)


@given(gs.effectives, gs.effectives)
def test_difference_of_product_names_domains_that_exceed(a: Effective, b: Effective) -> None:
    left = a.difference(b)
    assert (not left) == a.is_subset(b)
    mine, theirs = dict(a.domains()), dict(b.domains())
    assert set(left) == {name for name in DOMAINS if not mine[name].is_subset(theirs[name])}
    # What exceeds can be said: no domain is reported without a line.
    assert all(domain.describe() for domain in left.values())


@each_domain
@given(data=st.data())
def test_canonical_is_json_and_tells_values_apart(kind: Any, values: Any, data: st.DataObject) -> None:
    a, b = data.draw(values), data.draw(values)
    as_json = [json.dumps(x.canonical(), sort_keys=True) for x in (a, b)]
    assert (as_json[0] == as_json[1]) == (a == b)
    assert (a.describe() == b.describe()) == (a == b)
    assert not kind.bottom().describe()


@given(gs.effectives, gs.effectives)
def test_product_never_holds_way_to_start_programs_without_grant(a: Effective, b: Effective) -> None:
    both = a.meet(b)
    assert not both.syscalls.names & {"execveat", "memfd_create"}
    if not both.executables:
        assert "execve" not in both.syscalls.names
