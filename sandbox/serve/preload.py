"""Read what every run needs once, before the first shim is forked, so that all shims share its pages.

An agent of each runtime is compiled and thrown away. The results for this host (closures, programs, tables) stay in
memory. An idle shim repeats the first steps of a run. Counting a reference copies a shared page, and the copies are
made while no client waits.
"""

from __future__ import annotations

import contextlib
import time
from typing import Final

from policy import decide, errors
from policy.package import Package
from sandbox.broker import credentials
from sandbox.host import facts as host_facts
from sandbox.network import disconnect
from sandbox.network.dns import gate
from sandbox.network.tls import gate as tls_gate
from sandbox.runner import trusted_local
from sandbox.supervisor import Supervisor

# Modules that the code imports when it first needs them.
_MODULES: Final = (credentials, trusted_local, disconnect, gate, tls_gate)
_MANIFEST: Final = """\
[agent]
id = "covenant.warm"
name = "none"
version = "1.0.0"
runtime = "{runtime}"
entry = "main"
[resources]
network = "{network}"
[sandbox]
required = true
backend = "linux-gvisor"
filesystem = "ephemeral"
"""
_GRANTS: Final = """\
[[permissions.network]]
host = "example.com"
ports = [443]
protocol = "tls"
"""


def up(supervisor: Supervisor) -> None:
    """Compile a policy of each runtime, for no agent. A runtime that this machine lacks is left out."""
    for runtime in ("python3", "node"):
        for network, grants in (("off", ""), ("full", _GRANTS)):
            with contextlib.suppress(errors.CovenantError):
                _compile(supervisor, _MANIFEST.format(runtime=runtime, network=network) + grants)


def repeat(supervisor: Supervisor) -> None:
    """Take the first steps of a run in an idle shim, for no client. Nothing of it is kept."""
    with contextlib.suppress(errors.CovenantError, OSError), supervisor.in_shim() as own:
        own.state.trust_root(int(time.time() * 1000))
    with contextlib.suppress(errors.CovenantError, OSError):
        _compile(supervisor, _MANIFEST.format(runtime="python3", network="off"))


def _compile(supervisor: Supervisor, text: str) -> None:
    package = Package({"agent.toml": text.encode(), "main": b"pass\n"}, None)
    manifest = decide.manifest_of(package)
    facts = host_facts.for_manifest(
        host_facts.probe(supervisor.config),
        manifest,
        config=supervisor.config,
        package=package.files,
        extra_never=supervisor.never_granted,
    )
    decide.compile_unsigned(package, manifest, host=facts)
