"""docs/supervisor.md: its commands as a caller types them, its settings and docs/hardening.md beside the code."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shlex
import shutil
import stat
import subprocess
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from sandbox import config
from sandbox.serve import hardening
from tests.kernel import serving
from tests.kernel.serving import CALLER, Served, covenant
from tests.kernel.world import ROOT, World

PAGE = (ROOT / "docs" / "supervisor.md").read_text()
HARDENING = (ROOT / "docs" / "hardening.md").read_text()


def test_page_can_be_followed_by_caller(warm: Path) -> None:
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    with serving.open_place() as base, Served(World(base, warm=warm)) as served:
        package = served.world.sign(served.world.copy("hello"))
        found = []
        for line in lines:
            program, *words = shlex.split(line)
            assert program == "covenant"
            places = [str(package) if word == "agents/hello" else word for word in words]
            done = covenant(*places, served=served, uid=CALLER)
            found.append((line, done.returncode, done.stdout + done.stderr))
    assert [status for _, status, _ in found] == [0, 0], found
    assert "hello there" in found[0][2]


def _by_hand() -> list[str]:
    """The lines of "Without systemd", in their order."""
    section = PAGE.partition("Without systemd, as root:\n")[2].partition("One supervisor serves one state")[0]
    return re.findall(r"^    (.+)$", section, re.MULTILINE)


@contextlib.contextmanager
def _program(name: str, words: Sequence[str], world: World, uid: int, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """One of the two services as its user starts it, with an interpreter that any user may read."""
    module = {"covenant-supervisor": "sandbox.serve.start", "covenantd": "covenant.start"}[name]
    command = serving.covenant_command(*words)
    command[2] = command[2].replace("covenant.cli.main", module)
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **more}
    with (world.base / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd="/", **serving.identity(uid))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + serving.START_SECONDS
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)


def _daemon_home(base: Path, package: Path) -> Path:
    home = base / "daemon"
    shutil.copytree(package, home / "agents" / "hello")
    for path in (home, *home.rglob("*")):
        os.chown(path, CALLER, CALLER)
    home.chmod(0o700)
    return home


def test_services_can_be_started_by_hand(warm: Path) -> None:
    with contextlib.ExitStack() as stack:
        base = stack.enter_context(serving.open_place())
        world = World(base, warm=warm)
        served = Served(world)
        world.configure(journal=False, checkpoint_seconds=0)
        package = world.sign(world.copy("hello"))
        home = _daemon_home(base, package)
        places = {"/srv/covenant": str(world.state), "/run/covenant": str(base / "run"), "[1000]": f"[{CALLER}]"}
        lines = [
            functools.reduce(lambda text, place: text.replace(*place), places.items(), line) for line in _by_hand()
        ]
        *prepared, supervisor, run, daemon = lines
        for line in prepared:
            subprocess.run(["/bin/sh", "-c", line], check=True, timeout=30)
        stack.enter_context(_program("covenant-supervisor", shlex.split(supervisor)[1:], world, 0))
        served.path = base / "run" / "supervisor.sock"
        _until(served.path.exists)

        def asked(*words: str, **more: str) -> str:
            done = covenant(*words, served=served, uid=CALLER, environment=more)
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            return done.stdout

        socket, program, *words = shlex.split(run)
        assert (socket, program) == (f"COVENANT_SOCKET={served.path}", "covenant")
        assert "hello there" in asked(*(str(package) if word == "agents/hello" else word for word in words))
        assert shlex.split(daemon) == [socket, "covenantd"]
        named = {"COVENANT_SOCKET": str(served.path), "COVENANT_HOME": str(home), "COVENANT_HTTP_PORT": "off"}
        stack.enter_context(_program("covenantd", [], world, CALLER, **named))
        _until((home / "sock").exists)
        asked("bootstrap", **named)
        assert "hello there" in asked("intent", "hello there", "--agent", "hello", **named)
        assert stat.S_IMODE(world.state.stat().st_mode) == 0o700
        assert "callers cannot reach" not in (base / "covenant-supervisor.log").read_text()


def test_callers_that_cannot_reach_socket_are_named(warm: Path) -> None:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        world.configure(journal=False, checkpoint_seconds=0, callers=[CALLER])
        with _program("covenant-supervisor", ["--state", str(world.state)], world, 0):
            _until((world.state / "supervisor.sock").exists)
        said = (base / "covenant-supervisor.log").read_text()
    assert f"callers cannot reach `{world.state}/supervisor.sock`" in said
    assert 'socket = "/run/covenant/supervisor.sock"' in said


def test_its_tables_are_those_of_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \|$", HARDENING, re.MULTILINE)
    assert dict(rows) == dict(hardening.CAPABILITIES)
    (block,) = re.findall(r"((?:^    \w+ = .*\n)+)", PAGE, re.MULTILINE)
    document = tomllib.loads(block)
    found = config.parse(block.encode(), file="config.toml", state=Path("/s"))
    defaults = config.Config()
    for key in document.keys() - {"callers", "socket"}:
        assert getattr(found, key) == getattr(defaults, key), key
