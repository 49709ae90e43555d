"""The document of its own limits: bounded, the same each time, and never more than the grants."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy import data
from policy.explain import own_limits
from policy.grants.effective import Effective
from policy.rules import nine
from tests.property.policy import grants_strategies as gs
from tests.unit.policy.compile import sample

MANIFEST = sample.manifest(more="[process]\nenv = { PLANTED_NAME = 'planted-value' }\n")
QUICK = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def lists(value: Any, place: str = "") -> dict[str, int]:
    """Return the number of items by place; a range of ports is no list."""
    found: dict[str, int] = {}
    if isinstance(value, dict):
        for name, part in value.items():
            for at, count in lists(part, f"{place}.{name}" if place else name).items():
                found[at] = found.get(at, 0) + count
    elif isinstance(value, list) and not all(type(one) is int for one in value):
        found[place] = len(value)
        for one in value:
            for at, count in lists(one, place).items():
                found[at] = found.get(at, 0) + count
    return found


@QUICK
@given(gs.effectives)
def test_document_says_grants_and_nothing_else(effective: Effective) -> None:
    raw = own_limits.encoded(effective, MANIFEST)
    assert raw == own_limits.encoded(effective, MANIFEST)
    found, whole = json.loads(raw), effective.canonical()
    assert {name: whole[name] for name in found["grants"]} == found["grants"]
    assert {**whole["resources"], **whole["lifetime"]}.items() <= found["limits"].items()
    assert set(found) == {"version", "agent", "grants", "limits", "services", "denials"}
    assert b"planted" not in raw.lower()


def test_bound_below_fixed_part_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_limits, "MAX_BYTES", 256)
    with pytest.raises(ValueError, match="without its lists"):
        own_limits.encoded(nine.requested(MANIFEST, roles=data.roles()), MANIFEST)


@QUICK
@given(gs.effectives, st.integers(4096, 8192))
def test_document_is_never_over_its_bound(effective: Effective, most: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(own_limits, "MAX_BYTES", most)
        raw = own_limits.encoded(effective, MANIFEST)
    assert len(raw) <= most
    found = json.loads(raw)
    whole = json.loads(json.dumps(own_limits.document(effective, MANIFEST)))
    for place, count in found.get("cut", {}).items():
        assert 0 < count <= lists(whole)[place]
