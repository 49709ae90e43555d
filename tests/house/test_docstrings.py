"""Public names in the three rooms have docstrings, and a function that refuses documents its errors."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROOMS = ("policy", "sandbox", "covenant")
# Docstrings below covenant/cli are what `--help` prints.
MODULES = sorted(
    p for room in ROOMS for p in (ROOT / room).rglob("*.py") if not p.is_relative_to(ROOT / "covenant/cli")
)


def _public(body: list[ast.stmt]) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes, and the public functions of these; what only a type says (``...``) is left out."""
    for one in body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef) and not one.name.startswith("_"):
            yield one
            if isinstance(one, ast.ClassDef):
                yield from _public(one.body)


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions in it."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            todo.extend(ast.iter_child_nodes(node))


def _refuses(function: ast.FunctionDef) -> bool:
    """Whether it raises an error of the tree in policy.errors or one of a validator, itself."""
    calls = [n.exc for n in _own(function) if isinstance(n, ast.Raise) and isinstance(n.exc, ast.Call)]
    names = [ast.unparse(call.func) for call in calls]
    return any(name.startswith("errors.") or name in ("wrong", "text.wrong") for name in names)


def silent(source: str) -> list[str]:
    """The public functions of a module that refuse and do not say so."""
    found = [one for one in _public(ast.parse(source).body) if isinstance(one, ast.FunctionDef)]
    return [one.name for one in found if _refuses(one) and "aises" not in (ast.get_docstring(one) or "")]


@pytest.mark.parametrize("room", ROOMS)
def test_whoever_refuses_says_so(room: str) -> None:
    paths = [path for path in MODULES if path.is_relative_to(ROOT / room)]
    assert paths
    assert {str(p.relative_to(ROOT)): names for p in paths if (names := silent(p.read_text()))} == {}


def test_refusal_not_said_is_seen() -> None:
    body = "    if x:\n        raise errors.UsageError('no')\n"
    assert silent(f"def f(x):\n    '''Does it.'''\n{body}") == ["f"]
    assert silent(f"def f(x):\n    '''Does it.\n\n    Raises:\n        it.\n    '''\n{body}") == []
    assert silent(f"def _f(x):\n{body}") == []
