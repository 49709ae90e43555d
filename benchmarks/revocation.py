#!/usr/bin/env python3
"""One revocation that ends a tree of running agents, each with a network, beside `kill -9` of the same processes.

A trial measures from the call to three events: the end of the last process (pidfds, watched by a process other than the
one that revokes), the last byte that arrived in the world, and the return. The same tree is then ended by `covenant
kill --tree`, which is also what taking back a capability does; it returns when all is cleaned up. At last it is killed
by hand, with no connection cut and no audit row written.

The tree is flat: one run and the others below it, as their labels say. Each agent sends without a pause. Running
sandboxes use all of a small machine (6 % of a core each, idle). So the same tree is revoked once more with all but one
frozen, as suspended runs and standby instances are. The benchmark has its own internet of namespaces, as the tests
have. It needs root and leaves nothing. The receiver is a separate process: threads of one interpreter take turns, and a
revoking thread once waited for thirty that read.

.venv/bin/python benchmarks/revocation.py [trials] [runs] [running | frozen] [revoked | "kill --tree" | "kill -9"]...
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy import errors
from policy.lifecycle import State
from policy.signing import envelope
from sandbox.control import manager, tree_kill
from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import admission, registry
from sandbox.rundir import directory as rundir_directory
from sandbox.shim import process as shim_process
from sandbox.storage import package_reader
from sandbox.supervisor import Request, Supervisor
from tests.kernel import internet, revoking
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.revoking import STREAMS, Sink

WAIT_SECONDS, LEAVING_SECONDS = 90.0, 20.0
# A tree that runs, and not one that just begins: what is still written down of its start takes turns with our rows.
# An agent that reads no intent sends before it is given one, while its keeper still attests its start.
SETTLE_SECONDS = 1.0
# What of the tree runs when it is ended, by the word of the command line.
STATES = {"running": "all running", "frozen": "all but one frozen"}


# --- the world: takes what agents send ------------------------------------------------------------------


class World:
    """The sink, asked over a socket in lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rw")

    def _ask(self, what: str) -> dict[str, float]:
        self._stream.write(what + "\n")
        self._stream.flush()
        answer: dict[str, float] = json.loads(self._stream.readline())
        return answer

    def forget(self) -> None:
        """Forget the bytes that arrived until now."""
        self._ask("forget")

    def senders(self) -> int:
        """Return the number of runs that sent a byte."""
        return len(self._ask("total"))

    def last(self) -> float:
        """Return the time at which the last byte arrived."""
        return max(self._ask("last").values())


