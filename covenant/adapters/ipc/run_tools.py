"""The daemon as the MCP server of a run that it started: lines of the tool gate in, replies out.

Each call is a request of the caller whose intent the run is for, with the capabilities that the caller has at that
moment. The row of a call is written before it is made.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import socket
import time
from typing import Final

import anyio
import anyio.to_thread

from covenant.handlers.access import authentication, authorization
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.wire import mcp_server, responses
from covenant.wire.mcp_server import McpCall, McpReply
from covenant.wire.types import AgentId
from policy import errors, wire_json
from policy.rules import tool_calls
from sandbox.rate_limit import Tokens

_LOG: Final = logging.getLogger(__name__)

# A line of the gate, and one to it, which it reads no longer than this (sandbox.network.tools.mcp_session).
LINE_BYTES: Final = 4 * 1024 * 1024
# Calls of one run at one time.
AT_ONCE: Final = 8
_CHUNK: Final = 64 * 1024
# To make an answer of a longer response would block the loop too long.
_LARGE: Final = 256 * 1024


class RunTools:
    """Serves the runs of one daemon."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def allowed(self, caller: AgentId) -> list[str]:
        """Return the tools that the caller may use now, by their names."""
        who = self._caller(caller)
        return [
            name
            for name, action in mcp_server.OF_RUNS.items()
            if not action or authorization.holds_some(self._server, who, action)
        ]

    async def serve(self, sock: socket.socket, caller: AgentId, *, intent_id: str, agent_id: str) -> None:
        """Answer the calls of one run, until the other end is closed."""
        run = _Run(self._server, self._caller(caller), sock, intent_id, agent_id)
        try:
            await run.serve()
        except OSError:
            return  # the gate is gone
        except Exception:
            _LOG.exception("the tools of intent %s ended by a fault of the daemon", intent_id)
        finally:
            # The run goes on, and its calls fail at once.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _caller(self, agent: AgentId) -> Caller:
        is_operator = agent.pubkey == self._server.identity.agent.pubkey
        return Caller(agent=agent, operator=is_operator, token_prefix="", transport="ipc")


class _Run:
    def __init__(self, server: Server, caller: Caller, sock: socket.socket, intent_id: str, agent_id: str) -> None:
        self._server, self._caller, self._sock = server, caller, sock
        self._about = {"intent_id": intent_id, "agent_id": agent_id}
        # Of a peer there is an entry, also when its token has ended meanwhile.
        self._has_token = not caller.operator and bool(server.peers.listing(1, caller.agent.pubkey, None).entries)
        # Of a run of the operator too: each call is a row, and the agent is not the operator.
        rate = server.settings.peer_rate
        self._rate = Tokens(rate.requests_per_second, rate.burst, time.monotonic())
        self._writing, self._places = anyio.Lock(), anyio.Semaphore(AT_ONCE)

    async def serve(self) -> None:
        buffer = bytearray()
        async with anyio.create_task_group() as group:
            while data := await self._read():
                *lines, rest = (buffer + data).split(b"\n")
                buffer = bytearray(rest)
                if len(buffer) > LINE_BYTES:
                    break
                for line in lines:
                    await self._places.acquire()
                    group.start_soon(self._answer, bytes(line))
            group.cancel_scope.cancel()

    async def _answer(self, line: bytes) -> None:
        try:
            reply = await self._reply(line)
            if reply is not None:
                async with self._writing:
                    await self._write(reply + b"\n")
        except OSError:
            return  # the gate is gone, which the end of its line tells
        finally:
            self._places.release()

    async def _reply(self, line: bytes) -> bytes | None:
        try:
            found = mcp_server.take(line)
        except errors.MalformedRequestError as e:
            return mcp_server.malformed(e)
        if isinstance(found, McpReply):
            return found.message
        return None if found is None else await self._called(found)

    async def _called(self, call: McpCall) -> bytes:
        name = mcp_server.name_of(call)
        if name not in mcp_server.OF_RUNS:
            refused = errors.CapabilityMissingError(
                f"`{name}` is no tool of a run", hint="docs/tool-calls.md lists them"
            )
            return _refused(call, refused)
        given = call.request.model_dump(mode="json", exclude={"kind"}, exclude_unset=True)
        # As the tool gate takes it: both rows of one call have the same digest.
        digest = hashlib.sha256(tool_calls.encoded(given)).hexdigest()
        row = {**self._about, "tool": name, "arguments_hash_hex": digest}
        try:
            self._take_token()
            # INVARIANT: the row before the call. A call that cannot be logged is not made.
            await self._server.audit.append("run_tool_asked", row, self._caller.agent)
            self._still_admitted()
        except errors.CovenantError as e:
            return _refused(call, e)
        response = await self._server.respond(self._caller, call.request)
        try:
            self._still_admitted()  # the token may have ended while the call was made
        except errors.CovenantError as e:
            return _refused(call, e)
        raw = response.to_bytes()
        try:
            large = len(raw) > _LARGE
            return await anyio.to_thread.run_sync(_readable, call, raw) if large else _readable(call, raw)
        except errors.UsageError as e:
            return _refused(call, e)

    def _take_token(self) -> None:
        """Count a call.

        Raises:
            errors.BusyError: the run calls more often than a peer may ask.
        """
        if not self._rate.take(time.monotonic()):
            most = self._server.settings.peer_rate.requests_per_second
            raise errors.BusyError(
                f"a run may call tools of the daemon {most} times a second",
                hint="ask again later; COVENANT_PEER_REQUESTS_PER_SECOND and _BURST say how many may be",
            )

    def _still_admitted(self) -> None:
        """Refuse a caller whose last token was revoked or has ended. One that never had any, as a task of another
        host has none, is bound by its capabilities alone.

        Raises:
            errors.AuthenticationError: no token of the caller is valid any more.
        """
        if self._has_token and not self._server.peers.of(self._caller.agent.pubkey):
            raise errors.AuthenticationError(authentication.ENDED)

    async def _read(self) -> bytes:
        while True:
            try:
                return self._sock.recv(_CHUNK)
            except BlockingIOError:
                await anyio.wait_readable(self._sock)
            except ConnectionResetError:
                return b""  # the gate is gone, with answers that it did not read

    async def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._sock)


def _readable(call: McpCall, raw: bytes) -> bytes:
    """Return the answer of a call, which the gate can read. The gate takes another one for the end of the daemon, and
    fails every call of the run: a record that nests deep, written by another caller, would be enough.

    Raises:
        errors.UsageError: the answer is too large, holds too many values, or nests too deep.
    """
    # An answer contains the response at least once. One that is too large is not made.
    answer = b"" if len(raw) >= LINE_BYTES else mcp_server.answer(call, json.loads(raw))
    if not 0 < len(answer) < LINE_BYTES:
        raise errors.UsageError("the answer is larger than a line of MCP", hint="ask for fewer records")
    try:
        wire_json.read(answer)
    except errors.MalformedRequestError as e:
        raise errors.UsageError(
            f"the answer cannot be read: {e.message}", hint="ask for fewer records, or others"
        ) from None
    return answer


def _refused(call: McpCall, error: errors.CovenantError) -> bytes:
    return mcp_server.answer(call, json.loads(responses.Error.of(error).to_bytes()))
