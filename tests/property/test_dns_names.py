"""Check that the gate's own tables agree with the policy: names, addresses and the limits of a bucket."""

from __future__ import annotations

import ipaddress

from hypothesis import example, given
from hypothesis import strategies as st

from policy.grants.sets import addresses, hostnames
from sandbox.network.dns import names
from sandbox.rate_limit import Tokens

_LABEL = st.sampled_from(["a", "b", "example", "xn--a", "_x", "com"])
_NAME = st.lists(_LABEL, min_size=1, max_size=5).map(".".join)
_PATTERN = _NAME | _NAME.map("*.{}".format) | st.just(hostnames.EVERY)
_PUBLIC = names.Public(addresses.PUBLIC)


def covers(pattern: str, name: str) -> bool:
    """Whether a pattern covers a name, by the simplest reading."""
    if pattern == "*":
        return True
    return name.endswith(pattern[1:]) if pattern.startswith("*.") else name == pattern


@given(st.lists(_PATTERN, unique=True, max_size=8), _NAME)
def test_name_is_covered_by_exactly_patterns_that_mean_it(patterns: list[str], name: str) -> None:
    found = names.Patterns(patterns).covering(name)
    assert sorted(found) == [number for number, pattern in enumerate(patterns) if covers(pattern, name)]


@given(st.lists(_PATTERN, unique=True, min_size=1, max_size=8), _NAME)
def test_policy_gives_name_same_patterns(patterns: list[str], name: str) -> None:
    chain = {name, *hostnames.above(name)}
    found = {patterns[number] for number in names.Patterns(patterns).covering(name)}
    assert found == chain.intersection(patterns)


@given(st.binary(min_size=4, max_size=4) | st.binary(min_size=16, max_size=16))
@example(ipaddress.ip_address("::ffff:1.2.3.4").packed)
@example(ipaddress.ip_address("64:ff9b::1.2.3.4").packed)
@example(ipaddress.ip_address("2002:102:304::").packed)
@example(b"\xff" * 16)
@example(b"\0" * 16)
@example(b"\xff" * 4)
def test_address_is_public_where_policy_says_so(packed: bytes) -> None:
    address = ipaddress.ip_address(packed)
    blocks = addresses.NOT_PUBLIC_V4 if address.version == 4 else addresses.NOT_PUBLIC_V6
    public = not any(address in ipaddress.ip_network(block) for block in blocks)
    if address.version == 6:
        public = public and address in ipaddress.ip_network(addresses.PUBLIC_V6)
    assert (packed in _PUBLIC) == public


@given(st.lists(st.floats(0, 3), max_size=60), st.integers(1, 20), st.integers(1, 20))
def test_bucket_gives_no_more_than_its_burst_and_its_rate(steps: list[float], rate: int, burst: int) -> None:
    now, given_out = 100.0, 0
    tokens = Tokens(rate, burst, now)
    for step in steps:
        now += step
        given_out += tokens.take(now)
        assert given_out <= burst + rate * (now - 100.0) + 1e-6


@given(st.none() | st.integers(0, 2**31))
def test_time_is_held_within_its_bounds(ttl: int | None) -> None:
    held = names.clamp(ttl, (30, 3600))
    assert 30 <= held <= 3600
    assert ttl is None or not 30 <= ttl <= 3600 or held == ttl