@contextlib.contextmanager
def world_apart(net: Internet) -> Iterator[World]:
    """It, while the block lasts."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            _answer(net, theirs)
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        yield World(ours)
        ours.shutdown(socket.SHUT_RDWR)
    os.waitpid(pid, 0)


def _answer(net: Internet, connection: socket.socket) -> None:
    # Real receivers are on other machines, which our agents do not slow down. A byte that is read late counts as late.
    with tree_kill.urgent(), Sink.open(net) as sink, connection.makefile("rw") as stream:
        for line in stream:
            if line == "forget\n":
                sink.total.clear()
                sink.last.clear()
            stream.write(json.dumps(dict(sink.last if line == "last\n" else sink.total)) + "\n")
            stream.flush()


# --- the other process: forks a keeper for each run, inside the host's namespace ------------------------


def drive(state: Path, home: Path, where: Path, count: int) -> None:
    """Start ``count`` runs, the first above the others, and wait until stdin ends; then until the last has ended."""
    first: list[str] = []
    label = admission.AdmissionRequest.label

    def below(self: admission.AdmissionRequest, **more: object) -> dict[str, str]:
        made = label(self, **more)  # type: ignore[arg-type]
        return made | ({"parent": first[0], "ancestors": first[0], "depth": "1"} if first else {})

    admission.AdmissionRequest.label = below  # type: ignore[method-assign]
    issuer = {"display": "operator@local", "pubkey": sys.argv[-1]}
    read = package_reader.read(where)

    def work() -> None:
        with Supervisor(state, never_granted=(str(home),)) as supervisor, contextlib.suppress(errors.CovenantError):
            supervisor.run(Request(read, "go", issuer, package_name=str(where)))

    keepers = []
    for _ in range(count):
        keepers.append(shim_process.fork(work))
        while not first and not (first := [one.run_id for one in registry.agents(registry.live(state / "runs"))]):
            time.sleep(0.01)
    sys.stdin.read()
    until = time.monotonic() + LEAVING_SECONDS
    for one in keepers:
        if not shim_process.wait(one.pidfd, until - time.monotonic()):
            one.signal(signal.SIGTERM)
    for one in keepers:
        one.reap()


@contextlib.contextmanager
def tree(world: NetworkedWorld, where: Path, count: int, sink: World) -> Iterator[list[registry.Entry]]:
    """The runs, once all of them have their intent, and send."""
    sink.forget()
    space = f"/proc/{os.getpid()}/fd/{world.internet.spaces['host']}"
    own = [sys.executable, __file__, "--drive", str(world.state), str(world.home), str(where), str(count)]
    process = subprocess.Popen(["nsenter", f"--net={space}", *own, world.issuer["pubkey"]], stdin=subprocess.PIPE)
    try:
        until = time.monotonic() + WAIT_SECONDS
        while (sending := sink.senders()) < count:
            assert process.poll() is None
            assert time.monotonic() < until, f"{sending} of {count} send"
            time.sleep(0.1)
        # What the tree before sent and was read only now counted above, so that the runs are counted as well.
        while [one.state for one in registry.live(world.state / "runs")] != [State.RUNNING] * count:
            assert time.monotonic() < until, "some have no intent yet"
            time.sleep(0.1)
        time.sleep(SETTLE_SECONDS)
        yield registry.live(world.state / "runs")
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(WAIT_SECONDS)


# --- one trial -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Trial:
    """Seconds from the call."""

    gone: float
    packet: float
    returned: float


def leaf_of(entry: registry.Entry) -> cgroup.Leaf:
    """A run's cgroup."""
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), entry.run_id)
    leaf.adopt(rundir_directory.cgroups_of(entry.path))
    return leaf


def _plainly(act: Callable[[], None]) -> None:
    act()


def watched(
    entries: list[registry.Entry],
    sink: World,
    act: Callable[[], object],
    inside: Callable[[Callable[[], None]], None] = _plainly,
) -> Trial:
    """Run ``act`` and return when the last process of these runs was gone, as another process sees it.

    ``inside`` runs a call in the right namespace. Entering it is not part of the measurement, and takes time as well.
    """
    pids = [pid for one in entries for pid in leaf_of(one).pids()]
    assert len(pids) > 3 * len(entries)
    come, go = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        try:
            _watch(pids, go)
        finally:
            os._exit(0)
    # The child holds the only write end of `come`. If the child fails, the read below returns.
    os.close(go)
    os.read(come, 1)
    begin = returned = 0.0

    def timed() -> None:
        nonlocal begin, returned
        begin = time.monotonic()
        act()
        returned = time.monotonic()

    inside(timed)
    gone = float(os.read(come, 64))
    os.waitpid(watcher, 0)
    os.close(come)
    time.sleep(0.2)
    return Trial(gone - begin, max(sink.last() - begin, 0.0), returned - begin)


def _watch(pids: list[int], go: int) -> None:
    # Urgent like the receiver: an end that is seen late counts as late.
    with tree_kill.urgent():
        left = []
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself since it was listed
                left.append(os.pidfd_open(pid))
        os.write(go, b"r")
        poll = select.poll()
        while left:
            poll.register(left[-1], select.POLLIN)
            poll.poll()
            poll.unregister(left.pop())
        os.write(go, repr(time.monotonic()).encode())


