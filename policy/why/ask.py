"""Why may an agent do one thing, or why not: answered from the artefacts that were compiled, read back.

A question is a value that knows three things: what the artefacts say of it (``seen``), whether a set of grants would
allow it (``granted``: a parent's ceiling, a role's), and what an author would write to be granted it (``mend``). A
grant that no signature can give is named with its reason.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from policy.decompile.read import Decompiled, Grants
from policy.grants.effective import Effective
from policy.host import Closure
from policy.manifest import text


@dataclass(frozen=True, slots=True)
class Sight:
    """The sources of an answer: the artefacts read back, the package's file names, the closures of this host.

    ``bounds`` are the ceilings above the agent by what people call them (``role `reader```, ``parent `boss```);
    ``never`` the trees of this host that are never granted, beside those of the data file.
    """

    found: Decompiled
    files: Collection[str] = ()
    closures: Collection[Closure] = ()
    bounds: Mapping[str, Effective] | None = None
    never: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """The artefacts' answer: yes or no, the sentence, and the rule (``artefact:place``) where one rule decides."""

    allowed: bool
    because: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """``add`` is what to write, empty when it is allowed or never can be; ``bounds`` who above would allow it."""

    question: str
    allowed: bool
    because: str
    rule: str
    add: tuple[str, ...]
    never: str
    bounds: Mapping[str, bool]

    def document(self) -> dict[str, Any]:
        """As ``policy why --json`` prints it."""
        return {
            "question": self.question,
            "allowed": self.allowed,
            "because": self.because,
            "rule": self.rule or None,
            "add": list(self.add),
            "never": self.never or None,
            "bounds": dict(self.bounds),
        }


class Question(Protocol):
    """One thing that an agent might do."""

    def describe(self) -> str:
        """The question in words."""

    def seen(self, sight: Sight) -> Seen:
        """Return the answer of the artefacts."""

    def granted(self, grants: Grants | Effective) -> bool:
        """Whether a set of grants allows it."""

    def mend(self, sight: Sight) -> tuple[str, ...]:
        """The lines of ``agent.toml`` that ask for it."""

    def never(self, sight: Sight) -> str:
        """Why no manifest is granted it; empty when one can be."""


def ask(question: Question, sight: Sight) -> Answer:
    """The answer, and what would change it.

    Raises:
        errors.UnknownSyscallError, errors.UsageError: the question names what cannot exist.
    """
    seen, why_never = question.seen(sight), question.never(sight)
    add = () if seen.allowed or why_never else question.mend(sight)
    bounds = {name: question.granted(ceiling) for name, ceiling in (sight.bounds or {}).items()}
    return Answer(question.describe(), seen.allowed, seen.because, seen.rule, add, why_never, bounds)


def toml(value: str) -> str:
    """A TOML string: JSON's escapes are among TOML's."""
    return json.dumps(text.visible(value, limit=len(value) + 1), ensure_ascii=False)
