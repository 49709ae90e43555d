"""The combinations of the containment suite; each is run once, when the first test needs its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.kernel import hostile_runs as runs
from tests.kernel import hostile_table as table
from tests.kernel import hostile_verdicts as verdicts
from tests.kernel.hostile_runs import Outcome
from tests.kernel.hostile_settings import SETTINGS, Setting, strays
from tests.kernel.three_namespaces import Namespaces
from tests.kernel.world import World
from tests.unit.policy.compile import sample

PROBES = table.load_network()
CONTROL, WALLS = "control", "walls"


@dataclass(frozen=True)
class Combination:
    """One sandbox under Covenant. ``whole``: with the probes that are not repeated everywhere."""

    setting: str
    filesystem: str
    whole: bool = False
    package: str = "network"

    @property
    def name(self) -> str:
        """As a test or a column is called."""
        return f"{self.package}/{self.setting}/{self.filesystem}"

    @property
    def probes(self) -> tuple[table.NetworkProbe, ...]:
        """Those that run here, in their order."""
        own = (probe for probe in PROBES if probe.package == self.package)
        return tuple(probe for probe in own if self.whole or verdicts.everywhere(probe))


COMBINATIONS = (
    Combination("off", "ephemeral", whole=True),
    Combination("https", "read-only-package"),
    Combination("named", "ephemeral", whole=True),
    Combination("https-any", "ephemeral"),
    Combination("any", "read-only-package"),
    Combination("named", "read-only-package", package="node"),
    Combination("https-any", "ephemeral", package="node"),
)
PACKAGES = ("network", "node")
# What stands behind a sandbox that was taken over: everything but what it may do to itself.
BEHIND_THE_WALLS = tuple(probe for probe in PROBES if verdicts.on_the_wire(probe))


@dataclass
class Suite:
    """Runs on one host with one world behind it. ``wrong`` says per probe what is not as the table promises."""

    world: World
    spaces: Namespaces
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def control(self, package: str) -> dict[str, str]:
        """Every probe of a package without a rule around it."""
        probes = [probe for probe in PROBES if probe.package == package]
        outcome = self.outcomes[f"{CONTROL} {package}"] = runs.control([one.id for one in probes], package=package)
        return _found((probe, verdicts.wrong_in_control(probe, outcome)) for probe in probes)

    def covenant(self, combination: Combination) -> dict[str, str]:
        """All probes of a combination, and every packet outside that nothing grants."""
        setting, probes = SETTINGS[combination.setting], combination.probes
        outcome = self.outcomes[combination.name] = runs.covenant(
            self.world,
            self.spaces,
            setting,
            [probe.id for probe in probes],
            filesystem=combination.filesystem,
            package=combination.package,
        )
        if outcome.error:
            return {"the run": outcome.error}
        found = _found((probe, verdicts.wrong(probe, outcome, setting)) for probe in probes)
        return found | _strays(setting, outcome)

    def walls(self) -> dict[str, str]:
        """Return the faults of a sandbox with every right behind a gateway that grants the names and the service."""
        setting = SETTINGS["named"]
        artefacts = sample.compiled(sample.manifest(network=setting.network, more=setting.manifest()))
        ids = [probe.id for probe in BEHIND_THE_WALLS]
        outcome = self.outcomes[WALLS] = runs.behind_the_walls(self.spaces, artefacts, self.world.state, ids)

        def wrong(probe: table.NetworkProbe) -> str | None:
            if verdicts.granted(probe, setting):
                return verdicts.broken_grant(probe, outcome)
            return verdicts.escaped(probe, outcome, unprivileged=False)

        return _found((probe, wrong(probe)) for probe in BEHIND_THE_WALLS) | _strays(setting, outcome)


def _found(judged: Iterator[tuple[table.NetworkProbe, str | None]]) -> dict[str, str]:
    return {probe.id: wrong for probe, wrong in judged if wrong is not None}


def _strays(setting: Setting, outcome: Outcome) -> dict[str, str]:
    return {
        f"{address} port {port}": f"protocol {protocol}"
        for protocol, address, port in strays(setting, outcome.world.targets)
    }


@contextlib.contextmanager
def opened(base: Path, *, warm: Path | None = None) -> Iterator[Suite]:
    """A suite whose world lies in the directory ``base``, which exists."""
    world = World(base, warm=warm)
    world.configure(**runs.CONFIG)
    with runs.internet() as spaces:
        yield Suite(world, spaces)
