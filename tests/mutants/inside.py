"""The inside of a forked child: pytest over chosen tests, with a mutant in the place of one module.

Import this before policy and the tests, so that each child imports those anew. A child never writes; its exit status is
all that the parent reads.
"""

from __future__ import annotations

import ast
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import resource
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import hypothesis
import pytest
from hypothesis import Phase

# Exit statuses of a child beside those of pytest.
SURVIVED, KILLED, TIMED_OUT, MEMORY = 0, 1, 90, 91
# Plain asserts: whether one fails is all that is asked, and rewriting wants to be there before hypothesis is.
OPTIONS = ("-q", "--no-header", "--no-summary", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:faulthandler")
_MEMORY_BYTES = 3 * 1024**3
# Processor time: of a test beyond ten times its own, and of everything between tests.
_TEST_SECONDS, _IMPORT_SECONDS = 2.0, 10.0
_FIRST, _SECOND = 25, 150  # where the first batches of tests end


def few_examples() -> None:
    """Hypothesis without chance: the same few examples each time, nothing stored, nothing shrunk."""
    hypothesis.settings.register_profile(
        "mutants",
        max_examples=20,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    hypothesis.settings.load_profile("mutants")


def fewer(items: list[pytest.Item]) -> None:
    """Hold tests that ask for many examples to those of the profile."""
    most = hypothesis.settings.get_profile("mutants").max_examples
    for item in items:
        function: Any = getattr(item, "function", None)
        own = getattr(function, "_hypothesis_internal_use_settings", None)
        if own is not None and own.max_examples > most:
            function._hypothesis_internal_use_settings = hypothesis.settings(own, max_examples=most)


class _Instead(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives one module from a syntax tree instead of its file."""

    def __init__(self, name: str, tree: ast.Module, path: str) -> None:
        self.name, self.tree, self.path = name, tree, path

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        exec(compile(self.tree, self.path, "exec"), module.__dict__)


class _Chosen:
    """Runs the chosen tests in the given order, each with a limit on its processor time.

    A test that no run without a mutant has seen is run as well: a mutant that changes what is parametrised over
    must not lose the tests that would notice.
    """

    def __init__(self, order: Mapping[str, int], known: Collection[str], seconds: Mapping[str, float]) -> None:
        self.order, self.known, self.seconds = order, known, seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.order or item.nodeid not in self.known]
        fewer(chosen)
        items[:] = sorted(chosen, key=lambda item: self.order.get(item.nodeid, -1))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        limit_test(self.seconds.get(item.nodeid, 0))
        try:
            return (yield)
        finally:
            limit(_IMPORT_SECONDS)


def bound() -> None:
    """Bound the memory and the time of this child, and collect no garbage, since the child is short."""
    gc.disable()
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _out_of_time)
    limit(_IMPORT_SECONDS)


def limit_test(usual_seconds: float) -> None:
    """Bound the processor time of the next test, which takes ``usual_seconds`` without a mutant."""
    limit(_TEST_SECONDS + 10 * usual_seconds)


def limit(seconds: float) -> None:
    """Processor time from now, after which this process ends itself: an endless loop is a mutant that was seen."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def _out_of_time(*_: object) -> NoReturn:
    os._exit(TIMED_OUT)


def quiet() -> None:
    """Nothing of a child reaches the terminal."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def forked(work: Callable[[], int]) -> int:
    """Start a child that does ``work`` and exits with what it returns; the child's process id."""
    pid = os.fork()
    if pid:
        return pid
    status = KILLED
    try:
        status = work()
    except BaseException:  # a child never returns into its parent's code
        traceback.print_exc()
    finally:
        os._exit(status)


def try_mutant(
    name: str, tree: ast.Module, path: str, tests: Sequence[str], known: Collection[str], seconds: Mapping[str, float]
) -> int:
    """In a child: run ``tests`` in order against the mutant; the exit status."""
    quiet()
    bound()
    gc.freeze()
    sys.meta_path.insert(0, _Instead(name, tree, path))
    # Most mutants fall to the first few tests, and those lie in few files.
    for batch in (tests[:_FIRST], tests[_FIRST:_SECOND], tests[_SECOND:]):
        if batch and (status := _pytest(batch, known, seconds)) != SURVIVED:
            return status
    return SURVIVED


def _pytest(tests: Sequence[str], known: Collection[str], seconds: Mapping[str, float]) -> int:
    order = {test: i for i, test in enumerate(tests)}
    files = sorted({test.partition("::")[0] for test in tests})
    try:
        return int(pytest.main(["-x", *OPTIONS, *files], plugins=[_Chosen(order, known, seconds)]))
    except MemoryError:
        return MEMORY


def caches() -> list[Any]:
    """Every function of a policy module that caches what it returned."""
    modules = [m for name, m in sys.modules.items() if name.split(".")[0] == "policy" and m is not None]
    found = [value for module in modules for value in vars(module).values()]
    return [value for value in found if callable(getattr(value, "cache_clear", None))]


def clear_caches() -> None:
    """Forget what the collection of tests left in caches."""
    for cache in caches():
        cache.cache_clear()


class Recorder:
    """Runs every test with a context of its own in the coverage, and notes its time and outcome."""

    def __init__(self, coverage: Any) -> None:
        self.coverage = coverage
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._caches: list[Any] = []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        fewer(items)

    def pytest_collection_finish(self) -> None:
        self._caches = caches()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        # What an earlier test left in a cache would hide which lines this one stands on.
        for cache in self._caches:
            cache.cache_clear()
        self.coverage.switch_context(item.nodeid)
        started = time.process_time()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = time.process_time() - started
            self.coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
