"""The run without a mutant: the tests that execute each line, and the time of each test."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import coverage
import pytest

from tests.mutants import inside, operators

TESTS = ("tests/unit/policy", "tests/property", "tests/golden")
# Tests that look at the tree or at other processes: no mutant reaches them, or each one does.
LEFT_OUT = (
    "tests/golden/test_policy.py::test_nothing_of_process_reaches_bytes",
    "tests/golden/test_errors_page.py",
    # It runs every parser hundreds of times: what only it would notice, a test of its own should.
    "tests/property/test_fuzz_targets.py",
)


# How long the chosen tests may take: those of the mutant's own room, and the others, which are many and look elsewhere.
_OWN_SECONDS, _OTHER_SECONDS, _OTHERS = 8.0, 3.0, 150
# Words in the path of a test file that say which room it is about, beside the room's own name.
KIN = {
    "grants": ("grant", "path_points", "network_points"),
    "rules": ("rules", "delegation"),
    "signing": ("signing", "trust"),
    "manifest": ("manifest", "tools", "test_schema"),
    "decompile": ("decompile", "proof", "prove", "planted", "every_leaf", "nft", "filter"),
    "workspace": ("workspace",),
}


@dataclass(frozen=True)
class Baseline:
    """``lines``: (file, line) -> tests, the empty name for what an import runs; ``seconds``: time by test."""

    lines: dict[tuple[str, int], frozenset[str]]
    seconds: dict[str, float]
    modules: tuple[str, ...]

    def of_file(self, path: str) -> frozenset[str]:
        """Every test that stands on a line of a file."""
        return frozenset().union(*(tests for (name, _), tests in self.lines.items() if name == path))


def record(directory: pathlib.Path, left_out: tuple[str, ...] = LEFT_OUT) -> Baseline:
    """Run every test but ``left_out`` once in a child.

    Raises RuntimeError when one of them fails without a mutant.
    """
    data, noted = directory / "coverage", directory / "noted.json"

    def work() -> int:
        cov = coverage.Coverage(data_file=str(data), source=["policy"], config_file=False)
        cov.start()
        recorder = inside.Recorder(cov)
        deselect = [f"--deselect={name}" for name in left_out]
        status = int(pytest.main([*inside.OPTIONS, *deselect, *TESTS], plugins=[recorder]))
        cov.stop()
        cov.save()
        ours = ("policy", "tests", "covenant", "sandbox", "scripts")
        theirs = sorted(name for name in sys.modules if name.split(".")[0] not in ours)
        noted.write_text(
            json.dumps({"seconds": recorder.seconds, "failed": recorder.failed, "status": status, "modules": theirs})
        )
        return status

    wait(inside.forked(work))
    if not noted.exists():
        raise RuntimeError("the tests could not be run without a mutant")
    said = json.loads(noted.read_text())
    if said["status"] != 0:
        raise RuntimeError(f"the tests fail without a mutant: {said['failed'] or said['status']}")
    return Baseline(_lines(data), said["seconds"], tuple(said["modules"]))


def wait(pid: int) -> int:
    """The exit status of a child, minus the signal when one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _lines(data: pathlib.Path) -> dict[tuple[str, int], frozenset[str]]:
    found = coverage.CoverageData(basename=str(data))
    found.read()
    return {
        (file, line): frozenset(contexts)
        for file in found.measured_files()
        for line, contexts in found.contexts_by_lineno(file).items()
    }


