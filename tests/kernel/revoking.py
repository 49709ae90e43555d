"""Runs in separate processes, as `covenant run` makes them, and an operator who revokes what they depend on."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.keys import trust_root
from policy.signing import change, envelope
from policy.signing import root as roots
from sandbox.control import revocation, tree_kill
from sandbox.rundir import registry
from sandbox.storage.trust_state import State
from tests.kernel import internet
from tests.kernel.internet import Internet
from tests.kernel.live_runs import until
from tests.kernel.world import ROOT, World

PORT = 4747
# Says which run it is, then never stops sending; resets end nothing.
STREAMS = f"""
import os, socket, sys, time
peer = socket.create_connection(("93.184.216.34", {PORT}))
peer.sendall(os.environ["COVENANT_RUN_ID"].encode() + b"\\n")
while True:
    try:
        peer.sendall(b"x" * 64)
    except OSError:
        pass
    time.sleep(0.01)
"""
GRANT = internet.entries(("93.184.216.34", f"[{PORT}]", "tcp"))


@dataclass
class Sink:
    """Takes streams in the world: when the last byte of each came, and how many did, by the run that sends them."""

    listener: socket.socket
    last: dict[str, float] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def open(cls, net: Internet) -> Iterator[Sink]:
        """On its port of the world, while the block lasts."""
        with net.bound("world", "0.0.0.0", PORT) as listener:
            made = cls(listener)
            threading.Thread(target=made._serve, daemon=True).start()
            yield made
            listener.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                threading.Thread(target=self._take, args=(peer,), daemon=True).start()

    def _take(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb", buffering=0) as stream, contextlib.suppress(OSError):
            name = stream.readline().decode().strip()
            while data := stream.read(65536):
                self.last[name], self.total[name] = time.monotonic(), self.total.get(name, 0) + len(data)


@dataclass
class Running:
    """One `covenant run` under way."""

    process: subprocess.Popen[bytes]
    entry: registry.Entry

    def document(self) -> dict[str, Any]:
        """Wait for the end of the run, and return the document that it printed."""
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
        agents = registry.agents(registry.live(world.state / "runs"))
        return next((one for one in agents if one.run_id not in before), None)

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
    with tree_kill.urgent(), State(world.state) as state:
        present, now_ms = state.present_root(), int(time.time() * 1000)
        root = present.successor(raw, now_ms)
        return trust_root.install(state, world.home, present, root, ["tester"], ["revokes"], now_ms)


def second_operator(world: World) -> Ed25519PrivateKey:
    """List another key, which may sign for every agent id as the first may; return it."""
    key = Ed25519PrivateKey.generate()
    public = envelope.PublicKey.of(key)

    def add(document: roots.RootDocument) -> Any:
        entry = {**document.keys[0].model_dump(), "name": "second", "public": public.raw.hex(), "root": False}
        return change.add(document, entry)

    revoke(world, next_root(world, add))
    return key


def manifest_of(world: World, digest: str) -> Callable[[roots.RootDocument], Any]:
    """A version that revokes one signed manifest."""
    return lambda document: change.revoke_manifest(document, digest, now_ms=world.now_ms, reason="it leaks")
