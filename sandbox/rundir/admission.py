"""A run's place among those that are live: the label by which others see it, and what is asked again behind the gate.

The rules are asked before anything is prepared, and of two runs that ask at once both may be told yes. So what depends
on others is asked once more when the gate is held and no other label can appear: the first of them has the place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from policy import errors
from policy.compile.artefacts import Artefacts
from policy.grants.effective import Effective
from policy.grants.spawning import Spawning
from policy.manifest.agent import Manifest
from policy.rules import budget, nine, writers
from policy.rules.case import Claimant, Owner, Unsigned
from policy.rules.parent import Ancestor, Drawn, OnExcess, Parent
from policy.rules.writers import WrittenPlace
from policy.signing import trust
from policy.signing.root import Signer
from sandbox.rundir import label, registry

# The field of a label that says for whom the first of a line of runs was started.
CALLER = "caller"


class AncestorRun(Struct, frozen=True):
    """One run above a child, as its keeper knew it: how deep it is (0 without a parent), and what it may start."""

    run_id: str
    agent_id: str
    depth: int
    spawning: Spawning


class ParentRun(Struct, frozen=True):
    """A run as the parent of others, out of its own keeper's memory. ``line`` is from the root down, itself last;
    ``capabilities`` are those that its caller was shown to hold, None for the operator's, who holds all."""

    run_id: str
    intent_id: str
    agent_id: str
    payload_digest: str
    effective: Effective
    artefacts: Artefacts
    line: tuple[AncestorRun, ...]
    issuer: Mapping[str, str]
    capabilities: frozenset[str]

    def lineage(
        self, *, deadline: float, own: Drawn, on_excess: OnExcess = "reject", only: Effective | None = None
    ) -> Lineage:
        """Return the ceilings for a child of this run. ``own`` is the part that the run uses itself."""
        return Lineage(self, deadline, own, on_excess, only)


class Lineage(Struct, frozen=True):
    """Where a child comes from. ``deadline`` is when its parent ends at the latest, in seconds of CLOCK_MONOTONIC: one
    clock for all processes, which does not jump. ``only`` is what its parent's agent leaves of the child's manifest,
    None for all of it."""

    parent: ParentRun
    deadline: float
    own: Drawn
    on_excess: OnExcess
    only: Effective | None = None

    @property
    def remaining_ms(self) -> int:
        """Return the time that is left of the parent's task, now."""
        return max(0, int((self.deadline - time.monotonic()) * 1000))

    @property
    def depth(self) -> int:
        """How many runs are above the child."""
        return len(self.parent.line)

    @property
    def issuer(self) -> dict[str, str]:
        """Return the issuer of the child: the agent, by its run, under the key of the first issuer of the line."""
        return {"display": f"{self.parent.agent_id}@{self.parent.run_id}", "pubkey": self.parent.issuer["pubkey"]}

    def present(self, entries: Iterable[registry.Entry]) -> Parent:
        """The parent as the rules are asked about it, with what is live now.

        Raises:
            errors.ParentEndedError: it is not live any more.
        """
        agents = list(registry.agents(entries))
        parent = self.parent
        if all(one.run_id != parent.run_id for one in agents):
            raise errors.ParentEndedError("the run that asked for it has ended")
        holders = registry.held_under(agents, parent.run_id)
        return Parent(
            run_id=parent.run_id,
            agent_id=parent.agent_id,
            payload_digest=parent.payload_digest,
            effective=parent.effective,
            remaining_seconds=self.remaining_ms // 1000,
            drawn=Drawn(
                **{
                    name: getattr(self.own, name) + sum(getattr(one, name) for one in holders)
                    for name in Drawn.__struct_fields__
                }
            ),
            ancestors=tuple(
                Ancestor(
                    one.run_id,
                    one.agent_id,
                    one.depth,
                    one.spawning,
                    sum(one.run_id in other.ancestors for other in agents),
                )
                for one in parent.line
            ),
            artefacts=parent.artefacts,
        )


