"""A session of the daemon with the MCP endpoint of a signed package, which the supervisor runs in a sandbox.

The package's agent has the contract `stdio` and passes lines on to ``http://tools.covenant/mcp``. So the gate of the
run holds each call to the package's manifest. What comes from the sandbox is bounded and read strictly: one JSON-RPC
message a line, at most ``wire.REPLY_BYTES`` long.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import anyio
import anyio.abc
import anyio.to_thread

from covenant.runtime.supervisor_client import Supervised
from covenant.visible import visible
from policy import errors, json_bounds, wire_json
from policy.manifest import text
from policy.manifest.tools.advertised import AdvertisedTool
from sandbox.network.tools import mcp_session, wire
from sandbox.network.tools.mcp_session import McpSession

_LOG: Final = logging.getLogger(__name__)

# From the request to the supervisor to the list of tools: a queue, a cold start and the first answer.
START_SECONDS: Final = 120.0
# From the end of the agent's output to the supervisor's word on why, which comes after its clean-up.
_END_SECONDS: Final = 60.0
_CHUNK: Final = 64 * 1024
# Bytes that the agent has not read. A call that would add more is refused.
_UNREAD: Final = 2 * wire.MESSAGE_BYTES
# The same with a call that was just taken. Replies to an agent that would add more end its session.
_MOST_UNREAD: Final = 2 * _UNREAD
CALLS: Final = 64
# Each list is a row and a compilation of schemas. A server may tell of changes as often as it likes.
RELIST_SECONDS: Final = 5.0
# Parsing a longer line would block the loop too long.
_LARGE: Final = 256 * 1024
_STDERR_LINE: Final = 1024

Listed = Callable[[Sequence[AdvertisedTool]], Awaitable[None]]


class _Open:
    """A call that waits for its reply."""

    def __init__(self) -> None:
        self.done = anyio.Event()
        self.message: Mapping[str, Any] | None = None


class ToolSession:
    """One session. ``run`` holds it until it ends; ``call`` works while it runs, after the first list of tools."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pipes: list[int] = []
        self._theirs: list[int] = []
        self._out, self._wake = bytearray(), anyio.Event()
        self._listing: McpSession | None = McpSession()
        self._number = mcp_session.FIRST_CALL
        self._calls: dict[int, _Open] = {}
        self._ready, self._ended, self._changed = anyio.Event(), anyio.Event(), anyio.Event()
        self._error: errors.CovenantError | None = None
        self._is_open = False

    async def run(self, supervised: Supervised, directory: int, listed: Listed) -> errors.CovenantError:
        """Hold the session of the package in ``directory`` until it ends, and return why it ended.

        ``listed`` is called with each complete list of tools, the first one and those after a change.
        """
        try:
            self._open_pipes()
            async with (
                supervised.session(directory, self._theirs) as heard,
                anyio.create_task_group() as group,
            ):
                self._release()
                assert self._listing is not None
                self._is_open = True
                self._put(self._listing.start())
                group.start_soon(self._hear, heard)
                group.start_soon(self._read, listed)
                group.start_soon(self._write)
                group.start_soon(self._drain)
                group.start_soon(self._relist)
                with anyio.move_on_after(START_SECONDS):
                    await self._ready.wait()
                if not self._ready.is_set():
                    self._end(self._wrong("did not list its tools in time"))
                await self._ended.wait()
                group.cancel_scope.cancel()
        finally:
            self._fail()
            self._close()
        assert self._error is not None
        return self._error

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call a tool and return the result of its reply.

        Raises:
            errors.ToolError: the session ended, too much is under way, or the reply is an error.
        """
        if not self._is_open:
            raise self._gone()
        if len(self._calls) >= CALLS or len(self._out) > _UNREAD:
            raise errors.ToolError(f"tool server `{self._name}` has {CALLS} calls under way", hint="ask again later")
        self._number += 1
        number, one = self._number, _Open()
        params = {"name": name, "arguments": dict(arguments)}
        message = {"id": number, "method": "tools/call", "params": params}
        line = _line(message)
        if len(line) > wire.MESSAGE_BYTES:
            raise errors.ToolError(f"a call of tool server `{self._name}` has at most {wire.MESSAGE_BYTES} bytes")
        self._check_readable(message, line)
        self._calls[number] = one
        try:
            self._put(line)
            await one.done.wait()
        finally:
            if self._calls.pop(number, None) is not None and self._is_open:
                # The caller does not wait any more.
                self._put(_line({"method": "notifications/cancelled", "params": {"requestId": number}}))
        if one.message is None:
            raise self._gone()
        result = one.message.get("result")
        if not isinstance(result, dict):
            said = text.visible(mcp_session.error_of(one.message.get("error")), 1024)
            raise errors.ToolError(f"tool server `{self._name}` refused the call: {said}")
        return result

    def _check_readable(self, message: Mapping[str, Any], line: bytes) -> None:
        """Refuse a call that the gate could not read: its reply would have no id, and the call would wait in vain.

        Raises:
            errors.ToolError: the arguments hold too many values, or nest too deep.
        """
        try:
            wire_json.check_depth(message)
        except errors.MalformedRequestError as e:
            raise errors.ToolError(f"the arguments for tool server `{self._name}` are {e.message}") from None
        if json_bounds.exceeds(line, wire_json.MAX_VALUES):
            raise errors.ToolError(f"a call of tool server `{self._name}` has at most {wire_json.MAX_VALUES} values")

    def _gone(self) -> errors.ToolError:
        return errors.ToolError(
            f"the session of tool server `{self._name}` ended",
            hint="it is started again: covenant tools list shows its state",
        )

    def _wrong(self, what: str) -> errors.CovenantError:
        return errors.ToolServerError(
            f"tool server `{self._name}` {what}", hint="covenant logs of its package shows what it wrote to stderr"
        )

    # --- the ends -------------------------------------------------------------------------------------

    def _open_pipes(self) -> None:
        for mine_writes in (True, False, False):
            read, write = os.pipe2(os.O_CLOEXEC)
            self._pipes.append(write if mine_writes else read)
            self._theirs.append(read if mine_writes else write)
            os.set_blocking(self._pipes[-1], False)

    def _release(self) -> None:
        """Close the supervisor's ends, of which it has copies, so that the end of file comes from the shim."""
        while self._theirs:
            os.close(self._theirs.pop())

    def _close(self) -> None:
        self._release()
        while self._pipes:
            os.close(self._pipes.pop())

    def _end(self, error: errors.CovenantError) -> None:
        """End the session; the first reason counts."""
        if self._error is None:
            self._error = error
        self._fail()
        self._ready.set()
        self._ended.set()

    def _fail(self) -> None:
        """End every open call, and refuse further ones."""
        self._is_open = False
        while self._calls:
            self._calls.popitem()[1].done.set()

    async def _hear(self, heard: Callable[[], Awaitable[Mapping[str, Any]]]) -> None:
        """Wait for the supervisor's word on how the session ended."""
        try:
            document = await heard()
            while document.get("kind") in ("state", "rows"):
                document = await heard()
        except errors.CovenantError as e:
            self._end(e)
            return
        error = document.get("error")
        ended = self._wrong("ended")
        self._end(errors.restored(error) if isinstance(error, dict) else ended)

    # --- lines ----------------------------------------------------------------------------------------

    def _put(self, data: bytes) -> None:
        self._out += data
        self._wake.set()

    async def _write(self) -> None:
        while True:
            await self._wake.wait()
            self._wake = anyio.Event()
            while self._out:
                try:
                    del self._out[: os.write(self._pipes[0], self._out[:_CHUNK])]
                except BlockingIOError:
                    await anyio.wait_writable(self._pipes[0])
                except OSError:
                    return  # the agent has ended, which its output tells

    async def _read(self, listed: Listed) -> None:
        rest = bytearray()
        while True:
            await anyio.wait_readable(self._pipes[1])
            try:
                data = os.read(self._pipes[1], _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                break
            *lines, last = data.split(b"\n")
            try:
                for line in lines:
                    await self._take(bytes(rest + line), listed)
                    rest.clear()
                rest += last
                if len(rest) > wire.REPLY_BYTES:
                    raise self._wrong(f"wrote a line of more than {wire.REPLY_BYTES} bytes")
            except errors.CovenantError as e:
                self._end(e)
                return
        self._fail()
        with anyio.move_on_after(_END_SECONDS):
            await self._ended.wait()
        self._end(self._wrong("ended"))

    async def _take(self, line: bytes, listed: Listed) -> None:
        large = len(line) > _LARGE
        message = await anyio.to_thread.run_sync(mcp_session.read, line) if large else mcp_session.read(line)
        if message is None:
            return
        number = message.get("id")
        if "method" not in message and type(number) is int and (one := self._calls.pop(number, None)) is not None:
            one.message = message
            one.done.set()
        elif message.get("method") == "notifications/tools/list_changed":
            self._changed.set()
        elif self._listing is not None:
            self._reply(self._listing.take(line))
            if self._listing.done:
                found, self._listing = self._listing.tools, None
                await listed(found)
                self._ready.set()

    def _reply(self, data: bytes) -> None:
        """Send a reply, which may repeat a long id of the agent.

        Raises:
            errors.ToolServerError: the agent sends requests, and reads no reply.
        """
        if data and len(self._out) + len(data) > _MOST_UNREAD:
            raise self._wrong("does not read what it is sent")
        self._put(data)

    async def _relist(self) -> None:
        """Ask for the list again after it changed, which may be while it is listed."""
        await self._ready.wait()
        while True:
            await self._changed.wait()
            if self._listing is None:
                self._changed = anyio.Event()
                self._listing = McpSession(first=self._number + 1)
                self._number += mcp_session.PAGES + 1
                self._put(self._listing.list_again())
            await anyio.sleep(RELIST_SECONDS)

    async def _drain(self) -> None:
        """Log what the agent writes to stderr, at the level of details."""
        while True:
            await anyio.wait_readable(self._pipes[2])
            try:
                data = os.read(self._pipes[2], _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                return
            _LOG.debug("tool server `%s`: %s", self._name, visible(data.decode(errors="replace"))[:_STDERR_LINE])


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode() + b"\n"
