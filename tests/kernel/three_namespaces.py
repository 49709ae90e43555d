"""An agent, a gateway and a world: three network namespaces with veths named as the plan names them.

A thread enters a namespace to make a socket; the socket stays there, and is used from anywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)

AGENT, AGENT6 = "10.200.0.2", "fd00:200::2"
GATEWAY, GATEWAY6 = "10.200.0.1", "fd00:200::1"
# What answers in the world: addresses that a name may lead to, and others. All of them are this namespace's own.
WORLD = ("93.184.216.34", "10.9.9.9", "10.8.8.8", "203.0.113.5", "198.51.100.7", "9.9.9.9")
WORLD6 = ("2606:4700::1111", "fd00:9::9")

_LINKS = """
link add agent0 type veth peer name eth0 netns {agent}
link add uplink0 type veth peer name eth0 netns {world}
address add {gateway4}/30 dev agent0
address add {gateway6}/64 dev agent0 nodad
address add 10.201.0.1/30 dev uplink0
address add fd00:201::1/64 dev uplink0 nodad
link set lo up
link set agent0 up
link set uplink0 up
route add default via 10.201.0.2
route add default via fd00:201::2
"""
_AGENT = """
address add {agent4}/30 dev eth0
address add {agent6}/64 dev eth0 nodad
link set lo up
link set eth0 up
route add default via {gateway4}
route add default via {gateway6}
"""
_WORLD = """
address add 10.201.0.2/30 dev eth0
address add fd00:201::2/64 dev eth0 nodad
link set lo up
link set eth0 up
route add 10.200.0.0/30 via 10.201.0.1
route add fd00:200::/64 via fd00:201::1
"""


class Namespaces:
    """Made by ``made``; ``within`` runs a call in one of ``agent``, ``gateway``, ``world``."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}

    def within(self, role: str, call: Callable[[], T], *, uid: int | None = None) -> T:
        """The value of ``call`` in that namespace; what it raises is raised here. ``uid`` owns the sockets it makes."""
        out: list[Any] = []

        def work() -> None:
            try:
                with open(f"/proc/{self.pids[role]}/ns/net") as entry:
                    if _LIBC.setns(entry.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), "setns")
                if uid is not None:
                    # Of this thread alone (setfsuid(2)); it is what `meta skuid` compares.
                    _LIBC.setfsuid(uid)
                out.append((True, call()))
            except BaseException as e:
                out.append((False, e))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        good, value = out[0]
        if not good:
            raise value
        return value  # type: ignore[no-any-return]

    def batch(self, role: str, text: str) -> None:
        """Run lines of ip(8) there."""
        self.run(role, "ip", "-batch", "-", given=text.strip() + "\n")

    def run(self, role: str, *command: str, given: str = "") -> str:
        """Run a command there, which must succeed."""
        done = subprocess.run(
            ["nsenter", "--net", "-t", str(self.pids[role]), *command],
            input=given,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def listen(self, role: str, host: str, port: int, *, udp: bool = False) -> socket.socket:
        """A listening or bound socket of that namespace."""

        def make() -> socket.socket:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            made = socket.socket(family, socket.SOCK_DGRAM if udp else socket.SOCK_STREAM)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                made.bind((host, port))
                if not udp:
                    made.listen(64)
            except OSError:
                made.close()
                raise
            made.settimeout(5)
            return made

        return self.within(role, make)

    def listen_soon(self, role: str, host: str, port: int) -> socket.socket:
        """As ``listen``, once the namespace has the address: the kernel adds one of IPv6 in its own time."""
        until = time.monotonic() + 30
        while True:
            try:
                return self.listen(role, host, port)
            except OSError as e:
                if e.errno != errno.EADDRNOTAVAIL or time.monotonic() > until:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def made() -> Iterator[Namespaces]:
    """Three namespaces with their links; each lives as long as the process that holds it."""
    spaces = Namespaces()
    with contextlib.ExitStack() as stack:
        for role in ("agent", "gateway", "world"):
            spaces.pids[role] = stack.enter_context(anchor())
        places = {"gateway4": GATEWAY, "gateway6": GATEWAY6, "agent4": AGENT, "agent6": AGENT6}
        for role in spaces.pids:
            # A link-local address that is still looking for its double sends no solicitation for a second or more.
            spaces.run(role, "sysctl", "-q", "-w", *(f"net.ipv6.conf.{n}.accept_dad=0" for n in ("all", "default")))
        spaces.batch("gateway", _LINKS.format(**places, **spaces.pids))
        spaces.batch("agent", _AGENT.format(**places))
        own = [f"address add {host}/32 dev lo" for host in WORLD] + [f"address add {h}/128 dev lo" for h in WORLD6]
        spaces.batch("world", _WORLD + "\n".join(own))
        settings = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.icmp_ratelimit=0"]
        spaces.run("gateway", "sysctl", "-q", "-w", *settings, "net.ipv6.icmp.ratelimit=0")
        _settled(spaces)
        yield spaces


def _settled(spaces: Namespaces) -> None:
    """Wait until both families pass both links: the kernel brings up IPv6 on a new veth in its own time."""
    for host in (WORLD[0], WORLD6[0]):
        with spaces.listen_soon("world", host, 7) as server:
            until = time.monotonic() + 30
            while not spaces.within("agent", functools.partial(_connects, host)):
                assert time.monotonic() < until, f"{host} cannot be reached from the agent's namespace"
            server.accept()[0].close()


def _connects(host: str) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as made:
        made.settimeout(1)
        return made.connect_ex((host, 7)) == 0


@contextlib.contextmanager
def anchor() -> Iterator[int]:
    """The pid of a process in a network namespace of its own."""
    command = ["unshare", "-n", "sh", "-c", "echo there; exec sleep 600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"there\n"
            yield child.pid
        finally:
            child.kill()
