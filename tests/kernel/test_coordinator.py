"""The coordinator and its librarians, run as an operator runs them: really split, really looked up, really narrower."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.kernel.world import World
from tests.unit import agent_modules


def test_it_splits_question_and_joins_what_its_librarians_found(world: World) -> None:
    shelf = Path("/usr/share/doc")
    names = [name for name in ("dpkg", "tar", "bash", "grep") if (shelf / name / "copyright").is_file()][:2]
    assert len(names) == 2, "a machine of Debian's has these"
    world.sign(world.copy("librarian"))
    coordinator = world.sign(world.copy("coordinator"))
    question = f"who wrote {names[0]} and what license has {names[1]}?"
    answer = world.run(coordinator, question)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    text, sources = answer.result.text, answer.result.sources
    assert "not answered" not in text, text
    assert sources
    for name in names:
        assert any(source.startswith(f"{shelf}/{name}/") for source in sources), (name, sources)
    # Each is a file of this machine, and lies in a directory that was left to its librarian: it could read no other.
    package = agent_modules.load(coordinator / "main.py")
    parts = package.parts_of(question)
    left = {place for part in parts for place in package.shelves(part, [str(shelf)])}
    assert all(os.path.isfile(source) and os.path.dirname(source) in left for source in sources), (sources, left)

    rows = [row["kind"] for row in world.rows()]
    started = [row for row in rows if row["type"] == "run_started"]
    assert [row["agent_id"] for row in started] == ["coordinator", "librarian", "librarian"]
    assert {row["parent"] for row in started[1:]} == {started[0]["run_id"]}
    assert len({row["policy_digest"] for row in started}) == 3
    assert [row["status"] for row in rows if row["type"] == "run_ended"] == ["ok"] * 3


def test_alone_it_says_what_was_refused(world: World) -> None:
    answer = world.run(world.sign(world.copy("coordinator")), "what is bash")
    assert answer.result is not None, answer.error
    assert "not answered: package_invalid: no package of agent `librarian`" in answer.result.text
    assert json.dumps(answer.result.sources) == "[]"
