"""docs/schema/openapi.json and the tables of docs/http-routes.md are those of the routes and models.

Regenerate with: .venv/bin/python tests/golden/test_openapi.py
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from covenant.adapters.http import openapi, requests
from covenant.adapters.http import routes as http_routes
from covenant.adapters.http.routes import Route
from covenant.wire import responses

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
PATH, PAGE = DOCS / "schema" / "openapi.json", DOCS / "http-routes.md"
_HEAD = "| route | query or body | answer | |\n|---|---|---|---|\n"
_TABLE = re.compile(re.escape(_HEAD) + r"(?:\|.*\n)*")


def table(routes: Sequence[Route]) -> str:
    """The routes as rows of a page; a name with `?` may be left out, one with a value has that then."""
    rows = []
    for route in routes:
        required = set(requests.schema(route.kind).get("required", [])) - set(route.defaults) if route.kind else set()
        names = {field: name for name, field in requests.in_query(route).items()}
        said = [
            f"`{names.get(name, name)}`{_default(route.defaults.get(name, one.get('default')), name in required)}"
            for name, one in requests.fields(route).items()
            if name not in route.parameters
        ]
        answer = f"`{route.answer}`" if route.answer in responses.KINDS else ""
        rows.append(f"| `{route.method} {route.path}` | {', '.join(said)} | {answer} | {route.about} |\n")
    return _HEAD + "".join(rows)


def _default(value: Any, required: bool) -> str:
    if required:
        return ""
    return f" = {value}" if isinstance(value, int) and not isinstance(value, bool) else "?"


def page(text: str) -> str:
    """The page with its tables as they are to be."""
    tables = iter([table(http_routes.VERSION_1), table(http_routes.OURS)])
    return _TABLE.sub(lambda _: next(tables), text)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_document_is_what_routes_and_models_say() -> None:
    assert PATH.read_text() == openapi.text(), "regenerate docs/schema/openapi.json (see above)"


def test_page_has_every_route_with_its_fields() -> None:
    text = PAGE.read_text()
    assert text.count(_HEAD) == 2
    assert text == page(text), "regenerate docs/http-routes.md (see above)"


def test_it_is_valid_by_published_schema() -> None:
    """https://spec.openapis.org/oas/3.1/schema/2022-10-07, as schemathesis has it."""
    document = json.loads(PATH.read_text())
    assert [str(error) for error in OPENAPI_31_VALIDATOR.iter_errors(document)] == []
    # The validator sees: a document that lacks what must be there is refused.
    assert not OPENAPI_31_VALIDATOR.is_valid({**document, "info": {}})


def test_everything_that_it_refers_to_is_there_and_other_way_round() -> None:
    document = openapi.document()
    named = {f"#/components/{kind}/{name}" for kind, all_of_it in document["components"].items() for name in all_of_it}
    used = set(references(document))
    assert used <= named
    assert {name for name in named - used if not name.startswith("#/components/securitySchemes/")} == set()


def test_every_operation_has_name_of_its_own_and_says_when_it_needs_no_token() -> None:
    document = openapi.document()
    operations = [one for path in document["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names) == len(http_routes.TABLE)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)
    open_ones = {path for path, methods in document["paths"].items() for one in methods.values() if "security" in one}
    assert open_ones == {"/health", "/version", "/openapi.json", "/a2a/peer-tasks"}


if __name__ == "__main__":
    PATH.write_text(openapi.text())
    PAGE.write_text(page(PAGE.read_text()))
