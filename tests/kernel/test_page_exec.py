"""docs/exec.md from its first command to its last, as typed; the first screen of README.md with its output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.world import ROOT

_FENCE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Typist:
    """A new home with an operator's key and a vault's configuration, in which the lines of a page are typed."""

    def __init__(self, place: Path) -> None:
        self.place, self.home = place, place / "home"
        (place / "bin").mkdir()
        program = place / "bin/covenant"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m covenant "$@"\n')
        program.chmod(0o755)
        self.typed("covenant keys new ann --no-passphrase && covenant trust init --key ann")
        config = self.home / "supervisor/config.toml"
        config.write_text(f'self_test = false\n[vault]\nkey = "{place}/vault.key"\n')
        config.chmod(0o600)
        (place / "question").write_text("asked\n")
        (place / "secret").write_text("t0ken\n")

    def typed(self, command: str) -> tuple[str, str]:
        """Run a command with status 0. Returns its stdout and stderr."""
        environment = {
            "PATH": f"{self.place}/bin:/usr/bin:/bin",
            "COVENANT_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment, cwd=self.place, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.decode(), done.stderr.decode()


def _pattern(line: str) -> str:
    """Return what matches a line of the page. A root that is a directory refuses in other words than an image does."""
    said = re.escape(line).replace(re.escape("..."), ".*")
    return said.replace(re.escape("Read-only file system"), "(Read-only file system|Permission denied)")


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    made = Typist(tmp_path)
    yield made
    assert [p.name for p in (made.home / "supervisor/runs").iterdir() if p.is_dir()] == []


def test_page_can_be_followed(typist: Typist) -> None:
    page = (ROOT / "docs/exec.md").read_text()
    lines = [line for block in _FENCE.findall(page) for line in block.splitlines()]
    shown = {line: typist.typed(line)[0] for line in lines}
    wanted = {
        "id; git": r"uid=\d+\(agent\).*\ngit version .*\n(.*\n)*usr\n",
        "< question": "asked\n",
        "common-licenses": r"[1-9]\d*\n",
        "GREETING": "hello\n",
        "--publish": "nothing listens yet\n",
        "sys.version_info": r"\(3, \d+\)\n",
        "mail=MAIL_TOKEN": "",
        "covenant run mine": "signed for operator\n",
    }
    for mark, pattern in wanted.items():
        (found,) = [out for line, out in shown.items() if mark in line]
        assert re.search(rf"\A{pattern}", found), (mark, found)
    assert len(lines) >= 13


def test_readme_shows_what_is_printed(typist: Typist) -> None:
    """The first commands of the README print what it shows; `...` stands for what differs between machines."""
    screen = (ROOT / "README.md").read_text().partition("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```", screen, re.MULTILINE | re.DOTALL)
    steps = re.findall(r"^# ((?:.*\\\n)*.*)\n((?:(?!# ).*\n)*)", block, re.MULTILINE)
    assert [command.split()[:2] for command, _ in steps] == [["covenant", "layer"], ["covenant", "exec"]]
    for command, wanted in steps:
        out, err = typist.typed(command)
        # Two pipes: which line comes first on a screen is not fixed.
        shown = [*out.splitlines(), *err.splitlines()]
        for line in wanted.splitlines():
            found = [one for one in shown if re.fullmatch(_pattern(line), one)]
            assert found, (line, shown)
            shown.remove(found[0])
        assert shown == []
    assert os.environ.get("COVENANT_HOME") != str(typist.home)
