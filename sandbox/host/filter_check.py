"""Prove before the first run of each runsc binary that it applies filters, and remember the success.

``linux.seccomp`` is dead text unless runsc applies it, and nothing in a compiled agent would show that. ``doctor``
makes a live probe: Seccomp: 2 inside, a denied call gets EPERM, the same call without the filter succeeds. The same
probe is made before the first run with this runsc binary, flags, kernel and code. A runsc that fails it runs nothing.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from msgspec import Struct

from policy.compile import plan
from policy.host import HostFacts
from sandbox.config import Config
from sandbox.host import code_digest
from sandbox.storage import json_cache


class Proof(Struct, frozen=True):
    """Result of the probe. ``fault`` is empty if the filter is alive."""

    fault: str
    detail: str


def _key(facts: HostFacts) -> dict[str, str]:
    assert facts.runsc is not None
    flags = hashlib.sha256(json.dumps(plan.RUNSC_FLAGS, sort_keys=True).encode()).hexdigest()
    return {"runsc": facts.runsc.sha256, "flags": flags, "kernel": facts.kernel, "code": code_digest.digest()}


def _record(config: Config) -> Path:
    return config.state / "closures" / "self-test.json"


def proved(config: Config, facts: HostFacts) -> bool:
    """Whether this runsc with these flags on this kernel has passed before."""
    return json_cache.read(_record(config)) == _key(facts)


def prove(config: Config, facts: HostFacts) -> Proof:
    """Make the probe, which takes about a second, and remember a success.

    Raises:
        errors.MachineError: Raised when the probe itself cannot be made.
    """
    from sandbox.host import runsc_probe

    assert facts.runsc is not None
    found = runsc_probe.alive(config, Path(facts.runsc.path), deadline_seconds=config.start_deadline_seconds)
    name = f"runsc {facts.runsc.version} sha256 {facts.runsc.sha256[:16]}, kernel {facts.kernel}"
    if not found.fault:
        json_cache.write(_record(config), _key(facts))
    return Proof(found.fault, f"{name}: {found.fault or 'the filter is alive'}")
