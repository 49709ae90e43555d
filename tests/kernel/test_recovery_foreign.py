"""A recovery beside foreign objects that look like a run's: it removes its own orphans and nothing else."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sandbox.kernel.cgroup import cgroup
from sandbox.network import addresses
from sandbox.serve.api import paths
from tests.crash import traces
from tests.kernel import internet
from tests.kernel.conftest import leftovers
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.live_runs import SLEEPS, live, until
from tests.kernel.serving import open_place
from tests.kernel.world import HEAD, TAIL

ROOT = Path(__file__).resolve().parents[2]
GRANTS = internet.entries(("api.example.com", "[80]", "tcp"))
RECOVERS = """
import sys
from pathlib import Path
from sandbox.supervisor import Supervisor
with Supervisor(Path(sys.argv[1])):
    pass
"""
# A run as far as a recovery can see it: directory, cgroup, and a device whose name is of its id.
HOLDS = """
import sys
from pathlib import Path
from sandbox.rundir.directory import RunDirectory
from sandbox.kernel.cgroup import cgroup as cgroupfs
path = Path(sys.argv[1])
leaf = cgroupfs.Leaf(cgroupfs.Hierarchies.read(), path.name)
with RunDirectory(path, {"agent_id": "stranger"}) as held:
    held.note_cgroups(leaf.plan())
    held.note_network({"device": sys.argv[2]})
    with leaf:
        for file in leaf.join_files():
            Path(file).write_text("0")
        print("held", flush=True)
        sys.stdin.read()
"""
# In a mount namespace of its own: something in the held run's bundle, and a network namespace with a name.
MOUNTS = """
mount -t tmpfs covenant "$1"; echo "not ours" > "$1/file"
touch "$2"
make='ip link add cv-inside type veth peer name cv-within; mount --bind /proc/self/ns/net "$0"'
unshare --net sh -ec "$make" "$2"
echo mounted; exec cat
"""
TABLES = """
table ip covenant_uplink { comment "covenant 1 eth0 0 - 0 0"; chain forward { iifname "cv-*" counter drop; }; }
table inet covenant_uplink2 { set cv-12345678 { type ipv4_addr; elements = { 198.19.0.16 }; }; }
"""
_TABLES = (("ip", "covenant_uplink"), ("inet", "covenant_uplink2"))


@dataclass
class Stranger:
    """Foreign objects beside the orphans. ``seen`` is all of them, so that two looks can be compared."""

    net: Internet
    held: Path
    holder: int
    mounter: int
    space: Path
    listener: socket.socket

    @property
    def device(self) -> str:
        """The held run's, as it would be called."""
        return addresses.host_device(self.held.name)

    @property
    def leaf(self) -> dict[str, Path]:
        """The held run's cgroups."""
        return cgroup.Leaf(cgroup.Hierarchies.read(), self.held.name).plan()

    def seen(self) -> dict[str, object]:
        """Everything of it, as it is now."""
        place, root = self.listener.getsockname(), f"/proc/{self.mounter}/root"
        with socket.socket(socket.AF_UNIX, self.listener.type) as asks:
            asks.connect(place)
            self.listener.accept()[0].close()
        space = os.open(f"{root}{self.space}", os.O_RDONLY)
        try:
            inside = self.net.run("host", "ip", "-o", "link", within=space)
        finally:
            os.close(space)
        return {
            "socket": os.stat(place),
            "mounts": Path(f"/proc/{self.mounter}/mountinfo").read_text(),
            "file": Path(f"{root}{self.held}/bundle/rootfs/file").read_text(),
            "namespace": inside,
            "tables": [self.net.run("host", "nft", "list", "table", *one) for one in _TABLES],
            "device": self.net.run("host", "ip", "-o", "link", "show", self.device),
            "directory": {name: _content(self.held / name) for name in traces.tree(self.held)},
            "cgroup": {path: cgroup.members(path) for path in self.leaf.values()},
        }


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


