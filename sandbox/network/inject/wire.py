"""Messages of the inject gate, over pairs of SOCK_SEQPACKET sockets.

TLS gate -> gate       the host's name, with two descriptors: the agent's stream, and a connection to that host
gate -> supervisor     once the certificate of its authority; then JSON rows: ``held``, ``asked`` and ``ended``
supervisor -> gate     of a held request: a number, and whether it may be sent;
                       of one that is sent: a number, whether there is a secret, and its bytes; later, that it was taken
                       away, or that the lease has ended
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, Final

from policy.grants.credentials import InjectRule, InjectSet

NAME_BYTES: Final = 256
ROW_BYTES: Final = 4096
CERTIFICATE_BYTES: Final = 64 << 10
ANSWER: Final = struct.Struct("!IB")
VALUE_BYTES: Final = 16 * 1024
# The least bytes of a secret: a shorter one stands in answers by chance.
LEAST_BYTES: Final = 8
ABSENT, PRESENT, TAKEN, UNAPPROVED, GRANTED, REFUSED, OVER = range(7)


def requests(plan: Mapping[str, Any]) -> InjectSet:
    """The requests of the ``inject`` part of gates.json."""
    return InjectSet.of(*([InjectRule(**one) for one in plan.get(key, ())] for key in ("rules", "asked")))
