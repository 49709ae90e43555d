"""Check numbered calls over a line: each caller gets its own answer, and one that gives up cancels its call."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import socket
from collections.abc import Awaitable, Callable

from sandbox.network.gate.call_line import CallLine, Frames


async def _answer(reader: asyncio.StreamReader) -> tuple[int, str]:
    if not (line := await reader.readline()):
        raise EOFError
    number, answer = line.decode().split()
    return int(number), answer


FRAMES: Frames[str, str] = Frames(
    lambda number, call: f"{number} {call}\n".encode(), lambda number: f"{number} cancel\n".encode(), _answer
)


_GONE = 3


def _with_line(act: Callable[[CallLine[str, str], socket.socket], Awaitable[None]]) -> int | None:
    """Do it in a process of its own, as a gate is one. Returns its status."""
    gate = multiprocessing.get_context("fork").Process(target=_gate, args=(act,))
    gate.start()
    gate.join()
    return gate.exitcode


def _gate(act: Callable[[CallLine[str, str], socket.socket], Awaitable[None]]) -> None:
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    async def run() -> None:
        line = CallLine(ours.detach(), FRAMES)
        await line.start()
        await act(line, theirs)

    try:
        asyncio.run(run())
    except SystemExit:
        os._exit(_GONE)
    os._exit(0)


async def _lines(theirs: socket.socket, count: int) -> list[str]:
    data = b""
    while data.count(b"\n") < count:
        data += await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
    return data.decode().splitlines()


def test_answers_in_another_order_reach_their_callers() -> None:
    async def act(line: CallLine[str, str], theirs: socket.socket) -> None:
        calls = [asyncio.ensure_future(line.ask(f"c{number}")) for number in range(50)]
        asked = dict(one.split() for one in await _lines(theirs, 50))
        said = "".join(f"{number} to-{call}\n" for number, call in reversed(asked.items()))
        await asyncio.get_running_loop().sock_sendall(theirs, b"99 to-none\n" + said.encode())
        assert await asyncio.gather(*calls) == [f"to-c{number}" for number in range(50)]

    assert _with_line(act) == 0


def test_call_given_up_is_cancelled_and_others_go_on() -> None:
    async def act(line: CallLine[str, str], theirs: socket.socket) -> None:
        given_up, stays = asyncio.ensure_future(line.ask("a")), asyncio.ensure_future(line.ask("b"))
        assert await _lines(theirs, 2) == ["1 a", "2 b"]
        given_up.cancel()
        assert await _lines(theirs, 1) == ["1 cancel"]
        # An answer that was under way reaches no other call.
        await asyncio.get_running_loop().sock_sendall(theirs, b"1 late\n2 right\n")
        assert await stays == "right"
        assert given_up.cancelled()

    assert _with_line(act) == 0


def test_process_ends_with_other_end_of_its_line() -> None:
    async def act(line: CallLine[str, str], theirs: socket.socket) -> None:
        asked = asyncio.ensure_future(line.ask("a"))
        await _lines(theirs, 1)
        theirs.shutdown(socket.SHUT_WR)
        await asked

    assert _with_line(act) == _GONE
