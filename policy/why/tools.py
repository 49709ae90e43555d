"""A question about a tool: may the agent call it, and with these arguments?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct, structs

from policy.decompile.read import Grants
from policy.grants.effective import Effective
from policy.grants.skills import SkillSet
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.manifest.permissions import CALLS
from policy.manifest.tools import command
from policy.manifest.tools.document import ToolManifest
from policy.rules import command_calls, tool_calls
from policy.why.ask import LayerAnswer, Sight

_RULES: Final = "supervision.json:skills"


def _without_rules(skills: SkillSet) -> SkillSet:
    """Return the grants of which every rule can be met by some call."""
    return structs.replace(skills, rules=())


_ASKED: Final = "an operator is asked about each call, and grants it by a lease: covenant approvals list"
_UNASKED: Final = "without a question, if that is meant: take it out of ask, and sign again"


def _added(refusal: tool_calls.Refusal | None) -> tuple[str, ...]:
    return () if refusal is None else refusal.add


def _hint(refusal: tool_calls.Refusal | None) -> str:
    return refusal.hint if refusal is not None and not refusal.add else ""


class CallTool(Struct, frozen=True):
    """Call a tool of the package's tools.json. Without ``arguments`` the question is whether any call may be made."""

    uri: str
    tools: ToolManifest
    arguments: Mapping[str, Any] | None = None

    def describe(self) -> str:
        """The tool."""
        with_them = "" if self.arguments is None else " with these arguments"
        return f"call {text.visible(self.uri)}{with_them}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the grants of the artefacts."""
        skills = sight.found.grants.skills
        refusal = self._refusal(skills)
        if refusal is not None:
            return LayerAnswer(False, refusal.message, f"{_RULES}/allow")
        if self.uri in skills.asked:
            return LayerAnswer(False, _ASKED, f"{_RULES}/asked/{self.uri}")
        rules = " and ".join(map(str, skills.clauses(self.uri)))
        said = f"it is granted, with {rules}" if rules else "it is granted"
        return LayerAnswer(True, said, f"{_RULES}/allow/{self.uri}")

    def _refusal(self, skills: SkillSet) -> tool_calls.Refusal | None:
        skills = skills if self.arguments is not None else _without_rules(skills)
        return tool_calls.before(skills, self.tools, self.uri, self.arguments or {})

    def granted(self, grants: Grants | Effective) -> bool:
        """By the skills domain."""
        return self._refusal(grants.skills) is None and self.uri not in grants.skills.asked

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The list of tools and classes, a rule, or a limit."""
        return _added(self._refusal(sight.found.grants.skills))

    def never(self, sight: Sight) -> str:
        """A call that no line of agent.toml allows, or that a line holds for an operator."""
        skills = sight.found.grants.skills
        refusal = self._refusal(skills)
        return _UNASKED if refusal is None and self.uri in skills.asked else _hint(refusal)


class CallCommand(Struct, frozen=True):
    """Call a command. Without ``argv`` the question is whether any call may be made."""

    name: str
    argv: tuple[str, ...] | None = None

    def describe(self) -> str:
        """The command."""
        with_them = "" if self.argv is None else f" with arguments {text.visible(command.line(self.argv))}"
        return f"call command {text.visible(self.name)}{with_them}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the grants of the artefacts."""
        skills = sight.found.grants.skills
        refusal = self._refusal(skills)
        if refusal is not None:
            return LayerAnswer(False, refusal.message, f"{_RULES}/allow")
        agent = command_calls.agent_of(skills, self.name) or ""
        uri = command.uri(self.name, agent)
        if uri in skills.asked:
            return LayerAnswer(False, _ASKED, f"{_RULES}/asked/{uri}")
        rules = " and ".join(map(str, skills.clauses(uri)))
        return LayerAnswer(True, f"agent `{agent}` runs beside it, with {rules}", f"{_RULES}/allow/{uri}")

    def _refusal(self, skills: SkillSet) -> tool_calls.Refusal | None:
        skills = skills if self.argv is not None else _without_rules(skills)
        return command_calls.before(skills, self.name, self.argv or (), 0)

    def granted(self, grants: Grants | Effective) -> bool:
        """By the skills domain."""
        return self._refusal(grants.skills) is None and not self._asked(grants.skills)

    def _asked(self, skills: SkillSet) -> bool:
        return command.uri(self.name, command_calls.agent_of(skills, self.name) or "") in skills.asked

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """A table of the command with what the manifest lacks for any command, a rule, or a limit."""
        skills = sight.found.grants.skills
        is_granted = command_calls.agent_of(skills, self.name) is not None
        needs = () if is_granted or sight.manifest is None else _needs_of_command(sight.manifest)
        return needs + _added(self._refusal(skills))

    def never(self, sight: Sight) -> str:
        """A call that no line of agent.toml allows, or that a line holds for an operator."""
        skills = sight.found.grants.skills
        return _UNASKED if self._asked(skills) and self._refusal(skills) is None else _hint(self._refusal(skills))


def _needs_of_command(manifest: Manifest) -> tuple[str, ...]:
    """Return the lines without which a manifest grants no command, as ``command.problems`` refuses it."""
    spawn = () if manifest.spawn.allowed else ("[spawn]", "allowed = true", "max_depth = 1", "max_descendants = 1")
    has_shell = "shell" in manifest.permissions.skills.side_effects
    effects = () if has_shell else (tool_calls.TABLE, 'side_effects = ["shell"]')
    backend = () if manifest.sandbox.backend == "linux-gvisor" else ("[sandbox]", 'backend = "linux-gvisor"')
    return (*backend, *effects, *spawn)


class MoreCalls(Struct, frozen=True):
    """More of a limit of calls, which is ``key`` of ``[permissions.skills]``."""

    key: str
    wanted: int

    @classmethod
    def more(cls, key: str, sight: Sight) -> MoreCalls:
        """Twice as much as the artefacts give, as far as a manifest may."""
        return cls(key, min(CALLS[key], 2 * (getattr(sight.found.grants.skills, key) or 1)))

    def describe(self) -> str:
        """The limit and how much of it."""
        return f"have {self.key} = {self.wanted}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the artefacts' own limit."""
        held = getattr(sight.found.grants.skills, self.key)
        is_enough = held is None or held >= self.wanted
        return LayerAnswer(is_enough, f"{self.key} is {held}", f"{_RULES}/limits/{self.key}")

    def granted(self, grants: Grants | Effective) -> bool:
        """By the skills domain."""
        held = getattr(grants.skills, self.key)
        return held is None or held >= self.wanted

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The key with the higher number."""
        return tool_calls.TABLE, f"{self.key} = {self.wanted}"

    def never(self, sight: Sight) -> str:
        """Every limit can be raised to its own most."""
        return ""
