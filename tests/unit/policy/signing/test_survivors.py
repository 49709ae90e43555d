"""Kill mutants of the signed documents that no other test detects (docs/mutants.md)."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from policy import errors
from policy.signing import keyfile, revocation, root, statement
from tests import signing_kit as kit


def _models() -> list[type[pydantic.BaseModel]]:
    modules = (keyfile, revocation, root, statement)
    values = [(module.__name__, value) for module in modules for value in vars(module).values()]
    classes = [(name, value) for name, value in values if isinstance(value, type) and value.__module__ == name]
    return [value for _, value in classes if issubclass(value, pydantic.BaseModel)]


def test_every_document_is_closed_strict_and_frozen() -> None:
    # Listed here and not at collection, so that the list includes a planted fault.
    found = _models()
    assert len(found) > 15
    assert {keyfile._Closed, revocation._Closed, root._Closed} <= set(found)
    for model in found:
        config = model.model_config
        assert (config.get("extra"), config.get("strict"), config.get("frozen")) == ("forbid", True, True), model


def _revocations(name: str, number: int) -> revocation.Revocations:
    made = {"at": 1, "reason": "lost"}
    rows = {
        "keys": [{"keyid": f"{n:064x}", "name": None, **made} for n in range(number)],
        "manifests": [{"payload_digest": f"{n:064x}", **made} for n in range(number)],
        "serials": [{"agent_id": f"a{n:04}", "serial_at_most": 1, **made} for n in range(number)],
    }
    lists = {key: value if key == name else [] for key, value in rows.items()}
    return revocation.Revocations.model_validate_json(json.dumps(lists))


@pytest.mark.parametrize(("name", "most"), [("keys", 256), ("manifests", 512), ("serials", 256)])
def test_list_of_revocations_is_so_long_and_no_longer(name: str, most: int) -> None:
    assert len(getattr(_revocations(name, most), name)) == most
    with pytest.raises(pydantic.ValidationError):
        _revocations(name, most + 1)


@pytest.mark.parametrize(
    ("pattern", "good"), [("a*", True), ("*", True), ("a*b", False), ("a*\n", False), ("a b", False)]
)
def test_star_stands_at_end_of_pattern(pattern: str, good: bool) -> None:
    document = json.dumps(kit.scope(agents=(pattern,)))
    if good:
        assert root.Scope.model_validate_json(document).agents == (pattern,)
        return
    with pytest.raises(pydantic.ValidationError):
        root.Scope.model_validate_json(document)


@pytest.mark.parametrize("name", ["public", "plain"])
@pytest.mark.parametrize("change", [lambda h: h + "00", lambda h: h[:-2], lambda h: h.upper(), lambda h: "\n" + h])
def test_key_is_64_digits_and_no_more(name: str, change: Any) -> None:
    document = json.loads(keyfile.plain(kit.key(1)))
    document[name] = change("ab" * 32 if name == "plain" else document[name])
    with pytest.raises(errors.KeyFileError, match="malformed"):
        keyfile.read(json.dumps(document).encode())
