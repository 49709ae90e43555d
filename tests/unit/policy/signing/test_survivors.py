"""What planted faults showed to be held by no test of the signed documents (docs/mutants.md)."""

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


@pytest.mark.parametrize("model", _models(), ids=lambda m: f"{m.__module__.rpartition('.')[2]}.{m.__name__}")
def test_every_document_is_closed_strict_and_frozen(model: type[pydantic.BaseModel]) -> None:
    config = model.model_config
    assert (config.get("extra"), config.get("strict"), config.get("frozen")) == ("forbid", True, True)


@pytest.mark.parametrize("name", ["public", "plain"])
@pytest.mark.parametrize("change", [lambda h: h + "00", lambda h: h[:-2], lambda h: h.upper(), lambda h: "\n" + h])
def test_a_key_is_64_digits_and_no_more(name: str, change: Any) -> None:
    document = json.loads(keyfile.plain(kit.key(1)))
    document[name] = change("ab" * 32 if name == "plain" else document[name])
    with pytest.raises(errors.KeyFileError, match="malformed"):
        keyfile.read(json.dumps(document).encode())
