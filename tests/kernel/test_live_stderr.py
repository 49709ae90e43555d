"""`covenant run` shows on stderr, while an agent works, its lines, each once, and what waits for an operator."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.signing import keyfile
from tests.kernel import serving, test_asked_tools
from tests.kernel.serving import Served
from tests.kernel.test_contract_sessions import supervised
from tests.kernel.world import World

__all__ = ["supervised"]
TEXT = '[process]\ncontract = "text"\n'
ANSWERS = {"text": "print('done', end='')", "line": "import json; input(); print(json.dumps({'text': 'done'}))"}


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that an agent may be granted."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def _command(served: Served, through: bool, code: str, more: str) -> dict[str, Any]:
    """Return how `covenant run` is started with a package of this code."""
    package = served.world.sign(served.world.package({"main.py": code}, more=more, cpu_ms=300_000))
    environment = serving.environment_of(served, 0)
    if not through:
        del environment["COVENANT_SOCKET"]
    return {
        "args": serving.covenant_command("run", str(package), "TEXT"),
        "env": environment,
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
    }


def _until(stream: Any, mark: bytes) -> bytes:
    said = b""
    while mark not in said:
        line = stream.readline()
        assert line, said
        said += line
    return said


@pytest.mark.parametrize("contract", ["text", "line"])
def test_stderr_is_shown_while_agent_works(supervised: tuple[Served, bool], place: Path, contract: str) -> None:
    """The agent goes on only when the test has read its first line: it waits for a file that a grant shows it."""
    served, through = supervised
    code = (
        "import os, sys, time\nsys.stderr.write('first\\npart')\nsys.stderr.flush()\n"
        f"while not os.path.exists('{place}/go'): time.sleep(0.02)\n"
        f"sys.stderr.write(' of a line\\nlast')\nsys.stderr.flush()\n{ANSWERS[contract]}\n"
    )
    more = f'{TEXT if contract == "text" else ""}[permissions.filesystem]\nread = ["{place}"]\n'
    with subprocess.Popen(**_command(served, through, code, more)) as process:
        assert process.stderr is not None
        said = _until(process.stderr, b"agent: first\n")
        assert process.poll() is None
        (place / "go").touch()
        out, rest = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, b"done\n"), rest
    assert (said + rest).count(b"agent: ") == 3
    assert rest.startswith(b"agent: part of a line\nagent: last\n")


def test_stderr_that_floods_is_cut_and_answer_comes(supervised: tuple[Served, bool]) -> None:
    served, through = supervised
    code = "import sys\nfor n in range(100_000): sys.stderr.write(f'line {n:06}\\n')\nprint('done', end='')"
    done = subprocess.run(**_command(served, through, code, TEXT), timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, b"done\n")
    # The cut is within a line.
    lines = re.findall(rb"^agent: line (\d{6})$", done.stderr, re.MULTILINE)
    assert (lines[0], lines[-1]) == (b"000000", b"099999")
    assert len(lines) == len(set(lines)), "each is shown once"
    assert b"bytes dropped" in done.stderr


@pytest.mark.parametrize("through", [True, False])
def test_request_that_waits_is_shown_with_its_command(warm: Path, tmp_path: Path, through: bool) -> None:
    """The command that is shown works. The agent's run is silent otherwise, for as long as an operator needs."""
    with serving.open_place() as base:
        one = Served(World(base, warm=warm), ask_operators=True)
        (one.world.home / "keys").mkdir(mode=0o700)
        key = one.world.home / "keys" / "ann.key"
        key.write_bytes(keyfile.plain(one.world.key))
        key.chmod(0o600)
        with one if through else contextlib.nullcontext():
            environment = serving.environment_of(one, 0)
            if not through:
                del environment["COVENANT_SOCKET"]
            asks = json.dumps([test_asked_tools.call("hi")])
            command = serving.covenant_command("run", str(test_asked_tools.packaged(one.world, tmp_path)), asks)
            with subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            ) as process:
                said = _until(process.stderr, b"to grant it: ").decode()
                shown = said.rpartition("to grant it: ")[2].split()[1:]
                granted = subprocess.run(
                    serving.covenant_command(*shown, "--key", "ann"), env=environment, capture_output=True, timeout=120
                )
                assert granted.returncode == 0, granted.stderr
                out, rest = process.communicate(timeout=120)
    assert process.returncode == 0, rest
    assert b"HI" in out
    assert f"waits for an operator, at most 60 s: tool {test_asked_tools.target('hi')}\n" in said
