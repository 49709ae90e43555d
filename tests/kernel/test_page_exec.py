"""docs/exec.md from its first command to its last, as typed."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.kernel.world import ROOT

_FENCE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Typist:
    """A new home with an operator's key and a vault's configuration, in which the lines of a page are typed."""

    def __init__(self, place: Path, more: Mapping[str, str] | None = None, *, trusts: bool = True) -> None:
        """``more`` are variables of its commands besides. Without ``trusts`` there is no key and no trust root."""
        self.place, self.home, self._more = place, place / "home", more or {}
        (place / "bin").mkdir()
        program = place / "bin/covenant"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m covenant "$@"\n')
        program.chmod(0o755)
        if trusts:
            self.typed("covenant keys new ann --no-passphrase && covenant trust init --key ann")
        config = self.home / "supervisor/config.toml"
        for folder in (self.home, config.parent):
            folder.mkdir(mode=0o700, exist_ok=True)
        config.write_text(f'self_test = false\n[vault]\nkey = "{place}/vault.key"\n')
        config.chmod(0o600)
        (place / "question").write_text("asked\n")
        (place / "secret").write_text("t0ken\n")

    def typed(self, command: str) -> tuple[str, str]:
        """Run a command with status 0. Returns its stdout and stderr."""
        environment = {
            **self._more,
            "PATH": f"{self.place}/bin:/usr/bin:/bin",
            "COVENANT_HOME": str(self.home),
            "PYTHONPATH": str(ROOT),
        }
        done = subprocess.run(
            ["/bin/sh", "-c", command], env=environment, cwd=self.place, capture_output=True, timeout=120, check=False
        )
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def typist(tmp_path: Path) -> Iterator[Typist]:
    made = Typist(tmp_path)
    yield made
    assert [p.name for p in (made.home / "supervisor/runs").iterdir() if p.is_dir()] == []


def test_saved_package_runs_after_what_is_printed(tmp_path: Path) -> None:
    """On a host without a trust root its first one is a step too; afterwards it is not."""
    typist = Typist(tmp_path, trusts=False)
    typist.typed("covenant keys new ann --no-passphrase && covenant layer build debian-minimal")
    for name, steps in (("one", 3), ("two", 2)):
        said = typist.typed(f"covenant exec --save {name} -- echo {name}")[0]
        printed = said.partition("saved: ")[2].strip().split(", then ")
        assert len(printed) == steps, said
        *before, run = (command.replace("NAME", "ann") for command in printed)
        for command in before:
            typist.typed(command)
        assert typist.typed(run)[0] == f"{name}\n"


def test_page_can_be_followed(tmp_path: Path) -> None:
    typist = Typist(tmp_path, trusts=False)
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
    assert len(lines) >= 15
