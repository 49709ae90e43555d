"""What the supervisor gives up once it has opened what it needs."""

from __future__ import annotations

from sandbox.supervisor import Supervisor


def apply(supervisor: Supervisor) -> int:
    """Give it up."""
    return -1
