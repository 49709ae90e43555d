"""The client's side of an MCP session over stdio, as a state machine: lines of the server in, lines for it out.

Messages are JSON-RPC 2.0, one a line (Model Context Protocol, transport `stdio`). The session initializes, lists the
server's tools page by page, and calls at most one. Other requests of a server (sampling, roots) are refused. A server
that refuses ``initialize`` is asked as one that speaks revision 2026-07-28 alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from policy import errors, wire_json
from policy.manifest import text
from policy.manifest.tools.advertised import AdvertisedTool
from sandbox.network.tools import revisions

PROTOCOL: Final = revisions.EARLIER[-1]
LINE_BYTES: Final = 4 * 1024 * 1024
TOOLS: Final = 1_000
PAGES: Final = 100
# Numbers of calls begin here: a session's own requests are below.
FIRST_CALL: Final = PAGES + 10
_LINES = 10_000
_METHOD_NOT_FOUND = -32601


class ToolCall(Struct, frozen=True):
    """A call: the tool's name and its arguments."""

    name: str
    arguments: Mapping[str, Any]


class McpSession:
    """One session. Send what ``start`` returns, then ``take`` each line and send what it returns, until ``done``.

    ``tools`` is what the server advertises. ``result`` is the answer to ``call``, which is sent when the list is
    complete and ``approve`` has returned; what it raises ends the session.
    """

    def __init__(
        self,
        call: ToolCall | None = None,
        approve: Callable[[Sequence[AdvertisedTool]], None] = lambda tools: None,
        *,
        first: int = 0,
        alone: bool = False,
        over_http: bool = False,
    ) -> None:
        self._call, self._approve = call, approve
        self._expected = ""
        self._over_http = over_http
        self._number = first
        self._pages = 0
        self._lines = 0
        # The eras that are tried: a stdio server may answer nothing before `initialize`, so there that comes first.
        self._to_try = [revisions.DISCOVER, "initialize"] if over_http else ["initialize", revisions.DISCOVER]
        self._refused: errors.ToolServerError | None = None
        self._asked_again = False
        # Whether the server speaks 2026-07-28, where each request stands alone, and tells of changes of its list.
        self.alone, self.is_changing = alone, False
        self.done = False
        self.is_called = False
        self.result_bytes = 0
        self.tools: list[AdvertisedTool] = []
        self.result: dict[str, Any] | None = None

    def start(self) -> bytes:
        """Return the first request, or that of the era which is tried next."""
        method = self._to_try.pop(0)
        self.alone = method == revisions.DISCOVER
        if self.alone:
            return self._request(method)
        about = {"name": "covenant", "version": "0"}
        return self._request(method, protocolVersion=PROTOCOL, capabilities={}, clientInfo=about)

    def list_again(self) -> bytes:
        """Return the request for the list, in a session that another object has initialized."""
        return self._request("tools/list")

    def take(self, line: bytes) -> bytes:
        """Take one line of the server. Returns what to send to it, which may be nothing.

        Raises:
            errors.ToolServerError: the line is no message of MCP, or one that a server may not send here.
        """
        self._lines += 1
        if self._lines > _LINES:
            raise _wrong(f"it sent more than {_LINES} messages")
        message = read(line)
        if message is None:
            return b""
        if "method" in message:
            return refusal(message)
        if message.get("id") != self._number:
            return b""  # an answer to nothing that waits
        if "error" in message:
            refused = _wrong(f"it refused `{self._expected}`: {text.quote(error_of(message['error']))}")
            return self._try_next(message["error"], refused)
        result = message.get("result")
        if not isinstance(result, dict):
            raise _wrong(f"its answer to `{self._expected}` has no result")
        self.result_bytes = len(line)
        return self._answered(result)

    def _try_next(self, error: Any, refused: errors.ToolServerError) -> bytes:
        """Go on after a request that the server refused: it may be one of the other era.

        Raises:
            errors.ToolServerError: it is of neither, or refused another request.
        """
        if self._expected == "initialize" or self._refused is None:
            self._refused = refused
        if self._expected not in ("initialize", revisions.DISCOVER):
            raise refused
        if self._expected == revisions.DISCOVER and revisions.NEWEST in _supported(error):
            if self._asked_again:
                raise refused
            self._asked_again = True
            return self._request(revisions.DISCOVER)
        if not self._to_try:
            raise self._refused
        return self.start()

    def _answered(self, result: dict[str, Any]) -> bytes:
        if self._expected == "initialize":
            if not is_spoken(result.get("protocolVersion")):
                spoken = ", ".join(revisions.EARLIER)
                raise _wrong(
                    f"it speaks revision {text.quote(str(result.get('protocolVersion')))} of MCP, not {spoken}"
                )
            return _line({"method": "notifications/initialized"}) + self._request("tools/list")
        if self._expected == revisions.DISCOVER:
            versions, offers = result.get("supportedVersions"), result.get("capabilities")
            if not isinstance(versions, list) or revisions.NEWEST not in versions:
                return self._try_next(
                    None, _wrong(f"it speaks none of the revisions {', '.join(revisions.SPOKEN)} of MCP")
                )
            tools = offers.get("tools") if isinstance(offers, dict) else None
            self.is_changing = isinstance(tools, dict) and tools.get("listChanged") is True
            return self._request("tools/list")
        if self._expected == "tools/list":
            return self._listed(result)
        self.result, self.done = result, True
        return b""

    def _listed(self, result: dict[str, Any]) -> bytes:
        self._pages += 1
        tools = result.get("tools")
        if not isinstance(tools, list):
            raise _wrong("its answer to `tools/list` has no list of tools")
        self.tools += filter(self._is_usable, map(_advertised, tools))
        if len(self.tools) > TOOLS or self._pages > PAGES:
            raise _wrong(f"it advertises more than {TOOLS} tools, or more than {PAGES} pages of them")
        cursor = result.get("nextCursor")
        if isinstance(cursor, str) and cursor:
            return self._request("tools/list", cursor=cursor)
        names = [tool.name for tool in self.tools]
        for name in names:
            if names.count(name) > 1:
                raise _wrong(f"it advertises the tool {text.quote(name)} twice")
        if self._call is None:
            self.done = True
            return b""
        self._approve(self.tools)
        self.is_called = True
        return self._request("tools/call", name=self._call.name, arguments=dict(self._call.arguments))

    def _is_usable(self, tool: AdvertisedTool) -> bool:
        """Whether a call may be sent: over HTTP a tool whose headers are not allowed is as good as not advertised."""
        return not (self.alone and self._over_http and revisions.is_mirrored_wrongly(tool.input_schema))

    def _request(self, method: str, **params: Any) -> bytes:
        self._number += 1
        self._expected = method
        if self.alone:
            params["_meta"] = revisions.meta()
        return _line({"id": self._number, "method": method, "params": params})


