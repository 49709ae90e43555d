"""The shape of the house: no import circle, and no folder that is too long to read."""

from __future__ import annotations

import pathlib

import grimp

ROOMS = ("policy", "sandbox", "covenant")
MOST_MODULES = 16


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, by Tarjan's algorithm."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in sorted(imports[module]):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(imports):
        if module not in number:
            visit(module)
    return found


def test_no_modules_import_each_other() -> None:
    graph = grimp.build_graph(*ROOMS, cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 400
    assert circles(imports) == []


def test_planted_circle_is_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": set()}) == []


def test_folders_have_at_most_sixteen_modules(clone: pathlib.Path) -> None:
    lengths = {
        str(folder.relative_to(clone)): len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        for room in ROOMS
        for folder in (clone / room, *(path for path in (clone / room).rglob("*") if path.is_dir()))
    }
    assert {folder: length for folder, length in lengths.items() if length > MOST_MODULES} == {}
