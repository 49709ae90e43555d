"""Messages of the inject gate, over pairs of SOCK_SEQPACKET sockets.

TLS gate -> gate       the host's name, with two descriptors: the agent's stream, and a connection to that host
gate -> supervisor     once the certificate of its authority; then JSON rows: ``asked`` and ``ended``
supervisor -> gate     a number, whether there is a secret, and its bytes; later, that it was taken away
"""

from __future__ import annotations

import struct
from typing import Final

NAME_BYTES: Final = 256
ROW_BYTES: Final = 4096
CERTIFICATE_BYTES: Final = 64 << 10
ANSWER: Final = struct.Struct("!IB")
VALUE_BYTES: Final = 16 * 1024
# The least bytes of a secret: a shorter one stands in answers by chance.
LEAST_BYTES: Final = 8
ABSENT, PRESENT, TAKEN = 0, 1, 2
