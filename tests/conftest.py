"""Settings of every test: no network, its own home, and kernel tests that cannot vanish.

The folder decides what a test may do:

    tests/unit, tests/property, tests/golden    no network (only AF_UNIX sockets connect or bind)
    tests/kernel                                real runsc, as root; marked `kernel` by its folder
    tests/agents                                the same, with agents of npm and pip; only by `make agents`
    tests/packaging, tests/house                read the tree, build a wheel, run set-up

A kernel test that lacks root or a working runsc is skipped by name on a developer's machine. It fails where `CI` or
`COVENANT_REQUIRE_KERNEL` is set, which scripts/test does: a test that was not run is not green.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pathlib
import signal
import socket
from typing import Any, NoReturn

import pytest

from scripts.machine import runsc

ROOT = pathlib.Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"

_OFFLINE_FOLDERS = frozenset({"unit", "property", "golden"})
_REQUIRE_VARIABLES = ("CI", "COVENANT_REQUIRE_KERNEL")


def _no_property_by_time() -> None:
    """Turn off deadlines: the result of a property test must not depend on how busy the machine is.

    The rest is Hypothesis's default: the same examples each time where `CI` is set. A profile that another plugin or
    caller loaded stays.
    """
    import hypothesis

    found = hypothesis.settings.get_current_profile_name()
    if found in {"default", "ci"}:
        parent = hypothesis.settings.get_profile(found)
        # Suppress the one health check that a busy machine breaks: the time to draw an example.
        slow = [hypothesis.HealthCheck.too_slow]
        hypothesis.settings.register_profile("covenant", parent, deadline=None, suppress_health_check=slow)
        hypothesis.settings.load_profile("covenant")


# The virtual machine has what its tests need and no more: no property is among them.
if importlib.util.find_spec("hypothesis") is not None:
    _no_property_by_time()


def _signals_arrive() -> None:
    """A shell that starts these tests behind itself has them ignore SIGINT and SIGQUIT, nohup SIGHUP, and what is
    executed inherits that: commands that are interrupted here would go on, and be waited for."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


_signals_arrive()


def _folder(path: pathlib.Path) -> str:
    """The first folder below tests/ of a test file, or the empty string outside."""
    try:
        return path.relative_to(TESTS).parts[0]
    except ValueError:
        return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _folder(item.path) in {"kernel", "agents"}:
            item.add_marker(pytest.mark.kernel)
        if _folder(item.path) == "agents":
            item.add_marker(pytest.mark.agents)


@functools.cache
def _runsc_mend() -> str | None:
    """Why kernel tests cannot run here, or None: a live probe, since a version proves nothing."""
    if os.geteuid() != 0:
        return "kernel tests need root"
    # An emulated machine starts a sandbox in half a minute, and in more where its host is busy.
    runsc.DEADLINE_SECONDS = 60 * int(os.environ.get("COVENANT_SLOWNESS", "1"))
    found = runsc.probe()
    return None if found.works else f"no runsc that works ({found.problem}): run scripts/setup"


@pytest.fixture(autouse=True)
def _kernel_capability(request: pytest.FixtureRequest) -> None:
    """A kernel test runs, or says why not; in CI and under scripts/test `why not` is a failure."""
    if request.node.get_closest_marker("kernel") is None:
        return
    reason = _runsc_mend()
    if reason is None:
        return
    if any(os.environ.get(name) for name in _REQUIRE_VARIABLES):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


class NetworkTakenAwayError(AssertionError):
    """A unit or property test reached for the network."""


@pytest.fixture(autouse=True)
def _no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the network from unit, property and golden tests: only unix sockets connect or bind.

    getaddrinfo goes too, since a name lookup is traffic. The error is an AssertionError, so that code which catches
    OSError broadly does not pass by accident.
    """
    if _folder(request.path) not in _OFFLINE_FOLDERS:
        return

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NetworkTakenAwayError(f"network use in an offline test: {args[1:]!r}")

    def guard(name: str) -> None:
        real = getattr(socket.socket, name)

        def guarded(self: socket.socket, *args: Any, **kwargs: Any) -> Any:
            if self.family != socket.AF_UNIX:
                refuse(self, name, *args)
            return real(self, *args, **kwargs)

        monkeypatch.setattr(socket.socket, name, guarded)

    for name in ("connect", "connect_ex", "bind", "sendto", "sendmsg"):
        guard(name)
    for name in ("getaddrinfo", "gethostbyname", "gethostbyname_ex", "gethostbyaddr", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture(autouse=True)
def covenant_home(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> pathlib.Path:
    """A fresh COVENANT_HOME (0700) for every test; the caller's own is never touched.

    COVENANT_STATE and the caller's HOME are taken away as well, so that a default path that a test forgot to
    redirect lands in the same temporary place.
    """
    home = tmp_path_factory.mktemp("home", numbered=True)
    home.chmod(0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home / ".covenant"))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("COVENANT_STATE", raising=False)
    monkeypatch.delenv("SUDO_USER", raising=False)
    return home / ".covenant"


@pytest.fixture(params=["starter", "fork"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each way in which a child is started (sandbox.kernel.proc.spawn): a test with it is run once for each."""
    from sandbox.kernel.proc import launcher

    assert launcher.there(), "scripts/build_starter has not been run"
    if request.param == "fork":
        monkeypatch.setattr(launcher, "there", lambda: False)
    return str(request.param)


@pytest.fixture(scope="session")
def clone() -> pathlib.Path:
    """The root of the clone under test."""
    return ROOT


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The daemon runs on asyncio, so its tests do too."""
    return "asyncio"
