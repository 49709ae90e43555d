"""Numbered calls over one socket to another process of ours: many wait at one time, each for its own answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Call = TypeVar("Call")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Frames(Generic[Call, Answer]):
    """How the messages of a line are written and read.

    ``call`` and ``cancel`` return the bytes of a message with its number; ``answer`` reads the next answer and its
    number, and raises EOFError when the other process is gone.
    """

    call: Callable[[int, Call], bytes]
    cancel: Callable[[int], bytes]
    answer: Callable[[asyncio.StreamReader], Awaitable[tuple[int, Answer]]]


class PendingCalls(Generic[Answer]):
    """The calls of a line that have no answer yet, each under a number of its own."""

    def __init__(self) -> None:
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[tuple[int, asyncio.Future[Answer]]]:
        """Yield the number of a new call and its answer. After the block no answer is waited for."""
        self._number = (self._number + 1) & 0x7FFFFFFF
        number = self._number
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            yield number, answer
        finally:
            del self._waiting[number]

    def waiting(self, number: int) -> asyncio.Future[Answer] | None:
        """Return the answer that is still waited for under a number. None where there is none."""
        answer = self._waiting.get(number)
        return None if answer is None or answer.done() else answer


class CallLine(Generic[Call, Answer]):
    """One line of calls. ``most_bytes`` is the longest line of a message that ends with a newline.

    The process ends with the other end: without it no call is decided.
    """

    def __init__(self, fd: int, frames: Frames[Call, Answer], *, most_bytes: int = 1 << 16) -> None:
        self._socket, self._frames, self._most = socket.socket(fileno=fd), frames, most_bytes
        self._pending = PendingCalls[Answer]()
        self._task: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        """Begin to take answers."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=self._most)
        self._task = asyncio.create_task(self._read(reader))

    async def ask(self, call: Call) -> Answer:
        """Return the answer to a call. A call that is given up is cancelled."""
        assert self._writer is not None
        with self._pending.one() as (number, answer):
            try:
                self._writer.write(self._frames.call(number, call))
                await self._writer.drain()
                return await answer
            except asyncio.CancelledError:
                self._writer.write(self._frames.cancel(number))
                raise

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, answer = await self._frames.answer(reader)
                if (waiting := self._pending.waiting(number)) is not None:
                    waiting.set_result(answer)
        except (OSError, EOFError):
            raise SystemExit("the other end of the line is gone") from None
