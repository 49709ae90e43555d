"""A workspace's terms in a difference of two policies: each that is wider is named."""

from __future__ import annotations

import pytest

from policy.decompile.mounts import ReadWorkspace
from policy.explain import diff, workspaces
from tests import proof_kit
from tests.unit.policy.compile import sample
from tests.unit.policy.compile.test_workspace import TEXT, compiled

BASE = ReadWorkspace("/work", 24, ("/srv/a",), ("*.pem", ".env"), ("x/**",), "operator", False)


@pytest.mark.parametrize(
    ("mine", "line"),
    [
        ({"apply": "ask"}, "without an operator"),
        ({"below": ("/srv",)}, "below /srv"),
        ({"mask": (".env",)}, "*.pem is shown"),
        ({"protect": ("y/**",)}, "changes of x/** can be applied"),
        ({"max_mb": 25}, "25 MiB"),
    ],
)
def test_wider_term_is_named_and_narrower_is_not(mine: dict[str, object], line: str) -> None:
    values = {name: getattr(BASE, name) for name in BASE.__struct_fields__}
    other = ReadWorkspace(**{**values, **mine})
    (found,) = workspaces.wider(other, BASE)
    assert line in found
    assert workspaces.wider(BASE, other) == (("changes of y/** can be applied",) if "protect" in mine else ())


def test_workspace_where_none_was_is_wider() -> None:
    assert len(workspaces.wider(BASE, None)) == 2
    assert workspaces.wider(None, BASE) == ()
    assert workspaces.wider(BASE, BASE) == ()


@pytest.mark.parametrize(("old", "new", "widens"), [("never", "operator", True), ("ask", "operator", False)])
def test_looser_apply_widens_a_policy(old: str, new: str, widens: bool) -> None:
    before, after = (compiled(TEXT.replace('"never"', f'"{word}"')).artefacts for word in (old, new))
    found = diff.compare_artefacts(before, after)
    assert found.widens == widens
    (row,) = found.rows
    assert (row.domain, bool(row.added)) == ("workspace", widens)


def test_workspace_itself_widens_a_policy() -> None:
    found = diff.compare_artefacts(proof_kit.case(sample.manifest()).artefacts, compiled().artefacts)
    assert any("a directory of the caller at /work/x" in line for row in found.rows for line in row.added)
    assert found.widens