@contextlib.contextmanager
def stranger(net: Internet, runs: Path, base: Path, sock: Path) -> Iterator[Stranger]:
    """Make the foreign objects, and remove them at the end."""
    base.mkdir()
    held, space = runs / str(uuid.uuid4()), base / "cv-12345678"
    device = addresses.host_device(held.name)
    with contextlib.ExitStack() as stack:
        stack.callback(_emptied, held.name)
        holder = stack.enter_context(_waiting(sys.executable, "-c", HOLDS, str(held), device))
        words = ("unshare", "--mount", "--propagation", "private", "sh", "-ec", MOUNTS, "sh")
        mounter = stack.enter_context(_waiting(*words, str(held / "bundle" / "rootfs"), str(space)))
        net.run("host", "ip", "link", "add", device, "type", "veth", "peer", "name", "stranger0")
        stack.callback(net.run, "host", "ip", "link", "delete", "stranger0", check=False)
        net.run("host", "nft", "-f", "-", given=TABLES)
        for one in _TABLES:
            stack.callback(net.run, "host", "nft", "delete", "table", *one, check=False)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(sock))
        listener.listen()
        yield Stranger(net, held, holder, mounter, space, listener)


@contextlib.contextmanager
def _waiting(*command: str) -> Iterator[int]:
    """A process that has said that it is ready."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process.pid
        finally:
            process.kill()


def _emptied(name: str) -> None:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), name)
    leaf.adopt(leaf.plan())
    leaf.remove()


@contextlib.contextmanager
def _killed_over_a_run(world: NetworkedWorld) -> Iterator[Path]:
    """The directory that is left of one, with a device and a table beside it: until a start takes it away, and at the
    end one does."""
    net, runs = world.internet, world.state / "runs"
    package = world.sign(world.package({"main.py": SLEEPS}, cpu_ms=250_000, network="full", more=GRANTS))
    entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}", sys.executable, "-m", "covenant"]
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    before = set(runs.iterdir())

    def connected() -> Path | None:
        new = [path for path in set(runs.iterdir()) - before if path.is_dir()]
        return next((path for path in new if addresses.host_device(path.name) in net.run("host", "ip", "link")), None)

    with subprocess.Popen(
        [*entered, "run", str(package), "hi"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            orphan: Path = until(connected)
        finally:
            process.send_signal(signal.SIGKILL)
    try:
        yield orphan
    finally:
        _recovered(world, mounts=os.getpid())


def _recovered(world: NetworkedWorld, *, mounts: int) -> None:
    """By a start in the mount namespace of this process, where all that is mounted there can be seen."""
    spaces = (f"--mount=/proc/{mounts}/ns/mnt", f"--net=/proc/{os.getpid()}/fd/{world.internet.spaces['host']}")
    done = subprocess.run(
        ["nsenter", *spaces, sys.executable, "-c", RECOVERS, str(world.state)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def _of_a_run(net: Internet, path: Path) -> list[str]:
    """Return what exists of a run: its directory, its device, its cgroups."""
    found = [str(path)] if path.exists() else []
    found += [
        line for line in net.run("host", "ip", "-o", "link").splitlines() if addresses.host_device(path.name) in line
    ]
    return found + traces.cgroups({path.name})


@pytest.fixture
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made


@pytest.fixture
def base() -> Iterator[Path]:
    """With a short name: that of a socket in it must fit into an address (unix(7))."""
    with open_place() as made:
        yield made


def test_recovery_takes_its_own_orphans_and_touches_nothing_that_looks_like_them(
    base: Path, warm: Path, net: Internet
) -> None:
    for name in ("one", "two"):
        (base / name).mkdir()
    world, second = (internet.configured(NetworkedWorld(base / n, warm=warm), net) for n in ("one", "two"))
    # What it takes to know how the way is, and the folder of the runs.
    assert world.run_code(HEAD + "answer = 1" + TAIL, network="full", more=GRANTS).error is None
    runs, sock = world.state / "runs", paths.socket_of(str(second.state))
    with (
        live(second, network="full", more=GRANTS) as other,
        stranger(net, runs, base / "stranger", Path(sock)) as beside,
        _killed_over_a_run(world) as orphan,
    ):
        assert len(_of_a_run(net, orphan)) >= 3
        before, of_other = beside.seen(), _of_a_run(net, other.directory)
        _recovered(world, mounts=beside.mounter)
        assert _of_a_run(net, orphan) == []
        assert beside.seen() == before
        # The other installation's run goes on as it was, with the table and the settings that it needs.
        assert _of_a_run(net, other.directory) == of_other
        assert net.within("host", other.report).holds

        # The control: an object that was spared because it was held goes when it is no longer held.
        os.kill(beside.holder, signal.SIGKILL)
        until(lambda: not any(cgroup.members(path) for path in beside.leaf.values()))
        _recovered(world, mounts=os.getpid())
        assert _of_a_run(net, beside.held) == []
        assert net.within("host", other.report).holds
    assert net.leftovers() == []
    assert leftovers(world) == leftovers(second) == []
