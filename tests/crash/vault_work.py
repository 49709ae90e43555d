"""The vault's whole life, as an operator types it, in the process that is killed: each command told once it is done."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The file that opens it, beside the home.
KEY = "vault.key"
# What a vault holds: the secret and its version, by agent and name; None where there is no vault.
Held = Mapping[tuple[str, str], tuple[int, str]] | None


@dataclass(frozen=True)
class Command:
    """One command, the secret that it reads, and what the vault holds once it is done."""

    words: tuple[str, ...]
    secret: str
    held: Held


def _planted(number: int) -> str:
    return f"planted-secret-{number}-" + "x" * 64


COMMANDS = (
    Command(("init",), "", {}),
    Command(("put", "a", "one"), _planted(1), {("a", "one"): (1, _planted(1))}),
    Command(
        ("put", "a", "two"), _planted(2), {("a", "one"): (1, _planted(1)), ("a", "two"): (1, _planted(2))}
    ),
    Command(
        ("rotate", "a", "one"), _planted(3), {("a", "one"): (2, _planted(3)), ("a", "two"): (1, _planted(2))}
    ),
    Command(("rm", "a", "two"), "", {("a", "one"): (2, _planted(3))}),
    Command(("rekey",), "", {("a", "one"): (2, _planted(3))}),
    Command(
        ("put", "b", "one"), _planted(4), {("a", "one"): (2, _planted(3)), ("b", "one"): (1, _planted(4))}
    ),
)  # fmt: skip


def do(home: str, first: int, count: Callable[[], None], told: Callable[[Mapping[str, Any]], None]) -> None:
    """Everything from the command ``first`` on. ``count`` is called before it: from there on it may be killed."""
    from covenant.cli.operator.vault import vault

    os.environ["COVENANT_HOME"] = home
    pipes: Sequence[tuple[int, int]] = [os.pipe() for _ in COMMANDS]
    for (_, end), command in zip(pipes, COMMANDS, strict=True):
        os.write(end, command.secret.encode())
        os.close(end)
    count()
    for number in range(first, len(COMMANDS)):
        command = COMMANDS[number]
        given = ["--fd", str(pipes[number][0])] if command.secret else []
        if command.words == ("rekey",):
            given = ["--key-file", os.path.join(os.path.dirname(home), KEY)]
        with contextlib.redirect_stdout(io.StringIO()):
            vault.main([*command.words, *given], standalone_mode=False)
        told({"done": number})
