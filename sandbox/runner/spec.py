"""The linux-gvisor runner's input, one run decided and prepared, and a started sandbox that waits for its intent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from policy import denials
from policy.compile.artefacts import Artefacts
from policy.prove import live
from sandbox.attest import monitor
from sandbox.broker.server import Broker
from sandbox.config import Config
from sandbox.kernel.cgroup import cgroup
from sandbox.network import gateway
from sandbox.probes import preload
from sandbox.run_io import DeferredIntent, Limits, Outcome, PeriodicCheck, Watches
from sandbox.runner.limits import Meter
from sandbox.shim.operations import RunOperations
from sandbox.shim.signals import DeferredSignals

# The source of the mount that holds the run's secrets.
CREDENTIALS = "credentials"
# Called with a function that writes a secret, and with watches to serve meanwhile.
Secrets = Callable[[Callable[[str, memoryview], None], Watches], Outcome]
# The mount point of the package's copy.
PACKAGE = "/workspace"


@dataclass(frozen=True, slots=True)
class StartedSandbox:
    """A sandbox that was started ahead of its intent: its directory, its cgroup, and its agent's stdin.

    ``meter`` counts its use from the delivery of the intent on, and may be started ahead of the exchange.
    """

    directory: Path
    leaf: cgroup.Leaf
    limits: Sequence[cgroup.Limit]
    stdin: int
    attestor: monitor.Attestor | None
    meter: Meter


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """One run, decided and prepared.

    ``sources`` maps each bind destination to an open descriptor of its source; the caller owns the descriptors.
    ``covered`` are directories of the host that runsc must not see (sandbox.host.runsc_network). ``label`` identifies
    the run for others (sandbox.rundir.registry). ``claim`` is called behind the gate before others can see the run, and
    raises when it may not run beside theirs. ``denied`` is called with each denial of the agent, and ``drifted`` with
    each drift. ``rounds`` and ``watches`` are served while the run lasts. ``disks`` are the disks of its limits of
    input and output. ``arguments`` replace the agent by another first process, for a self-test alone. ``broker``
    answers the agent where its policy has one; without it every request is refused. ``operations`` are the operations
    on the run from outside. ``later`` is called with the started sandbox, and brings the intent later; ``intent`` is
    empty then. ``secrets`` writes each granted secret, where they are files, and serves watches meanwhile; None means
    no secrets. ``after`` takes the remains of the run's network, to be removed after the answer is sent; without it
    they are removed when the run has ended. ``signals`` are deferred from the beginning of the exchange.
    """

    run_id: str
    artefacts: Artefacts
    runsc_path: str
    rootfs: Path
    covered: Sequence[str]
    sources: Mapping[str, int]
    intent: bytes
    limits: Limits
    label: Mapping[str, str]
    claim: Callable[[], None]
    config: Config
    denied: denials.Told
    drifted: Callable[[live.Layer], None]
    rounds: Sequence[PeriodicCheck] = ()
    watches: gateway.Watches = field(default_factory=dict)
    disks: Sequence[str] = ()
    tries: preload.InProcessProbes | None = None
    arguments: Sequence[str] = ()
    broker: Broker | None = None
    operations: RunOperations | None = None
    later: Callable[[StartedSandbox], DeferredIntent] | None = None
    secrets: Secrets | None = None
    after: contextlib.ExitStack | None = None
    signals: DeferredSignals | None = None
