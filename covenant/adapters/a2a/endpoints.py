"""A2A's paths: each agent of this daemon is an A2A server of its own below ``/a2a/agents/AGENT``.

    GET  .../.well-known/agent-card.json      the card, of both versions
    POST ...                                  JSON-RPC
    ...  .../message:send, .../tasks/ID, ...  HTTP+JSON of version 1.0; version 0.3 has `v1/` before them

The gateway's checks of Host, Origin, token and sizes come first, as for every path. Refusals have A2A's own shape.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import anyio.to_thread
from aiohttp import web

from covenant.adapters.a2a import following
from covenant.adapters.a2a.following import Followed, Following, TaskEvents
from covenant.adapters.a2a.push import Pushes
from covenant.adapters.http import refusals, routes, streams
from covenant.handlers.access import authentication
from covenant.handlers.caller import Caller
from covenant.handlers.mailbox import a2a
from covenant.handlers.server import Server
from covenant.wire.a2a import calls, card, faults, shapes
from covenant.wire.a2a.calls import Dialect
from policy import errors

PREFIX: Final = "/a2a/agents/"
VERSION_HEADER: Final = "A2A-Version"
# The longest that a reply waits for the end of its task; later the client asks for the task.
WAIT_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class A2aGate:
    """The gateway's own parts that A2A shares with the other paths."""

    admitted: Callable[[web.Request], Awaitable[Caller]]
    body: Callable[[web.Request], Awaitable[bytes]]
    stream: Callable[[Caller], AbstractContextManager[None]]
    still: Callable[[web.Request, Caller], Awaitable[bool]]
    headers: Callable[[web.Request], Mapping[str, str]]
    pace: streams.Pace


class _Asked(NamedTuple):
    """A call on its way: who asks which agent, how the reply is written, and its JSON-RPC id."""

    request: web.Request
    caller: Caller
    agent_id: str
    dialect: Dialect
    number: str | int | None
    is_rpc: bool


