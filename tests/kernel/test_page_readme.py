"""README.md, its session by hand: from the first command to the last, with a copy of the agent that it signs."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from tests.house.test_docs import commands
from tests.kernel.test_command_line import call
from tests.kernel.world import ROOT, World


def test_session_can_be_followed(world: World, tmp_path: Path) -> None:
    # The page begins with a home that is not there yet; this one has the closures alone.
    shutil.rmtree(world.state / "trust")
    section = (ROOT / "README.md").read_text().partition("## A session by hand\n")[2].partition("\n## ")[0]
    places = {"agents/hello": str(world.copy("hello")), "/tmp/hello-policy": str(tmp_path / "policy")}
    ran = []
    for line in commands(section):
        program, *words = shlex.split(line)
        if program == "export":
            continue
        assert program == "covenant"
        done = call(world.home, *(places.get(word, word) for word in words))
        # `why` says no by its status: this agent has no network.
        wanted = 3 if words[:2] == ["policy", "why"] else 0
        assert done.returncode == wanted, (line, done.stdout, done.stderr)
        ran.append(words[0])
    assert len(ran) >= 13
    assert {"keys", "trust", "manifest", "policy", "run", "audit", "doctor"} == set(ran)
