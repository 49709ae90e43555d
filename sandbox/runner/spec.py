"""The linux-gvisor runner's input, one run decided and prepared, and a started sandbox that waits for its intent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from policy.compile import workspace
from policy.compile.artefacts import Artefacts
from policy.compile.mounts import CALLERS, REPOSITORY
from policy.contract import LINE, Contract
from policy.learn.observed import SeenAccess
from sandbox.attest import monitor
from sandbox.broker.server import Broker
from sandbox.config import Config
from sandbox.kernel.cgroup import cgroup
from sandbox.network import gateway
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.proxy import ProxyTerms
from sandbox.network.inject import gate as inject_gate
from sandbox.network.publish import gate as publish_gate
from sandbox.network.publish import host_gate
from sandbox.network.reached import TellReached
from sandbox.network.service import gate as service_gate
from sandbox.network.ssh import gate as ssh_gate
from sandbox.probes import preload
from sandbox.rootfs.erofs_image import ImageFile
from sandbox.run_io import CallerStreams, DeferredIntent, Limits, Outcome, PeriodicCheck, RunObserver, Watches
from sandbox.runner.limits import Meter
from sandbox.shim.operations import RunOperations
from sandbox.shim.signals import DeferredSignals
from sandbox.workspace.session import RunWorkspace

# The source of the mount that holds the run's secrets.
CREDENTIALS = "credentials"
# The sources of mounts that are made for each run, and are no files of the host.
OF_THE_RUN = (CREDENTIALS, "limits", CALLERS, REPOSITORY)
# Those of volumes begin with one of these.
VOLUMES = (workspace.VOLUME, workspace.OWN_VOLUME)
# Called with a function that writes a secret, and with watches to serve meanwhile.
Secrets = Callable[[Callable[[str, memoryview], None], Watches], Outcome]
# The mount point of the package's copy.
PACKAGE = "/workspace"


class StartedSandbox(Struct, frozen=True):
    """A sandbox that was started ahead of its intent: its directory, its cgroup, and its agent's stdin.

    ``meter`` counts its use from the delivery of the intent on, and may be started ahead of the exchange.
    """

    directory: Path
    leaf: cgroup.Leaf
    limits: Sequence[cgroup.Limit]
    stdin: int
    attestor: monitor.Attestor | None
    meter: Meter


class SandboxFiles(Struct, frozen=True):
    """The files of a sandbox, prepared before it starts (sandbox.runner.prepare).

    - ``sources`` maps each bind destination to an open descriptor of its source; the caller owns the descriptors.
    - ``covered`` are directories of the host that runsc must not see (sandbox.host.runsc_network).
    - ``disks`` are the disks of its limits of input and output.
    - ``tries`` are the probes inside the agent's interpreter, whose object ``rootfs`` has.
    - ``check_root`` raises when ``rootfs`` is not what was made; it is called before the sandbox starts.
    - ``own_limits`` is the document about its limits that the agent reads.
    - ``root_file`` is the EROFS file that has the root, for which ``rootfs`` is empty.
    """

    rootfs: Path
    covered: Sequence[str]
    sources: Mapping[str, int]
    disks: Sequence[str] = ()
    tries: preload.InProcessProbes | None = None
    check_root: Callable[[], None] = lambda: None
    own_limits: bytes = b""
    root_file: ImageFile | None = None


class SandboxSpec(Struct, frozen=True):
    """One run, decided and prepared.

    - ``label`` identifies the run for others (sandbox.rundir.registry). ``claim`` is called behind the gate before
      others can see the run, and raises when it may not run beside theirs.
    - ``observer`` takes the events of the run, ``operations`` are the operations on it from outside.
    - ``rounds`` and ``watches`` are served while the run lasts.
    - ``arguments`` replace the agent by another first process, for a self-test alone.
    - ``broker`` answers the agent where its policy has one; without it every request is refused.
    - ``contract`` says how the agent is given its intent, and how it answers. ``argument`` is the text
      of the intent where the agent takes it as an argument, ``appended`` are the
      arguments of a command's call, ``caller`` are the caller's ends of a stream session.
    - ``later`` is called with the started sandbox, and brings the intent later; ``intent`` is empty then.
    - ``secrets`` writes each granted secret, where they are files, and serves watches meanwhile; None means no secrets.
    - ``after`` takes the remains of the run's network, to be removed after the answer is sent; without it they are
      removed when the run has ended.
    - ``signals`` are deferred from the beginning of the exchange.
    - ``workspace`` is the caller's directory where the policy has one.
    - ``observe`` is called with each access of the agent to files and programs; without it none is traced.
    - ``reached`` is told the destinations that the agent reached.
    - ``services`` are the terms of its service gate; without them no service answers.
    - ``publish`` are the terms of its published ports; without them no place is made. ``host`` are those of its ports
      of this host.
    - ``ssh`` are the terms of the keys that sign its logins; without them no ssh-agent service answers.
    - ``inject`` are the terms of the secrets that its gate adds; without them no request is read.
    - ``proxy`` is the operator's, by which the run's own connections go; without it they go by the uplink.
    - ``desk`` holds requests that need a lease for an operator; without it they are denied.
    - ``tell_agent`` writes denials to the open file that the agent reads, until it is left; without it the file stays
      empty.
    """

    run_id: str
    artefacts: Artefacts
    runsc_path: str
    files: SandboxFiles
    intent: bytes
    limits: Limits
    label: Mapping[str, str]
    claim: Callable[[], None]
    config: Config
    observer: RunObserver
    rounds: Sequence[PeriodicCheck] = ()
    watches: gateway.Watches = msgspec.field(default_factory=dict)
    arguments: Sequence[str] = ()
    broker: Broker | None = None
    operations: RunOperations | None = None
    contract: Contract = LINE
    argument: str | None = None
    appended: Sequence[str] = ()
    caller: CallerStreams | None = None
    later: Callable[[StartedSandbox], DeferredIntent] | None = None
    secrets: Secrets | None = None
    after: contextlib.ExitStack | None = None
    signals: DeferredSignals | None = None
    tell_agent: Callable[[int], contextlib.AbstractContextManager[None]] | None = None
    workspace: RunWorkspace | None = None
    services: service_gate.Terms | None = None
    reached: TellReached | None = None
    publish: publish_gate.PublishTerms | None = None
    host: host_gate.HostTerms | None = None
    inject: inject_gate.InjectTerms | None = None
    ssh: ssh_gate.SshAgentTerms | None = None
    desk: LeaseDesk | None = None
    observe: Callable[[SeenAccess], None] | None = None
    proxy: ProxyTerms | None = None
