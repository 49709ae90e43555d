"""One MCP server for all tools of a run: messages of its clients in, lines for the tool servers and replies out.

A client sees the granted tools of all servers, each as ``ALIAS__NAME``; at the path of one server, by their own names.
A server is started by the first call of a tool of it. ``ToolProxy`` holds each of its calls to the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec
from msgspec import Struct, structs

from policy import errors, wire_json
from policy.manifest import text
from policy.manifest.tools.document import Server, ToolManifest
from sandbox.network.tools import revisions, spawn_tool, wire
from sandbox.network.tools.guard import ToolGuard
from sandbox.network.tools.proxy import Output, ToolProxy, refused_result
from sandbox.network.tools.revisions import Refusal
from sandbox.rate_limit import Tokens

SEPARATOR: Final = "__"
# Starts of one server: so many at once, and then one in so many seconds.
STARTS, START_SECONDS = 4, 15.0
# Children that clients wait for at one time. One that a client gave up on is stopped, and may still be ending.
CHILDREN: Final = 64
_INVALID, _NO_METHOD, _BAD_PARAMS, _CANCELLED = -32600, -32601, -32602, -32800


class Effects(Struct):
    """Effects of a message: replies by number, lines for servers by alias, servers to start, children by number, and
    questions to an operator.

    A child without bytes is one whose client is gone. A question says which call is held, or that the client of one is
    gone (wire).
    """

    replies: list[tuple[int, int, bytes]] = msgspec.field(default_factory=list)
    lines: list[tuple[str, bytes]] = msgspec.field(default_factory=list)
    starts: list[str] = msgspec.field(default_factory=list)
    children: list[tuple[int, bytes]] = msgspec.field(default_factory=list)
    questions: list[dict[str, Any]] = msgspec.field(default_factory=list)


class _Place(Struct, frozen=True):
    server: Server
    name: str


class ClientRequest(Struct, frozen=True):
    """A request of a client: its id, what its result has beside its own keys, and its headers where they count."""

    ident: str | int
    stamp: Mapping[str, Any]
    headers: Mapping[str, str] | None


class _HeldCall(Struct, frozen=True):
    place: _Place
    asked: ClientRequest
    uri: str
    arguments: dict[str, Any]


class ToolDesk:
    """Serve the clients of one run. Numbers of requests are the caller's, each used once.

    ``spawns`` says that the run may have children, which the tool ``spawn`` starts.
    """

    def __init__(
        self, guard: ToolGuard, tools: ToolManifest, *, clock: Callable[[], float], spawns: bool = False
    ) -> None:
        self._spawns = spawns
        self._children: dict[int, ClientRequest] = {}
        self._guard, self._tools, self._clock = guard, tools, clock
        self._servers = {one.alias: one for one in tools.servers}
        self._places = {
            f"{one.alias}{SEPARATOR}{tool.name}": _Place(one, tool.name)
            for one in self._servers.values()
            for tool in one.tools
        }
        self._proxies: dict[str, ToolProxy] = {}
        self._running: set[str] = set()
        self._open: dict[int, tuple[str, bytes]] = {}
        self._held: dict[int, _HeldCall] = {}
        self._rates = {alias: Tokens(1 / START_SECONDS, STARTS, clock()) for alias in self._servers}

    # --- clients --------------------------------------------------------------------------------------

    def take(self, number: int, alias: str, raw: bytes, headers: Mapping[str, str] | None = None) -> Effects:
        """Take a message of a client, at the path of one server or, with an empty ``alias``, of all.

        ``headers`` are those of MCP, for a message over HTTP.
        """
        if alias and alias not in self._servers:
            return _reply(number, wire.UNKNOWN, b"")
        try:
            message = wire_json.read(raw)
        except errors.MalformedRequestError as e:
            return _reply(number, wire.MALFORMED, _error(None, _INVALID, e.message))
        if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
            return _reply(number, wire.MALFORMED, _error(None, _INVALID, "a message is one JSON-RPC 2.0 object"))
        method, ident, params = message.get("method"), message.get("id"), message.get("params", {})
        if not isinstance(method, str) or "id" not in message:
            effects = _reply(number, wire.NOTHING, b"")
            return self._given_up(params, effects) if method == "notifications/cancelled" else effects
        if not isinstance(ident, str | int) or isinstance(ident, bool) or not isinstance(params, dict):
            said = "a request has an id and parameters by name"
            return _reply(number, wire.MALFORMED, _error(None, _INVALID, said))
        alone = revisions.stands_alone(method, params, headers)
        if isinstance(alone, Refusal):
            return _refusal(number, ident, alone)
        stamp = revisions.stamp(*self._name(alias)) if alone else {}
        if method == "tools/call":
            return self._call(number, alias, ClientRequest(ident, stamp, headers if alone else None), params)
        if not alone:
            return _reply(number, wire.ANSWER, self._own(method, alias, ident, params))
        result = revisions.own_result(method, stamp, list(self._listed(alias)))
        if isinstance(result, Refusal):
            return _refusal(number, ident, result)
        return _reply(number, wire.ANSWER, _message({"id": ident, "result": result}))

    def _name(self, alias: str) -> tuple[str, str]:
        return (alias, self._servers[alias].version) if alias else ("covenant", "1")

    def _own(self, method: str, alias: str, ident: str | int, params: Mapping[str, Any]) -> bytes:
        """Answer what needs no server, in a revision with ``initialize``."""
        if method == "initialize":
            name, version = self._name(alias)
            about: dict[str, Any] = {
                "protocolVersion": revisions.negotiated(params.get("protocolVersion")),
                "capabilities": {"tools": {}},
                "serverInfo": {"name": name, "version": version},
            }
            return _message({"id": ident, "result": about})
        if method == "ping":
            return _message({"id": ident, "result": {}})
        if method == "tools/list":
            return _message({"id": ident, "result": {"tools": list(self._listed(alias))}})
        return _error(ident, _NO_METHOD, f"there is no method {text.quote(method)}")

    def _listed(self, alias: str) -> Iterator[dict[str, Any]]:
        if self._spawns and not alias:
            yield spawn_tool.ADVERTISED
        for one in self._servers.values():
            for tool in one.tools:
                if alias in ("", one.alias) and self._guard.allows(str(one.uri(tool))):
                    name = tool.name if alias else f"{one.alias}{SEPARATOR}{tool.name}"
                    yield {"name": name, "description": tool.description, "inputSchema": tool.input_schema}

    def _call(self, number: int, alias: str, asked: ClientRequest, params: Mapping[str, Any]) -> Effects:
        ident = asked.ident
        name, arguments = params.get("name"), params.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            said = "a call has a name and arguments by name"
            return _reply(number, wire.ANSWER, _error(ident, _BAD_PARAMS, said))
        if self._spawns and not alias and name == spawn_tool.NAME:
            return self._spawn(number, asked, arguments)
        place = _Place(self._servers[alias], name) if alias else self._places.get(name)
        if place is None:
            self._guard.unknown(*name.rpartition(SEPARATOR)[::2], arguments)
            said = f"there is no tool {text.quote(name)}"
            return _reply(number, wire.ANSWER, _error(ident, _BAD_PARAMS, said))
        uri = f"matrix://tool/mcp/{place.server.alias}/{place.name}@{place.server.version}"
        tool = next((one for one in place.server.tools if one.name == place.name), None)
        wrong = revisions.check_arguments(tool and tool.input_schema, arguments, asked.headers)
        if wrong is not None:
            return _refusal(number, ident, wrong)
        held = _HeldCall(place, asked, uri, arguments)
        return self._hold(number, held) if self._guard.asks(uri) else self._make(number, held)

    def _hold(self, number: int, held: _HeldCall) -> Effects:
        """Hold a call for an operator, unless it is refused for another reason."""
        try:
            question = self._guard.question(held.uri, held.arguments)
            if len(self._held) >= wire.HELD_CALLS:
                raise self._guard.unapproved(held.uri, held.arguments)
        except (errors.ToolDeniedError, errors.ToolArgumentsError, errors.UsageError) as e:
            return _result(number, held.asked, refused_result(e))
        self._held[number] = held
        return Effects(questions=[{"number": number, **question}])

    def answered(self, number: int, *, granted: bool) -> Effects:
        """Make a call that was held, or refuse it. The client of one that is not there any more is gone."""
        held = self._held.pop(number, None)
        if held is None:
            return Effects()
        if granted:
            return self._make(number, held, approved=True)
        return _result(number, held.asked, refused_result(self._guard.unapproved(held.uri, held.arguments)))

    def _make(self, number: int, held: _HeldCall, *, approved: bool = False) -> Effects:
        effects, server = Effects(), held.place.server
        self._open[number] = server.alias, json.dumps(held.asked.ident).encode()
        proxy = self._proxies.get(server.alias)
        if proxy is None:
            proxy = self._proxies[server.alias] = ToolProxy(self._guard, self._tools, server, clock=self._clock)
        stamp = held.asked.stamp
        out = proxy.call(number, held.place.name, held.arguments, approved=approved, stamp=stamp)
        self._put(server.alias, out, effects)
        if proxy.waits and server.alias not in self._running:
            self._start(server.alias, proxy, effects)
        return effects

    def _spawn(self, number: int, asked: ClientRequest, arguments: Mapping[str, Any]) -> Effects:
        wrong = spawn_tool.check(arguments)
        if wrong or len(self._children) >= CHILDREN:
            said = wrong or f"at most {CHILDREN} children are waited for at one time"
            return _result(number, asked, spawn_tool.failed(said))
        self._children[number] = asked
        return Effects(children=[(number, json.dumps(arguments).encode())])

    def child_ended(self, number: int, raw: bytes) -> Effects:
        """Answer the call that started a child. Nothing where its client gave up."""
        if (asked := self._children.pop(number, None)) is None:
            return Effects()
        return _result(number, asked, spawn_tool.result(json.loads(raw)))

    def _start(self, alias: str, proxy: ToolProxy, effects: Effects) -> None:
        """Start a server, which a call that was allowed waits for."""
        if not self._rates[alias].take(self._clock()):
            effects.replies += self.ended(alias).replies
            return
        self._running.add(alias)
        effects.starts.append(alias)
        self._put(alias, proxy.start(), effects)

    def cancel(self, number: int) -> Effects:
        """End a call whose client no longer waits. It gets no reply."""
        effects = Effects()
        if self._children.pop(number, None) is not None:
            effects.children.append((number, b""))
        if self._held.pop(number, None) is not None:
            effects.questions.append({"number": number, "gone": True})
        if (found := self._open.pop(number, None)) is not None and found[0] in self._proxies:
            self._put(found[0], self._proxies[found[0]].cancel(number), effects)
        return effects

    def _given_up(self, params: Any, effects: Effects) -> Effects:
        """End the call whose id a notification names. Ids are of the whole agent: one of two calls ends neither."""
        wanted = json.dumps(params.get("requestId")).encode() if isinstance(params, dict) else b""
        idents = {number: ident for number, (_, ident) in self._open.items()}
        idents |= {number: json.dumps(asked.ident).encode() for number, asked in self._children.items()}
        idents |= {number: json.dumps(held.asked.ident).encode() for number, held in self._held.items()}
        found = [number for number, ident in idents.items() if ident == wanted]
        if len(found) != 1:
            return effects
        ended = self.cancel(found[0])
        error = _error(json.loads(wanted), _CANCELLED, "the client gave the call up")
        effects.replies.append((found[0], wire.ANSWER, error))
        return structs.replace(ended, replies=effects.replies)

    # --- servers --------------------------------------------------------------------------------------

    def from_server(self, alias: str, line: bytes) -> Effects:
        """Take a line of a server. A server that does not speak MCP has ended for its clients.

        Raises:
            errors.ToolServerError: it does not speak MCP, or sends too much that was not asked for.
        """
        effects = Effects()
        if alias in self._proxies:
            self._put(alias, self._proxies[alias].from_server(line), effects)
        return effects

    def ended(self, alias: str) -> Effects:
        """End the calls of a server that has ended, or could not be started. The next call starts it anew."""
        effects = Effects()
        self._running.discard(alias)
        if (proxy := self._proxies.pop(alias, None)) is not None:
            self._put(alias, proxy.ended(), effects)
        effects.lines.clear()
        return effects

    def close(self) -> None:
        """Write what was not written yet: the end of each call, and refusals that were counted."""
        for proxy in self._proxies.values():
            proxy.ended()
        self._guard.close()

    def due(self) -> float | None:
        """When the next call is late, by the clock."""
        return min((due for one in self._proxies.values() if (due := one.due()) is not None), default=None)

    def is_idle(self, alias: str) -> bool:
        """Whether a server owes nothing."""
        return alias not in self._proxies or self._proxies[alias].is_idle

    def tick(self) -> Effects:
        """End the calls that are late."""
        effects = Effects()
        for alias, proxy in self._proxies.items():
            self._put(alias, proxy.tick(), effects)
        return effects

    def _put(self, alias: str, out: Output, effects: Effects) -> None:
        if out.server:
            effects.lines.append((alias, out.server))
        for line in out.client.splitlines():
            number, rest = _numbered(line)
            if (found := self._open.pop(number, None)) is not None:
                effects.replies.append((number, wire.ANSWER, _HEAD + found[1] + rest))


# How each line of a proxy begins, before the number of its request (proxy.py writes them).
_HEAD: Final = b'{"jsonrpc":"2.0","id":'


def _numbered(line: bytes) -> tuple[int, bytes]:
    assert line.startswith(_HEAD)
    number, comma, rest = line[len(_HEAD) :].partition(b",")
    return int(number), comma + rest


def _reply(number: int, said: int, message: bytes) -> Effects:
    return Effects(replies=[(number, said, message)])


def _error(ident: str | int | None, code: int, said: str) -> bytes:
    return _message({"id": ident, "error": {"code": code, "message": said}})


def _result(number: int, asked: ClientRequest, result: Mapping[str, Any]) -> Effects:
    return _reply(number, wire.ANSWER, _message({"id": asked.ident, "result": {**result, **asked.stamp}}))


def _refusal(number: int, ident: str | int, refusal: Refusal) -> Effects:
    said = wire.NO_METHOD if refusal.code == revisions.NO_METHOD else wire.MALFORMED
    return _reply(number, said, _message({"id": ident, "error": refusal.error()}))


def _message(message: Mapping[str, Any]) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode()
