"""Client input of the supervisor: frames from a real socket, and the bodies in them."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence

from policy import base58, errors
from sandbox import unix_wire
from sandbox.serve.api import protocol
from tests.fuzz.drive import Target

_BODY_BYTES = 4096
# All bytes are in the socket before the first read, so no read waits; this timeout ends one that does.
_SECONDS = 5.0
# Two names from outside of 64 characters each, ten times as long when escaped, and the words around them.
_REFUSAL_CHARACTERS = 2 * 64 * 10 + 200
_KEY = base58.encode(bytes(range(32)))
_WORDS = (
    *(f'"{kind}"'.encode() for kind in sorted(protocol.KINDS)),
    b'"kind":', b'"text":', b'"user":', b'"run":', b'"timeout_ms":', b'"detach":true', b'"rows":true',
    b'"on_behalf_of":',
    b'"manifest_sha256":', b'"parent":', b'"x@y"', b"null", b"1e99", b"-1", b"\\ud800", b"\\u0000", b"\0\0\0\0",
    b"\0\0\0\2{}", b"\xff\xff\xff\xff",
)  # fmt: skip


def frame(raw: bytes) -> str:
    """A stream of frames: what is heard are the bytes that were sent, none over the bound, and no descriptor stays."""
    ours, theirs = socket.socketpair()
    fds: list[int] = []
    with ours, theirs:
        null = os.open("/dev/null", os.O_RDONLY)
        try:
            socket.send_fds(theirs, [raw], [null]) if raw else None
        finally:
            os.close(null)
        theirs.shutdown(socket.SHUT_WR)
        until, at, heard = time.monotonic() + _SECONDS, 0, 0
        try:
            while (body := unix_wire.receive(ours, max_bytes=_BODY_BYTES, until=until, fds=fds)) is not None:
                assert len(body) <= _BODY_BYTES
                assert raw[at : at + 4 + len(body)] == len(body).to_bytes(4) + body
                at, heard = at + 4 + len(body), heard + 1
        except unix_wire.FrameError as refusal:
            _judge(refusal)
            raise
        finally:
            for fd in fds:
                os.close(fd)
        assert at == len(raw), "an end in the middle was taken for the end"
    return f"{min(heard, 3)} {len(fds)}"


def request(raw: bytes) -> str:
    """A body: what is accepted says what its bytes say, and no more than its kind has."""
    try:
        asked = protocol.parse(raw)
    except errors.RequestError as refusal:
        _judge(refusal)
        raise
    said = json.loads(raw)
    assert asked.kind == said["kind"]
    assert type(asked) is protocol.KINDS[asked.kind]
    assert set(said) <= set(type(asked).model_fields)
    held = asked.model_dump(mode="json")
    assert all(held[name] == value for name, value in said.items())
    assert 0 <= asked.descriptors <= unix_wire.DESCRIPTORS
    return f"{asked.kind} {' '.join(sorted(said))}"


def _judge(refusal: Exception) -> None:
    """Assert that the refusal is one printable line, and that it is no timeout: all bytes were there."""
    assert not isinstance(refusal, unix_wire.SlowError)
    said = refusal.message if isinstance(refusal, errors.CovenantError) else str(refusal)
    assert said.isprintable()
    assert len(said) < _REFUSAL_CHARACTERS


def _requests() -> Sequence[bytes]:
    whom = {"display": "ann@example", "pubkey_b58": _KEY}
    documents = [
        {"kind": "run", "text": "hi"},
        {"kind": "run", "text": "hi", "detach": True, "timeout_ms": 1000},
        {"kind": "run", "text": "", "rows": True, "on_behalf_of": whom, "manifest_sha256": "0" * 64},
        {"kind": "ps"},
        {"kind": "top"},
    ]
    return [json.dumps(one).encode() for one in documents]


def _frames() -> Sequence[bytes]:
    one = [len(body).to_bytes(4) + body for body in _requests()]
    return *one, b"".join(one), one[0][:-1]


TARGETS = (
    Target("supervisor frame", frame, _frames, _WORDS, refusals=(unix_wire.FrameError,), share=3),
    Target("supervisor request", request, _requests, _WORDS, refusals=(errors.RequestError,), json=True),
)
