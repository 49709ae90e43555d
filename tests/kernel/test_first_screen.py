"""The example of README.md, as typed: an agent of npm works on a checkout, and prints what the screen shows."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import loopback_server
from tests.kernel.test_page_exec import Typist
from tests.kernel.world import ROOT

SCREEN = (ROOT / "README.md").read_text().partition("\n## An agent on your checkout\n")[2].partition("\n## ")[0]
STEP = re.compile(r"^# ((?:.*\\\n)*.*)\n((?:(?!# ).*\n)*)", re.MULTILINE)
GIT = ("git", "-c", "safe.directory=*", "-c", "user.name=owner", "-c", "user.email=owner@example.invalid")


@pytest.fixture
def typist() -> Iterator[Typist]:
    """A home, and a place for packages that no mount of a sandbox covers."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        # npm keeps the settings that this machine has for it.
        yield Typist(Path(made), dict(os.environ))


@pytest.fixture
def project() -> Iterator[Path]:
    """A checkout with one commit, on a file system that takes idmapped mounts."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as top:
        Path(top).chmod(0o755)
        made = Path(top) / "project"
        made.mkdir()
        (made / "notes").write_text("notes\n")
        for words in (("init", "-q", "-b", "main"), ("add", "."), ("commit", "-qm", "begin")):
            subprocess.run([*GIT, *words], cwd=made, check=True)
        yield made


@pytest.fixture
def port() -> Iterator[int]:
    """A free port, whose model ends with the test."""
    found = loopback_server.free_port()
    yield found
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
        except OSError:
            continue
        if command.endswith(f"/model.py\0{found}\0".encode()):
            os.kill(int(entry), signal.SIGTERM)


def _matches(wanted: str, shown: list[str]) -> None:
    """Check that each wanted line was shown, once. `...` is any text, and `[...]` further lines."""
    lines = wanted.splitlines()
    for line in filter(lambda line: line != "[...]", lines):
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        # A root that is a directory refuses in other words than an image does.
        pattern = pattern.replace(re.escape("Read-only file system"), "(Read-only file system|Permission denied)")
        found = [one for one in shown if re.fullmatch(pattern, one)]
        assert found, (line, shown)
        shown.remove(found[0])
    assert "[...]" in lines or shown == [], shown


def test_readme_shows_what_is_printed(typist: Typist, project: Path, port: int) -> None:
    places = {"/opt/": f"{typist.place}/", "8080": str(port), "--workspace project": f"--workspace {project}"}
    places["tests/agents/fake"] = str(ROOT / "tests/agents/fake")

    def typed(line: str, run: str) -> list[str]:
        for named, real in places.items():
            line = line.replace(named, real)
        out, err = typist.typed(line.replace("RUN", run))
        return [line.replace(run, "RUN") if run else line for line in [*out.splitlines(), *err.splitlines()]]

    # In the order of the page: what is made once, and then the example.
    (kind, once), (other, block) = re.findall(r"^```(\w+)\n(.*?)^```", SCREEN, re.MULTILINE | re.DOTALL)
    assert (kind, other) == ("sh", "console")
    for line in once.splitlines():
        typed(line, "")
    steps = STEP.findall(block)
    assert [re.findall(r"covenant (\w+)", command)[:1] for command, _ in steps] == [
        *([], ["exec"], ["workspace"], ["workspace"])
    ]
    run = ""
    for command, wanted in steps:
        shown = typed(command, run)
        if not run and "covenant exec" in command:
            listed = json.loads(typist.typed("covenant workspace list --json")[0])["workspaces"]
            (run,) = [one["run_id"][:8] for one in listed if one["directory"] == str(project)]
            shown = [line.replace(run, "RUN") for line in shown]
        _matches(wanted, shown)
    log = subprocess.run([*GIT, "log", "--format=%an %s"], cwd=project, capture_output=True, text=True, check=True)
    assert log.stdout == "agent license: add BSD\nowner begin\n"
    assert (project / "LICENSE").read_bytes() == Path("/usr/share/common-licenses/BSD").read_bytes()
    assert not (project / ".git/hooks/post-checkout").exists()