class Selector:
    """Chooses the tests of a mutant from the baseline."""

    def __init__(self, baseline: Baseline) -> None:
        self.baseline = baseline
        self._users = _users(baseline)
        self._mentions = _mentions(baseline.seconds)

    def tests(self, site: operators.Site, path: str) -> tuple[str, ...]:
        """Return the tests that execute the site or use its names: those of its room first, each the fastest first."""
        found = self._on(path, site.line, site.last_line)
        # Code that runs at import is seen by tests that use the names which it binds.
        if not site.in_function or "" in found:
            names, using, behind = self._behind(site.binds)
            found |= using.union(*(self._mentions.get(name, ()) for name in names))
            if not found - {""}:
                found |= behind or self.baseline.of_file(path)
        _, room, *rest = site.module.split(".")
        own = {test for test in found if any(word in test.partition("::")[0] for word in KIN[room])}
        # The file of tests that is named after the module is there for it.
        named = {test for test in own if rest[-1] in test.partition("::")[0].rpartition("/")[2]}
        near = (*self._quickest(named, _OWN_SECONDS), *self._quickest(own - named, _OWN_SECONDS))
        return (*near, *self._quickest(found - own - {""}, _OTHER_SECONDS)[:_OTHERS])

    def is_called_late(self, site: operators.Site, path: str) -> bool:
        """Whether the site is in a function, and no import executes it."""
        return site.in_function and site.operator != "default" and "" not in self._on(path, site.line, site.last_line)

    def _quickest(self, tests: Iterable[str], most_seconds: float) -> list[str]:
        """As many tests as the time allows, the fastest first. A mutant that only a slower one would see survives."""
        out, spent = list[str](), 0.0
        for test in sorted(tests, key=lambda test: (self.baseline.seconds.get(test, 0), test)):
            spent += self.baseline.seconds.get(test, 0)
            if out and spent > most_seconds:
                break
            out.append(test)
        return out

    def _on(self, path: str, first: int, last: int) -> set[str]:
        lines = self.baseline.lines
        return set().union(*(lines.get((path, n), ()) for n in range(first, last + 1)))

    def _behind(self, names: frozenset[str]) -> tuple[set[str], set[str], set[str]]:
        """The names with what an import makes of them at once; the tests of functions that use one of them; and those
        of every function that uses any of what is made of them in the end."""
        using, behind, seen, todo, near = set[str](), set[str](), set[str](), list(names), set(names)
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for user in self._users.get(name, ()):
                behind |= user.tests
                todo.extend(user.binds)
                if name in names:
                    near.update(user.binds)
                    using |= user.tests
        return near, using, behind


def _mentions(tests: Iterable[str]) -> dict[str, set[str]]:
    """Identifier -> the tests whose own function uses it, or whose file does outside of its tests."""
    by_function: dict[tuple[str, str], list[str]] = defaultdict(list)
    for test in tests:
        file, _, rest = test.partition("::")
        by_function[file, rest.partition("[")[0]].append(test)
    found: dict[str, set[str]] = defaultdict(set)
    for file in {file for file, _ in by_function}:
        every = [test for (where, _), listed in by_function.items() if where == file for test in listed]
        for statement in ast.parse(pathlib.Path(file).read_text()).body:
            mine = by_function.get((file, getattr(statement, "name", "")), every)
            for name in _identifiers(statement):
                found[name].update(mine)
    return found


def _identifiers(node: ast.AST) -> set[str]:
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


@dataclass(frozen=True)
class _User:
    """A place that uses a name: the tests on its lines, and the names that it gives a value to at import."""

    tests: frozenset[str]
    binds: tuple[str, ...]


def _users(baseline: Baseline) -> dict[str, list[_User]]:
    users: dict[str, list[_User]] = defaultdict(list)
    by_file: dict[str, dict[int, frozenset[str]]] = defaultdict(dict)
    for (file, line), tests in baseline.lines.items():
        by_file[file][line] = tests
    for file, lines in by_file.items():
        for names, place in _places(ast.parse(pathlib.Path(file).read_text())):
            used = _identifiers(place)
            on = (lines.get(n, frozenset()) for n in range(place.lineno, (place.end_lineno or place.lineno) + 1))
            tests = frozenset().union(*on)
            # A function that no import calls gives nothing a value; what stands in it is known by its own lines.
            called = not isinstance(place, ast.FunctionDef) or "" in _inside(place, lines)
            for name in used:
                users[name].append(_User(tests - {""}, names if called else ()))
    return users


def _inside(function: ast.FunctionDef, lines: dict[int, frozenset[str]]) -> frozenset[str]:
    """The tests on the statements of a function; its ``def`` line is run by the import."""
    first, last = function.body[0].lineno, function.end_lineno or function.lineno
    return frozenset().union(*(lines.get(n, frozenset()) for n in range(first, last + 1)))


def _places(tree: ast.Module) -> Iterable[tuple[tuple[str, ...], ast.stmt]]:
    """Functions, and the other statements of module and class bodies, with the names that the program knows them by."""
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            yield from (((statement.name,), inner) for inner in statement.body)
        elif isinstance(statement, ast.FunctionDef):
            yield (statement.name,), statement
        elif not isinstance(statement, ast.Import | ast.ImportFrom):
            yield operators.stored(statement), statement
