"""Agents that start agents, for tests: common parts of their code, and packages side by side."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.kernel.world import HEAD, TAIL, World

# What an agent knows of its broker: `ask` sends a request and gives its answer, `child` does both halves of one.
KIT = """
import os
_last = [0]
try: _answers = open(3, "rb", closefd=False)
except OSError: _answers = None
def send(kind, **fields):
    _last[0] += 1
    os.write(3, (json.dumps({"id": _last[0], "kind": kind, **fields}) + "\\n").encode())
    return _last[0]
_held = {}
def hear(ident):
    while ident not in _held:
        line = _answers.readline()
        if not line: return {"gone": True}
        said = json.loads(line)
        _held[said.pop("id")] = said
    return _held.pop(ident)
def ask(kind, **fields):
    return hear(send(kind, **fields))
def child(agent, text="hi", **fields):
    said = ask("spawn", agent=agent, text=text, **fields)
    return ask("wait", run=said["ok"]["run"]) if "ok" in said else said
"""


def spawn(depth: int = 3, number: int = 8, fate: str = "terminate") -> str:
    """The spawn table of a manifest."""
    return f'[spawn]\nallowed = true\nmax_depth = {depth}\nmax_descendants = {number}\non_parent_exit = "{fate}"\n'


def reads(*paths: str) -> str:
    """The table of granted paths."""
    return f"[permissions.filesystem]\nread = {json.dumps(list(paths))}\n"


def member(world: World, name: str, code: str, **fields: Any) -> Path:
    """A signed python agent of this id; ``code`` sets `answer`, and has the kit."""
    text = HEAD + KIT + textwrap.dedent(code) + TAIL
    return world.sign(world.package({"main.py": text}, name=name, **{"id": name, "cpu_ms": 250_000, **fields}))


def answered(world: World, path: Path, text: str = "hi", **request: Any) -> Any:
    """Return the agent's `answer`; a failed run fails the test."""
    answer = world.run(path, text, **request)
    assert answer.error is None, (str(answer.error), answer.stderr)
    assert answer.result is not None
    return json.loads(answer.result.text)


BIG: dict[str, Any] = {"memory_mb": 2048, "resources": "pids_max = 512\ncpu_millis = 2000\n"}
SMALL: dict[str, Any] = {"memory_mb": 64, "resources": "pids_max = 16\ncpu_millis = 100\n"}