class AdmissionRequest(Struct, frozen=True):
    """A request of one run to the machine and to the runs above it. ``effective`` is its grant if it is admitted.

    ``caller`` is the issuer of the run, or of the first run above it. A bounded caller (``bounded``) may have ``most``
    live runs, orphans included. ``itself`` is the requesting run where it is live already, with its holdings so far.
    ``claimant`` is its signed statement beside those of other runs, None where serials say nothing of it. ``writes``
    are the places that it writes, of ``rooms_mb`` MiB.
    """

    manifest: Manifest
    trusted: trust.TrustedPackage | Unsigned
    effective: Effective
    package_name: str
    capacity_mb: int
    overcommit: float = 1.0
    lineage: Lineage | None = None
    caller: str = ""
    most: int = 0
    itself: str = ""
    claimant: Claimant | None = None
    writes: tuple[WrittenPlace, ...] = ()
    rooms_mb: int = 0

    def label(
        self, *, issuer: Mapping[str, str], operator: str | None, signers: Iterable[Signer], now_ms: int
    ) -> dict[str, str]:
        """Return the label: facts that other processes need while the run lives, and the next start after a crash."""
        resources, spawning = self.effective.resources, self.effective.spawning
        numbers = {
            "depth": 0 if self.lineage is None else self.lineage.depth,
            "started_ms": now_ms,
            **{name: getattr(resources, name) or 0 for name in ("memory_mb", "pids_max", "cpu_millis")},
            "host_memory_mb": self._host_memory_mb,
            "max_depth": spawning.max_depth or 0,
            "max_descendants": spawning.max_descendants or 0,
        }
        return {
            "agent_id": self.manifest.agent.id,
            "package": self.package_name,
            "payload_digest": self._payload_digest,
            "operator": operator or "",
            "signers": " ".join(one.keyid for one in signers),
            "parent": self.lineage.parent.run_id if self.lineage else "",
            "ancestors": " ".join(one.run_id for one in self.lineage.parent.line) if self.lineage else "",
            "on_parent_exit": spawning.on_parent_exit,
            CALLER: self.caller,
            registry.SERIAL: str(self.claimant.serial) if self.claimant else "",
            registry.WRITES: writers.encode(self.writes),
            **{name: str(value) for name, value in numbers.items()},
            **issuer,
        }

    def settle(self, runs: Path) -> None:
        """Behind the gate, before the label can be seen: ask again what depends on other live runs.

        Raises:
            errors.RuleViolation: as ``check``.
            errors.ParentEndedError: the run that asked for it has ended.
        """
        self.check(registry.seen(runs, but=self.itself))
        if self.writes:
            # The sandbox of a killed run may live for a moment more.
            self._check_writers(registry.left(runs), left=True)

    def check(self, entries: Sequence[registry.Entry]) -> None:
        """Check the rules that depend on the live runs.

        Raises:
            errors.RuleViolation: rule 8: another package has the agent id; rule 5: an ancestor has no place left; rule
                6: this machine has promised too much already.
            errors.ParentEndedError: the run that asked for it has ended.
            errors.BusyError: as many runs of the caller live as may.
            errors.PathInUseError: another run writes what this one would.
        """
        if self.lineage is None and bounded(self.caller) and roots(entries, self.caller) >= self.most:
            raise errors.BusyError(
                f"{self.most} runs of this user live, and no more may: who outlives its parent is one of them",
                hint="covenant ps shows them, covenant kill ends one",
            )
        self._check_writers(entries)
        agent_id, shown = self.manifest.agent.id, shown_to(self.caller, self.lineage)
        nine.refuse_other_owners(
            owners(entries, shown).get(agent_id, ()),
            agent_id,
            payload_digest=self._payload_digest,
            package_name=self.package_name,
            where=self.manifest.where,
            claimant=self.claimant,
        )
        if self.lineage is not None:
            budget.within_budget(self.lineage.present(entries), self.effective.resources, self.manifest.where)
        budget.within_host(
            self._host_memory_mb,
            int(self.capacity_mb * self.overcommit),
            [budget.Promised(one.run_id, one.agent_id, one.host_memory_mb, shown(one)) for one in entries],
            self.manifest.where,
            share="" if self.overcommit == 1.0 else f" (overcommit {self.overcommit:g})",
        )

    def _check_writers(self, entries: Iterable[registry.Entry], *, left: bool = False) -> None:
        if not self.writes:
            return
        shown = shown_to(self.caller, self.lineage)
        others = (
            writers.Writer(one.run_id if shown(one) else "", writers.decode(one.label.get(registry.WRITES, "")), left)
            for one in registry.agents(entries)
        )
        writers.check(self.writes, others, self.manifest.where("permissions.filesystem.write"))

    @property
    def _host_memory_mb(self) -> int:
        gvisor = self.manifest.sandbox.backend == "linux-gvisor"
        return budget.host_memory_mb(self.effective, gvisor=gvisor, rooms_mb=self.rooms_mb)

    @property
    def _payload_digest(self) -> str:
        return self.trusted.payload_digest if isinstance(self.trusted, trust.TrustedPackage) else ""


def caller(runs: Path, issuer: Mapping[str, str], lineage: Lineage | None) -> str:
    """Return the issuer of the first run in a line. It is empty when its parent is gone."""
    if lineage is None:
        return issuer["display"]
    return (label.label_of(runs / lineage.parent.run_id) or {}).get(CALLER, "")


def bounded(caller: str) -> bool:
    """Whether the runs of this caller are counted: those of root and standby sandboxes are not."""
    return caller.startswith("uid")


def roots(entries: Iterable[registry.Entry], caller: str) -> int:
    """How many runs of a caller live that no other live run holds: those that they asked for, and orphans of these."""
    live = {one.run_id: one for one in entries}
    mine = (one for one in live.values() if one.label.get(CALLER) == caller and not one.self_test)
    return sum(live.keys().isdisjoint(one.ancestors) for one in mine)


def shown_to(caller: str, lineage: Lineage | None) -> Callable[[registry.Entry], bool]:
    """Return the live runs that a refusal may name: all for root, their own for a caller, none for an agent."""
    if lineage is not None:
        return lambda one: False
    return lambda one: not bounded(caller) or one.label.get(CALLER) == caller


def owners(entries: Iterable[registry.Entry], shown: Callable[[registry.Entry], bool]) -> dict[str, list[Owner]]:
    """Which packages hold which agent ids in live runs (rule 8), and of which a refusal may tell."""
    found: dict[str, list[Owner]] = {}
    # What waits for its intent gives way to another package: it is never told anything once that was accepted.
    for entry in (one for one in entries if label.STANDBY not in one.label):
        owner = Owner(
            entry.package, entry.payload_digest, shown(entry), entry.run_id, entry.serial, frozenset(entry.signers)
        )
        found.setdefault(entry.agent_id, []).append(owner)
    return found
