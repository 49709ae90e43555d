"""The OpenAPI 3.1 document of the gateway, from the table of routes and the models of ``covenant.wire``.

docs/schema/openapi.json is its output; tests/golden/test_openapi.py compares and regenerates that file, and
tests/daemon/test_openapi.py tests a daemon against it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from covenant.adapters.http import requests, routes
from covenant.adapters.http.routes import Route
from covenant.wire import responses

VERSION: Final = "3.1.0"
JSON: Final = "application/json"
STREAM: Final = "text/event-stream"
METRICS: Final = "text/plain"

# The gateway's own refusals. A refusal by a request's handler has status 200 and kind `error`.
REFUSALS: Final[Mapping[str, str]] = {
    "400": "The request is malformed.",
    "401": "No token that lets somebody in.",
    "403": "Another origin's page may not ask here.",
    "404": "There is no such path.",
    "405": "The path has no such method.",
    "408": "The body did not come in time.",
    "413": "The body is larger than 8 MiB.",
    "415": "The body is not application/json, or is compressed.",
    "421": "The Host is none of this server's.",
    "429": "Too many streams are open, or too many tokens were wrong.",
    "500": "The daemon failed.",
    "503": "The registry of peers cannot be read, a refusal cannot be written down, or the daemon stops.",
}
_OF_BODIES: Final = frozenset({"408", "413", "415"})
_OF_TOKENS: Final = frozenset({"401", "429"})


def document() -> dict[str, Any]:
    """Return the whole document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes.TABLE:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": VERSION,
        "info": {
            "title": "covenantd",
            "version": "1",
            "summary": "The control plane of agents on this machine.",
            "description": "Loopback only. What a handler refuses comes back as 200 with `kind` `error`.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://127.0.0.1:8421"}],
        "security": [{"bearer": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer", "bearerFormat": "base58"}},
            "responses": {name: _refusal(name, about) for name, about in REFUSALS.items()},
            "schemas": dict(sorted(_schemas().items())),
        },
    }


def text() -> str:
    """Return the document as it is served and published."""
    return json.dumps(document(), indent=2) + "\n"


# A message of a client of MCP.
_MESSAGE: Final[Mapping[str, Any]] = {
    "type": "object",
    "required": ["jsonrpc", "method"],
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer"], "maxLength": 256},
        "method": {"type": "string"},
        "params": {"type": "object"},
    },
}


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": route.operation, "summary": route.about}
    if route.open:
        operation["security"] = []
    if parameters := [*_path_parameters(route), *_query_parameters(route), *_header_parameters(route)]:
        operation["parameters"] = parameters
    if route.method == "POST" and route.kind:
        operation["requestBody"] = _request_body(route)
    if route.path == "/mcp":
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _MESSAGE}}}
    operation["responses"] = _answers(route)
    if route.path == "/mcp":
        operation["responses"]["202"] = {"description": "A notification, which has no reply."}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    of_path = {"type": "string", "pattern": f"^{routes.SEGMENT}$"}
    return [{"name": name, "in": "path", "required": True, "schema": of_path} for name in route.parameters]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    known = requests.fields(route)
    required = requests.schema(route.kind).get("required", []) if route.kind else []
    found = []
    for name, field in requests.in_query(route).items():
        of_field = _without_null(known[field])
        if field in route.defaults:
            of_field["default"] = route.defaults[field]
        if field in route.lenient:
            # An unknown value sets no filter, so any text is valid.
            of_field = {"type": "string", "examples": of_field.get("enum", [])}
        one: dict[str, Any] = {"name": name, "in": "query", "schema": of_field}
        if field in required and field not in route.defaults:
            one["required"] = True
        found.append(one)
    if route.stream == "intent" and route.method == "GET":
        about = "Whether every step is told, in envelopes; otherwise version 1's events of what the agent does."
        found.append(
            {"name": "extended", "in": "query", "description": about, "schema": {"type": "boolean", "default": False}}
        )
    if route.stream and route.method == "GET" and route.kind:
        about = "Of a stream: whether it goes on with what is to come."
        found.append(
            {"name": "follow", "in": "query", "description": about, "schema": {"type": "boolean", "default": True}}
        )
    return found


