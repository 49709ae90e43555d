"""Handle the DNS gate's requests to the supervisor: the gate itself can open no socket and change no rule.

There are two requests, over a pair of SOCK_SEQPACKET sockets and of fixed form. One puts an address into the sets of a
pattern, the other returns a socket connected to one of the operator's resolvers. The broker checks every request
against the plan itself. An attacker in the gate can therefore only talk to the resolvers, and add public addresses to
the sets of names within the times and sizes of the plan. A request that an honest gate would not make ends the run.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from policy import errors
from policy.compile.network import nft
from policy.grants.sets import addresses
from policy.leases.book import Lease
from sandbox.kernel.net import nft_sets
from sandbox.network.dns import broker_wire, names
from sandbox.network.gate.lease_desk import LeaseDesk
from sandbox.network.gate.rows import GateRows, RowTerms
from sandbox.rate_limit import Tokens

# A connection at the very end of the answer's time must still find its element.
GRACE_SECONDS = 10
PORT = 53
_AT_ONCE = 16
# A name may take several questions (aliases that lead on, a resolver that does not answer, or knows neither EDNS nor
# TCP): so many for each.
_QUESTIONS = 8
# An honest gate needs a few sockets and one change of sets for each query of the agent. More is an attack.
_REQUESTS = 32


class SetBroker(GateRows):
    """Serves one gate. ``gate_end`` is the descriptor for the gate's process; ``netlink`` a socket of the gateway.

    ``resolvers`` returns addresses, which may change while the run lives; sockets to them are made in the caller's own
    network namespace.
    """

    def __init__(
        self,
        plan: Mapping[str, Any],
        netlink: socket.socket,
        resolvers: Callable[[], Sequence[str]],
        *,
        port: int = PORT,
        clock: Callable[[], float] = time.monotonic,
        desk: LeaseDesk | None = None,
    ) -> None:
        self._desk = desk
        asked = plan.get("asked", ())
        self._asked = names.Patterns(row["pattern"] for row in asked)
        self._asked_sets = [(tuple(row["sets"]["v4"]), tuple(row["sets"]["v6"])) for row in asked]
        self._asked_seconds = [row["seconds"] for row in asked]
        # The elements of each name that has a lease.
        self._leased: dict[str, set[tuple[str, bytes]]] = {}
        if desk is not None and asked:
            desk.attach(self)
        self._sets = [(tuple(row["sets"]["v4"]), tuple(row["sets"]["v6"])) for row in plan["names"]]
        self._least, self._most = plan["ttl_seconds"]
        self._elements = nft_sets.Elements(nft.TABLE, netlink)
        self._held: dict[tuple[str, bytes], float] = {}
        self._resolvers, self._port, self._clock = resolvers, port, clock
        self._known, self._changes = tuple(resolvers()), 0
        rate, burst = plan["queries_per_second"], plan["burst"]
        self._sockets = Tokens(rate * _QUESTIONS, burst * _QUESTIONS, clock())
        self._requests = Tokens(rate * _REQUESTS, burst * _REQUESTS, clock())
        self._public = names.Public(addresses.PUBLIC)
        terms = RowTerms("dns", "asked for what it may not have", broker_wire.MESSAGE_BYTES, _AT_ONCE, self._take)
        super().__init__(terms)

    def _take(self, message: bytes) -> bool:
        return self._requests.take(self._clock()) and self._one(message)

    def _one(self, message: bytes) -> bool:
        if not broker_wire.HEADER.size <= len(message) <= broker_wire.MESSAGE_BYTES:
            return False
        operation, ident, value, patterns, count = broker_wire.HEADER.unpack_from(message)
        rest = message[broker_wire.HEADER.size :]
        if operation == broker_wire.ASK:
            return not (value or patterns or count) and self._ask(ident, rest)
        if operation == broker_wire.LEASED:
            return not patterns and self._lease(ident, value, count, rest)
        if operation == broker_wire.ADD:
            change = self._change(value, patterns, count, rest)
            if change is None:
                return False
            self._say(ident, self._add(change, value + GRACE_SECONDS))
            return True
        if value >= broker_wire.RESOLVERS or patterns or count:
            return False
        if operation == broker_wire.UDP and 0 < len(rest) <= broker_wire.QUERY_BYTES:
            self._connect(ident, value, rest)
            return True
        if operation == broker_wire.TCP and not rest:
            self._connect(ident, value, None)
            return True
        return False

    def _ask(self, ident: int, rest: bytes) -> bool:
        """Hold an ASK until an operator has answered. Returns whether an honest gate would send it."""
        host = rest.decode("ascii") if rest.isascii() else ""
        covering = self._asked.covering(host)
        if not covering:
            return False
        if self._desk is None:
            self._say(ident, broker_wire.FAILED)
            return True
        seconds = min(self._asked_seconds[number] for number in covering)

        def answer(granted: bool) -> None:
            self._say(ident, broker_wire.DONE if granted else broker_wire.FAILED)

        self._desk.ask("network", host, seconds, answer)
        return True

    def _lease(self, ident: int, ttl: int, count: int, rest: bytes) -> bool:
        """Put the addresses of a name with a lease into its sets. They leave them with the lease at the latest."""
        found = broker_wire.host_of(rest)
        packed = None if found is None else broker_wire.addresses_of(found[1], count)
        if found is None or not packed or count > broker_wire.ADDRESSES or not self._least <= ttl <= self._most:
            return False
        host = found[0]
        covering = self._asked.covering(host)
        if not covering or not all(one in self._public for one in packed):
            return False
        left = None if self._desk is None else self._desk.seconds("network", host)
        if left is None:
            self._say(ident, broker_wire.FAILED)
            return True
        pairs = [(name, one) for n in covering for one in packed for name in self._asked_sets[n][len(one) == 16]]
        status = self._add(pairs, min(ttl + GRACE_SECONDS, left))
        if status == broker_wire.DONE:
            self._leased.setdefault(host, set()).update(pairs)
        self._say(ident, status)
        return True

    def begin(self, lease: Lease) -> None:
        """Nothing is open before the gate has resolved the name (lease_desk.LeasedGate)."""

    def end(self, lease: Lease) -> None:
        """Take the addresses of a name out of the sets, but for those of another name with a lease.

        A later lease for the name needs them: they leave the sets when it ends, or by their time.

        Raises:
            errors.KernelError: one stays in its set.
        """
        if self._desk is not None and self._desk.live("network", lease.target) is not None:
            return
        mine = self._leased.pop(lease.target, set())
        kept = set().union(*self._leased.values()) if self._leased else set()
        for pair in mine - kept:
            self._held.pop(pair, None)
            try:
                self._elements.delete(_by_set([pair], None))
            except OSError as e:
                if e.errno != errno.ENOENT:  # it has expired by itself
                    raise errors.KernelError(f"an address stays in its set after its lease: {e.strerror}") from e

    def _resolver(self, number: int) -> str | None:
        """The address of a resolver by its number. None if there is none, because they have just become fewer."""
        found = tuple(self._resolvers())[: broker_wire.RESOLVERS]
        if found != self._known:
            self._known, self._changes = found, (self._changes + 1) & 0xFF
        return found[number] if number < len(found) else None

    def _change(self, ttl: int, patterns: int, count: int, rest: bytes) -> list[tuple[str, bytes]] | None:
        """Return the (set, address) pairs of an ADD. None if an honest gate would not send it."""
        if patterns > broker_wire.PATTERNS or count > broker_wire.ADDRESSES or not self._least <= ttl <= self._most:
            return None
        named = broker_wire.patterns_of(rest, patterns)
        if named is None:
            return None
        numbers, rest = named
        packed = broker_wire.addresses_of(rest, count)
        if not packed or len(set(numbers)) != len(numbers):
            return None
        pairs: list[tuple[str, bytes]] = []
        for number in numbers:
            if number >= len(self._sets):
                return None
            pairs += [(name, one) for one in packed for name in self._sets[number][len(one) == 16]]
        return pairs if all(one in self._public for one in packed) else None

    def _add(self, pairs: Sequence[tuple[str, bytes]], seconds: float) -> int:
        now = self._clock()
        until = now + seconds
        # Elements that stay long enough are skipped, so that a frequent name does not cost a transaction each time.
        late = [pair for pair in dict.fromkeys(pairs) if self._held.get(pair, 0) < until - GRACE_SECONDS / 2]
        there = [pair for pair in late if self._held.get(pair, 0) > now]
        try:
            try:
                self._elements.add(_by_set(late, seconds), instead=_by_set(there, None))
            except OSError as e:
                if e.errno != errno.ENOENT or not there:
                    raise
                # One of them expired in between: check all of them again.
                self._replace(late, there, seconds)
        except OSError as e:
            return broker_wire.FULL if e.errno == errno.ENFILE else broker_wire.FAILED
        if len(self._held) > 1 << 16:
            self._held = {pair: end for pair, end in self._held.items() if end > now}
        self._held.update(dict.fromkeys(late, until))
        return broker_wire.DONE

    def _replace(self, late: Sequence[tuple[str, bytes]], there: Sequence[tuple[str, bytes]], seconds: float) -> None:
        for pair in late:
            instead = _by_set([pair], None) if pair in there else {}
            try:
                self._elements.add(_by_set([pair], seconds), instead=instead)
            except OSError as e:
                if e.errno != errno.ENOENT or not instead:
                    raise
                self._elements.add(_by_set([pair], seconds))

    def _connect(self, ident: int, number: int, query: bytes | None) -> None:
        """Over UDP with a ``query``, else over TCP."""
        resolver = self._resolver(number)
        if resolver is None or not self._sockets.take(self._clock()):
            self._say(ident, broker_wire.FAILED)
            return
        family = socket.AF_INET6 if ":" in resolver else socket.AF_INET
        kind = socket.SOCK_STREAM if query is None else socket.SOCK_DGRAM
        try:
            with socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as made:
                # Each has a port of its own, drawn by the kernel: a forger has to guess it with the id.
                number = made.connect_ex((resolver, self._port))
                if number not in (0, errno.EINPROGRESS):
                    self._say(ident, broker_wire.FAILED)
                    return
                if query is not None:
                    made.send(query)
                    # INVARIANT: the gate gets no UDP socket that can still send. With sendto(2) a gate could choose
                    # the address even on a connected one, and this socket is in the supervisor's own network.
                    made.shutdown(socket.SHUT_WR)
                self._say(ident, broker_wire.DONE, made.fileno())
        except OSError:
            self._say(ident, broker_wire.FAILED)

    def _say(self, ident: int, status: int, fd: int | None = None) -> None:
        message = [broker_wire.REPLY.pack(ident, status, len(self._known), self._changes)]
        try:
            if fd is None:
                self.own.send(message[0])
            else:
                socket.send_fds(self.own, message, [fd])
        except OSError:
            return  # a gate that does not read gets no answer, and its question ends by its own clock


def _by_set(pairs: Sequence[tuple[str, bytes]], seconds: float | None) -> dict[str, list[nft_sets.Element]]:
    change: dict[str, list[nft_sets.Element]] = {}
    for name, packed in pairs:
        change.setdefault(name, []).append(nft_sets.Element(packed, seconds))
    return change
