"""Run the commands of docs/sessions.md as they are written there."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

from tests.kernel import serving
from tests.kernel.serving import Served
from tests.kernel.session_kit import Terminal
from tests.kernel.test_contract_console import in_terminal
from tests.kernel.test_contract_sessions import supervised
from tests.kernel.test_detach import _call, _package, served, terminals
from tests.kernel.world import ROOT
from tests.unit.sandbox.shim.test_stream import CAT

__all__ = ["served", "supervised", "terminals"]
# It has no handler of a new size, which an attach brings: that is test_detach.py's.
ENDS = "import sys\nprint('READY', flush=True)\nwhile input() != 'quit': pass\nsys.exit(7)\n"
PAGE = (ROOT / "docs/sessions.md").read_text()


def test_page_shows_session_that_works(supervised: tuple[Served, bool], tmp_path: Path) -> None:
    one, through = supervised
    (manifest,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    command, _ = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    package = one.world.sign(one.world.package({"main.py": CAT}, more=manifest))
    (tmp_path / "question").write_bytes(b"asked\n")
    words = shlex.join(serving.covenant_command())
    environment = serving.environment_of(one, 0)
    if not through:
        del environment["COVENANT_SOCKET"]
    line = command.replace("PACKAGE", str(package)).replace("covenant ", f"{words} ", 1)
    done = subprocess.run(["/bin/sh", "-c", line], cwd=tmp_path, env=environment, capture_output=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "answer").read_bytes() == b"asked\n"


def test_page_shows_detached_session(served: Served, terminals: list[Terminal]) -> None:
    """Both lines as they are written, with the package and the run put in."""
    _, lines = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    starts, returns = (line.split()[1:] for line in lines.splitlines())
    started = _call(served, *(_package(served.world, ENDS) if word == "PACKAGE" else word for word in starts))
    assert started.returncode == 0, started.stderr
    verb, *rest = [started.stdout.strip() if word == "RUN" else word for word in returns]
    one = in_terminal(served, True, *rest, verb=verb)
    terminals.append(one)
    one.until(b"READY")
    one.type(b"quit\r")
    assert one.ended() == 7, one.shown
