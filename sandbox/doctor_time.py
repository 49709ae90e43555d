"""Time checks of ``covenant doctor``: records ahead of this machine's clock, and what expires soon.

Each check returns (status word, finding, fix), as in ``sandbox.doctor_network``.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from pathlib import Path

from policy.signing import expiry
from sandbox.config import Config
from sandbox.doctor_network import DEGRADED, OK, UNKNOWN, Look
from sandbox.storage.trust_state import State

_SET_CLOCK = "look at this machine's clock; if it is right now: covenant state clock (as root)"


def clock(config: Config) -> Look:
    """Report records of the supervisor's state that are ahead of this machine's clock."""
    state = config.state
    if not readable(state):
        return UNKNOWN, "the state is root's to read", "run it with sudo"
    now_ms = int(time.time() * 1000)
    with State(state) as held:
        ahead = held.clock_ahead(now_ms)
    if ahead is None:
        return OK, "no record of the supervisor is ahead of the clock", ""
    named = f", and serials of {', '.join(ahead.agents)} are ahead too" if ahead.agents else ""
    when = datetime.fromtimestamp(ahead.greatest_time_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
    return DEGRADED, f"the clock was ahead once: the latest time recorded is {when}{named}", _SET_CLOCK


def expiries(config: Config) -> Look:
    """Report what of the trust root has expired, or expires within ``expiry.SOON_MS``."""
    state = config.state
    if not readable(state):
        return UNKNOWN, "the state is root's to read", "run it with sudo"
    now_ms = int(time.time() * 1000)
    with State(state) as held:
        if not held.has_root():
            return OK, "there is no trust root yet", ""
        soon = expiry.soon(expiry.of_root(held.present_root()), now_ms)
    if not soon:
        return OK, "the trust root and its keys hold for more than 14 days", ""
    words = "; ".join(one.line(now_ms) for one in soon)
    return DEGRADED, words, "covenant trust renew --sign-with NAME, or covenant trust set NAME --expires 365d"


def readable(state: Path) -> bool:
    """Whether this process may read the state."""
    return os.access(state, os.R_OK | os.X_OK)
