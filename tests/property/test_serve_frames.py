"""Check the socket's frames: any bytes in any pieces give a frame or a refusal and leave no descriptor open."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from policy import base58, contract, errors
from sandbox import unix_wire
from sandbox.serve.api import protocol

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def _heard(pieces: list[bytes], *, max_bytes: int, fds: list[int] | None = None) -> bytes | None:
    """Return the result of ``receive`` for these pieces, sent one after the other before the end of file."""
    ours, theirs = socket.socketpair()
    with ours, theirs:

        def send() -> None:
            with contextlib.suppress(OSError):
                for piece in pieces:
                    theirs.sendall(piece)
            with contextlib.suppress(OSError):
                theirs.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=send)
        thread.start()
        try:
            return unix_wire.receive(ours, max_bytes=max_bytes, until=time.monotonic() + 20, fds=fds)
        finally:
            ours.close()
            thread.join()


def _cut(data: bytes, places: list[int]) -> list[bytes]:
    at = sorted({place % (len(data) + 1) for place in places})
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True) if a < b]


@given(document=st.dictionaries(st.text(max_size=8), _JSON, max_size=5), places=st.lists(st.integers(0), max_size=6))
@settings(max_examples=60, deadline=None)
def test_frame_in_any_pieces_is_frame(document: dict[str, Any], places: list[int]) -> None:
    frame = unix_wire.encode(document)
    heard = _heard(_cut(frame, places), max_bytes=len(frame))
    assert heard is not None
    assert json.loads(heard) == document


@given(data=st.binary(max_size=64), places=st.lists(st.integers(0), max_size=3))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_frame_or_refused(data: bytes, places: list[int]) -> None:
    refusal = ""
    heard = None
    try:
        heard = _heard(_cut(data, places), max_bytes=32)
    except unix_wire.FrameError as e:
        refusal = str(e)
    assert refusal.isprintable()
    if not refusal:
        assert heard is None if not data else heard is not None and len(heard) <= 32
        if heard is not None:
            assert data[4 : 4 + len(heard)] == heard


@given(data=st.binary(max_size=200))
def test_any_body_is_request_or_refused(data: bytes) -> None:
    _parse(data)


_FIELDS = ["text", "timeout_ms", "user", "detach", "run", "rows", "on_behalf_of", "manifest_sha256", "x"]


@given(
    kind=st.sampled_from(sorted(protocol.KINDS)),
    fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=5),
)
def test_any_fields_are_those_of_kind_or_refused(kind: str, fields: dict[str, Any]) -> None:
    asked = _parse(json.dumps({"kind": kind, **fields}).encode())
    if asked is not None:
        assert asked.kind == kind
        assert "x" not in fields
        assert 0 <= asked.descriptors <= unix_wire.DESCRIPTORS


_SIDES = st.text("AZaz09_.-@ \n\u00e9", max_size=12) | st.just("x" * 257)


@given(
    display=_JSON | st.builds("{}@{}".format, _SIDES, _SIDES),
    key=_JSON | st.integers(31, 33).flatmap(lambda n: st.binary(min_size=n, max_size=n)).map(base58.encode),
    more=st.dictionaries(st.text(max_size=8), _JSON, max_size=1),
)
def test_for_whom_one_asks_is_display_and_key_or_refused(display: Any, key: Any, more: dict[str, Any]) -> None:
    """An accepted value never shows an agent the operator at the command line or a run as the asker."""
    whom = {**more, "display": display, "pubkey_b58": key}
    asked = _parse(json.dumps({"kind": "run", "text": "", "on_behalf_of": whom}).encode())
    if asked is None:
        return
    assert isinstance(asked, protocol.RunRequest)
    assert asked.on_behalf_of is not None
    assert set(whom) == {"display", "pubkey_b58"}
    assert re.fullmatch(r"[A-Za-z0-9_.-]{1,256}@[A-Za-z0-9_.-]{1,256}", display)
    assert len(base58.decode(key, length=32)) == 32
    read = contract.on_behalf(display, key, by="uid7@local")["display"]
    assert read.endswith(".via.uid7")
    assert read.count("@") == 1


def _parse(raw: bytes) -> protocol.ServiceRequest | None:
    try:
        return protocol.parse(raw)
    except errors.RequestError as e:
        refusal = e.message
    assert refusal.isprintable()
    assert len(refusal) < 400
    return None


@given(count=st.integers(0, 12), size=st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_descriptors_belong_to_owner(count: int, size: int) -> None:
    before = len(os.listdir("/proc/self/fd"))
    frame = unix_wire.encode({"kind": "x" * size})
    ours, theirs = socket.socketpair()
    given_fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]
    fds: list[int] = []
    with ours, theirs:
        socket.send_fds(theirs, [frame], given_fds) if count else theirs.sendall(frame)
        try:
            unix_wire.receive(ours, max_bytes=100, until=time.monotonic() + 20, fds=fds)
            assert len(fds) == count <= unix_wire.DESCRIPTORS
            assert not any(os.get_inheritable(fd) for fd in fds)
        except unix_wire.FrameError:
            assert count > unix_wire.DESCRIPTORS
            assert len(fds) <= unix_wire.DESCRIPTORS + 2, "CMSG_SPACE rounds up; the kernel closes the rest"
    for fd in [*given_fds, *fds]:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before
