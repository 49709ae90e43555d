"""Decide one call of a tool: granted, of an allowed class, with allowed arguments, and within the limits of calls.

Each refusal is a denial with the lines of agent.toml that end it. Whether the arguments fit the tool's own input schema
is asked elsewhere (``covenant.wire.json_schema``).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from policy import denials
from policy.denials import Denial
from policy.grants.skill_rules import Clause
from policy.grants.skills import SkillSet
from policy.manifest import text
from policy.manifest.permissions import CALLS
from policy.manifest.tools import command, skill_rules
from policy.manifest.tools.document import FILE, Server, Tool, ToolManifest

TABLE: Final = "[permissions.skills]"
WINDOW_SECONDS: Final = 60.0


class Refusal(Struct, frozen=True):
    """A refused call. ``add`` are the lines of agent.toml that end it, empty where no line does; ``hint`` says more.

    ``denial`` holds no argument of the call; ``add`` may, and is for the caller alone.
    """

    denial: Denial
    message: str
    add: tuple[str, ...] = ()
    hint: str = ""

    def fix(self) -> str:
        """The fix in one text."""
        lines = "\n".join(self.add)
        return "\n".join(
            part for part in (self.hint, f"write in agent.toml and sign again:\n{lines}" * bool(lines)) if part
        )


def find(tools: ToolManifest, uri: str) -> tuple[Server, Tool] | None:
    """Return the server and the tool of a URI; None for one that tools.json does not have, and for a native tool."""
    found = ((server, tool) for server in tools.servers for tool in server.tools if str(server.uri(tool)) == uri)
    return next(found, None)


def before(skills: SkillSet, tools: ToolManifest, uri: str, arguments: Mapping[str, Any]) -> Refusal | None:
    """Return the refusal of a call that is asked for; None where it may be made.

    1. the tool is declared and granted, with its class in both files;
    2. the arguments are no larger than allowed;
    3. they fit every rule.
    """
    # (1) the tool
    found = find(tools, uri)
    if found is None:
        message = f"{text.quote(uri)} is no tool of a server of {FILE}"
        return Refusal(Denial("tool", uri, "unknown_tool"), message, hint="covenant tools list shows what it has")
    if not skills.allow.holds(uri) or not skills.side_effects.holds(found[1].side_effect_class):
        return _not_granted(skills, uri, found[1].side_effect_class)
    if found[1].side_effect_class not in tools.allowed_side_effects:
        message = f"class `{found[1].side_effect_class}` is not in allowed_side_effects of {FILE}"
        hint = f"add it to allowed_side_effects of {FILE}, and sign again"
        return Refusal(Denial("tool", uri, "class_not_allowed"), message, hint=hint)

    # (2) their size
    size = len(encoded(arguments))
    if _over(size, skills.argument_bytes):
        return _too_much(skills, uri, "argument_bytes", size, f"the arguments have {size} bytes")

    # (3) the rules
    failed = tuple(one for one in skills.clauses(uri) if not one.holds(arguments))
    return _misfit(uri, failed, arguments) if failed else None


def after(skills: SkillSet, uri: str, size: int) -> Refusal | None:
    """Return the refusal of an answer of ``size`` bytes."""
    if _over(size, skills.answer_bytes):
        return _too_much(skills, uri, "answer_bytes", size, f"the answer has {size} bytes")
    return None


def unapproved(uri: str) -> Refusal:
    """Return the refusal of a call that an operator is asked about, and that no lease covers."""
    bound = command.bound(uri)
    message = f"each call of {text.quote(bound[0] if bound else uri)} needs an operator, and none granted this one"
    hint = "call it again when an operator is there: covenant approvals list shows what waits"
    return Refusal(Denial("tool", uri, denials.NOT_APPROVED), message, hint=hint)


def not_offered(uri: str, reason: str) -> Refusal:
    """Return the refusal of a granted tool of the daemon that this run does not have."""
    hint = "submit the intent to the daemon, as a caller with the capability of the tool"
    return Refusal(Denial("tool", uri, "not_offered"), f"`{uri}` may not be called: {reason}", hint=hint)


def call_ms(skills: SkillSet, tool: Tool) -> int:
    """Return the milliseconds that a call of a tool may take."""
    return tool.timeout_ms if skills.call_ms is None else min(tool.timeout_ms, skills.call_ms)


def late(skills: SkillSet, tools: ToolManifest, uri: str) -> Refusal:
    """Return the refusal of a call that has taken as long as it may."""
    found = find(tools, uri)
    assert found is not None
    server, tool = found
    if tool.timeout_ms <= call_ms(skills, tool):
        hint = f"raise timeout_ms of `{tool.name}` of server `{server.alias}` in {FILE}, pin and sign again"
        return Refusal(Denial("tool", uri, "timeout_ms"), f"it gave no answer in {tool.timeout_ms} ms", hint=hint)
    message = f"it gave no answer in {skills.call_ms} ms"
    return _too_much(skills, uri, "call_ms", tool.timeout_ms, message)


class CallRate:
    """The calls of the last 60 seconds, and all of a run. ``now`` is the time of any clock that does not go back."""

    def __init__(self, skills: SkillSet) -> None:
        self._skills = skills
        self._times: deque[float] = deque()
        self._made = 0

    def take(self, uri: str, now: float) -> Refusal | None:
        """Count a call, or return its refusal where there were as many as allowed."""
        refusal = self.spent(uri) or self._fast(uri, now)
        self._made += refusal is None
        return refusal

    def spent(self, uri: str) -> Refusal | None:
        """Return the refusal of a call where the run has made all that it may; counts none."""
        most = self._skills.calls
        if most is None or self._made < most:
            return None
        message = f"this run has made {self._made} calls"
        return _too_much(self._skills, uri, "calls", 2 * most, message)

    def _fast(self, uri: str, now: float) -> Refusal | None:
        most = self._skills.calls_per_minute
        if most is None:
            return None
        while self._times and self._times[0] <= now - WINDOW_SECONDS:
            self._times.popleft()
        if len(self._times) >= most:
            message = f"there were {most} calls in the last {WINDOW_SECONDS:g} seconds"
            return _too_much(self._skills, uri, "calls_per_minute", 2 * most, message)
        self._times.append(now)
        return None


def encoded(value: Any) -> bytes:
    """A value as JSON: what sizes and digests of arguments are taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _over(size: int, limit: int | None) -> bool:
    return limit is not None and size > limit


