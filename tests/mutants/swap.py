"""Mutants of functions that no import calls: a forked child gives the function other code, and imports nothing again.

One process imports policy and collects every test, once. For each mutant it forks a child, which replaces the code of
the function and runs the chosen tests. This tries the same program as a fresh import does, since the import has not
called the function.
"""

from __future__ import annotations

import gc
import json
import os
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TextIO

import pytest

from tests.mutants import baseline, draw, inside, operators

# A try: the site, the number of its tests, seconds, and the exit status of its child.
Tried = tuple[operators.Site, int, float, int]
# Starts a child for a site and its tests. None where the function cannot get other code.
Starter = Callable[[operators.Site, tuple[str, ...]], "Callable[[], int] | None"]
_Key = tuple[str, str, int]


def attempt(
    sites: Sequence[operators.Site], seconds: Mapping[str, float], each: Callable[[Starter], Iterator[Tried]]
) -> Iterator[Tried]:
    """Collect the tests in a child, and yield what ``each`` yields there. ``seconds`` is the time of each test.

    ``each`` leaves out the sites for which the starter returns None.
    """
    by_key = {site.key: site for site in sites}
    read, write = os.pipe()

    def work() -> int:
        os.close(read)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        with os.fdopen(write, "w") as out:
            deselect = [f"--deselect={name}" for name in baseline.LEFT_OUT]
            plugin = _Collected(seconds, each, out)
            return int(pytest.main([*inside.OPTIONS, *deselect, *baseline.TESTS], plugins=[plugin]))

    pid = inside.forked(work)
    os.close(write)
    with os.fdopen(read) as lines:
        for line in lines:
            key, *rest = json.loads(line)
            yield (by_key[key], *rest)
    if (status := baseline.wait(pid)) != 0:
        raise RuntimeError(f"the tests could not be collected: {status}")


class _Collected:
    """The plugin that tries mutants in the place of the tests."""

    def __init__(self, seconds: Mapping[str, float], each: Callable[[Starter], Iterator[Tried]], out: TextIO) -> None:
        self.seconds, self.each, self.out = seconds, each, out
        self.items: dict[str, pytest.Item] = {}
        self.functions: dict[_Key, list[types.FunctionType]] = {}
        self.failed = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        inside.fewer(items)
        self.items = {item.nodeid: item for item in items}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed |= report.failed

    def pytest_runtestloop(self) -> bool:
        self.functions = functions_of({str(path) for path in draw.sources().values()})
        inside.clear_caches()
        gc.collect()
        gc.freeze()
        for site, *rest in self.each(self._starter):
            print(json.dumps([site.key, *rest]), file=self.out, flush=True)
        return True

    def _starter(self, site: operators.Site, tests: tuple[str, ...]) -> Callable[[], int] | None:
        path = draw.sources()[site.module]
        codes = codes_of(compile(draw.mutated(path, site.module, site.key), str(path), "exec"))
        swaps = [
            (function, codes[key])
            for key in codes.keys() & self.functions.keys()
            for function in self.functions[key]
            if function.__code__ != codes[key]
        ]
        if not swaps or any(len(f.__code__.co_freevars) != len(code.co_freevars) for f, code in swaps):
            return None
        chosen = [self.items[test] for test in tests if test in self.items]
        return lambda: self._try(swaps, chosen)

    def _try(self, swaps: list[tuple[types.FunctionType, types.CodeType]], chosen: list[pytest.Item]) -> int:
        """In a child: run tests until one fails."""
        inside.bound()
        for function, code in swaps:
            function.__code__ = code
        for item, following in zip(chosen, [*chosen[1:], None], strict=True):
            inside.limit_test(self.seconds.get(item.nodeid, 0))
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.failed:
                return inside.KILLED
        return inside.SURVIVED


def functions_of(paths: set[str]) -> dict[_Key, list[types.FunctionType]]:
    """The live functions of these files, wrapped ones too."""
    found: dict[_Key, list[types.FunctionType]] = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is types.FunctionType and one.__code__.co_filename in paths:
            found[_key(one.__code__)].append(one)
    return found


def codes_of(module: types.CodeType) -> dict[_Key, types.CodeType]:
    """The code of each function, but of those that the name and line do not tell apart."""
    found: dict[_Key, types.CodeType | None] = {}
    todo = [module]
    while todo:
        inner = [one for one in todo.pop().co_consts if isinstance(one, types.CodeType)]
        for code in inner:
            found[_key(code)] = None if _key(code) in found else code
        todo += inner
    return {key: code for key, code in found.items() if code is not None}


def _key(code: types.CodeType) -> _Key:
    return code.co_filename, code.co_qualname, code.co_firstlineno
