"""Runs in processes of their own, as `covenant run` makes them, and an operator who takes back what they rest on."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from covenant import trust_root
from policy.signing import change
from policy.signing import root as roots
from sandbox import registry, revocation
from sandbox.state import State
from tests.kernel.live_runs import until
from tests.kernel.world import ROOT, World


@dataclass
class Running:
    """One `covenant run` under way."""

    process: subprocess.Popen[bytes]
    entry: registry.Entry

    def document(self) -> dict[str, Any]:
        """What it printed, once it has ended."""
        out, _ = self.process.communicate(timeout=60)
        found: dict[str, Any] = json.loads(out)
        return found


@contextlib.contextmanager
def running(world: World, package: Path, *, namespace: int | None = None) -> Iterator[Running]:
    """A run of a signed package, handed out when its label can be seen; ended with the block."""
    entered = [] if namespace is None else ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}"]
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    before = {one.run_id for one in registry.live(world.state / "runs")}
    command = [*entered, sys.executable, "-m", "covenant", "run", str(package), "hi", "--json"]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )

    def begun() -> registry.Entry | None:
        assert process.poll() is None, process.communicate()
        found = (one for one in registry.live(world.state / "runs") if one.run_id not in before)
        return next(found, None)

    try:
        yield Running(process, until(begun))
    finally:
        process.terminate()
        process.communicate(timeout=60)


def next_root(world: World, build: Callable[[roots.RootDocument], Any]) -> bytes:
    """The next version of the world's trust root, signed by its key."""
    with State(world.state) as state:
        wanted = build(state.present_root().document)
    return bytes(wanted.signed_by(wanted.envelope.sign(world.key)).encode())


def revoke(world: World, raw: bytes) -> revocation.Enforced:
    """Install a version and enforce it, as `covenant trust` does."""
    with State(world.state) as state:
        root = state.replace_root(raw, int(time.time() * 1000))
        return trust_root.enforce(state, world.home, root, operator="tester")


def manifest_of(world: World, digest: str) -> Callable[[roots.RootDocument], Any]:
    """A version that revokes one signed manifest."""
    return lambda document: change.revoke_manifest(document, digest, now_ms=world.now_ms, reason="it leaks")
