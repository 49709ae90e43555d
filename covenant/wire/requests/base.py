"""The base class of requests."""

from __future__ import annotations

from covenant.wire.types import Wire


class Request(Wire):
    """A request: ``kind`` says which."""

    kind: str
