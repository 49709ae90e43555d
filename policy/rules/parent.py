"""Rules 4 and 5: a spawning parent as the rules see it, and the grants of its child.

A parent is proved by the socket that the request came over (decisions.md, Roles), never named by a client; the
supervisor fills these values in from its own records.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from policy.compile.artefacts import Artefacts
from policy.grants.effective import DOMAINS, Effective
from policy.grants.sets.domain import Domain
from policy.grants.spawning import Spawning

OnExcess = Literal["reject", "narrow"]


class Ancestor(Struct, frozen=True):
    """A live run above the child: its depth (0 without a parent), its spawning grants, and its live descendants.

    ``live_descendants`` counts the whole subtree, reservations included: the supervisor reserves on every ancestor
    at once before it asks, so that two spawns that race for the last place cannot both win.
    """

    run_id: str
    agent_id: str
    depth: int
    spawning: Spawning
    live_descendants: int


class Drawn(Struct, frozen=True):
    """The draw on a parent's ceilings: its own use and the grants of its live children, summed."""

    memory_mb: int = 0
    pids_max: int = 0
    cpu_millis: int = 0


class Parent(Struct, frozen=True):
    """The run that asks for a child.

    ``effective`` is what the parent has, never what its manifest asked for; ``remaining_seconds`` what is left of its
    life (None without an end); ``ancestors`` all runs above the child from the root down, the parent last;
    ``artefacts`` what it runs under, which the child's are shown to lie within. A rule alone needs none.
    """

    run_id: str
    agent_id: str
    payload_digest: str
    effective: Effective
    remaining_seconds: int | None
    drawn: Drawn
    ancestors: tuple[Ancestor, ...]
    artefacts: Artefacts | None = None

    def __post_init__(self) -> None:
        # INVARIANT: rule 5 asks every ancestor; a parent that is not among them would have no budget at all.
        if not self.ancestors or self.ancestors[-1].run_id != self.run_id:
            raise ValueError(f"the last ancestor is not run {self.run_id}")

    @property
    def ceiling(self) -> Effective:
        """Return the most that a child may have."""
        return self.effective.for_child(remaining_seconds=self.remaining_seconds)


class Delegation(Struct, frozen=True):
    """The outcome of rule 4: what the child asked for, what it gets, and what was taken, by domain."""

    requested: Effective
    granted: Effective
    removed: dict[str, Domain]

    def report(self) -> dict[str, dict[str, list[str]]]:
        """Requested, granted and removed lines by domain, for the error, the answer and the audit log."""
        asked, got = self.requested.describe(), self.granted.describe()
        lost = {name: domain.describe() for name, domain in self.removed.items()}
        columns = {"requested": asked, "granted": got, "removed": lost}
        return {
            domain: {column: list(lines.get(domain, ())) for column, lines in columns.items()}
            for domain in DOMAINS
            if any(domain in lines for lines in columns.values())
        }


def delegate(parent: Parent, requested: Effective) -> Delegation:
    """The meet of what the parent can give and what the child asks for."""
    ceiling = parent.ceiling
    return Delegation(requested, ceiling.meet(requested), requested.difference(ceiling))
