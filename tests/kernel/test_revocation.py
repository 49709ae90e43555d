"""A revocation reaches processes, packets, connections and runs that are about to start; it reaches no other run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.control import manager
from sandbox.kernel.cgroup import cgroup
from tests.kernel import revoking
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import until
from tests.kernel.revoking import GRANT, STREAMS, Sink


@pytest.fixture
def sink(net: Internet) -> Iterator[Sink]:
    with Sink.open(net) as made:
        yield made


def _remembered(net: Internet) -> str:
    """The connections that the host remembers."""
    return net.within("host", lambda: Path("/proc/thread-self/net/nf_conntrack").read_text())


def _processes(run_id: str) -> list[int]:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), run_id)
    leaf.adopt(leaf.plan())
    return leaf.pids()


@dataclass(frozen=True)
class Pair:
    """Two runs that send to the world without a pause."""

    leaks: revoking.Running
    sibling: revoking.Running


@pytest.fixture
def pair(networked: NetworkedWorld, net: Internet, sink: Sink) -> Iterator[Pair]:
    packages = {}
    for name in ("leaks", "sibling"):
        fields: dict[str, Any] = {"name": name, "id": name, "network": "full", "more": GRANT, "cpu_ms": 200_000}
        packages[name] = networked.sign(networked.package({"main.py": STREAMS}, **fields))
    host = net.spaces["host"]
    with (
        revoking.running(networked, packages["leaks"], namespace=host) as leaks,
        revoking.running(networked, packages["sibling"], namespace=host) as sibling,
    ):
        until(lambda: {leaks.entry.run_id, sibling.entry.run_id} <= set(sink.total))
        yield Pair(leaks, sibling)


def _device(run_id: str) -> str:
    return f"cv-{run_id[:8]}"


def _is_read(sink: Sink, run_id: str) -> bool:
    """Whether what came before its link was gone has been read: an agent that still sends does so each 10 ms."""
    seen = sink.total[run_id]
    time.sleep(0.3)
    return sink.total[run_id] == seen


def _place(net: Internet, run_id: str) -> str:
    """The addresses of a run as the host routes them."""
    return net.run("host", "ip", "-o", "route", "show", "dev", _device(run_id)).split()[0]


def test_tree_killed_loses_its_network_also_while_its_keeper_does_nothing(
    networked: NetworkedWorld, net: Internet, sink: Sink, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A revoked capability ends links and connections with the processes, under any caller."""
    run_id, beside = pair.leaks.entry.run_id, pair.sibling.entry.run_id
    place, other = _place(net, run_id), _place(net, beside)
    assert place in _remembered(net)
    monkeypatch.setattr(manager, "_GONE_SECONDS", 0.0)
    os.kill(pair.leaks.entry.keeper, signal.SIGSTOP)
    try:
        with pytest.raises(errors.KeeperError, match="is still there"):
            net.within(
                "host",
                lambda: manager.operate(
                    networked.state, manager.Requester("operator@local", root=True), "kill", run_id, tree=True
                ),
            )
        assert _processes(run_id) == []
        remembered, links = _remembered(net), net.run("host", "ip", "-o", "link")
        assert place not in remembered
        assert _device(run_id) not in links
        assert other in remembered
        assert _device(beside) in links
        until(lambda: _is_read(sink, run_id))
        seen = dict(sink.total)
        until(lambda: sink.total[beside] > seen[beside] + 640)
        assert sink.total[run_id] == seen[run_id]
    finally:
        os.kill(pair.leaks.entry.keeper, signal.SIGCONT)
    assert pair.leaks.document()["code"] == "stopped"


def test_revoked_run_ends_at_once_with_its_connections_and_sibling_goes_on(
    networked: NetworkedWorld, net: Internet, sink: Sink, pair: Pair
) -> None:
    leaks, sibling = pair.leaks, pair.sibling
    raw = revoking.next_root(networked, revoking.manifest_of(networked, leaks.entry.payload_digest))
    before = dict(sink.total)
    until(lambda: all(sink.total[name] > before[name] for name in before))
    place = _place(net, leaks.entry.run_id)
    assert place in _remembered(net)
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
    until(lambda: sink.total[sibling.entry.run_id] > seen[sibling.entry.run_id] + 640)
    assert sink.total[leaks.entry.run_id] == seen[leaks.entry.run_id]
    assert sink.last[leaks.entry.run_id] < returned
    assert place not in _remembered(net)
    assert _processes(sibling.entry.run_id) != []
    kinds = [row["kind"] for row in networked.rows()]
    named = next(kind for kind in kinds if kind["type"] == "runs_revoked")
    assert [one["run_id"] for one in named["runs"]] == [leaks.entry.run_id]
    ended = next(kind for kind in kinds if kind["type"] == "run_ended" and kind["run_id"] == leaks.entry.run_id)
    assert (ended["status"], ended["code"]) == ("failed", "revoked")
    assert kinds.index(named) < kinds.index(ended)