def is_spoken(revision: Any) -> bool:
    """Whether a revision, which may be any value of JSON, is one of those with an ``initialize``."""
    return isinstance(revision, str) and revision in revisions.EARLIER


def read(line: bytes) -> dict[str, Any] | None:
    """Return the message of a line; None for an empty one.

    Raises:
        errors.ToolServerError: it is none.
    """
    if not line.strip():
        return None
    try:
        message = wire_json.read(line)
    except errors.MalformedRequestError as e:
        raise _wrong(
            f"a line of its stdout is {e}", "a stdio server writes messages to stdout, and logs to stderr"
        ) from None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        raise _wrong("a line of its stdout is no JSON-RPC 2.0 message")
    return message


def refusal(message: Mapping[str, Any]) -> bytes:
    """Answer a request of the server. A notification has no answer."""
    if "id" not in message:
        return b""
    if message["method"] == "ping":
        return _line({"id": message["id"], "result": {}})
    error = {"code": _METHOD_NOT_FOUND, "message": "this client offers nothing to servers"}
    return _line({"id": message["id"], "error": error})


def _advertised(tool: Any) -> AdvertisedTool:
    name = tool.get("name") if isinstance(tool, dict) else None
    if not isinstance(name, str):
        raise _wrong("a tool that it advertises has no name")
    description, schema = tool.get("description"), tool.get("inputSchema")
    if not isinstance(description, str | None) or not isinstance(schema, dict | None):
        raise _wrong(f"the description or the input schema of its tool {text.quote(name)} is of the wrong type")
    return AdvertisedTool(name, description or "", schema)


def error_of(error: Any) -> str:
    """The words of an error."""
    return str(error.get("message")) if isinstance(error, dict) else str(error)


def _supported(error: Any) -> list[Any]:
    """The revisions that an error names, which says that the server is not one of an earlier era."""
    data = error.get("data") if isinstance(error, dict) else None
    found = data.get("supported") if isinstance(data, dict) else None
    return found if isinstance(found, list) else []


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode() + b"\n"


def _wrong(message: str, hint: str = "") -> errors.ToolServerError:
    return errors.ToolServerError(message, hint=hint or "look at the server's own log, and at its version")
