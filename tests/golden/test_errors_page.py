"""docs/errors.md is the table of codes, and the table is all of them.

Regenerate with: .venv/bin/python -m covenant.cli.help > docs/errors.md
"""

from __future__ import annotations

import ast
import pathlib

import click.testing
import pytest

from covenant.cli import help as help_command
from covenant.cli import main
from policy import errors


def test_page_is_table(clone: pathlib.Path) -> None:
    assert (clone / "docs" / "errors.md").read_text() == help_command.page(), "regenerate docs/errors.md (see above)"


def test_every_code_is_on_page_and_explained() -> None:
    page = help_command.page()
    for code, cls in errors.TABLE.items():
        assert f"| `{code}` |" in page
        assert cls.__doc__, code


def test_codes_are_defined_in_one_package_only(clone: pathlib.Path) -> None:
    """A code that only some import brings into the table would be missing from the page."""
    found: list[tuple[str, str]] = []
    for room in ("policy", "sandbox", "covenant"):
        for path in sorted((clone / room).rglob("*.py")):
            place = path.relative_to(clone).as_posix()
            found.extend((place, name) for name in _coded_classes(path.read_text()))
    assert {place.rpartition("/")[0] for place, _ in found} == {"policy/errors"}, found
    assert len(found) == len(errors.TABLE)


def _coded_classes(source: str) -> list[str]:
    classes = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)]
    return [c.name for c in classes if _sets_code(c) and any(_is_error(b) for b in c.bases)]


def _sets_code(node: ast.ClassDef) -> bool:
    targets = [t for s in node.body if isinstance(s, ast.Assign) for t in s.targets]
    return any(isinstance(t, ast.Name) and t.id == "code" for t in targets)


def _is_error(base: ast.expr) -> bool:
    return ast.unparse(base).endswith(("Error", "Violation"))


@pytest.mark.parametrize("code", sorted(errors.TABLE))
def test_help_explains_each_code(code: str) -> None:
    done = click.testing.CliRunner().invoke(main.cli, ["help", code], standalone_mode=False)
    assert done.exception is None
    assert done.output.startswith(f"{code}: ")
    assert "who must act: " in done.output


def test_help_refuses_unknown_code() -> None:
    done = click.testing.CliRunner().invoke(main.cli, ["help", "no_such\x1b[31m"])
    assert isinstance(done.exception, errors.UsageError)
