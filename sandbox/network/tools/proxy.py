"""An MCP server in front of a tool server: lines of a client and of the server in, lines for both out.

The client sees the granted tools as tools.json declares them. Each call passes the guard. The server is listed before
the first call and again whenever it says that its list has changed: a tool that is not declared is never shown, and a
server that advertises something else than is declared gets no call. Its requests and notifications reach no client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from msgspec import Struct, structs

from policy import errors, wire_json
from policy.manifest import text
from policy.manifest.tools import advertised
from policy.manifest.tools.document import Server, ToolManifest
from sandbox.network.tools import mcp_session, revisions
from sandbox.network.tools.guard import AllowedCall, ToolGuard
from sandbox.network.tools.mcp_session import McpSession
from sandbox.network.tools.revisions import Refusal

# Calls at one time, and messages of the server that answer nothing, in one session.
CALLS: Final = 64
UNASKED: Final = 10_000
# The time of a server to start and to list its tools, in which calls wait.
LIST_SECONDS: Final = 60.0
_NO_STAMP: Final[Mapping[str, Any]] = MappingProxyType({})
_PARSE, _INVALID, _NO_METHOD, _BAD_PARAMS = -32700, -32600, -32601, -32602


class Output(Struct):
    """Bytes for the client and for the server."""

    client: bytes = b""
    server: bytes = b""


class _Pending(Struct, frozen=True):
    call: AllowedCall
    client_id: Any
    until: float
    # What the result has beside its own keys.
    stamp: Mapping[str, Any]


class ToolProxy:
    """One session with one server. Send what ``start`` returns; then feed lines, and call ``tick`` at ``due``."""

    def __init__(self, guard: ToolGuard, tools: ToolManifest, server: Server, *, clock: Callable[[], float]) -> None:
        self._guard, self._tools, self._server, self._clock = guard, tools, server, clock
        self._over_http = server.transport == "http"
        self._listing: McpSession | None = McpSession(over_http=self._over_http)
        self._changed = False
        self._drift: errors.ToolServerError | None = None
        self._waiting: list[_Pending] = []
        self._pending: dict[int, _Pending] = {}
        self._number = mcp_session.FIRST_CALL
        self._alone = False
        self._unasked = 0

    def start(self) -> Output:
        """Begin the session with the server."""
        assert self._listing is not None
        return Output(server=self._listing.start())

    @property
    def waits(self) -> bool:
        """Whether a call waits for the server's list."""
        return bool(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether the server owes nothing: neither a list nor an answer."""
        return self._listing is None and not self._waiting and not self._pending

    def due(self) -> float | None:
        """When the next call is late, by the clock."""
        return min((one.until for one in (*self._waiting, *self._pending.values())), default=None)

    def tick(self) -> Output:
        """End the calls that are late."""
        out, now = Output(), self._clock()
        for number, one in list(self._pending.items()):
            if one.until <= now:
                del self._pending[number]
                out.client += _tool_error(one, self._guard.late(one.call))
                out.server += _message({"method": "notifications/cancelled", "params": {"requestId": number}})
        for one in [one for one in self._waiting if one.until <= now]:
            self._waiting.remove(one)
            self._guard.failed(one.call, "no_list")
            out.client += _tool_error(one, errors.ToolServerError("the server did not list its tools in time"))
        return out

    def ended(self) -> Output:
        """End every call: the server has ended."""
        out = Output()
        for one in (*self._waiting, *self._pending.values()):
            self._guard.failed(one.call, "server_ended")
            out.client += _tool_error(one, errors.ToolServerError(f"the server of `{one.call.uri}` ended"))
        self._waiting.clear()
        self._pending.clear()
        self._guard.close()
        return out

    # --- the client -----------------------------------------------------------------------------------

    def from_client(self, line: bytes) -> Output:
        """Take a line of the client."""
        if not line.strip():
            return Output()
        try:
            message = wire_json.read(line)
        except errors.MalformedRequestError as e:
            return Output(_error(None, _PARSE, str(e)))
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return Output(_error(None, _INVALID, "no JSON-RPC 2.0 message"))
        method, number = message.get("method"), message.get("id")
        params = message.get("params", {})
        if not isinstance(method, str) or "id" not in message:
            return self._cancelled(params) if method == "notifications/cancelled" else Output()
        if not isinstance(number, str | int) or isinstance(number, bool) or not isinstance(params, dict):
            return Output(_error(None, _INVALID, "a request has an id and parameters by name"))
        alone = revisions.stands_alone(method, params, None)
        if isinstance(alone, Refusal):
            return Output(_message({"id": number, "error": alone.error()}))
        if alone:
            return self._stands_alone(number, method, params)
        if method == "initialize":
            return Output(_result(number, self._about(params)))
        if method == "ping":
            return Output(_result(number, {}))
        if method == "tools/list":
            return Output(_result(number, {"tools": self._tools_of_client()}))
        if method == "tools/call":
            return self._call(number, params, {})
        return Output(_error(number, _NO_METHOD, f"there is no method {text.quote(method)}"))

    def _stands_alone(self, number: Any, method: str, params: Mapping[str, Any]) -> Output:
        stamp = revisions.stamp(self._server.alias, self._server.version)
        if method == "tools/call":
            return self._call(number, params, stamp)
        result = revisions.own_result(method, stamp, self._tools_of_client())
        if isinstance(result, Refusal):
            return Output(_message({"id": number, "error": result.error()}))
        return Output(_result(number, result))

    def _about(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "protocolVersion": revisions.negotiated(params.get("protocolVersion")),
            "capabilities": {"tools": {}},
            "serverInfo": {"name": self._server.alias, "version": self._server.version},
        }

    def _tools_of_client(self) -> list[dict[str, Any]]:
        return [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
            for tool in self._server.tools
            if self._guard.allows(str(self._server.uri(tool)))
        ]

    def _call(self, number: Any, params: Mapping[str, Any], stamp: Mapping[str, Any]) -> Output:
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return Output(_error(number, _BAD_PARAMS, "a call has a name and arguments by name"))
        return self.call(number, name, arguments, stamp=stamp)

    def call(
        self,
        number: Any,
        name: str,
        arguments: dict[str, Any],
        *,
        approved: bool = False,
        stamp: Mapping[str, Any] = _NO_STAMP,
    ) -> Output:
        """Take a call of a client, whose id is ``number``. ``approved``: an operator let it pass.

        ``stamp`` is what its result has beside its own keys.
        """
        taken = [one.client_id for one in (*self._waiting, *self._pending.values())]
        if number in taken or len(taken) >= CALLS:
            return Output(_error(number, _INVALID, f"its id is that of another call, or there are {CALLS} calls"))
        if self._drift is not None:
            return Output(_result(number, {**refused_result(self._drift), **stamp}))
        uri = f"matrix://tool/mcp/{self._server.alias}/{name}@{self._server.version}"
        try:
            call = self._guard.check(uri, arguments, approved=approved)
        except (errors.ToolDeniedError, errors.ToolArgumentsError, errors.UsageError) as e:
            return Output(_result(number, {**refused_result(e), **stamp}))
        one = _Pending(call, number, self._clock() + LIST_SECONDS, stamp)
        if self._listing is not None:
            self._waiting.append(one)
            return Output()
        return Output(server=self._send(one))

    def _send(self, one: _Pending) -> bytes:
        self._number += 1
        call = one.call
        self._pending[self._number] = structs.replace(one, until=self._clock() + call.seconds)
        params = {"name": call.tool.name, "arguments": dict(call.arguments)}
        if self._alone:
            params["_meta"] = revisions.meta()
        return _message({"id": self._number, "method": "tools/call", "params": params})

    def _cancelled(self, params: Any) -> Output:
        """End a call that the client no longer waits for. It gets no answer, as the protocol says."""
        return self.cancel(params.get("requestId") if isinstance(params, dict) else None)

    def cancel(self, asked: Any) -> Output:
        """End the call whose id is ``asked``, without an answer."""
        for one in self._waiting:
            if one.client_id == asked and type(one.client_id) is type(asked):
                self._waiting.remove(one)
                self._guard.failed(one.call, "cancelled")
                return Output()
        for number, one in self._pending.items():
            if one.client_id == asked and type(one.client_id) is type(asked):
                del self._pending[number]
                self._guard.failed(one.call, "cancelled")
                return Output(server=_message({"method": "notifications/cancelled", "params": {"requestId": number}}))
        return Output()

    # --- the server -----------------------------------------------------------------------------------

    def from_server(self, line: bytes) -> Output:
        """Take a line of the server.

        Raises:
            errors.ToolServerError: it does not speak MCP, or sends too much that was not asked for.
        """
        message = mcp_session.read(line)
        if message is None:
            return Output()
        number = message.get("id")
        # By its type first: an object is no key, and true is 1.
        if "method" not in message and type(number) is int and number in self._pending:
            return self._answer(self._pending.pop(number), message, len(line))
        if self._listing is not None:
            return self._listed(line, message)
        self._unasked += 1
        if self._unasked > UNASKED:
            raise errors.ToolServerError(f"it sent more than {UNASKED} messages that nothing asked for")
        if message.get("method") == "notifications/tools/list_changed":
            return self._relist()
        return Output(server=mcp_session.refusal(message) if "method" in message else b"")

    def _listen(self) -> bytes:
        """Ask a server of revision 2026-07-28 to tell of changes of its list, which the others do unasked."""
        self._number += 1
        params = {"notifications": {"toolsListChanged": True}, "_meta": revisions.meta()}
        return _message({"id": self._number, "method": "subscriptions/listen", "params": params})

    def _relist(self) -> Output:
        self._listing = McpSession(first=self._number + 1, alone=self._alone, over_http=self._over_http)
        self._number += mcp_session.PAGES + 1
        return Output(server=self._listing.list_again())

    def _listed(self, line: bytes, message: Mapping[str, Any]) -> Output:
        assert self._listing is not None
        if message.get("method") == "notifications/tools/list_changed":
            self._changed = True
        out = Output(server=self._listing.take(line))
        if not self._listing.done:
            return out
        found, self._alone = self._listing.tools, self._listing.alone
        if self._listing.is_changing and not self._over_http:
            out.server += self._listen()
        self._listing, self._drift = None, None
        for finding in advertised.compare(self._tools, self._server, found):
            self._drift = errors.ToolServerError(finding.message, hint=finding.hint)
            break
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            if self._drift is not None:
                self._guard.failed(one.call, "drift")
                out.client += _tool_error(one, self._drift)
            else:
                out.server += self._send(one)
        if self._changed:
            self._changed = False
            self._unasked += 1
            out.server += self._relist().server
        return out

    def _answer(self, one: _Pending, message: Mapping[str, Any], size: int) -> Output:
        if "error" in message:
            self._guard.failed(one.call, "server_error")
            said = text.visible(mcp_session.error_of(message["error"]), 1024)
            return Output(_tool_error(one, errors.ToolServerError(f"the server refused the call: {said}")))
        try:
            result = self._guard.answered(one.call, message.get("result"), size)
        except (errors.ToolDeniedError, errors.ToolServerError) as e:
            return Output(_tool_error(one, e))
        return Output(_result(one.client_id, {**result, **one.stamp}))


def refused_result(error: errors.CovenantError) -> dict[str, Any]:
    """Return the result of a call that was refused."""
    said = f"{error.message}\n{error.hint}".strip()
    return {"content": [{"type": "text", "text": said}], "isError": True}


def _tool_error(one: _Pending, error: errors.CovenantError) -> bytes:
    return _result(one.client_id, {**refused_result(error), **one.stamp})


def _result(number: Any, result: Mapping[str, Any]) -> bytes:
    return _message({"id": number, "result": result})


def _error(number: Any, code: int, message: str) -> bytes:
    return _message({"id": number, "error": {"code": code, "message": message}})


def _message(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode() + b"\n"
