"""The TLS gate in its own process, between three namespaces under the compiled ruleset: real TLS, and what is none.

Every denial has its control: the same bytes from the same place, with the granted name or to the granted address.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import denials
from policy.compile.artefacts import Artefacts
from policy.compile.network.firewall import GATE_UID, TLS_PORT
from sandbox.network import reached as reached_rows
from sandbox.network.gate import process as gate_process
from sandbox.network.gate import told_names
from sandbox.network.tls import gate as tls_gate
from sandbox.network.tls import server
from tests import hello_kit as kit
from tests.kernel import three_namespaces, tls_servers
from tests.kernel.three_namespaces import GATEWAY, GATEWAY6, Namespaces
from tests.kernel.tls_servers import Certificates, Server
from tests.unit.policy.compile import sample

NAME, WILD, OTHER = "secure.example.com", "a.b.wild.example.org", "other.example.com"
ENTRIES = (
    (NAME, "[443, 444]", "tls"),
    ("*.wild.example.org", "[443]", "tls"),
    ("198.51.100.7", "[443, 444]", "tls"),
    ("fd00:9::9", "[443]", "tls"),
    ("10.9.9.9", "[5432]", "tcp"),
)
NAMED, NAMED6, GRANTED, GRANTED6 = "93.184.216.34", "2606:4700::1111", "198.51.100.7", "fd00:9::9"
# Another address of the name, at which there is no server.
DEAD = "93.184.216.36"
# More names than a gate keeps and its line holds.
NAMES = 1000
# Four times as much as a server has room for that does not read.
LAST_BYTES = 1 << 20
# 443 speaks TLS, 444 answers a hello and goes on in clear, 445 asks every client for a second hello.
TLS, CLEAR, RETRY = 443, 444, 445


class World:
    """The namespaces with servers, a filled ruleset, and the gate."""

    def __init__(self, spaces: Namespaces, certificates: Certificates, servers: dict[int, Server]) -> None:
        self.spaces, self.certificates, self.servers = spaces, certificates, servers
        self.denied: list[denials.Denial] = []
        self.gate: gate_process.OpenGate | None = None
        # The DNS gate's end of its line to this gate.
        self.tells, self.names = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.names.setblocking(False)

    def close(self) -> None:
        """Close the line."""
        self.tells.close()
        self.names.close()

    def refusals(self) -> list[tuple[str, str]]:
        """Target and code of what was refused since the last call."""
        assert self.gate is not None
        # A report is sent before the reset that the agent sees.
        poll = select.poll()
        for fd in self.gate.watches:
            poll.register(fd, select.POLLIN)
        while ready := poll.poll(0):
            for fd, _ in ready:
                assert self.gate.watches[fd]() is None
        found = [(one.target, one.code) for one in self.denied]
        assert {one.layer for one in self.denied} <= {"sni"}
        self.denied.clear()
        return found

    def connected(self, host: str, port: int) -> socket.socket:
        """A connection of the agent."""

        def connect() -> socket.socket:
            made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            made.settimeout(20)
            try:
                made.connect((host, port))
            except OSError:
                made.close()
                raise
            return made

        return self.spaces.within("agent", connect)

    def say(self, host: str, port: int, *pieces: bytes, pause: float = 0) -> bytes | str:
        """Send pieces as segments of their own, and what comes back first: bytes, ``ended`` or ``reset``."""
        try:
            with self.connected(host, port) as made:
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for piece in pieces:
                    made.sendall(piece)
                    time.sleep(pause)
                return made.recv(65536) or "ended"
        except (ConnectionResetError, BrokenPipeError):
            return "reset"

    @contextlib.contextmanager
    def secured(self, host: str, port: int, name: str | None) -> Iterator[ssl.SSLSocket]:
        """A TLS connection of the agent that checks the server's certificate."""
        context = self.certificates.client(names=name is not None)
        with self.connected(host, port) as made, context.wrap_socket(made, server_hostname=name) as secure:
            yield secure

    def asked(self, host: str, port: int, name: str | None) -> str:
        """The name that the server says it was asked for; ``reset`` where there was no handshake."""
        try:
            with self.secured(host, port, name) as secure:
                secure.sendall(b"name\n")
                return secure.recv(300).decode()
        except ConnectionResetError:
            return "reset"


