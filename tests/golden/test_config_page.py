"""docs/config.md lists each key of config.toml once, with its default."""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pydantic

from sandbox import config

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "config.md"
# Defaults that this host decides, in words; and what is no key of the file.
IN_WORDS = {"host", "runsc", "nft", "python3", "node", "socket", "vault.token", "vault.ca"}
NO_KEY = {"state"}


def keys(model: type[pydantic.BaseModel], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its default, those of a table with its name before them."""
    for name, field in model.model_fields.items():
        if isinstance(field.default, pydantic.BaseModel):
            yield from keys(type(field.default), f"{name}.")
        elif above + name not in NO_KEY:
            yield above + name, field.default


def written(value: Any) -> str:
    """A default as TOML."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def test_page_lists_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (.*?) \|", PAGE.read_text(), re.MULTILINE)
    expected = dict(keys(config.Config))
    assert sorted(name for name, _ in rows) == sorted(expected)
    for name, default in rows:
        assert name in IN_WORDS or default == f"`{written(expected[name])}`", (name, default)
