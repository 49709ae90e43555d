"""The revisions of MCP that our servers speak: what a request must carry, and what a result carries.

A request of a revision up to 2025-11-25 follows an ``initialize``. One of 2026-07-28 stands alone: ``_meta`` names its
revision and the client's capabilities, HTTP headers repeat what the message says, and ``server/discover`` replaces
``initialize`` and ``ping`` (modelcontextprotocol.io/specification/2026-07-28, ADR 0143).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from msgspec import Struct

NEWEST: Final = "2026-07-28"
# Revisions of `initialize`, oldest first. Their `tools/list` and `tools/call` are the same here.
EARLIER: Final = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
SPOKEN: Final = (NEWEST, *reversed(EARLIER))
DISCOVER: Final = "server/discover"
VERSION: Final = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES: Final = "io.modelcontextprotocol/clientCapabilities"
CLIENT: Final = "io.modelcontextprotocol/clientInfo"
SERVER: Final = "io.modelcontextprotocol/serverInfo"
# Headers of a request, in lower case. A name that begins with PARAM repeats an argument of a call.
VERSION_HEADER, METHOD_HEADER, NAME_HEADER, PARAM = "mcp-protocol-version", "mcp-method", "mcp-name", "mcp-param-"
# How long a client may keep the list of tools, in milliseconds. It is of one caller.
_CACHE: Final = {"ttlMs": 60_000, "cacheScope": "private"}
_NAMED: Final = ("tools/call", "prompts/get")
_ENCODED: Final = "=?base64?"
_TOKEN: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_NUMBER: Final = re.compile(r"-?[0-9]{1,32}(?:\.[0-9]{1,32})?")
NO_METHOD, BAD_PARAMS, MISMATCH, UNSUPPORTED = -32601, -32602, -32020, -32022


class Refusal(Struct, frozen=True):
    """An error of JSON-RPC. Over HTTP its status is 404 for a method that there is not, and else 400."""

    code: int
    message: str
    data: Mapping[str, Any] | None = None

    def error(self) -> dict[str, Any]:
        """Return the member ``error`` of the reply."""
        return {"code": self.code, "message": self.message, **({} if self.data is None else {"data": self.data})}


def negotiated(asked: Any) -> str:
    """Return the revision of the answer to an ``initialize`` that asks for one, which may be any value of JSON."""
    return asked if isinstance(asked, str) and asked in EARLIER else EARLIER[-1]


def stands_alone(method: str, params: Mapping[str, Any], headers: Mapping[str, str] | None) -> bool | Refusal:
    """Return whether a request is one of 2026-07-28; else it is of an earlier revision, or refused.

    ``headers`` are those of HTTP that this module names, by names in lower case; None where there is no HTTP.
    """
    meta = params.get("_meta")
    meta = meta if isinstance(meta, dict) else {}
    said = meta.get(VERSION)
    header = None if headers is None else headers.get(VERSION_HEADER)
    if method != DISCOVER and VERSION not in meta and (header is None or header in EARLIER):
        return False
    if VERSION not in meta and header is not None and header not in SPOKEN:
        return _unsupported(header)
    if not isinstance(said, str):
        return Refusal(BAD_PARAMS, f"`_meta` of the request lacks `{VERSION}`")
    if headers is not None and header != said:
        return Refusal(MISMATCH, "the header MCP-Protocol-Version is not the revision in `_meta`")
    if said in EARLIER:
        return False
    if said != NEWEST:
        return _unsupported(said)
    if not isinstance(meta.get(CAPABILITIES), dict):
        return Refusal(BAD_PARAMS, f"`_meta` of the request lacks `{CAPABILITIES}`")
    return (None if headers is None else _repeated(method, params, headers)) or True


def _unsupported(asked: str) -> Refusal:
    data = {"supported": list(SPOKEN), "requested": asked}
    return Refusal(UNSUPPORTED, f"revisions of MCP are {', '.join(SPOKEN)}", data)


def _repeated(method: str, params: Mapping[str, Any], headers: Mapping[str, str]) -> Refusal | None:
    if headers.get(METHOD_HEADER) != method:
        return Refusal(MISMATCH, "the header Mcp-Method is not the method of the message")
    if method in _NAMED and _decoded(headers.get(NAME_HEADER)) != params.get("name"):
        return Refusal(MISMATCH, "the header Mcp-Name is not the name in the message")
    return None


def check_arguments(schema: Any, arguments: Mapping[str, Any], headers: Mapping[str, str] | None) -> Refusal | None:
    """Return the refusal of a call whose headers are not its arguments, as ``x-mcp-header`` in its schema wants."""
    if headers is None:
        return None
    for name, path in mirrored(schema):
        value: Any = arguments
        for part in path:
            value = value.get(part) if isinstance(value, dict) else None
        found = _decoded(headers.get(PARAM + name.lower()))
        if not _same(value, found):
            return Refusal(MISMATCH, f"the header Mcp-Param-{name} is not the argument `{'.'.join(path)}`")
    return None


def mirrored(schema: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the headers that the arguments of a tool are repeated in: the name, and the path of the argument."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, one in properties.items() if isinstance(properties, dict) else ():
        if isinstance(one, dict) and isinstance(header := one.get("x-mcp-header"), str):
            yield header, (*path, name)
        yield from mirrored(one, (*path, name))


def is_mirrored_wrongly(schema: Any) -> bool:
    """Whether ``x-mcp-header`` is somewhere in a schema where no client may heed it, or names no header."""
    names: list[str] = []
    return _is_wrong(schema, names, is_argument=False, is_reached=True) or len(names) != len(set(names))


def _is_wrong(schema: Any, names: list[str], *, is_argument: bool, is_reached: bool) -> bool:
    if isinstance(schema, list):
        return any(_is_wrong(one, names, is_argument=False, is_reached=False) for one in schema)
    if not isinstance(schema, dict):
        return False
    if "x-mcp-header" in schema:
        name = schema["x-mcp-header"]
        if not (is_argument and is_reached and isinstance(name, str) and _TOKEN.fullmatch(name)):
            return True
        if schema.get("type") not in ("string", "integer", "boolean"):
            return True
        names.append(name.lower())
    properties = schema.get("properties") if is_reached else None
    inner = properties.values() if isinstance(properties, dict) else ()
    others = (one for key, one in schema.items() if not (key == "properties" and isinstance(properties, dict)))
    return any(_is_wrong(one, names, is_argument=True, is_reached=True) for one in inner) or any(
        _is_wrong(one, names, is_argument=False, is_reached=False) for one in others
    )


def _decoded(value: str | None) -> str | None:
    if value is None or not (value.startswith(_ENCODED) and value.endswith("?=")):
        return value
    try:
        return base64.b64decode(value[len(_ENCODED) : -2], validate=True).decode()
    except ValueError:  # also of text that is not ASCII: aiohttp passes bytes of a header on as surrogates
        return None


def _same(value: Any, header: str | None) -> bool:
    if value is None or header is None:
        return value is None and header is None
    if isinstance(value, bool):
        return header == str(value).lower()
    if isinstance(value, int | float):
        return bool(_NUMBER.fullmatch(header)) and Decimal(header) == value
    return bool(header == value)


def stamp(name: str, version: str) -> dict[str, Any]:
    """Return what each result of 2026-07-28 has beside its own keys, of a server of this name."""
    return {"resultType": "complete", "_meta": {SERVER: {"name": name, "version": version}}}


def own_result(method: str, stamped: Mapping[str, Any], tools: list[dict[str, Any]]) -> dict[str, Any] | Refusal:
    """Return the result of a request of 2026-07-28 that is no call of a tool."""
    if method == DISCOVER:
        result: dict[str, Any] = {"supportedVersions": list(SPOKEN), "capabilities": {"tools": {}}}
    elif method == "tools/list":
        result = {"tools": tools}
    else:
        return Refusal(NO_METHOD, f"there is no method of this name in revision {NEWEST}")
    return {**result, **_CACHE, **stamped}


def meta() -> dict[str, Any]:
    """Return ``_meta`` of a request of ours to a server that speaks 2026-07-28."""
    return {VERSION: NEWEST, CAPABILITIES: {}, CLIENT: {"name": "covenant", "version": "0"}}