def revoke(world: NetworkedWorld, entries: list[registry.Entry], sink: World) -> Trial:
    """By a new trust root: installed, written down and enforced."""
    raw = revoking.next_root(world, revoking.manifest_of(world, entries[0].payload_digest))

    def act() -> None:
        enforced = revoking.revoke(world, raw)
        assert len(enforced.ended) == len(entries)
        assert enforced.failed == (), enforced.failed

    return watched(entries, sink, act, lambda timed: world.internet.within("host", timed))


def end(world: NetworkedWorld, entries: list[registry.Entry], sink: World) -> Trial:
    """End the tree as `covenant kill --tree` does, and as taking back a capability does."""
    requester = manager.Requester("operator@local", root=True)

    def act() -> None:
        done = manager.operate(world.state, requester, "kill", entries[0].run_id, reason="it leaks", tree=True)
        assert len(done) == len(entries)

    return watched(entries, sink, act, lambda timed: world.internet.within("host", timed))


def kill(world: NetworkedWorld, entries: list[registry.Entry], sink: World) -> Trial:
    """Kill by hand: SIGKILL to every process, thawed first where cgroup version 1 would keep it frozen."""
    leaves = [leaf_of(one) for one in entries]

    def act() -> None:
        for leaf in leaves:
            for pid in leaf.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for leaf in leaves:
            with contextlib.suppress(errors.KernelError):  # its keeper was faster
                leaf.thaw()

    return watched(entries, sink, act)


def trial(
    net: Internet, world: NetworkedWorld, count: int, sink: World, way: Callable[..., Trial], idle: bool
) -> Trial:
    """One tree, made and ended."""
    where = world.package(
        {"main.py": STREAMS}, network="full", more=revoking.GRANT, cpu_ms=1_200_000, memory_mb=64, disk_mb=1
    )
    world.sign(where)
    signed = envelope.decode((where / "agent.dsse.json").read_bytes())
    assert hashlib.sha256(signed.payload).hexdigest()
    with tree(world, where, count, sink) as entries:
        assert len(entries) == count
        for one in entries[1:] if idle else ():
            leaf_of(one).freeze()
        return way(world, entries, sink)


def main() -> None:
    """Print the median and the worst of each."""
    trials = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 32
    asked = [one for one in STATES if one in sys.argv[3:]] or list(STATES)
    ways = {"revoked": revoke, "kill --tree": end, "kill -9": kill}
    ways = {name: way for name, way in ways.items() if name in sys.argv[3:]} or ways
    with tempfile.TemporaryDirectory() as directory, internet.made() as net, world_apart(net) as sink:
        world = internet.configured(
            NetworkedWorld(Path(directory)), net, attest_seconds=3600, start_deadline_seconds=300
        )
        warm = world.run(world.sign(world.copy("hello")))
        assert warm.error is None, warm.error
        figures: dict[str, list[Trial]] = {}
        for number in range(1, trials + 1):
            for state in asked:
                for name, way in ways.items():
                    one = trial(net, world, count, sink, way, state == "frozen")
                    figures.setdefault(f"{name}, {STATES[state]}", []).append(one)
                    # Twenty trials take half an hour. Printing each one keeps its figure for a user who stops early.
                    print(f"{number}/{trials} {name}: gone {one.gone * 1000:.1f} ms", file=sys.stderr, flush=True)
    print(f"{count} runs with a network, {trials} trials; ms from the call, median and worst")
    for name, made in figures.items():
        columns = []
        for what in ("gone", "packet", "returned"):
            times = [getattr(one, what) * 1000 for one in made]
            columns.append(f"{what} {statistics.median(times):7.1f} {max(times):7.1f}")
        print(f"{name:36} {'   '.join(columns)}")
    for words in map(STATES.__getitem__, asked if "revoked" in ways and "kill -9" in ways else ()):
        ours, raw = ([one.gone for one in figures[f"{name}, {words}"]] for name in ("revoked", "kill -9"))
        ratios = statistics.median(ours) / statistics.median(raw), max(ours) / max(raw)
        print(f"revoked / kill -9, {words}: gone, median {ratios[0]:.2f}, worst {ratios[1]:.2f}")
    print(f"load average at the end {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--drive"]:
        drive(Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
