"""docs/command-tools.md: its packages as they are written there, signed and run; and the line that ends a refusal."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.kernel.world import ROOT, World

_FENCE = re.compile(r"^```\w+\n# (\w+)/([\w.]+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGE = ROOT / "docs" / "command-tools.md"


@pytest.fixture(scope="module")
def packages() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for package, file, content in _FENCE.findall(PAGE.read_text()):
        found.setdefault(package, {})[file] = content
    return found


def test_page_does_what_it_says(world: World, packages: dict[str, dict[str, str]]) -> None:
    assert sorted(packages) == ["asker", "count"]
    count, asker = (world.sign(world.package(packages[name], name=name)) for name in ("count", "asker"))
    assert count.is_dir()
    answers = []
    for word in ("BSD", "GPL-3"):
        answer = world.run(asker, word)
        assert answer.result is not None, (answer.error, answer.stderr)
        answers.append(answer.result.text)
    first, second = answers
    assert f"`{' '.join(first.split(chr(10))[0].split())}`" in PAGE.read_text(), first
    assert first.endswith("seen False")
    assert second.startswith("126 ")
    assert second.endswith("seen False")
    # What the page asks about the same call names the same lines.
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    typed = next(line for line in PAGE.read_text().splitlines() if line.startswith("covenant policy why"))
    words = typed.replace("covenant", f"{sys.executable} -m covenant", 1)
    done = subprocess.run(["/bin/sh", "-c", words], env=environment, cwd=asker.parent, capture_output=True, check=False)
    assert done.returncode == 3, done.stderr
    assert b'equals = "GPL-3"' in done.stdout
    # The lines of the refusal, behind the table that they belong to.
    lines = [line.strip().removeprefix("fix: ") for line in second.splitlines()]
    at = lines.index("[[tools.command.rule]]")
    added = "\n".join(line for line in lines[at:] if not line.startswith("seen"))
    files = packages["asker"]
    wider = {**files, "agent.toml": files["agent.toml"] + added + "\n"}
    answer = world.run(world.sign(world.package(wider, name="asker")), "GPL-3")
    assert answer.result is not None, (answer.error, answer.stderr)
    assert answer.result.text.startswith("0 ")
