"""A gate's line to its sealed reader: a process without rights that parses hostile bytes (``GateInput.answer``).

Both sides send frames of ``sandbox.unix_wire``. A request gets one answer, and requests are answered one by one.
"""

from __future__ import annotations

import asyncio
import socket

from sandbox import unix_wire


class SealedReader:
    """Ask a sealed reader. After a request that takes too long it is not asked again.

    ``name`` and ``request`` are words for messages: the reader's name, and what it is asked to read. ``max_bytes``
    bounds an answer.
    """

    def __init__(self, line: socket.socket, *, name: str, request: str, max_bytes: int, timeout_seconds: float) -> None:
        self._socket = line
        self._socket.setblocking(False)
        self._name, self._request = name, request
        self._max_bytes, self._timeout_seconds = max_bytes, timeout_seconds
        self._turn = asyncio.Lock()
        self._stuck = False
        self._asked: asyncio.Task[bytes] | None = None

    async def ask(self, message: bytes) -> bytes:
        """Return the reader's answer.

        Raises:
            TimeoutError: the reader does not answer in time, or did not answer an earlier request.
            SystemExit: the reader is gone, or sends too much.
        """
        await self._turn.acquire()
        # INVARIANT: an exchange that has begun goes on if its caller is cancelled. Otherwise the next request would
        # get the rest of its answer.
        self._asked = asyncio.get_running_loop().create_task(self._ask(message))
        return await asyncio.shield(self._asked)

    async def _ask(self, message: bytes) -> bytes:
        try:
            if self._stuck:
                raise TimeoutError(f"the reader of {self._name} is stuck for the rest of the run")
            self._stuck = True
            try:
                async with asyncio.timeout(self._timeout_seconds):
                    answer = await self._exchange(message)
            except TimeoutError as e:
                raise TimeoutError(f"the {self._request} takes too long to read") from e
            self._stuck = False
            return answer
        finally:
            self._turn.release()

    async def _exchange(self, message: bytes) -> bytes:
        await asyncio.get_running_loop().sock_sendall(self._socket, unix_wire.framed(message))
        (length,) = unix_wire.LENGTH.unpack(await self._received(unix_wire.LENGTH.size))
        if length > self._max_bytes:
            raise SystemExit(f"the reader of {self._name} sends {length} bytes, at most {self._max_bytes} are taken")
        return await self._received(length)

    async def _received(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = await asyncio.get_running_loop().sock_recv(self._socket, length - len(data))
            if not part:
                raise SystemExit(f"the reader of {self._name} is gone")
            data += part
        return bytes(data)
