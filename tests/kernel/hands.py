"""Root's hand in a live run with a network: commands in its namespaces, files of its cgroups, its processes."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandbox.kernel.net import netlink, netns
from sandbox.network import addresses
from tests.kernel import planted, planted_bpf, planted_iptables
from tests.kernel.test_attest import within
from tests.kernel.test_attest_network import Hand, rewritten

Tamper = Callable[[Hand], "contextlib.AbstractContextManager[None]"]

RESOURCE = "Takes or gives no way: only how long the kernel remembers, or how it sends"


@dataclass(frozen=True, slots=True)
class Change:
    """One change: ``layers`` are those that do not hold while it is in. None: it stands, and ``why`` says why."""

    make: Tamper
    layers: tuple[str, ...] = ()
    why: str = ""


def caught(make: Tamper, *layers: str) -> Change:
    return Change(make, layers or ("network",))


def stands(make: Tamper, why: str) -> Change:
    return Change(make, (), why)


def space(hand: Hand, place: str) -> int:
    """A descriptor of the namespace ``gateway``, ``agent`` or ``host``."""
    network = hand.one.made.network
    assert network is not None
    return hand.net.spaces["host"] if place == "host" else int(getattr(network, place).fd)


def words(hand: Hand, text: str) -> str:
    """A command with the names of this run in it."""
    network = hand.one.made.network
    assert network is not None
    line = next(line for line in network.gateway.lines if line.startswith("address 198.19."))
    sets = hand.sets()
    return text.format(
        dev=addresses.host_device(hand.one.made.run_id), own=line.split()[1].partition("/")[0], a4=sets["a4"],
        n4=sets["n4"],
    )  # fmt: skip


def command(place: str, make: str, undo: str) -> Tamper:
    """A command there, and the one that undoes it."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        hand.do(place, *shlex.split(words(hand, make)))
        try:
            yield
        finally:
            hand.do(place, *shlex.split(words(hand, undo)))

    return tamper


def ip(place: str, make: str, undo: str) -> Tamper:
    return command(place, f"/usr/sbin/ip {make}", f"/usr/sbin/ip {undo}")


def tc(place: str, make: str, undo: str) -> Tamper:
    return command(place, f"/usr/sbin/tc {make}", f"/usr/sbin/tc {undo}")


def table(place: str, text: str) -> Tamper:
    """Another table there, whole; its name is ``hand``."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        family = text.split()[1]
        path = Path(hand.one.world.base, "hand.nft")
        path.write_text(words(hand, text.replace("{", "{{").replace("}", "}}").replace("<<", "{").replace(">>", "}")))
        hand.nft(place, "-f", str(path))
        try:
            yield
        finally:
            hand.nft(place, "delete", "table", family, "hand")

    return tamper


def chain(place: str, base: str, rule: str, family: str = "ip") -> Tamper:
    """A base chain with one rule in another table; names of the run stand in ``<<`` and ``>>``."""
    return table(place, f"table {family} hand {{\n\tchain c {{\n\t\ttype {base};\n\t\t{rule}\n\t}}\n}}\n")


def rules(place: str, *given: str) -> Tamper:
    """A change of rules in a table of ours, which is put back whole."""
    return lambda hand: rewritten(
        hand, place, *(words(hand, one) if one.isprintable() and "{a4}" in one else one for one in given)
    )


def rule_less(table_name: str, chain_name: str, says: str) -> Tamper:
    """The first rule of a chain that says this is deleted; the table is put back whole."""

    def tamper(hand: Hand) -> contextlib.AbstractContextManager[None]:
        listed = hand.nft("gateway", "-a", "list", "chain", "inet", table_name, chain_name).splitlines()
        handle = next(line for line in listed if says in line and "# handle" in line).rpartition(" ")[2]
        return rewritten(hand, "gateway", "delete", "rule", "inet", table_name, chain_name, "handle", handle)

    return tamper


def rule_instead(table_name: str, chain_name: str, says: str, *instead: str) -> Tamper:
    """The first rule of a chain that says this is replaced; the table is put back whole."""

    def tamper(hand: Hand) -> contextlib.AbstractContextManager[None]:
        listed = hand.nft("gateway", "-a", "list", "chain", "inet", table_name, chain_name).splitlines()
        handle = next(line for line in listed if says in line and "# handle" in line).rpartition(" ")[2]
        where = ("inet", table_name, chain_name, "handle", handle)
        return rewritten(hand, "gateway", "replace", "rule", *where, *instead)

    return tamper


def element(text: str) -> Tamper:
    """An element of a set of the gateway: ``SET { ... }``."""
    address = text.partition("{{")[2].split()[0]
    name = text.split(maxsplit=1)[0]
    return command(
        "gateway",
        f"/usr/sbin/nft add element inet covenant {text}",
        f"/usr/sbin/nft delete element inet covenant {name} {{{{ {address} }}}}",
    )


def setting(place: str, name: str, value: str) -> Tamper:
    """A file below /proc/sys/net of that namespace; ``{dev}`` is the run's device on the host."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        path = Path("/proc/sys/net", words(hand, name))
        before = netns.within(space(hand, place), path.read_text)
        assert before.strip() != value, "the change is none"
        netns.within(space(hand, place), lambda: path.write_text(value))
        try:
            yield
        finally:
            netns.within(space(hand, place), lambda: path.write_text(before))

    return tamper


