"""The supervisor's end of an inject gate's line: a secret for each granted request, and a row for each.

What the gate says is checked: it is the process that reads the agent's bytes. It gets the secret of a request that the
policy grants, and no other; each request reads the vault, so that a rotation or a removal holds from the next one on.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from policy import errors
from policy.grants.credentials import InjectSet
from sandbox.network.gate.rows import GateRows, RowShapes, RowTerms, read_row
from sandbox.network.inject import wire
from sandbox.network.inject.holds import HeldRequests, HeldRequestTerms

_AT_ONCE: Final = 64
# An honest gate has no more under way (server.CONNECTIONS).
_UNDER_WAY: Final = 1024
_ASKED: Final = {"number": int, "host": str, "method": str, "path": str, "digest": str}
_SHAPES: Final[RowShapes] = {
    "asked": _ASKED,
    "held": {**_ASKED, "arguments": str},
    "ended": {
        "number": int,
        "status": int,
        "out_bytes": int,
        "in_bytes": int,
        "whole": bool,
        "duration_ms": int,
    },
}


class Injected(Struct, frozen=True):
    """One request with a secret. ``status`` is 0 where the host did not answer; ``whole``: the agent has all of it."""

    host: str
    secret: str
    method: str
    path: str
    status: int = 0
    out_bytes: int = 0
    in_bytes: int = 0
    whole: bool = False
    duration_ms: int = 0


# Called with host and name, and with what takes the version and the secret, or None; it may take its time.
Then = Callable[[int, memoryview | None], None]
AskSecret = Callable[[str, str, Then], None]
# None: the vault cannot be asked.
AskStill = Callable[[str, str, Callable[[bool | None], None]], None]


class InjectLedger(GateRows):
    """Serves one gate. ``ask`` looks a secret up, ``told`` takes the row of each request, ``still`` asks whether a
    secret that was given is there. Without ``hold`` no request is held for an operator."""

    def __init__(
        self,
        injected: InjectSet,
        ask: AskSecret,
        told: Callable[[Injected], None],
        still: AskStill,
        hold: HeldRequestTerms | None = None,
    ) -> None:
        self._injected, self._ask, self._told, self._still = injected, ask, told, still
        self._held = None if hold is None else HeldRequests(hold, injected, self._over)
        # Requests to send that had no lease: the gate tells their end too.
        self._unapproved: set[int] = set()
        # The secrets about which the vault is being asked, with the number of questions, and the requests that are cut.
        self._looking = Counter[tuple[str, str]]()
        self._cut: set[int] = set()
        # The secrets about which the vault could not be asked.
        self._unknown: set[tuple[str, str]] = set()
        self._under_way: dict[int, Injected] = {}
        self._answers = True
        super().__init__(RowTerms("inject", "tells what it may not", wire.ROW_BYTES, _AT_ONCE, self._one))

    def certificate(self) -> bytes:
        """The certificate of the run's authority, which a gate that is ready has sent.

        Raises:
            errors.GateError: it has not.
        """
        try:
            message = self.own.recv(wire.CERTIFICATE_BYTES)
        except OSError:
            message = b""
        if not message.startswith(b"-----BEGIN CERTIFICATE-----\n"):
            raise errors.GateError("the inject gate made no certificate")
        return message

    @property
    def is_checking(self) -> bool:
        """Whether an answer of the vault, or the end of a request that is cut, is still awaited."""
        unknown = any((one.host, one.secret) in self._unknown for one in self._under_way.values())
        return self._looking.total() > 0 or bool(self._cut) or unknown

    def look(self, *, anew: bool = False) -> None:
        """Ask whether the secrets of requests under way are still there, and cut those whose secret is not.

        ``anew``: an answer to an earlier question does not count.
        """
        for secret in {(one.host, one.secret) for one in self._under_way.values()}:
            if anew or not self._looking[secret]:
                self._looking[secret] += 1
                self._still(*secret, functools.partial(self._looked, secret))

    def _looked(self, secret: tuple[str, str], is_there: bool | None) -> None:
        self._looking[secret] -= 1
        if is_there is None:
            self._unknown.add(secret)
            return
        self._unknown.discard(secret)
        if not is_there:
            for number, one in self._under_way.items():
                if (one.host, one.secret) == secret:
                    # Again at each check until it ends: the gate may not have taken the secret yet.
                    self._cut.add(number)
                    self._send(number, wire.TAKEN)

    def finish(self) -> None:
        """Write the rest, once the gate has ended: also the requests that it could not end."""
        self._answers = False
        self.rest()
        while self._under_way:
            self._told(self._under_way.pop(next(iter(self._under_way))))

    def _one(self, message: bytes) -> bool:
        row = read_row(message, _SHAPES)
        if row is None:
            return False
        kind, number = row.pop("kind"), row.pop("number")
        if kind == "held":
            return self._held is not None and self._held.ask(row, functools.partial(self._verdict, number))
        if kind == "ended":
            if number in self._unapproved:
                self._unapproved.remove(number)
                return True
            if self._held is not None:
                self._held.ended(number)
            begun = self._under_way.pop(number, None)
            self._cut.discard(number)
            if begun is None:
                return False
            self._told(Injected(begun.host, begun.secret, begun.method, begun.path, **row))
            return True
        if number in self._under_way or number in self._unapproved:
            return False
        if len(self._under_way) + len(self._unapproved) >= _UNDER_WAY:
            return False
        may_send = self._may_send(number, row)
        if may_send:
            self._send_with_secret(number, row)
        elif may_send is False:
            self._unapproved.add(number)
            self._send(number, wire.UNAPPROVED)
        return may_send is not None

    def _may_send(self, number: int, row: Mapping[str, str]) -> bool | None:
        """Return whether a request gets its secret: it is granted, or under a lease. None: no honest gate asks so."""
        if row["digest"]:
            return None if self._held is None else self._held.send(number, row)
        return any(rule.takes(row["method"], row["path"]) for rule in self._injected.at(row["host"])) or None

    def _send_with_secret(self, number: int, row: Mapping[str, str]) -> None:
        host = row["host"]
        secret = (*self._injected.at(host), *self._injected.asked_at(host))[0].secret
        self._under_way[number] = Injected(host, secret, row["method"], row["path"])
        if self._answers:
            self._ask(host, secret, lambda version, value: self._answer(number, value))

    def _verdict(self, number: int, granted: bool) -> None:
        self._send(number, wire.GRANTED if granted else wire.REFUSED)

    def _over(self, number: int) -> None:
        self._send(number, wire.OVER)

    def _answer(self, number: int, value: memoryview | None) -> None:
        self._send(number, wire.ABSENT if value is None else wire.PRESENT, value)

    def _send(self, number: int, status: int, value: memoryview | None = None) -> None:
        try:
            self.own.sendmsg([wire.ANSWER.pack(number, status), *([] if value is None else [value])])
        except OSError:
            # The gate is gone, or takes no answers: the request waits, and gets none.
            return