@pytest.fixture(scope="module")
def artefacts() -> Artefacts:
    entries = [*ENTRIES, (NAME, f"[{RETRY}]", "tls")]
    return sample.compiled(sample.manifest(network="full", more=sample.entries(*entries)))


@pytest.fixture(scope="module")
def world(artefacts: Artefacts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("tls")
    certificates = Certificates(directory, NAME, "*.b.wild.example.org", OTHER)
    with three_namespaces.made() as spaces, contextlib.ExitStack() as stack:
        servers = {}
        for port, context in (
            (TLS, certificates.server()),
            (CLEAR, None),
            (RETRY, certificates.server(groups="secp384r1")),
        ):
            listeners = [spaces.listen("world", host, port) for host in ("0.0.0.0", "::")]
            servers[port] = stack.enter_context(tls_servers.serving(context, *listeners))
        made = stack.enter_context(contextlib.closing(World(spaces, certificates, servers)))
        _load(spaces, artefacts, directory)
        inside: Callable[[Callable[[], object]], object] = functools.partial(spaces.within, "gateway")
        plan, line = artefacts.json("gates.json")["tls"], made.names.fileno()
        gate = tls_gate.open(plan, inside=inside, denied=made.denied.append, names=line)
        made.gate = stack.enter_context(gate)
        made.gate.process.ready()
        yield made
        made.refusals()


def _load(spaces: Namespaces, artefacts: Artefacts, directory: Path) -> None:
    path = directory / "firewall.nft"
    path.write_bytes(artefacts.files["firewall.nft"])
    spaces.run("gateway", "nft", "-f", str(path))
    for grant in artefacts.json("network.json")["grants"]:
        for name in grant["sets"] if grant["kind"] == "name" else ():
            found = (NAMED6,) if name[1] == "6" else (NAMED, DEAD)
            element = f"{{ {', '.join(f'{address} timeout 600s' for address in found)} }}"
            spaces.run("gateway", "nft", "add", "element", "inet", "covenant", name, element)


@contextlib.contextmanager
def _gate_alone(
    artefacts: Artefacts, directory: Path, port: int, reached: reached_rows.TellReached | None = None
) -> Iterator[tuple[Namespaces, socket.socket, gate_process.OpenGate]]:
    """A gate that is ready, in namespaces of its own, and a listener at a port of the world."""
    with three_namespaces.made() as spaces:
        _load(spaces, artefacts, directory)
        inside: Callable[[Callable[[], object]], object] = functools.partial(spaces.within, "gateway")
        plan = artefacts.json("gates.json")["tls"]
        with (
            spaces.listen("world", "0.0.0.0", port) as listener,
            tls_gate.open(plan, inside=inside, denied=lambda _: None, reached=reached) as opened,
        ):
            opened.process.ready()
            yield spaces, listener, opened


@pytest.fixture(autouse=True)
def _nothing_left_of_others(world: World) -> None:
    world.refusals()


def test_granted_name_is_carried_to_its_server(world: World) -> None:
    for host in (NAMED, NAMED6):
        assert world.asked(host, TLS, NAME) == NAME
        assert world.asked(host, TLS, WILD) == WILD
    assert world.refusals() == []


def test_name_not_granted_is_reset_and_said(world: World) -> None:
    for host in (NAMED, NAMED6):
        assert world.asked(host, TLS, OTHER) == "reset"
        # The wildcard is not its own parent, and has its own ports.
        assert world.asked(host, TLS, "wild.example.org") == "reset"
        assert world.asked(host, CLEAR, WILD) == "reset"
    assert (
        world.refusals()
        == [
            (f"{OTHER}:443/tls", "sni_not_granted"),
            ("wild.example.org:443/tls", "sni_not_granted"),
            (f"{WILD}:444/tls", "sni_not_granted"),
        ]
        * 2
    )


def test_granted_address_may_be_asked_for_any_name_and_for_none(world: World) -> None:
    for host in (GRANTED, GRANTED6):
        assert world.asked(host, TLS, OTHER) == OTHER
        assert world.asked(host, TLS, None) == "None"
    assert world.refusals() == []


def test_without_name_or_with_hidden_one_nothing_passes(world: World) -> None:
    before = world.servers[CLEAR].accepted
    twice = kit.body(kit.server_name(NAME.encode()), kit.server_name(OTHER.encode()))
    for hello, code in (
        (kit.hello(None), "no_sni"),
        (kit.hello(NAME, kit.extension(kit.ECH, b"\0" * 64)), "ech_present"),
        (b"GET / HTTP/1.1\r\n\r\n", "not_tls"),
        (kit.hello(NAME)[:40] + b"\xff" * 60, "malformed"),
        (kit.record(b"\x01\x00\x44\x00"), "hello_too_long"),
        (kit.record(kit.message(twice)), "malformed"),
    ):
        assert world.say(NAMED, CLEAR, hello) == "reset", code
        assert [one[1] for one in world.refusals()] == [code]
    # No packet of a refused connection has reached the server.
    assert world.servers[CLEAR].accepted == before
    assert world.say(NAMED, CLEAR, kit.hello(NAME)) == kit.server_hello()
    assert world.servers[CLEAR].accepted == before + 1
    assert world.say(GRANTED, CLEAR, kit.hello(None)) == kit.server_hello()


def test_hello_in_twenty_segments_and_many_records_is_one_hello(world: World) -> None:
    for name, answer in ((NAME, kit.server_hello()), (OTHER, "reset")):
        message = kit.message(kit.body(kit.server_name(name.encode()), kit.extension(21, b"\0" * 400)))
        data = kit.records(message, (1, 2, 3, 60, 5, 40, 80))
        size = -(-len(data) // 20)
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert len(pieces) == 20
        assert world.say(NAMED, CLEAR, *pieces, pause=0.01) == answer
    assert world.refusals() == [(f"{OTHER}:444/tls", "sni_not_granted")]


def test_longest_hello_passes_and_longer_one_does_not(world: World) -> None:
    def padded(size: int) -> bytes:
        data = kit.message(kit.body(kit.server_name(NAME.encode()), kit.extension(21, b"")))
        data = kit.message(kit.body(kit.server_name(NAME.encode()), kit.extension(21, b"\0" * (size - len(data)))))
        return kit.records(data, (16384,))

    assert world.say(NAMED, CLEAR, padded(16384)) == kit.server_hello()
    assert world.say(NAMED, CLEAR, padded(17 << 10)) == "reset"
    assert world.refusals() == [(f"{NAMED}:444/tls", "hello_too_long")]


def test_hello_that_does_not_come_is_refused(world: World) -> None:
    # Two at once, so that the test waits once: nothing, and all but the last byte.
    with world.connected(NAMED, CLEAR) as silent, world.connected(NAMED6, CLEAR) as slow:
        slow.sendall(kit.hello(NAME)[:-1])
        for made in (silent, slow):
            with pytest.raises(ConnectionResetError):
                made.recv(1)
    assert sorted(world.refusals()) == [(f"{NAMED}:444/tls", "hello_timeout"), (f"[{NAMED6}]:444/tls", "hello_timeout")]


def test_look_at_port_is_no_refusal(world: World) -> None:
    with world.connected(NAMED, TLS) as made:
        made.shutdown(socket.SHUT_WR)
        assert made.recv(1) == b""
    assert world.refusals() == []


def test_gate_has_no_door_of_its_own(world: World) -> None:
    for host in (GATEWAY, GATEWAY6):
        with pytest.raises(ConnectionRefusedError):
            world.connected(host, TLS_PORT)
    # Where no ruleset stands before it (as loopback here), the gate itself refuses who was not redirected.
    world.spaces.run("gateway", "nft", "insert", "rule", "inet", "covenant", "output", "oifname", "lo", "accept")
    world.spaces.run("gateway", "nft", "insert", "rule", "inet", "covenant", "input", "iifname", "lo", "accept")

    def straight() -> str:
        try:
            with socket.create_connection(("127.0.0.1", TLS_PORT), timeout=20) as made:
                made.sendall(kit.hello(NAME))
                return repr(made.recv(1))
        except (ConnectionResetError, BrokenPipeError):
            return "reset"

    assert world.spaces.within("gateway", straight) == "reset"


def test_second_hello_is_judged_too(world: World) -> None:
    # The control: a real client that is asked again goes through, and the server takes the name of the second hello.
    assert world.asked(NAMED, RETRY, NAME) == NAME
    assert world.servers[RETRY].names[-2:] == [NAME, NAME]
    seen = len(world.servers[RETRY].names)
    for change, code in (
        (lambda raw: raw.replace(NAME.encode(), OTHER.encode().rjust(len(NAME), b"x")), "sni_not_granted"),
        (lambda raw: kit.hello(NAME, kit.extension(kit.ECH, b"")), "ech_present"),
        (lambda raw: kit.hello(None), "no_sni"),
        (lambda raw: b"GET /", "not_tls"),
    ):
        assert _second_hello(world, change) == "reset"
        assert [one[1] for one in world.refusals()] == [code]
    # The server saw the first hello of each, and none of the second ones.
    assert world.servers[RETRY].names[seen:] == [NAME] * 4
    assert _second_hello(world, lambda raw: raw) == "answered"


def _second_hello(world: World, change: Callable[[bytes], bytes]) -> str:
    """A handshake in which the second hello is changed on its way."""
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = world.certificates.client().wrap_bio(coming, going, server_hostname=NAME)
    with world.connected(NAMED, RETRY) as made:
        for flight in range(2):
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            raw = going.read()
            try:
                made.sendall(change(raw) if flight else raw)
                answer = made.recv(65536)
            except (ConnectionResetError, BrokenPipeError):
                return "reset"
            assert answer[:1] == b"\x16"
            coming.write(answer)
    return "answered"


def test_nothing_but_hellos_passes_before_servers_answer(world: World) -> None:
    # A second hello that is sent along with the first is held until the server has said that it wants none.
    evil = kit.hello(OTHER)
    for host in (NAMED, NAMED6):
        with world.connected(host, CLEAR) as made:
            made.sendall(kit.hello(NAME) + b"echo\n" + evil)
            received = b""
            while len(received) < len(kit.server_hello() + evil):
                received += made.recv(65536)
            # Carried, after the answer: no server takes a plaintext hello then.
            assert received == kit.server_hello() + evil


def test_each_side_may_end_alone(world: World) -> None:
    with world.connected(NAMED, CLEAR) as made:
        made.sendall(kit.hello(NAME))
        assert made.recv(65536) == kit.server_hello()
        made.sendall(b"take 1000\nabc")
        made.shutdown(socket.SHUT_WR)
        assert made.recv(100) == b"3"
        assert made.recv(100) == b""
    with world.connected(NAMED, CLEAR) as made:
        made.sendall(kit.hello(NAME))
        assert made.recv(65536) == kit.server_hello()
        made.sendall(b"end 1000\n")
        assert made.recv(100) == b""
        made.sendall(b"still heard")
        made.shutdown(socket.SHUT_WR)
        until = time.monotonic() + 30
        while not world.servers[CLEAR].taken and time.monotonic() < until:
            time.sleep(0.01)
        assert sum(world.servers[CLEAR].taken) == len(b"still heard")


def test_much_is_carried_both_ways_at_once(world: World) -> None:
    size = 48 << 20
    with world.secured(NAMED, TLS, NAME) as down, world.secured(NAMED6, TLS, WILD) as up:
        down.sendall(f"give {size}\n".encode())
        up.sendall(f"take {size}\n".encode())
        sender = threading.Thread(target=tls_servers.give, args=(up, size))
        sender.start()
        assert tls_servers.take(down, size) == size
        sender.join(60)
        assert up.recv(100) == str(size).encode()


def test_hundred_connections_are_carried_at_once(world: World) -> None:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(world.connected(NAMED, CLEAR)) for _ in range(100)]
        for one in made:
            one.sendall(kit.hello(NAME))
        for one in made:
            assert one.recv(65536) == kit.server_hello()
            one.sendall(b"echo\n")
        for index, one in enumerate(made):
            one.sendall(f"number {index}".encode() * 2000)
        for index, one in enumerate(made):
            expected = f"number {index}".encode() * 2000
            received = b""
            while len(received) < len(expected):
                received += one.recv(65536)
            assert received == expected
    assert world.refusals() == []


def test_more_connections_than_gate_holds_wait(world: World) -> None:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(world.connected(GRANTED, CLEAR)) for _ in range(server.CONNECTIONS)]
        for one in made:
            one.sendall(kit.hello(None))
        for one in made:
            assert one.recv(65536) == kit.server_hello()
        waiting = stack.enter_context(world.connected(NAMED, CLEAR))
        waiting.sendall(kit.hello(NAME))
        assert not select.select([waiting], [], [], 1)[0]
        assert world.refusals() == [(f"{server.CONNECTIONS} connections", "connections_wait")]
        made[0].close()
        assert waiting.recv(65536) == kit.server_hello()
    assert world.refusals() == []


