"""Decide between two signed packages of one agent id, of which one is running: rule 8 and serials (ADR 0062).

(1) the payloads are equal                                  they run beside each other
(2) the serial of one says nothing here                     rule 8 as ever: one place, or a refusal
(3) the older one runs above the one that asks              refused: it would end its own tree
(4) the serial is not higher                                refused as the ratchet refuses it
(5) no signer in common, and one who signed the older may
    sign for the id still                                   refused: it is another operator's agent
(6) else                                                    the newer one supersedes the older
"""

from __future__ import annotations

from enum import Enum
from typing import Literal

from msgspec import Struct

from policy.rules.case import Claimant, Owner

# The operator's setting `on_newer_serial`: end the runs of the older package, or let them finish.
OnNewer = Literal["end", "finish"]


class Beside(Enum):
    """How a package that asks for an agent id stands to one that runs under it."""

    SAME = "it is the same package"
    SUPERSEDES = "it is the newer of the two"
    ABOVE = "the other one runs above it"
    OLDER = "its serial is not the higher of the two"
    OTHER = "it is another package"


class LiveSerial(Struct, frozen=True):
    """A live run and the highest serial that was accepted for its agent id. ``waits``: it has no intent yet."""

    serial: int | None
    accepted: int | None
    waits: bool = False


def beside(owner: Owner, claimant: Claimant | None, *, payload_digest: str | None, package_name: str | None) -> Beside:
    """Compare the package that asks with one that has the id. ``claimant`` is None where serials say nothing."""
    if owner.payload_digest == payload_digest:  # (1)
        return Beside.SAME
    if claimant is None or owner.serial is None:  # (2) The same place may hold another payload.
        return Beside.SAME if owner.package == package_name else Beside.OTHER
    if owner.run_id in claimant.above:  # (3)
        return Beside.ABOVE
    if claimant.serial <= owner.serial:  # (4)
        return Beside.OLDER
    disputed = owner.signers & claimant.listed and not owner.signers & claimant.signers  # (5)
    return Beside.OTHER if disputed else Beside.SUPERSEDES  # (6)


def ends(held: LiveSerial, setting: OnNewer) -> bool:
    """Return whether a live run ends because a newer serial of its agent id was accepted.

    A run that waits for its intent does not end here: it is never given one (``sandbox.standby``).
    """
    if setting == "finish" or held.waits or held.serial is None or held.accepted is None:
        return False
    return held.serial < held.accepted
