"""Serve in the DNS gate's process: the only resolver that an agent has.

If a query's name is granted, the gate makes a new query to a resolver of the operator and answers from its answer. The
addresses are in the firewall's sets before the answer leaves. Other queries are answered at once and reach no resolver,
so they carry no data outside. Answers are kept for their time to live, equal questions at one time are one question to
a resolver, and questions above the rate wait for their turn.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
import types
from typing import NoReturn

# INVARIANT: before dnspython. It asks which optional packages are installed, for features that a gate never uses, and
# reading the metadata of packages is a third of the gate's start.
sys.modules.setdefault("importlib.metadata", types.ModuleType("importlib.metadata"))

from sandbox.network.dns import broker_wire, cache, names  # noqa: E402
from sandbox.network.dns import wire as dns_wire  # noqa: E402
from sandbox.network.dns.cache import Resolution  # noqa: E402
from sandbox.network.dns.https_record import Service  # noqa: E402
from sandbox.network.dns.loop import READ, Future, Loop  # noqa: E402
from sandbox.network.dns.turns import Turns  # noqa: E402
from sandbox.network.dns.upstream import TOTAL_SECONDS, BrokerClient, Upstream, UpstreamError  # noqa: E402
from sandbox.network.gate import told_names  # noqa: E402
from sandbox.network.gate.main import GateInput  # noqa: E402
from sandbox.rate_limit import Tokens  # noqa: E402

# The most queries that wait for an answer, the most TCP connections, and their idle and total timeouts in seconds.
_WAITING = 1024
_CONNECTIONS, _IDLE_SECONDS, _LASTS_SECONDS = 8, 5.0, 30.0
# The rate of datagrams read, as a multiple of the plan's query rate. A flood fills the socket's buffer, and the kernel
# drops the rest there.
_READ_FOR_EACH, _PAUSE_SECONDS = 50, 0.05
_AT_ONCE = 16
# The most aliases that are followed within one answer.
_FOLLOWED = 4


# The gate sends nothing: the agent's libc asks again after some seconds, and finds the answer or a turn.
_SILENCE = Resolution(None, code="rate")
_UPSTREAM = Resolution(dns_wire.SERVFAIL, code="upstream")


class DnsServer:
    """Answers the questions of one agent."""

    def __init__(self, gate: GateInput, loop: Loop) -> None:
        plan = gate.plan
        self._gate, self._loop = gate, loop
        self._patterns, self._public = names.tables(plan)
        self._filled = [{4: bool(row["sets"]["v4"]), 16: bool(row["sets"]["v6"])} for row in plan["names"]]
        self._inward = [names.Public(row["inward"]) for row in plan["names"]]
        # Names that need a lease, and how long each is held for an operator.
        held = plan.get("asked", ())
        self._held, self._held_seconds = names.Patterns(row["pattern"] for row in held), [r["seconds"] for r in held]
        self._by_proxy = names.Patterns(plan["by_proxy"])
        self._types = {dns_wire.TYPES[name] for name in plan["types"]}
        self._ttl, self._name_bytes = plan["ttl_seconds"], plan["name_bytes"]
        now = time.monotonic()
        rate, burst = plan["queries_per_second"], plan["burst"]
        self._turns = Turns(loop, rate, burst)
        self._cache = cache.AnswerCache()
        # Questions that are being answered, each with those that ask the same meanwhile.
        self._asked: dict[cache.Key, list[Future]] = {}
        self._reading = Tokens(_READ_FOR_EACH * rate, _READ_FOR_EACH * burst, now)
        self._agent = plan["agent"]
        self._broker = BrokerClient(loop, gate.fds["broker"], plan["resolvers"])
        self._upstream, self._changes = Upstream(loop, self._broker), self._broker.changes
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 0, fileno=gate.fds["udp"])
        self._tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=gate.fds["tcp"])
        self._tells = gate.fds.get("tells")
        self._waiting = self._connections = 0

    def start(self) -> None:
        """Begin to serve."""
        self._loop.on_readable(self._udp.fileno(), self._datagrams)
        self._loop.on_readable(self._tcp.fileno(), self._connection)

    # --- over UDP and TCP ---------------------------------------------------------------------------

    def _datagrams(self) -> None:
        for _ in range(_AT_ONCE):
            now = time.monotonic()
            if not self._reading.take(now):
                self._loop.forget(self._udp.fileno())
                self._loop.at(now + _PAUSE_SECONDS, self._resume)
                return
            try:
                wire, peer = self._udp.recvfrom(dns_wire.QUERY_BYTES + 1)
            except BlockingIOError:
                return
            if peer[0] == self._agent:
                self._loop.spawn(self._datagram(wire, peer))

    def _resume(self) -> None:
        self._loop.on_readable(self._udp.fileno(), self._datagrams)

    async def _datagram(self, wire: bytes, peer: tuple[str, int]) -> None:
        answer = await self._answer(wire, udp=True)
        if answer is not None:
            try:
                self._udp.sendto(answer, peer)
            except OSError:
                return  # its buffer is full or its port is gone: UDP

    def _connection(self) -> None:
        try:
            made, peer = self._tcp.accept()
        except OSError:
            return
        if peer[0] != self._agent or self._connections >= _CONNECTIONS:
            made.close()
            return
        self._connections += 1
        self._loop.spawn(self._stream(made))

    async def _stream(self, made: socket.socket) -> None:
        """Questions one after the other, each with its length in front (RFC 7766)."""
        try:
            ends, data = time.monotonic() + _LASTS_SECONDS, b""
            while True:
                until = min(ends, time.monotonic() + _IDLE_SECONDS)
                while len(data) < 2 or len(data) < 2 + int.from_bytes(data[:2], "big"):
                    if len(data) >= 2 and int.from_bytes(data[:2], "big") > dns_wire.QUERY_BYTES:
                        self._gate.denied("question: too long", "malformed")
                        return
                    if not await self._loop.ready(made.fileno(), READ, until):
                        return
                    more = made.recv(4096, socket.MSG_DONTWAIT)
                    if not more:
                        return
                    data += more
                size = 2 + int.from_bytes(data[:2], "big")
                wire, data = data[2:size], data[size:]
                answer = await self._answer(wire, udp=False)
                if answer is None:
                    return
                whole = struct.pack("!H", len(answer)) + answer
                # A peer that does not read its answers is disconnected.
                if made.send(whole, socket.MSG_DONTWAIT) != len(whole):
                    return
        except OSError:
            return
        finally:
            self._connections -= 1
            made.close()

    # --- a question ---------------------------------------------------------------------------------

    async def _answer(self, wire: bytes, *, udp: bool) -> bytes | None:
        """The answer to a question, in these steps: read it, is the name granted, is the type answered, is the answer
        known, what do the resolvers say, are the addresses public, are they in the sets. None for silence."""
        try:
            query = dns_wire.parse_query(wire)
        except dns_wire.MalformedError as e:
            self._gate.denied(f"question: {e}", "malformed")
            return None if e.rcode is None else dns_wire.refusal(wire, e.rcode)
        outcome = await self._judged(query)
        if outcome.code is not None:
            self._gate.denied(query.shown[:253], outcome.code)
        if outcome.rcode is None:
            return None if udp else dns_wire.reply(query, dns_wire.SERVFAIL)
        room = query.payload if udp else 65535
        return dns_wire.reply(query, outcome.rcode, data=outcome.data, ttl=outcome.ttl, room=room)

    async def _judged(self, query: dns_wire.Query) -> Resolution:
        host = query.host
        if host is not None and len(host) > self._name_bytes:
            host = None
        covering = self._patterns.covering(host) if host is not None else ()
        held = self._held.covering(host) if host is not None and not covering else ()
        # Names of the run's own services are in its /etc/hosts, and never leave it.
        if host is None or not (covering or held) or host.rpartition(".")[2] == "covenant":
            return Resolution(dns_wire.NXDOMAIN, code="name_not_granted")
        if query.klass != dns_wire.IN:
            return Resolution(dns_wire.REFUSED, code="type_refused")
        if query.type not in self._types:
            return Resolution(dns_wire.NOERROR, code="type_refused")
        return await self._known((host, query.type), covering)

    async def _known(self, key: cache.Key, covering: tuple[int, ...]) -> Resolution:
        """The outcome that is kept, or that another question is waiting for, or a new one."""
        kept = self._cache.get(key, time.monotonic()) if covering else None
        if kept is not None:
            return kept
        if self._waiting >= _WAITING:
            return _SILENCE
        self._waiting += 1
        try:
            if key in self._asked:
                future = Future()
                self._asked[key].append(future)
                found: Resolution = await future
                return found
            self._asked[key] = []
            outcome = await self._new(key, covering)
            for future in self._asked.pop(key):
                future.set(outcome)
            return outcome
        finally:
            self._waiting -= 1

    async def _new(self, key: cache.Key, covering: tuple[int, ...]) -> Resolution:
        if not await self._turns.mine(first=self._patterns.exact(key[0])):
            return _SILENCE
        if not covering and not await self._approved(key[0]):
            return Resolution(dns_wire.NXDOMAIN, code="not_approved")
        # The addresses are in the sets for a time that begins after this.
        since = time.monotonic()
        outcome = await self._resolved(*key, covering)
        if self._changes != self._broker.changes:
            self._changes = self._broker.changes
            self._cache.clear()
        if covering:  # an answer under a lease is no longer true when the lease ends
            self._cache.put(key, outcome, since if outcome.data else time.monotonic())
        return outcome

    async def _approved(self, host: str) -> bool:
        """Whether a lease opens a name, once an operator has answered. No resolver hears of it before."""
        seconds = min(self._held_seconds[number] for number in self._held.covering(host))
        return await self._broker.approved(host, seconds)

    async def _resolved(self, host: str, kind: int, covering: tuple[int, ...]) -> Resolution:
        answer, ttls = await self._followed(host, kind)
        if answer is None:
            return _UPSTREAM
        absent = names.clamp(answer.negative_ttl or 0, (cache.LEAST_SECONDS, cache.NEGATIVE_SECONDS))
        if answer.rcode == dns_wire.NXDOMAIN:
            return Resolution(dns_wire.NXDOMAIN, fresh=absent)
        services = [one for one in answer.services if self._leads(one, host)]
        named = [*answer.addresses, *(hint for one in services for hint in one.hints)]
        allowed = [packed for packed in named if self._leads_there(packed, covering)]
        # Said even when others are left: the name's owner has tried to lead the agent inwards.
        code = "rebinding" if len(allowed) != len(named) else None
        # Many records may have too many hints; those that are not in the sets are left out of the answer.
        allowed = list(dict.fromkeys(allowed))[: dns_wire.RECORDS]
        ttl = names.clamp(min(ttls, default=None), self._ttl)
        failed = await self._open(host, covering, allowed, ttl)
        if failed is not None:
            return failed
        kept = set(allowed)
        data = [packed for packed in answer.addresses if packed in kept]
        data += [one.data([hint for hint in one.hints if hint in kept]) for one in services]
        self._tell(host, [packed for packed in answer.addresses if packed in kept], ttl)
        fresh = names.clamp(min(ttls, default=0), (cache.LEAST_SECONDS, ttl)) if data else absent
        return Resolution(dns_wire.NOERROR, tuple(data), ttl, fresh, code)

    async def _followed(self, host: str, kind: int) -> tuple[dns_wire.Answer | None, list[int]]:
        """Return the resolvers' answer with aliases followed, and the TTLs on the way. None if there is none.

        Names that the operator's proxy alone can look up reach no resolver: they have one address that stands for them.
        """
        if self._by_proxy.covering(host):
            has_one = kind == dns_wire.TYPES["A"] and names.is_elsewhere(self._by_proxy, host)
            found = (names.stand_in(host),) if has_one else ()
            return dns_wire.Answer(dns_wire.NOERROR, False, host, found, (), None, not found), []
        until = time.monotonic() + TOTAL_SECONDS
        name, ttls, seen = host, [], {host}
        for _ in range(_FOLLOWED):
            try:
                answer = await self._upstream.ask(name, kind, until)
            except UpstreamError:
                break
            if answer.ttl is not None:
                ttls.append(answer.ttl)
            if answer.addresses or answer.services or answer.negative:
                return answer, ttls
            name = answer.last
            if name in seen:
                break
            seen.add(name)
        return None, []

    async def _open(self, host: str, covering: tuple[int, ...], packed: list[bytes], ttl: int) -> Resolution | None:
        """Let connections to the addresses pass. Returns when the kernel has them; an outcome if it refuses them."""
        wanted = [
            one
            for one in packed
            if one in self._public and (not covering or any(self._filled[n][len(one)] for n in covering))
        ]
        if not wanted:
            return None  # every public address is granted anyway, or an entry of the manifest names it
        adding = self._broker.add(ttl, covering, wanted) if covering else self._broker.leased(ttl, host, wanted)
        status = await adding
        if status == broker_wire.DONE:
            return None
        return Resolution(dns_wire.SERVFAIL, code="set_full") if status == broker_wire.FULL else _UPSTREAM

    def _tell(self, host: str, packed: list[bytes], ttl: int) -> None:
        """Tell the TLS gate the addresses of a name, before the agent. It is told again if its line is full."""
        if self._tells is not None and packed:
            with contextlib.suppress(OSError):
                os.write(self._tells, told_names.message(host, packed, ttl))

    def _leads_there(self, packed: bytes, covering: tuple[int, ...]) -> bool:
        """Whether a name may lead to an address: a public one, or one that the manifest grants beside the name."""
        return packed in self._public or any(packed in self._inward[number] for number in covering)

    def _leads(self, service: Service, host: str) -> bool:
        """Whether the agent may follow an HTTPS record to its target."""
        return service.target in ("", host) or bool(self._patterns.covering(service.target))


def serve(gate: GateInput) -> NoReturn:
    """The gate's life."""
    loop = Loop()
    server = DnsServer(gate, loop)
    gate.seal()
    server.start()
    loop.run()
    raise SystemExit("nothing left to wait for")