def test_flood_of_refusals_leaves_gate_serving(world: World) -> None:
    def flood() -> None:
        for _ in range(400):
            reset = contextlib.suppress(ConnectionResetError, BrokenPipeError)
            with reset, socket.create_connection((NAMED, CLEAR), timeout=20) as made:
                made.sendall(b"GET /")
                made.recv(1)

    world.spaces.within("agent", flood)
    assert set(world.refusals()) == {(f"{NAMED}:444/tls", "not_tls")}
    assert world.asked(NAMED, TLS, NAME) == NAME


def test_server_not_there_is_told(world: World) -> None:
    with world.connected(GRANTED6, TLS) as made:
        made.close()
    world.spaces.run("world", "ip", "address", "del", f"{GRANTED6}/128", "dev", "lo")
    try:
        world.spaces.run("world", "ip", "route", "add", "unreachable", f"{GRANTED6}/128")
        assert world.say(GRANTED6, TLS, kit.hello(NAME)) == "reset"
        assert world.refusals() == [(f"{NAME}:{TLS}/tls", "connect_unreachable")]
    finally:
        world.spaces.run("world", "ip", "route", "del", "unreachable", f"{GRANTED6}/128")
        world.spaces.run("world", "ip", "address", "add", f"{GRANTED6}/128", "dev", "lo")


