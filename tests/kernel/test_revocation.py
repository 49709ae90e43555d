"""A revocation reaches what runs: processes, packets, connections and whoever is about to start; and nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sandbox.kernel import cgroupfs
from tests.kernel import internet, revoking
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import until

PORT = 4747
# Says its name, then never stops sending; SIGPIPE and resets end nothing.
STREAMS = """
import json, socket, sys, time
peer = socket.create_connection(("93.184.216.34", 4747))
peer.sendall(b"{name}\\n")
while True:
    try:
        peer.sendall(b"x" * 64)
    except OSError:
        pass
    time.sleep(0.002)
"""
GRANT = internet.entries(("93.184.216.34", f"[{PORT}]", "tcp"))


@dataclass
class Sink:
    """Takes streams in the world: when the last byte of each came, by the name that it began with."""

    listener: socket.socket
    last: dict[str, float] = field(default_factory=dict)
    total: dict[str, int] = field(default_factory=dict)

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer, _ = self.listener.accept()
                threading.Thread(target=self._take, args=(peer,), daemon=True).start()

    def _take(self, peer: socket.socket) -> None:
        with peer, peer.makefile("rb", buffering=0) as stream, contextlib.suppress(OSError):
            name = stream.readline().decode().strip()
            while data := stream.read(65536):
                self.last[name], self.total[name] = time.monotonic(), self.total.get(name, 0) + len(data)


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made


@pytest.fixture
def sink(net: Internet) -> Iterator[Sink]:
    with net.bound("world", "0.0.0.0", PORT) as listener:
        made = Sink(listener)
        threading.Thread(target=made.serve, daemon=True).start()
        yield made
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> Iterator[NetworkedWorld]:
    world = internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
    yield world
    assert net.leftovers() == []


def _remembered(net: Internet) -> str:
    """The connections that the host remembers."""
    return net.within("host", lambda: Path("/proc/thread-self/net/nf_conntrack").read_text())


def _processes(run_id: str) -> list[int]:
    leaf = cgroupfs.Leaf(cgroupfs.Hierarchies.read(), run_id)
    leaf.adopt(leaf.plan())
    return leaf.pids()


def test_a_revoked_run_ends_at_once_with_its_connections_and_a_sibling_goes_on(
    networked: NetworkedWorld, net: Internet, sink: Sink
) -> None:
    packages = {}
    for name in ("leaks", "sibling"):
        code = STREAMS.format(name=name)
        made = networked.package({"main.py": code}, name=name, id=name, network="full", more=GRANT, cpu_ms=200_000)
        packages[name] = networked.sign(made)
    host = net.spaces["host"]
    with (
        revoking.running(networked, packages["leaks"], namespace=host) as leaks,
        revoking.running(networked, packages["sibling"], namespace=host) as sibling,
    ):
        until(lambda: {"leaks", "sibling"} <= set(sink.total))
        raw = revoking.next_root(networked, revoking.manifest_of(networked, leaks.entry.payload_digest))
        before = dict(sink.total)
        until(lambda: all(sink.total[name] > before[name] for name in before))
        place = net.run("host", "ip", "-o", "route", "show", "dev", f"cv-{leaks.entry.run_id[:8]}")
        assert place.split()[0] in _remembered(net)
        enforced = net.within("host", lambda: revoking.revoke(networked, raw))
        returned = time.monotonic()
        # What it promises when it returns: nothing of it runs, and no packet has come since.
        assert enforced.failed == ()
        assert [(one.run_id, one.because) for one in enforced.ended] == [(leaks.entry.run_id, leaks.entry.run_id)]
        assert _processes(leaks.entry.run_id) == []
        document = leaks.document()
        assert document["code"] == "revoked", document
        assert document["message"] == "the signed manifest was revoked: it leaks"
        seen = dict(sink.total)
        until(lambda: sink.total["sibling"] > seen["sibling"] + 1000)
        assert sink.total["leaks"] == seen["leaks"]
        assert sink.last["leaks"] < returned
        assert place.split()[0] not in _remembered(net)
        assert _processes(sibling.entry.run_id) != []
    kinds = [row["kind"] for row in networked.rows()]
    named = next(kind for kind in kinds if kind["type"] == "runs_revoked")
    assert [one["run_id"] for one in named["runs"]] == [leaks.entry.run_id]
    ended = next(kind for kind in kinds if kind["type"] == "run_ended" and kind["run_id"] == leaks.entry.run_id)
    assert (ended["status"], ended["code"]) == ("failed", "revoked")
    assert kinds.index(named) < kinds.index(ended)
