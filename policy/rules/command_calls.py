"""Decide one call of a command: granted, with allowed arguments, and within the limits of calls.

Each refusal is a denial with the lines of agent.toml that end it. It holds no argument; the lines may, for the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from policy import denials
from policy.denials import Denial
from policy.grants.skills import SkillSet
from policy.manifest import text
from policy.manifest.tools import command
from policy.rules.tool_calls import Refusal

RULE: Final = "[[tools.command.rule]]"


def agent_of(skills: SkillSet, name: str) -> str | None:
    """Return the agent id of a granted command's package; None where the command is not granted."""
    return dict(skills.commands).get(name)


def before(skills: SkillSet, name: str, argv: Sequence[str], stdin_bytes: int) -> Refusal | None:
    """Return the refusal of a call that is asked for; None where it may be made."""
    agent = agent_of(skills, name)
    if agent is None:
        uri = command.uri(text.visible(name, 64), "?")
        lines = ("[[tools.command]]", f"name = {text.toml(text.visible(name, 64))}", 'agent = "AGENT_ID"')
        return Refusal(Denial("tool", uri, denials.NOT_GRANTED), f"command {text.quote(name)} is not granted", lines)
    uri = command.uri(name, agent)
    size = sum(len(one.encode("utf-8", "surrogatepass")) for one in argv) + stdin_bytes
    if skills.argument_bytes is not None and size > skills.argument_bytes:
        message = f"the arguments and stdin have {size} bytes, and argument_bytes is {skills.argument_bytes}"
        wider = ("[permissions.skills]", f"argument_bytes = {size}")
        return Refusal(Denial("tool", uri, "argument_bytes"), message, wider)
    given = command.values(argv)
    failed = [one for one in skills.clauses(uri) if not one.holds(given)]
    return _misfit(uri, name, [one.argument for one in failed], argv) if failed else None


def _misfit(uri: str, name: str, arguments: Sequence[str], argv: Sequence[str]) -> Refusal:
    """The refusal with a rule for each argument that has none that takes it."""
    given, rules, hint = command.values(argv), dict[str, tuple[str, ...]](), ""
    for one in arguments:
        if one == command.COUNT:
            # Positions that have no rule yet are those behind the ones that must be given.
            rules |= {str(at): (value,) for at, value in enumerate(argv, 1) if str(at) not in rules}
        elif one == command.ALL:
            rules[one] = tuple(dict.fromkeys(argv))
        elif one in given:
            rules[one] = (str(given[one]),)
    if not all(rules.values()) or not rules:
        hint = f"call {name} with as many arguments as its rules have"
        rules = {}
    message = f"the arguments of {name} do not fit the rules of the manifest ({', '.join(arguments)})"
    lines = [line for argument, values in rules.items() for line in _rule(argument, values)]
    lines = [below(name), *lines] if lines else lines
    return Refusal(Denial("tool", f"{uri} {arguments[0]}", denials.ARGUMENTS), message, tuple(lines), hint)


def below(name: str) -> str:
    """The comment that says to which command the lines of a rule belong."""
    return f"# below [[tools.command]] with name = {text.toml(name)}"


def _rule(argument: str, values: tuple[str, ...]) -> tuple[str, ...]:
    listed = ", ".join(map(text.toml, values))
    condition = f"equals = {listed}" if len(values) == 1 else f"one_of = [{listed}]"
    return RULE, f"argument = {text.toml(argument)}", condition
