"""A question about a ceiling: may the agent have more of it?"""

from __future__ import annotations

from dataclasses import dataclass

from policy.decompile.read import Grants
from policy.grants.effective import Effective
from policy.grants.resources import UNITS
from policy.why.ask import LayerAnswer, Sight

TTL = "ttl_seconds"
KEYS = (*UNITS, TTL)


@dataclass(frozen=True, slots=True)
class Limit:
    """More of one ceiling, which is ``key`` of ``[resources]`` or ``[lifetime]``: ``wanted`` of its units."""

    key: str
    wanted: int

    @classmethod
    def more(cls, key: str, sight: Sight) -> Limit:
        """Twice what the artefacts give."""
        return cls(key, 2 * (_ceiling(key, sight.found.grants) or 1))

    def describe(self) -> str:
        """The ceiling and how much of it."""
        return f"have {self.key} = {self.wanted}"

    def seen(self, sight: Sight) -> LayerAnswer:
        """By the artefacts' own ceiling."""
        held = _ceiling(self.key, sight.found.grants)
        if held is None or held >= self.wanted:
            return LayerAnswer(True, f"{self.key} is {'not limited' if held is None else held}")
        return LayerAnswer(False, f"{self.key} is {held}", f"effective.json:{self.key}")

    def granted(self, grants: Grants | Effective) -> bool:
        """By the resources, or the lifetime."""
        held = _ceiling(self.key, grants)
        return held is None or held >= self.wanted

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The key with the higher number."""
        return ("[lifetime]" if self.key == TTL else "[resources]"), f"{self.key} = {self.wanted}"

    def never(self, sight: Sight) -> str:
        """Every ceiling can be raised by some key."""
        return ""


def _ceiling(key: str, grants: Grants | Effective) -> int | None:
    held: int | None = grants.lifetime.ttl_seconds if key == TTL else getattr(grants.resources, key)
    return held