def tracked(place: str, protocol: int, sent: tuple[str, int, str, int], **more: str | int) -> Tamper:
    """An entry of the conntrack table; ``{own}`` is the gateway's address towards the host."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        source, first, destination, last = sent
        begun = planted.ends(words(hand, source), first, words(hand, destination), last)
        given = {key: words(hand, value) if isinstance(value, str) else value for key, value in more.items()}
        netns.within(space(hand, place), lambda: planted.entry(protocol, begun, **given))  # type: ignore[arg-type]
        try:
            yield
        finally:
            netns.within(space(hand, place), lambda: planted.gone(protocol, begun))

    return tamper


def program(place: str, kind: int, at: int, device: str = "", gives: int = 1) -> Tamper:
    """A BPF program at a device or at the namespace itself."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        def link() -> contextlib.AbstractContextManager[None]:
            target = space(hand, place)
            if device:
                with netlink.Route() as route:
                    target = route.links()[words(hand, device)]
            made = planted_bpf.linked(kind, at, target, gives=gives)
            made.__enter__()
            return made

        made = netns.within(space(hand, place), link)
        try:
            yield
        finally:
            made.__exit__(None, None, None)

    return tamper


def old_nat(destination: str) -> Tamper:
    """A DNAT of the older iptables on the host."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        rule = planted_iptables.rule(planted_iptables.dnat("10.8.8.8"), destination=destination)
        netns.within(space(hand, "host"), lambda: planted_iptables.load_nat(rule))
        try:
            yield
        finally:
            netns.within(space(hand, "host"), planted_iptables.load_nat)

    return tamper


def sockets(place: str, family: int, kind: int, protocol: int = 0, bind: tuple[str, int] | None = None) -> Tamper:
    """A socket that stays in the namespace, held by a process elsewhere."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        def make() -> socket.socket:
            made = socket.socket(family, kind, protocol)
            if bind:
                made.bind(bind)
                if kind == socket.SOCK_STREAM:
                    made.listen()
            return made

        with netns.within(space(hand, place), make):
            yield

    return tamper


def limit(controller: str, file: str, value: str, *, gates: bool = False) -> Tamper:
    """A file of the run's own cgroup, or of its gates'."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        network = hand.one.made.network
        assert network is not None
        if gates:
            directory = next(Path(one).parent for one in network.gates if Path(one).name.startswith(controller))
        else:
            directory = Path(hand.one.made.cgroup_files[controller])
        path = directory / file
        before = path.read_text().split("\n")[0].split(" ")[-1]
        path.write_text(value)
        try:
            yield
        finally:
            path.write_text(before)

    return tamper


def process(role: str, change: Callable[[int], None], undo: Callable[[int], None]) -> Tamper:
    """Something done to one process of the run: ``runner``, ``gofer`` or ``sandbox``; or to a ``gate``."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        if role == "gate":
            network = hand.one.made.network
            assert network is not None
            pid = network.bounded[0].pid
        else:
            pid = getattr(hand.one.family(), role).name.pid
        change(pid)
        try:
            yield
        finally:
            undo(pid)

    return tamper


def in_mounts(role: str, code: str, undo: str) -> Tamper:
    """Code in the mount namespace of the run's ``gofer`` or ``sandbox``, below what it has for its root."""
    return process(role, functools.partial(_swapped, within, code), functools.partial(_swapped, within, undo))


def _swapped(call: Callable[[int, str], None], code: str, pid: int) -> None:
    call(pid, code)


@contextlib.contextmanager
def aside(controller: Path, name: str) -> Iterator[Path]:
    """A cgroup beside."""
    made = controller.parent / name
    made.mkdir()
    try:
        yield made
    finally:
        made.rmdir()


def moved(controller: str, *, thread: bool = False, below: bool = False, gates: bool = False) -> Tamper:
    """A process or a thread in another cgroup: beside the run's, or below it."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        own = Path(hand.one.made.cgroup_files[controller])
        if gates:
            network = hand.one.made.network
            assert network is not None
            own = next(Path(one).parent for one in network.gates if Path(one).name.startswith(controller))
        pid = int((own / "cgroup.procs").read_text().split()[0]) if gates else hand.one.family().sandbox.name.pid
        file = "tasks" if thread else "cgroup.procs"
        every = "tasks" if (own / "tasks").exists() else "cgroup.procs"
        which = next(one for one in os.listdir(f"/proc/{pid}/task") if one != str(pid)) if thread else str(pid)
        with aside(own / "x" if below else own, f"hand-{hand.one.made.run_id}") as other:
            (other / file).write_text(which)
            try:
                yield
            finally:
                while left := (other / every).read_text().split():
                    for task in left:
                        with contextlib.suppress(ProcessLookupError):
                            (own / every).write_text(task)

    return tamper


def stranger(*, space_of: str = "", controller: str = "", gates: bool = False) -> Tamper:
    """Put a foreign process into a namespace or a cgroup of the run."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        begin = functools.partial(subprocess.Popen[bytes], ["/usr/bin/sleep", "60"])
        made = netns.within(space(hand, space_of), begin) if space_of else begin()
        with made:
            try:
                if controller:
                    own = Path(hand.one.made.cgroup_files[controller])
                    if gates:
                        own = own.with_name(f"{own.name}-gates")
                    (own / "cgroup.procs").write_text(str(made.pid))
                yield
            finally:
                made.kill()

    return tamper


def file_of_run(name: str, change: Callable[[bytes], bytes]) -> Tamper:
    """A file below the run's directory, its package or the supervisor's state, changed and put back."""

    @contextlib.contextmanager
    def tamper(hand: Hand) -> Iterator[None]:
        made = hand.one.made
        path = Path(name.format(run=made.directory, package=made.package, state=hand.one.world.state))
        before, mode = (path.read_bytes(), path.stat().st_mode) if path.exists() else (None, 0o644)
        path.unlink(missing_ok=True)
        path.write_bytes(change(before or b""))
        path.chmod(mode)
        try:
            yield
        finally:
            path.unlink()
            if before is not None:
                path.write_bytes(before)
                path.chmod(mode)

    return tamper


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def gone_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
