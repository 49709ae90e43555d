"""Where the supervisor listens, and where its clients look: the same rule for both, and nothing to read for it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Final

# The state and the socket of an installed service, and the home of an installed daemon.
SYSTEM_STATE: Final = "/var/lib/covenant"
SYSTEM_HOME: Final = "/var/lib/covenantd"
SYSTEM_SOCKET: Final = "/run/covenant/supervisor.sock"
NAME: Final = "supervisor.sock"


def start(candidates: Sequence[str]) -> str:
    """The hint that starts a supervisor at one of these sockets. The machine's own needs no option."""
    for path in candidates[:1]:
        state, name = os.path.split(path)
        if SYSTEM_SOCKET not in candidates and name == NAME:
            return f"start covenant-supervisor --state {shlex.quote(state)}"
    return "start covenant-supervisor"


def named_by(environ: Mapping[str, str]) -> str | None:
    """The state that COVENANT_STATE or COVENANT_HOME names, as `covenant run` reads them."""
    home = environ.get("COVENANT_HOME")
    return environ.get("COVENANT_STATE") or (os.path.join(home, "supervisor") if home else None)


def socket_of(state: str) -> str:
    """The socket of the supervisor that holds ``state``, unless its configuration names another."""
    return SYSTEM_SOCKET if state == SYSTEM_STATE else os.path.join(state, NAME)
