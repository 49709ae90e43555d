"""A DNS gate in three namespaces: the compiled ruleset, the gate's real process, and a scripted resolver in the world.

The supervisor's side (the exchange that serves the broker) is a thread in the world, so that nothing is ever asked of
a resolver outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dns.message
import dns.rcode

from policy import denials
from policy.compile.artefacts import Artefacts
from sandbox.network import addresses
from sandbox.network.dns import gate as dns_gate
from sandbox.network.gate import process as gate_process
from tests.kernel.scripted_resolver import Resolver, serving
from tests.kernel.three_namespaces import Namespaces

RESOLVER = "9.9.9.9"
GATEWAY, AGENT = addresses.GATEWAY4, addresses.AGENT4
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Gated:
    """An open gate as a test sees it. ``error`` is what the gate's watches ended the run with."""

    spaces: Namespaces
    resolver: Resolver
    sets: Mapping[str, list[str]]
    gate: gate_process.OpenGate
    denied: list[denials.Denial] = field(default_factory=list)
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    marks: int = 0

    def udp(self, wire: bytes, *, wait: float = 10, role: str = "agent") -> bytes | None:
        """Send a datagram to the gate; what comes back."""

        def probe() -> bytes | None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
                made.settimeout(wait)
                made.connect((GATEWAY, 53))
                made.send(wire)
                try:
                    return made.recv(65535)
                except TimeoutError:
                    return None

        return self.spaces.within(role, probe)

    def tcp(self, *wires: bytes, raw: bytes = b"", wait: float = 10) -> list[bytes]:
        """Send messages over one connection, or ``raw`` bytes; the messages that come back until it is closed."""

        def probe() -> list[bytes]:
            found = []
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
                made.settimeout(wait)
                made.connect((GATEWAY, 53))
                data = b""
                with contextlib.suppress(OSError):  # a reset, or nothing for so long
                    made.sendall(raw or b"".join(struct.pack("!H", len(one)) + one for one in wires))
                    made.shutdown(socket.SHUT_WR)
                    while more := made.recv(65536):
                        data += more
                while len(data) >= 2:
                    size = int.from_bytes(data[:2], "big")
                    found.append(data[2 : 2 + size])
                    data = data[2 + size :]
            return found

        return self.spaces.within("agent", probe)

    def ask(self, name: str, kind: str = "A", **more: Any) -> dns.message.Message:
        """The gate's answer over UDP, read by dnspython; it must have one."""
        query = dns.message.make_query(name, kind, **more)
        wire = self.udp(query.to_wire())
        assert wire is not None, name
        answer = dns.message.from_wire(wire)
        assert query.is_response(answer), answer
        return answer

    def texts(self, name: str, kind: str = "A") -> list[str]:
        """The records of the answer as text; its rcode where it has none."""
        answer = self.ask(name, kind)
        found = [rdata.to_text() for rrset in answer.answer for rdata in rrset]
        return found or [dns.rcode.to_text(answer.rcode())]

    def elements(self, host: str) -> dict[str, int]:
        """The addresses in the sets of a pattern, with the seconds that they were added for."""
        return {address: seconds for name in self.sets[host] for address, seconds in self.elements_of(name).items()}

    def elements_of(self, name: str) -> dict[str, int]:
        """The same of one set."""
        listed = json.loads(self.spaces.run("gateway", "nft", "-j", "list", "set", "inet", "covenant", name))
        elements = (element["elem"] for element in listed["nftables"][1]["set"].get("elem", ()))
        return {element["val"]: element["timeout"] for element in elements}

    def connect(self, host: str, port: int) -> str:
        """``connected`` or the name of the error, from the agent."""

        def probe() -> str:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.socket(family, socket.SOCK_STREAM) as made:
                made.settimeout(10)
                number = made.connect_ex((host, port))
                return errno.errorcode[number] if number else "connected"

        return self.spaces.within("agent", probe)

    def codes(self) -> set[tuple[str, str]]:
        """Return the denials so far as (target, code)."""
        # Reports keep their order: when a later question's report is here, all before it are. After a flood, ask again:
        # a gate sends only a limited number of reports a second.
        until = time.monotonic() + 30
        while True:
            self.marks += 1
            self.ask(f"mark{self.marks}.invalid")
            for _ in range(20):
                if any(one.target == f"mark{self.marks}.invalid" for one in list(self.denied)):
                    break
                time.sleep(0.01)
            else:
                assert time.monotonic() < until
                continue
            break
        return {(one.target, one.code) for one in list(self.denied) if not one.target.startswith("mark")}

    def forget(self) -> None:
        """Forget the denials so far, those among them whose reports are still on their way."""
        self.codes()
        self.denied.clear()


def exchange(gated: Gated, spaces: Namespaces, stop: int) -> None:
    """Do the work of the run's exchange, in the namespace that plays the supervisor's."""
    with open(f"/proc/{spaces.pids['world']}/ns/net") as entry:
        assert _LIBC.setns(entry.fileno(), 0x40000000) == 0
    poll = select.poll()
    for fd in (*gated.gate.watches, stop):
        poll.register(fd, select.POLLIN)
    while not gated.ended.is_set():
        for fd, _ in poll.poll():
            if fd == stop:
                return
            gated.error = gated.error or gated.gate.watches[fd]()
            if gated.error is not None:
                gated.ended.set()
                return


def links(spaces: Namespaces) -> None:
    """Give the agent's link the addresses of a real run."""
    spaces.batch("gateway", f"address add {GATEWAY}/{addresses.PREFIX4} dev agent0")
    spaces.batch("agent", f"address add {AGENT}/{addresses.PREFIX4} dev eth0")


@contextlib.contextmanager
def ruleset(spaces: Namespaces, artefacts: Artefacts) -> Iterator[None]:
    """The compiled ruleset in the gateway."""
    with tempfile.NamedTemporaryFile(suffix=".nft") as file:
        file.write(artefacts.files["firewall.nft"])
        file.flush()
        spaces.run("gateway", "nft", "-f", file.name)
    try:
        yield
    finally:
        spaces.run("gateway", "nft", "delete", "table", "inet", "covenant")


@contextlib.contextmanager
def opened(
    spaces: Namespaces,
    artefacts: Artefacts,
    resolver: Resolver,
    *,
    resolvers: Sequence[str] = (RESOLVER,),
    streams: bool = True,
    **changes: Any,
) -> Iterator[Gated]:
    """A gate that serves; ``links`` must have been made. ``changes`` are to the plan, for what would take long.

    A test may change ``resolvers`` while the gate serves. Without ``streams`` the resolver refuses TCP.
    """
    denied: list[denials.Denial] = []
    names: dict[str, list[str]] = {}
    for grant in artefacts.json("network.json")["grants"]:
        names.setdefault(grant["host"], []).extend(grant["sets"])
    with contextlib.ExitStack() as stack:
        stack.enter_context(ruleset(spaces, artefacts))
        stack.enter_context(serving(resolver, RESOLVER, lambda call: spaces.within("world", call), streams=streams))
        gate = stack.enter_context(
            dns_gate.open(
                {**artefacts.json("gates.json")["dns"], **changes},
                inside=lambda call: spaces.within("gateway", call),
                denied=denied.append,
                resolvers=lambda: resolvers,
            )
        )
        gate.process.ready(60)
        gated = Gated(spaces, resolver, names, gate, denied)
        stop, wake = os.pipe()
        stack.callback(os.close, stop)
        thread = threading.Thread(target=exchange, args=(gated, spaces, stop))
        thread.start()
        try:
            yield gated
        finally:
            os.close(wake)
            thread.join(10)
