"""Build a request of ``covenant.wire`` from a path, a query and a body, in the same way for every route."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from covenant.adapters.http.routes import Route
from covenant.wire import requests
from policy import errors, wire_json
from policy.signing import strict_json

# `Accept` selects the form of the response, not a field; a list has no form in a query.
UNSAID: Final = frozenset({"kind", "prefer_stream", "types"})
_REF: Final = "#/components/schemas/{model}"
_INTEGER: Final = re.compile(r"-?[0-9]{1,24}")
_NUMBER: Final = re.compile(r"-?[0-9]{1,24}(?:\.[0-9]{1,24})?(?:[eE][+-]?[0-9]{1,3})?")


@functools.cache
def schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of request, with OpenAPI references and definitions under ``$defs``."""
    found = requests.KINDS[kind].model_json_schema(ref_template=_REF)
    for defined in found.get("$defs", {}).values():
        # The tag of an alternative is required, although each alternative has a default for it.
        tags = [name for name, each in defined.get("properties", {}).items() if "const" in each]
        if tags:
            defined["required"] = sorted({*defined.get("required", []), *tags})
    return found


def fields(route: Route) -> dict[str, dict[str, Any]]:
    """Return the fields of a route's request except its kind, with their schemas."""
    if not route.kind:
        return {}
    return {name: each for name, each in schema(route.kind)["properties"].items() if name not in UNSAID}


def in_query(route: Route) -> dict[str, str]:
    """Return the query parameters of a route and the field of each."""
    if route.method != "GET":
        return {}
    return {route.renamed.get(name, name): name for name in fields(route) if name not in route.parameters}


def build(
    route: Route, *, path: Mapping[str, str], query: Iterable[tuple[str, str]], body: bytes = b""
) -> requests.Request:
    """Build the request. Query parameters that the route does not have are ignored, as unknown fields are.

    Raises:
        errors.MalformedRequestError: the body is no JSON object, a name occurs twice, or a field is missing or wrong.
    """
    document: dict[str, Any] = {**route.defaults} if route.method == "GET" else _body(route, body)
    document |= _query(route, query)
    document |= {name: path[name] for name in route.parameters}
    document["kind"] = route.kind
    return requests.parse(json.dumps(document).encode())


def _body(route: Route, body: bytes) -> dict[str, Any]:
    # An empty body means `{}`: several requests have no required field.
    document = wire_json.read(body) if body else {}
    if not isinstance(document, dict):
        raise errors.MalformedRequestError("a body is a JSON object")
    # Version 1's page does not say if these bodies have the field around them; both forms are accepted.
    if route.inside and route.inside not in document and document:
        document = {route.inside: document}
    document.pop("prefer_stream", None)
    return document


def _query(route: Route, query: Iterable[tuple[str, str]]) -> dict[str, Any]:
    names, known, found = in_query(route), fields(route), dict[str, Any]()
    for name, text in query:
        if (field := names.get(name)) is None:
            continue
        if field in found:
            raise errors.MalformedRequestError(f"`{strict_json.shown(name)}` stands twice in the query")
        found[field] = _typed(text, known[field])
    for field in route.lenient & found.keys():
        if found[field] not in _choices(known[field]):
            del found[field]
    return found


def _alternatives(one: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [alternative for alternative in one.get("anyOf", [one]) if alternative.get("type") != "null"]


def _choices(one: Mapping[str, Any]) -> list[Any]:
    return [choice for alternative in _alternatives(one) for choice in alternative.get("enum", ())]


def _typed(text: str, one: Mapping[str, Any]) -> Any:
    """Convert the text of a query to the type in the field's schema, if possible."""
    kinds = {alternative.get("type") for alternative in _alternatives(one)}
    if "integer" in kinds and _INTEGER.fullmatch(text):
        return int(text)
    if "number" in kinds and _NUMBER.fullmatch(text):
        return float(text)
    if "boolean" in kinds and text in ("true", "false"):
        return text == "true"
    return text
