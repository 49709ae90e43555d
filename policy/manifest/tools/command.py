"""``[[tools.command]]``: programs that run for the agent in sandboxes of their own, each called by a name on its PATH.

The program is an agent package of its own with the contract `stdio`, signed as any, and a child of the agent that
calls it. Rules hold its arguments: those of one argument are alternatives, and each argument that has a rule must fit.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator

from policy.manifest import fields, text
from policy.manifest.tools import skill_rules

says = fields.says
# The namespace of the tool URIs that stand for commands in grants; no manifest may write one.
PREFIX: Final = "matrix://tool/command/"
NAME: Final = r"[a-z0-9][a-z0-9._+-]{0,31}"
# The agent id stands in the version of the URI, which has 64 characters.
AGENT: Final = r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,61}"
ALL, LINE, COUNT = "argv", "line", "count"
POSITIONS: Final = 64
ARGUMENT: Final = rf"{ALL}|{LINE}|[1-9]|[1-5][0-9]|6[0-4]"


def word(value: Any) -> str:
    """A validator: the text of one argument.

    Raises:
        PydanticCustomError: it is no text, or has hidden characters.
    """
    if not isinstance(value, str) or len(value) > text.STRING_CHARACTERS:
        raise text.wrong(f"{text.quote(value)} is no text of an argument", "arguments of programs are text")
    return text.unhidden(value)


class CommandRule(fields.Section):
    """``[[tools.command.rule]]``: values that an argument of the command may have."""

    argument: Annotated[
        str,
        AfterValidator(text.Matching("argument", ARGUMENT, f'"1" to "{POSITIONS}", "{ALL}" or "{LINE}"')),
        says(
            f'`"1"` is the first, `"2"` the second; `"{ALL}"` each of them, at least one; `"{LINE}"` the whole command '
            "line without the name, quoted as a shell needs it"
        ),
    ]
    equals: Annotated[str | None, BeforeValidator(word), says("its value")] = None
    matches: Annotated[
        Annotated[str, AfterValidator(skill_rules.pattern_of)] | None,
        says("a pattern (RE2) that the whole of it fits"),
    ] = None
    one_of: Annotated[
        tuple[Annotated[str, BeforeValidator(word)], ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says("its values, one of these"),
    ] = ()


def ruled(items: tuple[CommandRule, ...]) -> tuple[CommandRule, ...]:
    """A validator: each rule has one form, and the positions begin at 1 without a gap.

    Raises:
        PydanticCustomError: it is not that.
    """
    for index, rule in enumerate(items):
        skill_rules.one_form(index, rule)
        if rule in items[:index]:
            raise text.wrong("the rule is written twice", "keep one", at=index)
    places = positions(items)
    for index, rule in enumerate(items):
        if rule.argument.isdigit() and int(rule.argument) > 1 and int(rule.argument) - 1 not in places:
            before = int(rule.argument) - 1
            raise text.wrong(
                f"argument {rule.argument} has a rule, and argument {before} has none",
                f'write a rule of "{before}" as well; matches = ".*" takes any',
                at=index,
            )
    return items


def positions(rules: Sequence[CommandRule]) -> frozenset[int]:
    """The positions that have a rule."""
    return frozenset(int(one.argument) for one in rules if one.argument.isdigit())


class CommandTool(fields.Section):
    """``[[tools.command]]``: a program in a sandbox of its own, which the agent calls by its name."""

    name: Annotated[
        str,
        AfterValidator(text.Matching("command", NAME, "1 to 32 of a-z 0-9 . _ + -, the first a letter or digit")),
        says("its name on the agent's PATH"),
    ]
    agent: Annotated[
        str,
        AfterValidator(text.Matching("agent", AGENT, "an agent id of at most 62 characters")),
        says('agent id of its package, which lies beside this one; its contract is "stdio"'),
    ]
    rule: Annotated[
        tuple[CommandRule, ...],
        fields.LIST,
        AfterValidator(ruled),
        says("values that its arguments may have; without a rule it is called without arguments"),
    ] = ()
    ask: Annotated[
        bool, says("whether each call is held for an operator, at most `ask_seconds` of `[permissions.skills]`")
    ] = False

    @property
    def uri(self) -> str:
        """The name of the grant: the command, and the package that runs."""
        return uri(self.name, self.agent)

    def clauses(self) -> Iterator[tuple[str, CommandRule | int]]:
        """Each argument with a rule of it; where the rules are about positions alone, how many arguments there are."""
        for one in self.rule:
            yield one.argument, one
        if not any(one.argument in (ALL, LINE) for one in self.rule):
            yield COUNT, len(positions(self.rule))


def unique_names(items: tuple[CommandTool, ...]) -> tuple[CommandTool, ...]:
    """A validator: no name twice.

    Raises:
        PydanticCustomError: one is written twice.
    """
    fields.unique(tuple(one.name for one in items))
    return items


class Tools(fields.Section):
    """``[tools]``: programs in sandboxes of their own. The tools of MCP servers are in tools.json."""

    command: Annotated[tuple[CommandTool, ...], fields.LIST, AfterValidator(unique_names), says("commands")] = ()


def uri(name: str, agent: str) -> str:
    """The tool URI that stands for a command in grants."""
    return f"{PREFIX}{name}@1:{agent}"


def bound(uri_: str) -> tuple[str, str] | None:
    """Return the name and the agent id of a command's URI; None for every other tool."""
    if not uri_.startswith(PREFIX):
        return None
    name, _, agent = uri_.removeprefix(PREFIX).partition("@1:")
    return name, agent


def line(argv: Sequence[str]) -> str:
    """The arguments in one text, quoted as a shell needs it."""
    return shlex.join(argv)


def values(argv: Sequence[str]) -> dict[str, Any]:
    """The arguments of a call as its rules name them."""
    placed = {str(index): one for index, one in enumerate(argv[:POSITIONS], 1)}
    return {**placed, ALL: list(argv), LINE: line(argv), COUNT: len(argv)}


def problems(
    tools: Tools, *, backend: str, spawns: bool, effects: Sequence[str], allowed: Sequence[str]
) -> Iterator[tuple[str, str, str]]:
    """Each place, message and fix: what a command needs beside its own table."""
    for index, one in enumerate(allowed):
        if one.startswith(PREFIX):
            hint = "take it out, and write [[tools.command]] with name and agent"
            yield f"permissions.skills.allow[{index}]", f"{text.quote(one)} is granted by [[tools.command]] alone", hint
    if not tools.command:
        return
    if backend != "linux-gvisor":
        message = f"[[tools.command]] is written while the backend is `{backend}`"
        yield "tools.command", message, 'write backend = "linux-gvisor"'
    if not spawns:
        hint = "write allowed = true, max_depth = 1 and max_descendants = 1 below [spawn]"
        yield "tools.command", "[[tools.command]] is written while spawn.allowed is `false`", hint
    if "shell" not in effects:
        hint = 'write side_effects = ["shell"] below [permissions.skills]'
        yield "tools.command", "a command runs a program, and class `shell` is not granted", hint
