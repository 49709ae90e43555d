"""Grants that were written down come back as they were, and nothing else is taken for grants."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy import errors
from policy.grants import restore
from policy.grants.effective import Effective
from policy.grants.skills import SkillSet
from tests.property.policy import grants_strategies as gs


@settings(max_examples=150)
@given(gs.effectives)
def test_what_was_written_comes_back(grants: Effective) -> None:
    document = json.loads(json.dumps(grants.canonical()))
    assert restore.effective(document) == grants


NO_BUDGET = dataclasses.replace(Effective.bottom(), skills=SkillSet(calls=None))


@pytest.mark.parametrize("grants", [Effective.bottom(), Effective.top(), NO_BUDGET])
def test_ends_come_back(grants: Effective) -> None:
    assert restore.effective(json.loads(json.dumps(grants.canonical()))) == grants


def _places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(place for key, value in items for place in _places(value, (*path, key)))]


STRANGE = st.sampled_from(
    [None, True, -1, 0, 1.5, "", "x", "/", "..", [], {}, ["*"], [None], {"a": 1}, [[1, 2]], 2**70]
)


@settings(max_examples=200)
@given(gs.effectives, st.data())
def test_changed_document_is_refused_or_says_what_it_says(grants: Effective, data: st.DataObject) -> None:
    document = json.loads(json.dumps(grants.canonical()))
    place = data.draw(st.sampled_from(_places(document)))
    new = data.draw(STRANGE)
    changed = copy.deepcopy(document)
    if place:
        around: Any = changed
        for key in place[:-1]:
            around = around[key]
        around[place[-1]] = new
    else:
        changed = new
    try:
        found = restore.effective(changed)
    except errors.ArtefactError:
        return
    assert json.dumps(found.canonical(), sort_keys=True) == json.dumps(changed, sort_keys=True)


@pytest.mark.parametrize("document", [None, [], {}, {"identity": {}}, 1, "x"])
def test_no_document_is_refused(document: Any) -> None:
    with pytest.raises(errors.ArtefactError):
        restore.effective(document)
