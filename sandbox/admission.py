"""A run's place among those that are live: the label by which others see it, and what is asked again behind the gate.

The rules are asked before anything is prepared, and of two runs that ask at once both may be told yes. So what depends
on others is asked once more when the gate is held and no other label can appear: the first of them has the place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from policy.grants.effective import Effective
from policy.manifest.agent import Manifest
from policy.rules import budget, nine
from policy.rules.case import Owner, Unsigned
from policy.signing import trust
from policy.signing.root import Signer
from sandbox import registry


@dataclass(frozen=True, slots=True)
class Claim:
    """What one run asks of the machine and of those above it. ``effective`` is what it gets if it is admitted."""

    manifest: Manifest
    trusted: trust.TrustedPackage | Unsigned
    effective: Effective
    package_name: str

    def label(
        self, *, issuer: Mapping[str, str], operator: str | None, signers: Iterable[Signer], now_ms: int
    ) -> dict[str, str]:
        """What others may need to know of this run while it lives, and the next start if it is cut off."""
        resources, spawning = self.effective.resources, self.effective.spawning
        gvisor = self.manifest.sandbox.backend == "linux-gvisor"
        numbers = {
            "depth": 0,
            "started_ms": now_ms,
            **{name: getattr(resources, name) or 0 for name in ("memory_mb", "pids_max", "cpu_millis")},
            "host_memory_mb": budget.host_memory_mb(self.effective, gvisor=gvisor),
            "max_depth": spawning.max_depth or 0,
            "max_descendants": spawning.max_descendants or 0,
        }
        return {
            "agent_id": self.manifest.agent.id,
            "package": self.package_name,
            "payload_digest": self._payload_digest,
            "operator": operator or "",
            "signers": " ".join(one.keyid for one in signers),
            "parent": "",
            "ancestors": "",
            "on_parent_exit": spawning.on_parent_exit,
            **{name: str(value) for name, value in numbers.items()},
            **issuer,
        }

    def settle(self, runs: Path) -> None:
        """Behind the gate, before the label can be seen: ask again what depends on other live runs.

        Raises:
            errors.RuleViolation: rule 8: another package has the agent id now.
        """
        entries = registry.seen(runs)
        agent_id = self.manifest.agent.id
        nine.refuse_other_owners(
            owners(entries).get(agent_id, ()),
            agent_id,
            payload_digest=self._payload_digest,
            package_name=self.package_name,
            where=self.manifest.where("agent.id"),
        )

    @property
    def _payload_digest(self) -> str:
        return self.trusted.payload_digest if isinstance(self.trusted, trust.TrustedPackage) else ""


def owners(entries: Iterable[registry.Entry]) -> dict[str, list[Owner]]:
    """Which packages hold which agent ids in live runs (rule 8)."""
    found: dict[str, list[Owner]] = {}
    for entry in entries:
        found.setdefault(entry.agent_id, []).append(Owner(entry.package, entry.payload_digest))
    return found
