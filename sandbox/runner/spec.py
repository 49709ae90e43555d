"""One run as the linux-gvisor runner is given it, decided and prepared, and the sandbox that waits for its intent."""

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
# Given what puts a secret, and what is to be served meanwhile.
Secrets = Callable[[Callable[[str, memoryview], None], Watches], Outcome]
# Where the package's copy is mounted.
PACKAGE = "/workspace"


@dataclass(frozen=True, slots=True)
class Started:
    """A sandbox started for an intent that comes later: where it lies, what holds it, and its agent's stdin. ``meter``
    counts what it uses from when it is about to be given that, which may be said ahead of the exchange."""

    directory: Path
    leaf: cgroup.Leaf
    limits: Sequence[cgroup.Limit]
    stdin: int
    attestor: monitor.Attestor | None
    meter: Meter


@dataclass(frozen=True, slots=True)
class Job:
    """One run, decided and prepared. ``sources`` gives, for each bind destination, an open descriptor of what is
    to be mounted there; the descriptors stay the caller's. ``covered`` are directories of the host that runsc must not
    see (sandbox.host.runsc_network). ``label`` says whose run it is (sandbox.rundir.registry); ``claim`` is called
    behind the gate before others can see it, and raises when the run may not be beside theirs. ``denied`` is told of
    everything that was refused to the agent, ``drifted`` of what confines it and was changed; ``rounds`` and
    ``watches`` are looked at while the run lasts; ``disks`` are those that its limits of input and output are about.
    ``arguments`` start another first process than the agent, for a self-test alone. ``broker`` answers the agent where
    its policy has one; without it every request is refused. ``steering`` is what may be asked of the run from outside.
    ``later`` is given what was started, and brings the intent once there is one; ``intent`` is empty then. ``secrets``
    puts each granted secret, where they are files, and serves what is to be watched meanwhile; without it there is
    none. ``after`` is given what is left of the run's network once it is over, to be taken away when its answer was
    given; without it nothing is left when the run has ended. ``signals`` are held back from when its conversation
    begins."""

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
    tries: preload.Tries | None = None
    arguments: Sequence[str] = ()
    broker: Broker | None = None
    steering: RunOperations | None = None
    later: Callable[[Started], DeferredIntent] | None = None
    secrets: Secrets | None = None
    after: contextlib.ExitStack | None = None
    signals: DeferredSignals | None = None
