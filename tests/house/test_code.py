"""ruff, mypy strict, sizes, and the purity that imports alone do not show."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys
from collections.abc import Iterator

import pytest

BIN = pathlib.Path(sys.executable).parent
ROOMS = ("policy", "sandbox", "covenant")
MODULE_LINES, TEST_LINES = 500, 800
FUNCTION_LINES = 90

# Built-in doors to files, terminals and unseen code; pathlib and os are import-linter's business.
IMPURE_BUILTINS = frozenset({"open", "print", "input", "exec", "eval", "compile", "__import__", "breakpoint"})
# Clocks that hide in classes which policy may otherwise use.
CLOCKS = frozenset({"now", "utcnow", "today"})


def _tool(clone: pathlib.Path, *command: str) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=clone, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing(clone: pathlib.Path) -> None:
    _tool(clone, "ruff", "check", "--quiet", ".")


def test_code_is_formatted(clone: pathlib.Path) -> None:
    _tool(clone, "ruff", "format", "--check", "--quiet", ".")


def test_mypy_strict_finds_nothing(clone: pathlib.Path) -> None:
    # Without its cache: one made before a module was added went on saying that there is no such module.
    _tool(clone, "mypy", "--no-error-summary", "--cache-dir=/dev/null")


def _sources(clone: pathlib.Path, *folders: str) -> Iterator[pathlib.Path]:
    for folder in folders:
        yield from sorted((clone / folder).rglob("*.py"))


def test_modules_keep_their_size(clone: pathlib.Path) -> None:
    limits = [(ROOMS, MODULE_LINES), (("scripts", "benchmarks"), MODULE_LINES), (("tests",), TEST_LINES)]
    too_long = [
        f"{path.relative_to(clone)}: {lines} lines, at most {limit}"
        for folders, limit in limits
        for path in _sources(clone, *folders)
        if (lines := len(path.read_text().splitlines())) > limit
    ]
    assert too_long == []


def test_functions_fit_screen(clone: pathlib.Path) -> None:
    too_long = []
    for path in _sources(clone, *ROOMS, "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                # A docstring that states a procedure is not length to be sorry for.
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                lines = (node.end_lineno or 0) - first.lineno + 1
                if lines > FUNCTION_LINES:
                    too_long.append(f"{path.relative_to(clone)}:{node.lineno} {node.name}: {lines} lines")
    assert too_long == []


def _impurities(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if isinstance(node.func, ast.Name) and node.func.id in IMPURE_BUILTINS:
            found.append(f"{node.lineno}: {node.func.id}()")
        if isinstance(node.func, ast.Attribute) and node.func.attr in CLOCKS:
            found.append(f"{node.lineno}: .{node.func.attr}()")
    return found


def test_policy_calls_nothing_impure(clone: pathlib.Path) -> None:
    found = {
        str(path.relative_to(clone)): bad
        for path in _sources(clone, "policy")
        if (bad := _impurities(path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize("source", ["open('x')", "print(1)", "datetime.datetime.now()", "__import__('os')"])
def test_purity_check_sees(source: str) -> None:
    assert _impurities(source)


# Each with what keeps it from going on with another thread's locks: it executes at once, it is no Python at all, it
# lives for a millisecond in system calls, it is in a child that has one thread, its caller has (process.has_threads).
FORKS = {
    "sandbox/kernel/proc/child.py",
    "sandbox/kernel/proc/spawn.py",
    "sandbox/kernel/proc/launcher.py",
    "sandbox/kernel/proc/confine.py",
    "sandbox/shim/process.py",
    "sandbox/audit/follow_process.py",
}


def _forks(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty", "posix_spawn", "posix_spawnp"):
            found += [node.attr] if isinstance(node.value, ast.Name) and node.value.id == "os" else []
        elif isinstance(node, ast.keyword) and node.arg == "preexec_fn":
            found.append(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name in ("multiprocessing", "ProcessPoolExecutor", "fork", "pty")]
    return found


def test_processes_are_forked_in_known_places(clone: pathlib.Path) -> None:
    assert {str(path.relative_to(clone)) for path in _sources(clone, *ROOMS) if _forks(path.read_text())} == FORKS


@pytest.mark.parametrize(
    "source",
    ["os.fork()", "x = os.posix_spawn", "run(a, preexec_fn=b)", "import multiprocessing", "from os import fork"],
)
def test_look_for_forks_sees(source: str) -> None:
    assert _forks(source)


def test_public_modules_say_what_they_are(clone: pathlib.Path) -> None:
    silent = [
        str(path.relative_to(clone))
        for path in _sources(clone, *ROOMS, "tests", "scripts")
        if path.read_text().strip() and ast.get_docstring(ast.parse(path.read_text())) is None
    ]
    assert silent == []


def test_no_property_hangs_on_how_busy_machine_is(request: pytest.FixtureRequest) -> None:
    """Check the settings of all tests collected with this one, and the inherited profile.

    A run of the whole suite checks all.
    """
    import hypothesis

    found = {"the profile": hypothesis.settings()}
    for item in request.session.items:
        own = getattr(getattr(item, "function", None), "_hypothesis_internal_use_settings", None)
        if own is not None:
            found[item.nodeid] = own
    wrong = [
        name
        for name, one in found.items()
        if one.deadline is not None or hypothesis.HealthCheck.too_slow not in one.suppress_health_check
    ]
    assert not wrong, wrong
