"""Grants of trees of programs: kept, restored from a record, and part of everything."""

from __future__ import annotations

import pytest

from policy import data, errors
from policy.grants import restore
from policy.grants.effective import Effective
from policy.grants.executables import Executable, ExecutableSet
from policy.manifest import parse


def test_trees_are_kept_unless_all_is_granted() -> None:
    assert ExecutableSet.of([], ["root"]).trees == frozenset({"root"})
    assert ExecutableSet((), any=True, trees=frozenset({"root"})) == ExecutableSet.top()
    assert ExecutableSet((), any=True, trees=frozenset({"root"})).trees == frozenset()


def test_recorded_trees_are_texts() -> None:
    document = {**Effective.top().canonical(), "executables": {"allow": [], "trees": ["root"]}}
    assert restore.effective(document).executables.trees == frozenset({"root"})
    for trees in ([1], ["root", None], [["root"]]):
        with pytest.raises(errors.CovenantError):
            restore.effective({**document, "executables": {"allow": [], "trees": trees}})


def test_manifest_grants_programs_beside_trees() -> None:
    text = (
        '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "python3"\nentry = "main.py"\n'
        '[permissions.executables]\nallow = ["root", "/usr/bin/cat"]\n'
    )
    found = Effective.from_manifest(parse.parse(text.encode()), profiles=data.profiles()).executables
    assert found == ExecutableSet((Executable("/usr/bin/cat"),), trees=frozenset({"root"}))
