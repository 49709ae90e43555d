"""The caller of a request, as its adapter authenticated it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from covenant.wire.types import AgentId


@dataclass(frozen=True, slots=True)
class Caller:
    """Bound for the life of a connection: an old one outlives a rotation of its token.

    ``operator``: its key is the daemon's own identity. ``token_prefix``: the six characters that may be shown.
    """

    agent: AgentId
    operator: bool
    token_prefix: str
    transport: Literal["ipc", "http"]