def _not_granted(skills: SkillSet, uri: str, side_effect: str) -> Refusal:
    lines = [TABLE]
    missing = []
    if not skills.allow.holds(uri):
        missing.append("its URI is not in allow")
        lines.append(f"allow = [{text.toml(uri)}]")
    if not skills.side_effects.holds(side_effect):
        missing.append(f"its class `{side_effect}` is not in side_effects")
        lines.append(f"side_effects = [{text.toml(side_effect)}]")
    message = f"`{uri}` may not be called: {' and '.join(missing)} of {TABLE}"
    return Refusal(Denial("tool", uri, denials.NOT_GRANTED), message, tuple(lines))


def _too_much(skills: SkillSet, uri: str, key: str, wanted: int, message: str) -> Refusal:
    held, most = getattr(skills, key), CALLS[key]
    said = f"{message}, and {key} is {held}"
    if held >= most or (wanted > most and key not in ("calls", "calls_per_minute")):
        return Refusal(Denial("tool", uri, key), said, hint=f"{key} is at most {most}: use the tool in smaller steps")
    return Refusal(Denial("tool", uri, key), said, (TABLE, f"{key} = {min(wanted, most)}"))


def _misfit(uri: str, failed: tuple[Clause, ...], arguments: Mapping[str, Any]) -> Refusal:
    names = sorted({one.argument for one in failed})
    message = f"{' and '.join(map(text.quote, names))} of the call of `{uri}` is not what a rule of the manifest takes"
    rows: dict[tuple[str, ...], None] = {}
    for one in failed:
        row = _row(one, arguments)
        if not row:
            hint = f"give {text.quote(one.argument)} a text, a whole number or a boolean that a rule can name"
            return Refusal(Denial("tool", f"{uri} {one.argument}", denials.ARGUMENTS), message, hint=hint)
        rows[row] = None
    lines = tuple(line for row in rows for line in row)
    return Refusal(Denial("tool", f"{uri} {names[0]}", denials.ARGUMENTS), message, lines)


def _row(clause: Clause, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The rule that takes the argument of a call as well; nothing where there is no such rule."""
    value = arguments.get(clause.argument)
    items = value if isinstance(value, list) else [value]
    # By its TOML: to Python, true is 1.
    refused = dict.fromkeys(_toml(one) for one in items if not clause.takes(one))
    if not refused or "" in refused:
        return ()
    condition = f"equals = {next(iter(refused))}" if len(refused) == 1 else f"one_of = [{', '.join(refused)}]"
    named = (f"tool = {text.toml(clause.tool)}", f"argument = {text.toml(clause.argument)}")
    return "[[permissions.skills.rule]]", *named, condition


def _toml(value: Any) -> str:
    """A value as a manifest may hold it, or nothing."""
    from pydantic_core import PydanticCustomError

    try:
        return text.toml(skill_rules.scalar(value))
    except PydanticCustomError:
        return ""
