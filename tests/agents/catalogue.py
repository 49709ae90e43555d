"""The agents of ``agents.toml``, and their cells."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from covenant.session import profiles

HERE = Path(__file__).resolve().parent
COMMAND = (
    "printf 'hello, world\\n' > greeting.txt && git add greeting.txt && git commit -q -m 'add a greeting' "
    # The mark by which mini-swe-agent ends.
    "&& echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
)
# Those of `make longer`, each with a lock: small, and of npm and pip.
LIGHT = ("llm", "shell-gpt", "qwen-code")
KINDS = ("version", "task", "gate", "terminal", "acp")


class Cell(Struct, frozen=True, forbid_unknown_fields=True):
    """One cell: the arguments of the agent, and signs of success.

    ``shows`` matches the output of ``version``, or a cell with a limit. ``pipe`` is a program that reads the output of
    ``task``. ``provider`` is the kind of the provider behind the gate. ``ready`` matches the screen of ``terminal``
    once the agent waits for a key. ``keys`` are typed before, ``leave`` after the resize, each when its pattern is
    shown; with `!`, once it is gone. ``status`` is the exit status. ``npm`` is an adapter that speaks for the agent, a
    layer of its own, and ``env`` what it needs besides.
    """

    args: tuple[str, ...] = ()
    program: str = ""
    shows: str = ""
    pipe: str = ""
    provider: str = ""
    ready: str = ""
    npm: tuple[str, ...] = ()
    env: dict[str, str] = {}
    keys: tuple[tuple[str, str], ...] = ()
    leave: tuple[tuple[str, str], ...] = (("", "C-c"),)
    status: int = 0
    expected: str = "ok"


class Agent(Struct, frozen=True, forbid_unknown_fields=True):
    """One agent."""

    program: str
    npm: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    env: dict[str, str] = {}
    options: tuple[str, ...] = ()
    setup: str = ""
    reply: str = ""
    version: Cell | None = None
    task: Cell | None = None
    gate: Cell | None = None
    terminal: Cell | None = None
    acp: Cell | None = None

    def cell(self, kind: str) -> Cell | None:
        """Return the cell of this kind."""
        found: Cell | None = getattr(self, kind)
        return found

    @property
    def profile(self) -> str:
        """The profile that `covenant exec` takes for the agent's program."""
        return profiles.chosen(self.program)

    def words(self, kind: str) -> list[str]:
        """Return the command of a cell."""
        cell = self.cell(kind)
        assert cell is not None
        words: list[str] = [cell.program or self.program]
        for one in cell.args:
            words += self.options if one == "{options}" else [one]
        return words

    def variables(self, kind: str) -> dict[str, str]:
        """Return the environment of a cell, which leads the agent to the model beside it."""
        reply, cell = self.reply.replace("{command}", COMMAND), self.cell(kind)
        script = {"MODEL_COMMAND": COMMAND, "MODEL_REPLY": reply, "SETUP": self.setup}
        # A cell behind the gate has the variables of `--model` in place of those that lead to the model beside it.
        own = {"MODEL_ELSEWHERE": "1"} if kind == "gate" else self.env
        found = {**own, **(cell.env if cell else {}), **script}
        return {name: value for name, value in found.items() if value}


def adapter(name: str) -> str:
    """Return the name of the layer of an agent's adapter."""
    return f"{name}-acp"


def load() -> dict[str, Agent]:
    """Return the agents by their names."""
    return msgspec.convert(tomllib.loads((HERE / "agents.toml").read_text()), dict[str, Agent])


def cells(kind: str) -> list[str]:
    """Return the names of the agents that have a cell of this kind."""
    return [name for name, agent in load().items() if agent.cell(kind)]
