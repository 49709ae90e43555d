"""Unit tests reach into private names of the product rarely, and ever less."""

from __future__ import annotations

import ast
import pathlib

from tests.house import prose

# The number of reaches today. It may fall and never rise.
MOST = 127
# Names with an underscore that are public.
_OWN = frozenset({"self", "cls"})
_PUBLIC = frozenset({"_exit", "_replace", "_asdict", "_fields"})


def reaches(source: str) -> list[tuple[int, str]]:
    """Return line and name of each access to a private name of another object or module."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in _OWN):
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.ImportFrom):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "setattr":
            texts = [arg.value for arg in node.args[:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            found += [(node.lineno, text.rpartition(".")[2]) for text in texts]
    return [(line, name) for line, name in found if _is_private(name)]


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


def test_private_reaches_become_fewer() -> None:
    folder: pathlib.Path = prose.ROOT / "tests/unit"
    found = [
        f"{path.relative_to(prose.ROOT)}:{line}: {name}"
        for path in sorted(folder.rglob("*.py"))
        for line, name in reaches(path.read_text())
    ]
    assert len(found) == MOST, "\n".join(found)


def test_planted_reaches_are_found() -> None:
    source = "from a import _b\nc._d()\nself._e\npatch.setattr(c, '_f', 1)\npatch.setattr('c._g', 1)\nos._exit(0)\n"
    assert sorted(reaches(source)) == [(1, "_b"), (2, "_d"), (4, "_f"), (5, "_g")]
