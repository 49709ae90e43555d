"""An internet of a test's own: a host on which a supervisor runs, and behind it a world with servers, names and TLS.

    agent ── gateway ── cv-... [ host: eth0 10.77.0.2, fd77::2 ] ── [ world: every address below is its own ]

The host has a service on its loopback alone and one on every address. The world answers on addresses that look public
and on private ones, has resolvers, TLS servers under an authority of its own, and a metadata service. Everything lives
in namespaces that this process alone holds; nothing of it is on the machine.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sandbox.kernel.net import netns
from sandbox.network import uplink
from tests.kernel import scripted_resolver, tls_servers
from tests.kernel.scripted_resolver import Resolver
from tests.kernel.world import World

T = TypeVar("T")
HOST, HOST6 = "10.77.0.2", "fd77::2"
WORLD, WORLD6 = "10.77.0.1", "fd77::1"
RESOLVER = "10.77.0.1"
# Addresses of the world: what a name may lead to, and what it may not.
PUBLIC = ("93.184.216.34", "93.184.216.35", "9.9.9.9", "8.8.8.8")
PRIVATE = ("10.8.8.8", "192.168.7.7", "172.16.7.7", "100.64.7.7", "203.0.113.5", "198.51.100.7")
METADATA = "169.254.169.254"
PUBLIC6 = ("2606:4700::1111", "2606:4700::2222")
PRIVATE6 = ("fd00:9::9", "fe80:9::9")
# What the world's resolver knows to begin with; a test may change its zone.
ZONE = {
    ("api.example.com", "A"): ["93.184.216.34"],
    ("api.example.com", "AAAA"): ["2606:4700::1111"],
    ("www.example.com", "CNAME"): ["edge.example.net."],
    ("edge.example.net", "A"): ["93.184.216.35"],
    ("other.example.com", "A"): ["9.9.9.9"],
    ("rebind.example.com", "A"): ["10.8.8.8"],
    ("metadata.example.com", "A"): [METADATA],
}
NAMES = ("*.example.com", "*.example.net")
# Ports of the world with a listener on every address, and of the host.
TCP_PORTS, UDP_PORTS, TLS_PORT = (22, 80, 5432, 8443), (123, 443), 443
LOOPBACK_PORT, HOST_PORT = 7001, 7002

_HOST_LINKS = f"""
link set lo up
link add eth0 type veth peer name eth0 netns {{world}}
address add {HOST}/24 dev eth0
address add {HOST6}/64 dev eth0 nodad
link set eth0 up
route add default via {WORLD}
route add default via {WORLD6}
"""
_WORLD_LINKS = f"""
link set lo up
address add {WORLD}/24 dev eth0
address add {WORLD6}/64 dev eth0 nodad
link set eth0 up
"""


@dataclass
class Server:
    """A listener; ``seen`` are the peers that it heard, ``received`` the bytes of each in all."""

    name: str
    port: int
    seen: list[str] = field(default_factory=list)
    received: int = 0


class Servers:
    """One thread that serves sockets of any namespace: TCP says who is asking and then echoes, UDP echoes."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._wake, self._poke = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._loop, name="servers", daemon=True)
        self._thread.start()

    def add(self, sock: socket.socket, server: Server) -> Server:
        """Serve a bound socket, which is taken over."""
        sock.setblocking(False)
        act = self._accept if sock.type == socket.SOCK_STREAM else self._answer
        self._selector.register(sock, selectors.EVENT_READ, (act, server))
        self._poke.send(b"x")
        return server

    def close(self) -> None:
        """End the thread and close everything."""
        self._poke.send(b"q")
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._poke.close()

    def _loop(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    if b"q" in self._wake.recv(64):
                        return
                    continue
                act, server = key.data
                with contextlib.suppress(OSError):
                    act(key.fileobj, server)

    def _accept(self, sock: socket.socket, server: Server) -> None:
        taken, peer = sock.accept()
        taken.setblocking(False)
        server.seen.append(peer[0])
        self._selector.register(taken, selectors.EVENT_READ, (self._echo, server))
        taken.send(f"{server.name} {peer[0]}\n".encode())

    def _echo(self, sock: socket.socket, server: Server) -> None:
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        server.received += len(data)
        if not data:
            self._selector.unregister(sock)
            sock.close()
            return
        sock.send(data[:1024])

    def _answer(self, sock: socket.socket, server: Server) -> None:
        data, peer = sock.recvfrom(65536)
        server.seen.append(peer[0])
        server.received += len(data)
        sock.sendto(data[:1024], peer)


class Internet:
    """Made by ``made``. ``resolver`` answers at RESOLVER, ``tls`` on every address; ``certificate`` is what it shows,
    as PEM. ``named`` are the host's own services."""

    resolver: Resolver
    tls: tls_servers.Server
    certificate: str

    def __init__(self, spaces: Mapping[str, int], servers: Servers) -> None:
        self.spaces, self.servers = spaces, servers
        self.named: dict[str, Server] = {}

    def within(self, role: str, call: Callable[[], T]) -> T:
        """The value of ``call`` in that namespace; what it raises is raised here."""
        return netns.within(self.spaces[role], call)

    def run(
        self, role: str, *command: str, given: str = "", check: bool = True, within: int | None = None, **more: Any
    ) -> str:
        """Run a command there, and give what it wrote. ``within`` is a namespace's descriptor in place of a role's."""
        space = self.spaces[role] if within is None else within
        entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{space}", *command]
        done: subprocess.CompletedProcess[str] = subprocess.run(
            entered, input=given, capture_output=True, text=True, timeout=120, **more
        )
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def listen(self, role: str, host: str, port: int, *, udp: bool = False, name: str = "") -> Server:
        """A server on an address of that namespace."""
        return self.servers.add(self.bound(role, host, port, udp=udp), Server(name or f"{role}:{port}", port))

    def bound(self, role: str, host: str, port: int, *, udp: bool = False) -> socket.socket:
        """A socket there, listening for TCP; the caller closes it."""

        def make() -> socket.socket:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            made.bind((host, port))
            if not udp:
                made.listen(256)
            return made

        return self.within(role, make)

    def link(self) -> None:
        """Make the interfaces of the host and of the world, with their addresses and routes."""
        world = f"/proc/{os.getpid()}/fd/{self.spaces['world']}"
        self.run("host", "ip", "-batch", "-", given=_HOST_LINKS.format(world=world))
        self.run("world", "ip", "-batch", "-", given=_WORLD_LINKS)

    def forwards_ipv6(self) -> bool:
        """Whether this kernel forwards IPv6 for one interface (6.17), or the host anyway: else agents have none."""
        return self.within("host", lambda: uplink.look("eth0")).ipv6 is not None

    def leftovers(self) -> list[str]:
        """Return what runs left on the host: devices, tables, settings."""
        links = [line for line in self.run("host", "ip", "-o", "link").splitlines() if "cv-" in line]
        tables = [t for t in self.run("host", "nft", "list", "tables").splitlines() if "covenant" in t]
        routes = [r for r in self.run("host", "ip", "route").splitlines() if "198.19." in r]
        on = [
            name
            for name in ("net.ipv4.conf.eth0.forwarding", "net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
            if self.run("host", "sysctl", "-n", name).strip() != "0"
        ]
        return links + tables + routes + on


class NetworkedWorld(World):
    """A world whose runs happen on the internet's host."""

    internet: Internet

    def run(self, path: Any, text: str = "hi", **request: Any) -> Any:
        """As ``World.run``, in the host's namespace."""
        return self.internet.within("host", lambda: World.run(self, path, text, **request))


@contextlib.contextmanager
def made() -> Iterator[Internet]:
    """The whole of it, with every server up."""
    fds = netns.make(2)
    spaces = dict(zip(("host", "world"), fds, strict=True))
    with contextlib.ExitStack() as stack:
        for fd in fds:
            stack.callback(os.close, fd)
        servers = Servers()
        stack.callback(servers.close)
        net = Internet(spaces, servers)
        for role in spaces:
            still = [f"net.ipv6.conf.{n}.accept_dad=0" for n in ("all", "default")]
            net.run(role, "sysctl", "-q", "-w", *still)
        net.link()
        own = [f"address add {a}/32 dev lo" for a in (*PUBLIC, *PRIVATE, METADATA)]
        own += [f"address add {a}/128 dev lo nodad" for a in (*PUBLIC6, *PRIVATE6)]
        net.run("world", "ip", "-batch", "-", given="\n".join(own))
        _serve(net)
        with tempfile.TemporaryDirectory() as folder:
            certificates = tls_servers.Certificates(Path(folder), *NAMES)
            net.certificate = "-----BEGIN CERT" + certificates.path.read_text().partition("-----BEGIN CERT")[2]
            context = certificates.server()
        listeners = [net.bound("world", host, TLS_PORT) for host in ("0.0.0.0", "::")]
        net.tls = stack.enter_context(tls_servers.serving(context, *listeners))
        net.resolver = stack.enter_context(
            scripted_resolver.serving(Resolver(dict(ZONE)), RESOLVER, lambda call: net.within("world", call))
        )
        yield net


def _serve(net: Internet) -> None:
    for host in ("0.0.0.0", "::"):
        for port in TCP_PORTS:
            net.listen("world", host, port)
        net.named[f"host {host}"] = net.listen("host", host, HOST_PORT)
    # Each on its own address, since a datagram's answer must come from where it was sent to.
    for host in (*PUBLIC, *PUBLIC6, METADATA):
        for port in UDP_PORTS:
            net.listen("world", host, port, udp=True)
    for host in ("127.0.0.1", "::1"):
        net.named[f"loopback {host}"] = net.listen("host", host, LOOPBACK_PORT)


def entries(*listed: tuple[str, str, str]) -> str:
    """``[[permissions.network]]`` of each (host, ports as TOML, protocol)."""
    table = '[[permissions.network]]\nhost = "{}"\nports = {}\nprotocol = "{}"\n'
    return "".join(table.format(*one) for one in listed)


def configured(world: NetworkedWorld, net: Internet, **more: Any) -> NetworkedWorld:
    """The world with the internet's host as its own, its uplink and resolver named."""
    world.internet = net
    world.configure(**{"uplink": "eth0", "resolvers": [RESOLVER], **more})
    return world


# Probes that an agent runs: each gives one word.
PROBES = """
import errno, socket
def tcp(host, port, wait=10, say=None):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(wait)
        try:
            s.connect((host, port))
            if say is None:
                return "connected"
            s.sendall(say)
            return s.recv(200).decode()
        except TimeoutError:
            return "silence"
        except OSError as e:
            return errno.errorcode.get(e.errno or 0, str(e))
def udp(host, port, wait=10, data=b"ask"):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(wait)
        try:
            s.connect((host, port))
            s.send(data)
            return "answered" if s.recv(2000) else "garbled"
        except TimeoutError:
            return "silence"
        except OSError as e:
            return errno.errorcode.get(e.errno or 0, str(e))
"""


# The certificate lies in the agent's package. Gives the server's word, or what went wrong.
TLS_PROBE = """
import ssl
def tls(name, host=None, port=443, wait=10):
    context = ssl.create_default_context(cafile="/workspace/ca.pem")
    try:
        with socket.create_connection((host or name, port), timeout=wait) as plain:
            with context.wrap_socket(plain, server_hostname=name) as secure:
                secure.sendall(b"name\\n")
                return secure.recv(200).decode()
    except socket.gaierror as e:
        return "gaierror"
    except ssl.SSLError as e:
        return "ssl " + str(e.reason)
    except TimeoutError:
        return "silence"
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
def raw_https(host):
    # What comes of bytes that are no TLS.
    with socket.create_connection((host, 443), timeout=10) as plain:
        try:
            plain.sendall(b"GET / HTTP/1.0\\r\\n\\r\\n")
            return plain.recv(200).decode() or "closed"
        except OSError:
            return "closed"
def ping():
    # An echo request; the socket is the one that needs no right.
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as s:
            s.settimeout(1)
            s.connect(("93.184.216.34", 0))
            s.send(b"\\x08\\0\\0\\0\\0\\0\\0\\0")
            return "answered" if s.recv(100) else "garbled"
    except TimeoutError:
        return "silence"
    except OSError as e:
        return errno.errorcode.get(e.errno or 0, str(e))
def resolve(name):
    try:
        return sorted({a[4][0] for a in socket.getaddrinfo(name, 80, type=socket.SOCK_STREAM)})
    except socket.gaierror as e:
        return "gaierror %d" % e.errno
"""


def probes(calls: Sequence[str]) -> str:
    """Agent code that answers with the values of these expressions, in order."""
    return PROBES + TLS_PROBE + "answer = [" + ", ".join(calls) + "]\n"