def _header_parameters(route: Route) -> list[dict[str, Any]]:
    if not (route.stream and route.method == "GET" and route.kind):
        return []
    about = "Of a stream: the last id that was seen; what is not newer is left out."
    return [{"name": "Last-Event-ID", "in": "header", "description": about, "schema": {"type": "string"}}]


def _without_null(one: Mapping[str, Any]) -> dict[str, Any]:
    """Remove null: a query has no null, a missing parameter is left out."""
    rest = {key: value for key, value in one.items() if key not in ("anyOf", "default")}
    if "default" in one and one["default"] is not None:
        rest["default"] = one["default"]
    others = [alternative for alternative in one.get("anyOf", []) if alternative.get("type") != "null"]
    return rest | (others[0] if len(others) == 1 else {"anyOf": others} if others else {})


def _request_body(route: Route) -> dict[str, Any]:
    known = requests.fields(route)
    required = [name for name in requests.schema(route.kind).get("required", []) if name in known]
    whole: dict[str, Any] = {"type": "object", "properties": known}
    if required:
        whole["required"] = required
    if route.inside:
        inner = known[route.inside]
        # Distinguished by the field, which none of these objects contains itself.
        bare = {"allOf": [{"$ref": inner["$ref"]}, {"not": {"required": [route.inside]}}]}
        whole = {"oneOf": [whole | {"required": [route.inside]}, bare]}
    return {"required": bool(required), "content": {JSON: {"schema": whole}}}


def _answers(route: Route) -> dict[str, Any]:
    refusals = set(REFUSALS)
    if route.method == "GET" or not route.kind:
        refusals -= _OF_BODIES - {"413"}
    if route.open:
        refusals -= _OF_TOKENS
    content = _content(route)
    done = {"200": {"description": "Done, or refused by its handler.", "content": content}} if content else {}
    return done | {status: {"$ref": f"#/components/responses/{status}"} for status in sorted(refusals)}


def _content(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.path == "/metrics":
        return {METRICS: {"schema": {"type": "string"}}}
    if route.path == "/openapi.json":
        return {JSON: {"schema": {"type": "object"}}}
    if route.path == "/mcp":
        return {JSON: {"schema": {"type": "object"}}}
    error = _ref("responses.Error")
    if route.answer:
        own = _ref(_answer_name(route.answer))
        content[JSON] = {"schema": own if route.open else {"oneOf": [own, error]}}
    elif route.kind or route.parameters:
        content[JSON] = {"schema": error}
    if route.stream:
        content[STREAM] = {"schema": {"type": "string"}}
    return content


def _answer_name(kind: str) -> str:
    return f"responses.{responses.KINDS[kind].__name__}" if kind in responses.KINDS else f"gateway.{kind}"


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _refusal(status: str, about: str) -> dict[str, Any]:
    schema = {"oneOf": [_ref("gateway.fault"), _ref("responses.Error")]} if status == "500" else _ref("responses.Error")
    return {"description": about, "content": {JSON: {"schema": schema}}}


def _schemas() -> dict[str, Any]:
    found: dict[str, Any] = {
        "gateway.fault": _closed({"error": {"type": "string"}}),
        "gateway.health": _closed({"status": {"const": "ok"}}),
        "gateway.version": _closed(
            {
                "kind": {"const": "protocol_info"},
                "info": {"type": "object"},
                "name": {"const": "covenantd"},
                "version": {"type": "string"},
            }
        ),
    }
    for route in routes.TABLE:
        if route.kind:
            _take(found, requests.schema(route.kind).get("$defs", {}))
        if route.answer in responses.KINDS:
            _whole(found, responses.KINDS[route.answer])
    _whole(found, responses.Error)
    return found


def _whole(found: dict[str, Any], model: type[responses.Response]) -> None:
    whole = model.model_json_schema(ref_template="#/components/schemas/{model}")
    _take(found, whole.pop("$defs", {}))
    # `kind` has a default, and is always present.
    whole["required"] = ["kind", *whole.get("required", [])]
    _take(found, {f"responses.{model.__name__}": whole})


def _take(found: dict[str, Any], defined: Mapping[str, Any]) -> None:
    for name, one in defined.items():
        # INVARIANT: each name has one schema; of two classes with one name, one would replace the other.
        if found.setdefault(name, one) != one:
            raise LookupError(f"two schemas are called {name}")


def _closed(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": list(properties)}
