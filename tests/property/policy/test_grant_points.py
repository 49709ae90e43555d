"""Compare each domain with a naive reading, point by point: a meet allows a point exactly when both sides do.

A point is one thing that an agent might do. The sets are compressed and canonical; these tests query one point at a
time. Paths and network have their own modules: test_path_points, test_network_points.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy.grants.credentials import InjectRule
from policy.grants.effective import DOMAINS, Effective
from policy.grants.executables import Executable, ExecutableSet
from policy.grants.lifetime import ON_EXPIRY, LifetimeGrant
from policy.grants.network import Network
from policy.grants.resources import UNITS
from policy.grants.spawning import ON_PARENT_EXIT, Spawning
from tests.property.policy import grants_strategies as gs

names = st.sampled_from(["a", "b", "c", "read", "execve", "openat", "low", "left", "right", "high", "nobody"])
amounts = st.integers(0, 5)


def _holds(value: Any, name: str) -> bool:
    return value.any or name in value.names


def _starts(value: ExecutableSet, program: tuple[str, str]) -> bool:
    """Whether the value allows a program, which is a path and its content."""
    path, content = program
    return value.any or any(f.path == path and f.sha256 in ("", content) for f in value.files)


def _bounded(ceiling: int | None, amount: int) -> bool:
    return ceiling is None or amount <= ceiling


def _lives(value: LifetimeGrant, point: tuple[int, str]) -> bool:
    seconds, end = point
    return _bounded(value.ttl_seconds, seconds) and ON_EXPIRY.index(end) <= ON_EXPIRY.index(value.on_expiry)


def _spawns(value: Spawning, point: tuple[int, int, str]) -> bool:
    depth, number, fate = point
    within = _bounded(value.max_depth, depth) and _bounded(value.max_descendants, number)
    return within and ON_PARENT_EXIT.index(fate) <= ON_PARENT_EXIT.index(value.on_parent_exit)


def _reads(value: Any, point: Any) -> bool:
    provider, host, number = point
    searched = value.searches(provider) and _bounded(value.searches_per_minute, number)
    return searched and value.holds(host) and _bounded(value.fetches_per_minute, number)


def _sends(value: Any, point: Any) -> bool:
    signal, size, number = point
    within = _bounded(value.bytes_per_minute, size) and _bounded(value.requests_per_minute, number)
    return within and signal in value.signals


contents = st.sampled_from(["a1" * 32, "b2" * 32, "c3" * 32])
# Domain -> its points, and a predicate that says whether a value allows one.
POINTS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any, Any], bool]]] = {
    "identity": (names, lambda value, name: _holds(value.roles, name)),
    "syscalls": (names, _holds),
    "credentials": (names, _holds),
    "skills": (
        st.tuples(names, st.sampled_from(["read", "write"])),
        lambda value, point: _holds(value.allow, point[0]) and _holds(value.side_effects, point[1]),
    ),
    "executables": (st.tuples(gs.paths, contents), _starts),
    "resources": (
        st.tuples(st.sampled_from(tuple(UNITS)), amounts),
        lambda value, point: _bounded(getattr(value, point[0]), point[1]),
    ),
    "lifetime": (st.tuples(amounts, st.sampled_from(ON_EXPIRY)), _lives),
    "services": (
        st.tuples(st.sampled_from(["p", "q"]), st.sampled_from(["a", "ab", "abc", "abd", "b", "c"]), amounts),
        lambda value, point: value.holds(*point[:2]) and _bounded(value.requests_per_minute, point[2]),
    ),
    "publish": (st.sampled_from(["80 at unix:/a", "8080 at unix:/b", "80 at 127.0.0.1:2000"]), _holds),
    "agents": (st.sampled_from(["a", "b", "d"]), _holds),
    "telemetry": (st.tuples(st.sampled_from(["logs", "metrics", "traces"]), amounts, amounts), _sends),
    "host_ports": (st.sampled_from(["1024", "5432", "11434"]), _holds),
    "ssh": (st.sampled_from(["s at git.example.org ssh-ed25519 AAAA", "t at 10.0.0.1 ssh-rsa AAAA=="]), _holds),
    "inject": (
        st.builds(
            InjectRule,
            st.sampled_from(["a.example", "b.example", "c.example"]),
            st.sampled_from(["s", "t"]),
            st.just("Authorization"),
            st.sampled_from(["{}", "Bearer {}"]),
            st.just(""),
            st.sampled_from(["GET", "POST", "PUT"]),
            st.sampled_from(["/", "/a", "/a/", "/a/b", "/ab", "/b", "/b/c"]),
        ),
        lambda value, point: any(rule.covers(point) for rule in value.rules),
    ),
    "web": (
        st.tuples(
            st.sampled_from(["p", "q", "s"]), st.sampled_from(["a.example.com", "x.a.example.com", "b.test"]), amounts
        ),
        _reads,
    ),
    "may_grant": (
        st.tuples(names, gs.paths),
        lambda value, point: _holds(value.credentials, point[0]) and value.read.covers(point[1]),
    ),
    "spawning": (st.tuples(amounts, amounts, st.sampled_from(ON_PARENT_EXIT)), _spawns),
}


def test_every_domain_is_asked_point_by_point() -> None:
    assert set(POINTS) | {"filesystem", "network"} == set(DOMAINS)


@pytest.mark.parametrize("name", POINTS)
@given(data=st.data())
def test_meet_allows_what_both_allow(name: str, data: st.DataObject) -> None:
    points, allows = POINTS[name]
    values: Any = gs.BY_DOMAIN[name]
    a, b = data.draw(values), data.draw(values)
    both = a.meet(b)
    for point in data.draw(st.lists(points, min_size=1, max_size=8)):
        if name == "spawning" and 0 in point[:2]:
            continue  # a child is one level and one agent: no depth, or no number, is no spawn at all
        assert allows(both, point) == (allows(a, point) and allows(b, point)), point


@pytest.mark.parametrize("name", POINTS)
@given(data=st.data())
def test_subset_allows_nothing_more_and_difference_nothing_covered(name: str, data: st.DataObject) -> None:
    points, allows = POINTS[name]
    values: Any = gs.BY_DOMAIN[name]
    a, b = data.draw(values), data.draw(values)
    for point in data.draw(st.lists(points, min_size=1, max_size=8)):
        assert not a.meet(b).is_subset(b) or allows(a.meet(b), point) <= allows(b, point)
        if a.is_subset(b):
            assert allows(a, point) <= allows(b, point)


@given(st.lists(st.tuples(gs.paths, gs.digests), max_size=5), gs.paths, contents)
def test_program_is_granted_as_entries_say(entries: list[tuple[str, str | None]], path: str, content: str) -> None:
    wanted = any(p == path and d in (None, content) for p, d in entries)
    made = ExecutableSet.of(entries)
    assert _starts(made, (path, content)) == wanted
    assert all(isinstance(f, Executable) for f in made)


@given(gs.networks, st.integers(0, 2**32 - 1) | st.sampled_from([0x0A010203, 0x08080808, 0x7F000001, 0, 2**32 - 1]))
def test_ipv4_written_as_ipv6_is_ipv4(network: Network, number: int) -> None:
    plain = ipaddress.IPv4Address(number)
    assert network.to_address(str(plain)) == network.to_address(f"::ffff:{plain}")


@settings(max_examples=20, deadline=None)
@given(st.lists(gs.effectives, min_size=4, max_size=8), gs.effectives, st.randoms(use_true_random=False))
def test_narrowing_is_monotone_down_to_depth_64(pool: list[Effective], other: Effective, chance: Random) -> None:
    """A child's grants are a subset of each ancestor's at any depth, and so are their meets with a third grant."""
    chain = [Effective(**{name: getattr(chance.choice(pool), name) for name in DOMAINS}) for _ in range(64)]
    held = [chain[0]]
    for asked in chain[1:]:
        held.append(held[-1].meet(asked))
    for _ in range(10):
        above, below = sorted((chance.randrange(64), chance.randrange(64)))
        assert held[below].is_subset(held[above])
        assert held[below].meet(other).is_subset(held[above].meet(other))
        assert held[-1].is_subset(chain[above])
    # The order of the meets does not change the result.
    backwards = chain[-1]
    for asked in reversed(chain[:-1]):
        backwards = asked.meet(backwards)
    assert backwards == held[-1]
