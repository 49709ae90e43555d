"""README.md, its session by hand: from the first command to the last, in a clone whose agents the demo has signed."""

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
    places = {"mine": str(tmp_path / "mine"), "/tmp/hello-policy": str(tmp_path / "policy")}
    ran = []
    for line in commands(section):
        program, *words = shlex.split(line)
        if program == "export":
            continue
        if program == "cp":
            shutil.copytree(ROOT / words[1], places[words[2]], ignore=shutil.ignore_patterns("__pycache__"))
            assert (tmp_path / "mine/agent.dsse.json").exists(), "set-up signs the agents of a clone"
            continue
        assert program == "covenant"
        done = call(world.home, *(places.get(word, word) for word in words))
        # `why` says no by its status: this agent has no network.
        wanted = 3 if words[:2] == ["policy", "why"] else 0
        assert done.returncode == wanted, (line, done.stdout, done.stderr)
        ran.append(words[0])
    assert len(ran) >= 13
    assert {"keys", "trust", "manifest", "policy", "run", "audit", "doctor"} == set(ran)
