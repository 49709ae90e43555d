"""Where the supervisor listens, and where its clients look: the same rule for both, and nothing to read for it."""

from __future__ import annotations

import os
from typing import Final

# The state and the socket of an installed service.
SYSTEM_STATE: Final = "/var/lib/covenant"
SYSTEM_SOCKET: Final = "/run/covenant/supervisor.sock"
NAME: Final = "supervisor.sock"


def socket_of(state: str) -> str:
    """The socket of the supervisor that holds ``state``, unless its configuration names another."""
    return SYSTEM_SOCKET if state == SYSTEM_STATE else os.path.join(state, NAME)
