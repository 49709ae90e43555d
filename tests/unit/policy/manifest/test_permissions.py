"""Read permissions: single programs beside trees of programs."""

from __future__ import annotations

from policy.manifest import permissions


def test_programs_and_trees_are_told_apart() -> None:
    own = permissions.Executables.model_validate({"allow": ["root", "/bin/b", "layer:x", "/bin/a"]})
    assert own.trees == ("root", "layer:x")
    assert [(index, one.path) for index, one in own.programs] == [(1, "/bin/b"), (3, "/bin/a")]
