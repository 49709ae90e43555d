"""Find out how to start this runsc with a network on this kernel: by starting it, once for each pair of the two.

    plain    in the agent's namespace, unchanged
    masked   the same, with /proc/sys/net/core covered by an empty directory
    host     with the host kernel's network stack instead of gVisor's; the only way if the operator sets it

Releases up to 20240729 take /proc/sys/net/core/rmem_default as a sign of the machine's own namespace, and refuse. Since
about Linux 6.7 every namespace shows it. With the cover they see the same as on older kernels (sandbox-facts).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from msgspec import Struct

from policy import errors
from policy.host import HostFacts
from sandbox.config import Config
from sandbox.host import runsc_probe
from sandbox.network import namespaces
from sandbox.storage import json_cache

# The directories that the sandbox's own processes see empty, by the name of the way. They are tried in this order.
WAYS: Final[Mapping[str, tuple[str, ...]]] = {"plain": (), "masked": ("/proc/sys/net/core",)}
HOST: Final[Mapping[str, tuple[str, ...]]] = {"host": ()}


class Way(Struct, frozen=True):
    """``name`` is one of ``WAYS`` or ``HOST``, empty if none works. ``fault`` is runsc's error for the last."""

    name: str
    fault: str = ""


def known(config: Config, *, sha256: str, kernel: str) -> Way | None:
    """Return the remembered way for this binary on this kernel, if any."""
    held = json_cache.read(_record(config))
    if held is None or held.get("key") != [sha256, kernel] or held.get("way") not in _ways(config):
        return None
    return Way(str(held["way"]))


def find(config: Config, binary: Path, *, sha256: str, kernel: str, deadline_seconds: float) -> Way:
    """Start a sandbox with its own link by each way until one shows the device. A success is remembered.

    Raises:
        errors.MachineError: Raised when the attempt itself cannot be made.
    """
    fault = ""
    for name, covered in _ways(config).items():
        with contextlib.ExitStack() as stack:
            spaces = stack.enter_context(namespaces.made())
            namespaces.connect(spaces)
            namespaces.open_link(spaces)
            fault = runsc_probe.networked(
                config, binary, network=spaces.agent, covered=covered, deadline_seconds=deadline_seconds
            )
        if not fault:
            json_cache.write(_record(config), {"key": [sha256, kernel], "way": name})
            return Way(name)
    return Way("", fault)


def covered(config: Config, facts: HostFacts) -> tuple[str, ...]:
    """Return the directories of /proc to cover for a run with a network.

    Raises:
        errors.NotEnforceableError: Raised when this runsc takes no network on this kernel.
        errors.MachineError: Raised when the attempt cannot be made.
    """
    assert facts.runsc is not None
    key = {"sha256": facts.runsc.sha256, "kernel": facts.kernel}
    way = known(config, **key)
    if way is None:
        way = find(config, Path(facts.runsc.path), **key, deadline_seconds=config.start_deadline_seconds)
    if not way.name:
        raise errors.NotEnforceableError(
            f"this runsc takes no network on this kernel: {way.fault}",
            hint="run `covenant doctor` for the fix",
            grant="resources.network",
        )
    return _ways(config)[way.name]


def _ways(config: Config) -> Mapping[str, tuple[str, ...]]:
    return HOST if config.runsc_network == "host" else WAYS


def _record(config: Config) -> Path:
    return config.state / "closures" / "runsc-network.json"
