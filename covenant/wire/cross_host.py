"""The envelope by which a task reaches another host: version 1's ``SignedA2ATask`` (covenant-v1.md, section 14).

The signature is over a tag, the time in eight bytes (little-endian) and the exact bytes of the task. ``open`` returns a
task only with a signature by the key that the task names as its sender: authenticity, and no authority.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Final, Literal

import pydantic
from msgspec import Struct

from covenant.wire.types import U64, A2ATask, Wire
from policy import errors, wire_json

# The largest body: version 1 writes bytes as lists of numbers, so a task of some 13 KiB.
BODY_BYTES: Final = 64 * 1024
ACCEPTED: Final = {"kind": "accepted"}
REJECTED: Final = {"kind": "rejected"}
_TAG: Final = b"covenant.a2a.cross-host.v1"
_SIGNATURE_BYTES: Final = 64
Malformed = Literal["malformed_payload", "malformed_signature"]
_Byte = Annotated[int, pydantic.Field(ge=0, le=255)]


class SignedTask(Struct, frozen=True):
    """A task as bytes, the time at which it was signed, and the signature."""

    task_json: bytes
    issued_at_ms: int
    signature: bytes

    def message(self) -> bytes:
        """Return the bytes that are signed."""
        return message(self.issued_at_ms, self.task_json)

    def to_bytes(self) -> bytes:
        """Return the envelope as version 1 sends it."""
        document = {
            "task_json": list(self.task_json),
            "issued_at_ms": self.issued_at_ms,
            "signature": list(self.signature),
        }
        return json.dumps(document, separators=(",", ":")).encode()


class _Envelope(Wire):
    task_json: tuple[_Byte, ...]
    issued_at_ms: U64
    signature: tuple[_Byte, ...]


def message(issued_at_ms: int, task_json: bytes) -> bytes:
    """Return the bytes that a sender signs."""
    return _TAG + issued_at_ms.to_bytes(8, "little") + task_json


def read(raw: bytes) -> SignedTask:
    """Read an envelope.

    Raises:
        errors.MalformedRequestError: it is none.
    """
    document = wire_json.read(raw)
    try:
        found = _Envelope.model_validate(_with_tuples(document))
    except pydantic.ValidationError:
        raise errors.MalformedRequestError("this is no envelope of a task") from None
    return SignedTask(bytes(found.task_json), found.issued_at_ms, bytes(found.signature))


def task_of(envelope: SignedTask) -> A2ATask | Malformed:
    """Return the task that an envelope has, or why it has none. Its signature is not checked."""
    try:
        task = A2ATask.model_validate(wire_json.read(envelope.task_json))
    except (errors.MalformedRequestError, pydantic.ValidationError):
        return "malformed_payload"
    return task if len(envelope.signature) == _SIGNATURE_BYTES else "malformed_signature"


def _with_tuples(document: Any) -> Any:
    """Return the document with lists as the tuples that strict models take."""
    if not isinstance(document, dict):
        return document
    return {name: tuple(value) if isinstance(value, list) else value for name, value in document.items()}
