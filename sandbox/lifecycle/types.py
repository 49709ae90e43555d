"""Data types of a run: its request, and the dependencies that the supervisor passes to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from policy import decide
from policy.learn.observed import Observed
from policy.manifest.tools.document import ToolManifest
from policy.package import Package
from policy.signing import trust
from sandbox.audit.log import Ledger
from sandbox.broker import children as broker_children
from sandbox.broker.tool_servers import ServerRequest
from sandbox.config import Config
from sandbox.network import gateway
from sandbox.run_io import CallerStreams
from sandbox.storage.trust_state import State
from sandbox.workspace.session import GivenDirectory

# Called with a run's id, and (records, bytes of events, bytes of the chain) of the log before its first row.
Began = Callable[[str, tuple[int, int, int] | None], None]


class Laps:
    """Measure the steps of a run one after the other. ``seconds`` maps each step to its time."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all steps, and begin the next one now."""
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    def lap(self, name: str) -> None:
        """End the step ``name``, and begin the next one."""
        now = time.perf_counter()
        self.seconds[name], self._began = now - self._began, now


class ToolSource(Struct, frozen=True):
    """The tools of a run's package, checked.

    ``seconds`` is how long a server of them may run. ``authorities`` are trusted by the relays to servers over HTTP.
    """

    tools: ToolManifest
    trusted: trust.TrustedPackage
    seconds: int
    authorities: bytes = b""


class DaemonTools(Struct, frozen=True):
    """The line to the daemon that asked for a run, a socket on which it answers as an MCP server.

    ``tools`` are those of its tools that its caller may use.
    """

    fd: int
    tools: frozenset[str]


class Request(Struct, frozen=True):
    """Request for a run: the package's bytes, the intent's text, the issuer, and the timeout.

    - ``user`` is for trusted-local.
    - ``dev`` is the agent id whose local key of ``covenant dev`` replaces the trust root; empty for a run.
    - ``typed``: root typed the command and the secrets of this package (``covenant exec``), which the local key signed.
    - ``package_name`` is the path of the package for the operator.
    - ``intent_id`` and ``priority`` are passed to the agent. An empty id is replaced by a new one.
    - ``children`` is an open directory with packages of child agents, used after the configured ones. It is read with
      the ``rights`` of the caller.
    - ``behalf`` (display and pubkey) names the person whom the caller acts for. It is logged and decides nothing.
      ``told`` is then the issuer as the agent reads it.
    - ``began`` is called for each run of this request, with the head of the log before the run's first row. The head
      is None for the run of the request itself.
    - ``caller`` are the caller's ends of a stream session. Its agent has no intent, and ``text`` is empty.
    - ``workspace`` is the directory that the caller gives to the agent, for a manifest with ``[workspace]``.
    - ``uid`` is that of the caller, by the kernel: it may use its own volumes, and root all of them.
    - ``credits`` is what the run and its children may spend at their service gates, None for no limit.
    - ``meter`` counts what the run's parents and their children have spent of them; a child is given it.
    - ``part`` is this package as a part of a verified one: a tool server's, which has no envelope of its own.
    - ``secrets_of`` is the agent id whose secrets it is given: a tool server's are its agent's. Empty for its own.
    - ``idle`` says whether something is asked of the run, which rests meanwhile (shim.idleness).
    - ``observe`` collects what the run does (``covenant learn``). A child of it is not observed.
    - ``arguments`` stand behind those of the manifest: the arguments of a command's call.
    - ``daemon`` is the line to the daemon that asked for it, whose tools the agent may be granted. A child has none.
    - ``live`` takes the first lines of stderr as they come, for a client that shows them. A child has none.
    - ``asks`` takes the first requests that wait for an operator, for the same client. A child has none.
    """

    package: Package
    text: str
    issuer: Mapping[str, str]
    timeout_ms: int | None = None
    user: str | None = None
    dev: str = ""
    typed: bool = False
    package_name: str = ""
    intent_id: str = ""
    priority: str = "normal"
    children: int | None = None
    rights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    behalf: Mapping[str, str] | None = None
    told: Mapping[str, str] | None = None
    began: Began = lambda run_id, since: None
    caller: CallerStreams | None = None
    workspace: GivenDirectory | None = None
    live: Callable[[str], None] | None = None
    asks: Callable[[Mapping[str, Any]], None] | None = None
    uid: int = 0
    credits: int | None = None
    meter: int | None = None
    part: trust.TrustedPackage | None = None
    secrets_of: str = ""
    idle: int | None = None
    observe: Observed | None = None
    arguments: tuple[str, ...] = ()
    daemon: DaemonTools | None = None

    @property
    def is_dev(self) -> bool:
        """Return whether a local key alone signed the package, which then is given no secret."""
        return bool(self.dev) and not self.typed

    @property
    def reads(self) -> Mapping[str, str]:
        """Return the issuer as the agent reads it."""
        return self.told or self.issuer


class RunDependencies(Struct, frozen=True):
    """Resources that the supervisor gives to a run.

    - ``state`` is the deciding state: the supervisor's own, or a dev state.
    - ``watches`` are descriptors that may end the run, such as of a client that disconnects
      (run_io.ContainerIO.watches).
    - ``below`` are watches that end its children as well; the children's shims keep their descriptors.
    - ``isolated`` says that no agent may have the host's network: the operator named no uplink.
    - ``after`` is closed once the answer was given (spec.SandboxSpec).
    """

    path: Path
    config: Config
    ledger: Ledger
    state: State
    never_granted: tuple[str, ...]
    policies: decide.Policies
    watches: gateway.Watches = msgspec.field(default_factory=dict)
    start_child: Callable[[Request, broker_children.ChildRequest, broker_children.Say], None] | None = None
    start_server: Callable[[Request, ToolSource, ServerRequest], None] | None = None
    keeps_standby: bool = False
    isolated: bool = False
    below: gateway.Watches = msgspec.field(default_factory=dict)
    after: contextlib.ExitStack | None = None