@pytest.mark.parametrize("state", ["unreachable", "blackhole"])
def test_dead_address_of_name_is_left_for_another(world: World, state: str) -> None:
    """The agent's choice is dead, by an error or in silence; the DNS gate has told another address of the name."""
    packed = [ipaddress.ip_address(one).packed for one in (DEAD, NAMED)]
    world.tells.send(told_names.message(NAME, packed, 600))
    world.tells.send(told_names.message(OTHER, packed, 600))
    world.spaces.run("world", "ip", "route", "add", state, f"{DEAD}/32")
    try:
        assert world.asked(DEAD, TLS, NAME) == NAME
        assert world.refusals() == []
        # What is not granted is not tried anywhere, and an address that is granted as such is tried alone.
        assert world.asked(DEAD, TLS, OTHER) == "reset"
        assert world.refusals() == [(f"{OTHER}:{TLS}/tls", "sni_not_granted")]
    finally:
        world.spaces.run("world", "ip", "route", "del", state, f"{DEAD}/32")


def test_told_address_outside_the_grant_is_not_reached(world: World) -> None:
    """A DNS gate in an attacker's hands tells the TLS gate where to connect; the firewall knows better."""
    inner = [ipaddress.ip_address(one).packed for one in ("10.9.9.9", "10.201.0.2", "127.0.0.1", "192.0.0.2")]
    before = world.servers[TLS].accepted
    world.tells.send(told_names.message(NAME, inner, 600))
    world.spaces.run("world", "ip", "route", "add", "unreachable", f"{DEAD}/32")
    try:
        assert world.asked(DEAD, TLS, NAME) == "reset"
    finally:
        world.spaces.run("world", "ip", "route", "del", "unreachable", f"{DEAD}/32")
    assert [one[1] for one in world.refusals()] in (["connect_unreachable"], ["connect_refused"])
    # The server listens on every address of the world, 10.9.9.9 too.
    assert world.servers[TLS].accepted == before