class A2aEndpoints:
    """The paths of A2A of one daemon."""

    def __init__(self, server: Server, gate: A2aGate, pushes: Pushes) -> None:
        self._server, self._gate, self._pushes = server, gate, pushes
        self._following = Following(server)

    def stop(self) -> None:
        """End the streams and the waits for tasks: the daemon stops."""
        self._following.stop()

    async def close(self) -> None:
        """Close the connections of push notifications."""
        await self._pushes.close()

    def add_to(self, router: web.UrlDispatcher, not_yet: Any) -> None:
        """Add the paths. ``not_yet`` answers no ``Expect`` before the caller is known."""
        agent = f"{PREFIX}{{agent:{routes.SEGMENT}}}"
        router.add_get(f"{agent}/{card.WELL_KNOWN}", self._card, expect_handler=not_yet)
        for path in (agent, f"{agent}/"):
            router.add_post(path, self._rpc, expect_handler=not_yet)
        for method in ("GET", "POST", "DELETE"):
            router.add_route(method, f"{agent}/{{path:.+}}", self._http, expect_handler=not_yet)

    async def _card(self, request: web.Request) -> web.StreamResponse:
        await self._gate.admitted(request)
        agent_id = request.match_info["agent"]
        url = f"http://{request.headers['Host']}{PREFIX}{agent_id}"
        try:
            return web.json_response(
                card.card(url=url, push=bool(self._pushes.allowed), **a2a.about(self._server, agent_id))
            )
        except errors.NoAgentError as e:
            return refusal(request, faults.NO_AGENT.status, e)

    # JSON-RPC -------------------------------------------------------------------------------------------------

    async def _rpc(self, request: web.Request) -> web.StreamResponse:
        caller = await self._gate.admitted(request)
        number: str | int | None = None
        try:
            calls.check_version(request.headers.get(VERSION_HEADER))
            body = await self._gate.body(request) if request.body_exists else b""
            found = await anyio.to_thread.run_sync(calls.envelope, body)
            number = found.id
            dialect, call = calls.of_method(found.method, found.params)
            asked = _Asked(request, caller, request.match_info["agent"], dialect, number, is_rpc=True)
            return await self._done(asked, call)
        except errors.CovenantError as e:
            return _refusal_of_rpc(number, e)

    # HTTP+JSON ------------------------------------------------------------------------------------------------

    async def _http(self, request: web.Request) -> web.StreamResponse:
        caller = await self._gate.admitted(request)
        try:
            calls.check_version(request.headers.get(VERSION_HEADER))
            body = await self._gate.body(request) if request.body_exists else b""
            path, query = request.match_info["path"], dict(request.query.items())
            read = functools.partial(calls.of_path, request.method, path, query, body)
            dialect, call = await anyio.to_thread.run_sync(read)
            asked = _Asked(request, caller, request.match_info["agent"], dialect, None, is_rpc=False)
            return await self._done(asked, call)
        except errors.CovenantError as e:
            return refusal(request, faults.fault_of(e).status, e)

    # Both -----------------------------------------------------------------------------------------------------

    async def _done(self, asked: _Asked, call: calls.Call) -> web.StreamResponse:
        server, caller, agent_id = self._server, asked.caller, asked.agent_id
        a2a.about(server, agent_id)
        match call:
            case calls.Send():
                return await self._send(asked, call)
            case calls.GetTask(id=name):
                return _reply(asked, shapes.task(a2a.get(server, caller, agent_id, name), asked.dialect))
            case calls.CancelTask(id=name):
                return _reply(asked, shapes.task(await a2a.cancel(server, caller, agent_id, name), asked.dialect))
            case calls.ListTasks():
                views, token, total = a2a.listed(server, caller, agent_id, call)
                return _reply(
                    asked, shapes.page(views, size=call.size, token=token, total=total, artifacts=call.artifacts)
                )
            case calls.GetExtendedCard():
                # Version 1.0 has the other error where the card says that there is none.
                fault = faults.UNSUPPORTED if asked.dialect is Dialect.V1 else faults.NO_EXTENDED_CARD
                raise faults.refused(fault, "an agent's card has no extended form")
            case calls.Subscribe(id=name):
                if a2a.get(server, caller, agent_id, name).ended:
                    raise faults.refused(faults.UNSUPPORTED, "the task has ended", hint="ask for the task")
                with self._gate.stream(caller):
                    return await self._stream(asked, name)
            case calls.SetPush() | calls.GetPush() | calls.ListPush() | calls.DeletePush():
                return self._configure(asked, call)

    def _configure(
        self, asked: _Asked, call: calls.SetPush | calls.GetPush | calls.ListPush | calls.DeletePush
    ) -> web.StreamResponse:
        """Set, return, list or delete push configurations of a task."""
        self._pushes.require()
        # Counts as a request of the caller's.
        a2a.get(self._server, asked.caller, asked.agent_id, call.id)
        who = (asked.caller, asked.agent_id, call.id)
        if isinstance(call, calls.SetPush):
            return _reply(
                asked, shapes.push_config(call.id, self._pushes.set(*who, call.target, asked.dialect), asked.dialect)
            )
        found = self._pushes.listed(*who)
        if isinstance(call, calls.ListPush):
            configs = [shapes.push_config(call.id, one, asked.dialect) for one in found]
            return _reply(asked, configs if asked.dialect is Dialect.RPC_03 else {"configs": configs})
        if isinstance(call, calls.DeletePush):
            self._pushes.delete(*who, call.config_id)
            return _reply(asked, None if asked.dialect is Dialect.RPC_03 else {})
        for one in found:
            if call.config_id in ("", one.id):
                return _reply(asked, shapes.push_config(call.id, one, asked.dialect))
        raise faults.refused(faults.NO_TASK, "the task has no such push configuration")

    async def _send(self, asked: _Asked, call: calls.Send) -> web.StreamResponse:
        if not (call.streams or call.waits):
            return _reply(asked, shapes.sent(await self._sent(asked, call), asked.dialect))
        # Before the task is sent: a caller that may not wait is told so, and nothing runs for it.
        with self._gate.stream(asked.caller):
            view = await self._sent(asked, call)
            if call.streams:
                return await self._stream(asked, view.id)
            if not view.ended:
                with self._follow(asked, view.id) as one:
                    view = await following.end_of(one, WAIT_SECONDS)
            # Also of a task that had ended when it was first seen: the token may have been revoked since.
            if not await self._gate.still(asked.request, asked.caller):
                raise errors.HttpRefusedError(authentication.ENDED, status=401)
        return _reply(asked, shapes.sent(view, asked.dialect))

    async def _sent(self, asked: _Asked, call: calls.Send) -> shapes.TaskView:
        """Send a message as a task, with its push configuration."""
        if call.push is not None:
            self._pushes.check(asked.caller, call.push)
        view = await a2a.send(self._server, asked.caller, asked.agent_id, call)
        if call.push is not None:
            self._pushes.set(asked.caller, asked.agent_id, view.id, call.push, asked.dialect)
        return view

    async def _stream(self, asked: _Asked, task_id: str) -> web.StreamResponse:
        events = TaskEvents(
            asked.request, self._gate.headers(asked.request), self._gate.pace, functools.partial(_result, asked)
        )
        with self._follow(asked, task_id) as one:
            await events.write(one, asked.dialect, functools.partial(self._gate.still, asked.request, asked.caller))
        return events.response

    def _follow(self, asked: _Asked, task_id: str) -> AbstractContextManager[Followed]:
        return self._following.task(asked.caller, asked.agent_id, task_id)


def refusal(request: web.Request, status: int, error: errors.CovenantError) -> web.Response:
    """Return the response of a refused request: JSON-RPC's for its path, HTTP+JSON's for the others."""
    fault = faults.at_status(status, error)
    rest = request.path.removeprefix(PREFIX).partition("/")[2]
    if not rest and request.method == "POST":
        return _refused(fault.status, faults.to_rpc(None, fault, error))
    return _refused(fault.status, faults.to_http(fault, error, legacy=calls.is_legacy(rest)))


def is_ours(request: web.Request) -> bool:
    """Whether the path is one of A2A's."""
    return request.path.startswith(PREFIX)


def _refusal_of_rpc(number: str | int | None, error: errors.CovenantError) -> web.Response:
    fault = faults.fault_of(error)
    return _refused(faults.rpc_status(fault), faults.to_rpc(number, fault, error))


def _refused(status: int, body: bytes) -> web.Response:
    response = web.Response(status=status, body=body, content_type=faults.JSON)
    if status == faults.UNAUTHENTICATED.status:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status != 200:
        # The unread rest of a refused request must not be read as the next one.
        response.force_close()
    return response


def _reply(asked: _Asked, result: Any) -> web.Response:
    body = json.dumps(_result(asked, result), separators=(",", ":")).encode()
    return web.Response(body=body, content_type=refusals.JSON)


def _result(asked: _Asked, result: Any) -> Any:
    return {"jsonrpc": "2.0", "id": asked.number, "result": result} if asked.is_rpc else result
