"""Both ends of the line between a gate and its sealed reader, each against a test at the other end."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from sandbox.network.gate.main import GateInput
from sandbox.network.gate.sealed_reader import SealedReader
from sandbox.unix_wire import LENGTH, framed

pytestmark = pytest.mark.anyio

MOST = 8


def sealed(line: socket.socket, timeout_seconds: float = 30) -> SealedReader:
    return SealedReader(line, name="pages", request="page", max_bytes=MOST, timeout_seconds=timeout_seconds)


async def test_asker_leaves_and_next_request_is_read() -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    with ours, theirs:
        async with asyncio.timeout(60):
            await _leave(sealed(ours), theirs)


async def _leave(reader: SealedReader, theirs: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    asked = [asyncio.create_task(reader.ask(message)) for message in (b"first", b"waits", b"second")]
    assert await loop.sock_recv(theirs, 100) == LENGTH.pack(5) + b"first"
    for one in asked[:2]:
        one.cancel()
    await asyncio.wait(asked[:2])
    # The answer comes in two parts when the asker is gone.
    for part in (LENGTH.pack(3), b"one"):
        await loop.sock_sendall(theirs, part)
    assert await loop.sock_recv(theirs, 100) == LENGTH.pack(6) + b"second"
    await loop.sock_sendall(theirs, LENGTH.pack(3) + b"two")
    assert await asked[2] == b"two"


async def test_reader_that_is_late_is_not_asked_again() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = sealed(ours, timeout_seconds=0.01)
        with pytest.raises(TimeoutError, match=r"^the page takes too long to read$"):
            await reader.ask(b"slow")
        assert theirs.recv(100) == framed(b"slow")
        theirs.sendall(framed(b"late"))
        with pytest.raises(TimeoutError, match=r"^the reader of pages is stuck for the rest of the run$"):
            await reader.ask(b"next")
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize(
    ("answer", "ends"),
    [
        (b"", "is gone"),
        (LENGTH.pack(MOST) + b"part", "is gone"),
        (LENGTH.pack(MOST + 1), "sends 9 bytes, at most 8 are taken"),
    ],
)
def test_broken_answer_ends_gate(answer: bytes, ends: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(answer)
        theirs.shutdown(socket.SHUT_WR)

        async def asks() -> bytes:
            return await sealed(ours).ask(b"page")

        with pytest.raises(SystemExit, match=f"^the reader of pages {ends}$"):
            asyncio.run(asks())


class UnsealedInput(GateInput):
    """A gate's input in this process, which keeps its rights."""

    def __init__(self, line: int) -> None:
        super().__init__({"plan": {}, "fds": {"line": line}, "layer": "model", "seal": None, "reports": -1})
        self.sealed = False

    def seal(self) -> None:
        self.sealed = True


def answered(requests: bytes) -> tuple[Any, bytes]:
    """Return the exit of a reader that counts bytes, and its answers."""
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(requests)
        theirs.shutdown(socket.SHUT_WR)
        gate = UnsealedInput(ours.detach())
        with pytest.raises(SystemExit) as ended:
            gate.answer(lambda message: json.dumps([gate.sealed, len(message)]).encode(), max_bytes=MOST)
        return ended.value.code, theirs.recv(100)


@pytest.mark.parametrize(
    ("requests", "ends", "answers"),
    [
        (b"", "the gate is gone", b""),
        (framed(b"") + framed(b"a" * MOST), "the gate is gone", framed(b"[true, 0]") + framed(b"[true, 8]")),
        (
            framed(b"a") + framed(b"a" * (MOST + 1)),
            "the gate sends no request: it is 9 bytes, at most 8 are taken",
            framed(b"[true, 1]"),
        ),
        (framed(b"ab")[:-1], "the gate sends no request: it ends after 1 of 2 bytes", b""),
    ],
)
def test_reader_answers_until_gate_ends(requests: bytes, ends: str, answers: bytes) -> None:
    assert answered(requests) == (ends, answers)
