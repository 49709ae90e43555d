"""The shim's end of a gate's line: it reads a key of the vault for each request, and signs what may be signed.

A request is decided here once more, from its bytes: the gate is the process that reads the agent's. A request that an
honest gate would have refused ends the run. Each one reads the vault: a rotation or a removal holds from the next one
on. No key is kept, and none leaves this process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, Protocol

from msgspec import Struct

from policy.grants.services import SshSet
from policy.ssh import sessions, wire
from policy.ssh.sessions import Allowed, Hosts, SignRequest
from sandbox.network.gate.rows import GateRows, RowTerms
from sandbox.network.ssh import line, private_keys

_AT_ONCE: Final = 16
# An honest gate has no more under way than it has connections.
_UNDER_WAY: Final = 64


class SshSigned(Struct, frozen=True):
    """One signature, about to be given: digests and names, never content."""

    name: str
    version: int
    host: str
    user: str
    algorithm: str
    fingerprint: str


# Called with the version and the secret, or with None; it may take its time.
Then = Callable[[int, memoryview | None], None]


class SshTerms(Protocol):
    """The operator's part: ``ask`` looks a secret up, ``signed`` writes a durable row before a signature leaves."""

    def ask(self, name: str, then: Then) -> None: ...
    def signed(self, row: SshSigned) -> None: ...


class SshDesk(GateRows):
    """Serves one gate."""

    def __init__(self, granted: SshSet, operator: SshTerms) -> None:
        self._hosts, self._operator = Hosts(granted.triples()), operator
        self._under_way = 0
        super().__init__(RowTerms("ssh", "asks for what it may not", line.MOST_BYTES, _AT_ONCE, self._one))

    def _one(self, message: bytes) -> bool:
        if not line.QUESTION.size <= len(message) <= line.MOST_BYTES or self._under_way >= _UNDER_WAY:
            return False
        kind, number = line.QUESTION.unpack_from(message)
        rest = message[line.QUESTION.size :]
        if kind == line.LIST and not rest:
            self._under_way += 1
            self._list(number, list(self._hosts.secrets), [])
            return True
        if kind != line.SIGN:
            return False
        try:
            request = SignRequest.decoded(wire.Reader(rest))
            allowed = sessions.check(request, self._hosts)
        except (wire.WireError, sessions.RefusedError):
            return False
        self._under_way += 1
        self._sign(number, request, allowed, list(allowed.secrets), line.NOT_GRANTED)
        return True

    def _list(self, number: int, names: list[str], found: list[tuple[str, bytes]]) -> None:
        """Ask for one key after the other. A key that is absent or cannot be read is left out."""
        if not names:
            self._answer(number, line.GIVEN, line.encoded(found))
            return
        name, *left = names

        def then(version: int, secret: memoryview | None) -> None:
            private = _loaded(secret)
            own = [] if private is None else [(name, private_keys.public(private))]
            self._list(number, left, [*found, *own])

        self._operator.ask(name, then)

    def _sign(self, number: int, request: SignRequest, allowed: Allowed, names: list[str], status: int) -> None:
        """Try the secrets of a host one after the other, until one is the key of the request."""
        if not names:
            self._answer(number, status)
            return
        name, *left = names
        self._operator.ask(name, functools.partial(self._found, number, request, allowed, (name, left, status)))

    def _found(
        self,
        number: int,
        request: SignRequest,
        allowed: Allowed,
        tried: tuple[str, list[str], int],
        version: int,
        secret: memoryview | None,
    ) -> None:
        name, left, status = tried
        private = _loaded(secret)
        if private is None or private_keys.public(private) != request.key:
            self._sign(number, request, allowed, left, line.UNAVAILABLE if private is None else status)
            return
        try:
            signature = private_keys.sign(private, allowed.algorithm, request.data)
        except ValueError:
            self._answer(number, line.UNAVAILABLE)
            return
        own = wire.fingerprint(request.key)
        self._operator.signed(SshSigned(name, version, allowed.host, allowed.user, allowed.algorithm, own))
        self._answer(number, line.GIVEN, signature)

    def _answer(self, number: int, status: int, data: bytes = b"") -> None:
        self._under_way -= 1
        try:
            self.own.send(line.ANSWER.pack(number, status) + data)
        except OSError:
            return  # the gate is gone, or takes no answers: the request waits, and gets none


def _loaded(secret: memoryview | None) -> private_keys.Private | None:
    """Read a private key. None: there is none, or the secret is no such key."""
    if secret is None:
        return None
    try:
        return private_keys.load(secret)
    except ValueError:
        return None
