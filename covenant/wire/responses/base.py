"""The base class of responses."""

from __future__ import annotations

from typing import Literal

from covenant.wire.types import Wire, omitted
from policy import errors


class Response(Wire):
    """A response: ``kind`` says which."""

    kind: str

    def to_bytes(self) -> bytes:
        """The JSON of one frame."""
        return self.model_dump_json(by_alias=True).encode()


class Error(Response):
    """It was refused or failed. ``code``, ``hint`` and ``where`` are ours, and absent where there is none."""

    kind: Literal["error"] = "error"
    message: str
    code: str | None = omitted()
    hint: str | None = omitted()
    where: str | None = omitted()

    @classmethod
    def of(cls, error: errors.CovenantError) -> Error:
        """The response that says what was refused."""
        return cls(message=error.message, code=error.code, hint=error.hint or None, where=error.where or None)