def test_gate_holds_no_right_and_nothing_of_ours(world: World) -> None:
    assert world.gate is not None
    pid = world.gate.process.pid
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line)
    assert status["Uid"].split() == [str(GATE_UID)] * 4
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{world.spaces.pids['gateway']}/ns/net")
    # A socket of the host that is reached by its path is not reached: there is no path.
    assert os.listdir(f"/proc/{os.getpid()}/root")
    assert os.listdir(f"/proc/{pid}/root") == []
    assert os.readlink(f"/proc/{pid}/cwd") == os.readlink(f"/proc/{pid}/root")
    kinds = {os.readlink(entry).partition(":")[0] for entry in Path(f"/proc/{pid}/fd").iterdir()}
    assert kinds <= {"socket", "pipe", "anon_inode"}


def test_gate_that_ends_leaves_its_port_closed(artefacts: Artefacts, tmp_path: Path) -> None:
    with _gate_alone(artefacts, tmp_path, TLS) as (spaces, _, opened):
        made = World(spaces, Certificates(tmp_path, NAME), {})
        made.close()
        made.connected(NAMED, TLS).close()
        os.kill(opened.process.pid, 9)
        assert select.select([opened.process.pidfd], [], [], 30)[0]
        ended = opened.watches[opened.process.pidfd]()
        assert ended is not None
        assert ended.code == "gate_died"
        with pytest.raises(ConnectionRefusedError):
            made.connected(NAMED, TLS)


