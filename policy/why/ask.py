"""Why may an agent do one thing, or why not: answered from the artefacts that were compiled, read back.

A question is a value that knows three things: what the artefacts say of it (``seen``), whether a set of grants would
allow it (``granted``: a parent's ceiling, a role's), and what an author would write to be granted it (``mend``). A
grant that no signature can give is named with its reason.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct, structs

from policy import data
from policy.decompile.read import Decompiled, Grants
from policy.grants.effective import Effective, ceilings_of_children
from policy.host import Closure
from policy.manifest import text
from policy.manifest.agent import Manifest
from policy.rules import items, nine
from policy.why import amend


class Sight(Struct, frozen=True):
    """The sources of an answer: the artefacts read back, the package's file names, the closures of this host.

    ``bounds`` are the ceilings above the agent by what people call them (``role `reader```, ``parent `boss```);
    ``never`` the trees of this host that are never granted, beside those of the data file. By ``anchors`` the root
    has the trust anchors of this host. Additions are judged by ``manifest``, from which the artefacts were compiled.
    """

    found: Decompiled
    files: Collection[str] = ()
    closures: Collection[Closure] = ()
    bounds: Mapping[str, Effective] | None = None
    never: Mapping[str, str] | None = None
    anchors: bool = False
    manifest: Manifest | None = None


class LayerAnswer(Struct, frozen=True):
    """The artefacts' answer: yes or no, the sentence, and the rule (``artefact:place``) where one rule decides."""

    allowed: bool
    because: str
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """``add`` is what to write, empty when it is allowed or never can be; ``bounds`` who above would allow it.

    ``there`` says which sections and keys of ``add`` the manifest has already, and where.
    """

    question: str
    allowed: bool
    because: str
    rule: str
    add: tuple[str, ...]
    never: str
    bounds: Mapping[str, bool]
    there: tuple[str, ...] = ()

    def document(self) -> dict[str, Any]:
        """As ``policy why --json`` prints it."""
        return {
            "question": self.question,
            "allowed": self.allowed,
            "because": self.because,
            "rule": self.rule or None,
            "add": list(self.add),
            "there": list(self.there),
            "never": self.never or None,
            "bounds": dict(self.bounds),
        }


class Question(Protocol):
    """One thing that an agent might do."""

    def describe(self) -> str:
        """The question in words."""

    def seen(self, sight: Sight) -> LayerAnswer:
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
        errors.ManifestError: Raised when the additions do not fit the manifest.
    """
    seen, why_never = question.seen(sight), question.never(sight)
    add = () if seen.allowed or why_never else question.mend(sight)
    after = None if sight.manifest is None or not add else amend.amended(sight.manifest, add)
    because = seen.because
    grants = sight.found.grants
    if grants.may_grant and not question.granted(grants) and question.granted(_children(grants)):
        because += "; its children may be given it (spawn.may_grant)"
    bounds = {
        name: question.granted(ceiling)
        and (after is None or not _excess(after, ceiling) - _excess(sight.manifest, ceiling))
        for name, ceiling in (sight.bounds or {}).items()
    }
    there = () if after is None or sight.manifest is None else amend.standing(sight.manifest, add)
    return Answer(question.describe(), seen.allowed, because, seen.rule, add, why_never, bounds, there)


def _children(grants: Grants) -> Grants:
    """The most that children of an agent with these grants may have."""
    return structs.replace(grants, **ceilings_of_children(grants, remaining_seconds=None))


def _excess(manifest: Manifest | None, ceiling: Effective) -> set[tuple[str, str]]:
    """Return what rule 3 or 4 finds beyond a ceiling, as (domain, line)."""
    if manifest is None:
        return set()
    over = items.excess(manifest, nine.requested(manifest, roles=data.roles()), ceiling)
    return {(one.domain, line) for one in over for line in one.lines}


def toml(value: str) -> str:
    """A TOML string without hidden characters."""
    return text.toml(text.visible(value, limit=len(value) + 1))
