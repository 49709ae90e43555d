"""docs/schema/openapi.json is what the routes and models say, and itself valid.

Regenerate with: .venv/bin/python tests/golden/test_openapi.py
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from covenant.adapters import http_routes, openapi

PATH = pathlib.Path(__file__).resolve().parents[2] / "docs" / "schema" / "openapi.json"


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_the_document_is_what_the_routes_and_models_say() -> None:
    assert PATH.read_text() == openapi.text(), "regenerate docs/schema/openapi.json (see above)"


def test_it_is_valid_by_the_published_schema() -> None:
    """https://spec.openapis.org/oas/3.1/schema/2022-10-07, as schemathesis has it."""
    document = json.loads(PATH.read_text())
    assert [str(error) for error in OPENAPI_31_VALIDATOR.iter_errors(document)] == []
    # The validator sees: a document that lacks what must be there is refused.
    assert not OPENAPI_31_VALIDATOR.is_valid({**document, "info": {}})


def test_everything_that_it_refers_to_is_there_and_the_other_way_round() -> None:
    document = openapi.document()
    named = {f"#/components/{kind}/{name}" for kind, all_of_it in document["components"].items() for name in all_of_it}
    used = set(references(document))
    assert used <= named
    assert {name for name in named - used if not name.startswith("#/components/securitySchemes/")} == set()


def test_every_operation_has_a_name_of_its_own_and_says_when_it_needs_no_token() -> None:
    document = openapi.document()
    operations = [one for path in document["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names) == len(http_routes.TABLE)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)
    open_ones = {path for path, methods in document["paths"].items() for one in methods.values() if "security" in one}
    assert open_ones == {"/health", "/version", "/openapi.json", "/a2a/peer-tasks"}


if __name__ == "__main__":
    PATH.write_text(openapi.text())
