"""The supervisor's end of requests with a secret that are held for an operator.

A lease is for a request with the digest of all that is sent (question). A longer one, for the run or for a time, may be
for the method and the path alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from msgspec import Struct

from policy.grants.credentials import InjectSet
from policy.leases import targets
from policy.leases.book import Lease
from policy.manifest import text
from policy.signing.lease import TARGET_CHARACTERS
from sandbox.network.gate.lease_desk import LeaseDesk

KIND: Final = "inject"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class HeldRequestTerms(Struct, frozen=True):
    """The desk of a run, and the seconds that a request to a host is held at most."""

    desk: LeaseDesk
    seconds: Callable[[str], int]


class HeldRequests:
    """Asks the desk about requests of one gate, and counts the uses of leases when they are sent.

    The desk calls ``begin`` and ``end`` (lease_desk.LeasedGate). ``over`` is called with the number of each request
    under way whose lease has ended.
    """

    def __init__(self, terms: HeldRequestTerms, injected: InjectSet, over: Callable[[int], None]) -> None:
        self._terms, self._injected, self._over = terms, injected, over
        # The number of each request under way, with the id of its lease.
        self._sent: dict[int, str] = {}
        terms.desk.attach(self)

    def ask(self, row: Mapping[str, str], then: Callable[[bool], None]) -> bool:
        """Call ``then`` when an operator has answered. False: an honest gate does not ask so."""
        target = self._target(row)
        if target is None:
            return False
        # The end again: escapes of a gate that is not honest could make it long.
        shown = text.visible(row["arguments"], targets.SHOWN_CHARACTERS)[: targets.SHOWN_CHARACTERS]
        self._terms.desk.ask(KIND, target, self._terms.seconds(row["host"]), then, arguments=shown)
        return True

    def send(self, number: int, row: Mapping[str, str]) -> bool | None:
        """Count a use of the lease of a request that is to be sent. False without one, None where none could be."""
        target = self._target(row)
        if target is None:
            return None
        lease = self._terms.desk.live(KIND, target)
        if lease is None:
            return False
        self._terms.desk.used(KIND, target)
        self._sent[number] = lease.id
        return True

    def ended(self, number: int) -> None:
        """Forget a request that has ended."""
        self._sent.pop(number, None)

    def begin(self, lease: Lease) -> None:
        """Do nothing: a lease opens a request when it is sent."""

    def end(self, lease: Lease) -> None:
        """End the requests under way that a lease let pass. Those of a spent one go on until its time."""
        if lease.kind != KIND or (lease.spent and lease.ends_ms > self._terms.desk.now_ms):
            return
        for number, lease_id in list(self._sent.items()):
            if lease_id == lease.id:
                self._over(number)

    def _target(self, row: Mapping[str, str]) -> str | None:
        host, method, path = row["host"], row["method"], row["path"]
        head = targets.request(method, host, path)
        if not head or any(one.takes(method, path) for one in self._injected.at(host)):
            return None
        if not any(one.takes(method, path) for one in self._injected.asked_at(host)):
            return None
        target = targets.call(head, row["digest"])
        return target if _DIGEST.fullmatch(row["digest"]) and len(target) <= TARGET_CHARACTERS else None