def test_counted_bytes_of_last_moment_arrive(artefacts: Artefacts, tmp_path: Path) -> None:
    """The gate's end is no reset: its kernel still sends what a slow server has not taken."""
    told: list[int] = []

    def reached(target: str, connections: int, carried: int | None) -> None:
        told.append(carried or 0)

    with (
        _gate_alone(artefacts, tmp_path, CLEAR, reached) as (spaces, listener, opened),
        contextlib.ExitStack() as stack,
    ):
        made = World(spaces, Certificates(tmp_path, NAME), {})
        made.close()
        agent = stack.enter_context(made.connected(NAMED, CLEAR))
        agent.sendall(kit.hello(NAME))
        taken = stack.enter_context(listener.accept()[0])
        taken.settimeout(30)
        assert taken.recv(65536) == kit.hello(NAME)
        taken.sendall(kit.server_hello())
        assert agent.recv(65536) == kit.server_hello()
        agent.sendall(b"x" * LAST_BYTES)
        (reports,) = opened.watches.keys() - {opened.process.pidfd}
        # More than the server has room for: the rest is in the gate's kernel.
        while sum(told) < LAST_BYTES // 4:
            assert select.select([reports], [], [], 30)[0]
            assert opened.watches[reports]() is None
        assert opened.process.tell_last()
        opened.process.end()
        assert tls_servers.take(taken, LAST_BYTES) == sum(told) - len(kit.hello(NAME) + kit.server_hello())


def test_names_of_wildcard_that_wait_are_bounded_and_none_is_lost(artefacts: Artefacts, tmp_path: Path) -> None:
    """The supervisor reads no report until the end, so that all but a socket's room of them waits in the gate."""
    told: dict[str, int] = {}

    def reached(target: str, connections: int, carried: int | None) -> None:
        told[target] = told.get(target, 0) + connections

    def serve(listener: socket.socket) -> None:
        for _ in range(NAMES):
            with listener.accept()[0] as taken:
                taken.recv(65536)

    def ask() -> None:
        for number in range(NAMES):
            with socket.create_connection((NAMED, TLS), timeout=30) as made:
                made.sendall(kit.hello(f"n{number}.wild.example.org"))
                assert made.recv(1) == b""

    with _gate_alone(artefacts, tmp_path, TLS, reached) as (spaces, listener, opened):
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        spaces.within("agent", ask)
        thread.join(60)
        assert told == {}
        assert opened.process.tell_last()
    assert told["n0.wild.example.org:443/tls"] == 1
    assert told[reached_rows.REST] > 0
    assert sum(told.values()) == NAMES
