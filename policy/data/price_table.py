"""The table of prices (prices.toml), read once. Strict and closed."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from policy import errors
from policy.budget import Prices

_BUYS = ("cpu_ms", "memory_byte_ms", "wall_ms", "stored_bytes")


class PriceTableError(ValueError):
    """The table is malformed: the key."""


@functools.cache
def prices() -> Prices:
    """Read the prices: the use that a credit buys.

    Raises:
        errors.InstallationError: the file is malformed.
    """
    try:
        return read(tomllib.loads(resources.files("policy.data").joinpath("prices.toml").read_text("utf-8")))
    except PriceTableError as e:
        raise errors.InstallationError(f"prices.toml: {e}") from e


def read(table: Mapping[str, Any]) -> Prices:
    """The prices of a table.

    Raises:
        PriceTableError: a key is missing or unknown, or a value is no whole number from 1.
    """
    if set(table) != {"version", "buys"} or not isinstance(table["buys"], dict) or set(table["buys"]) != set(_BUYS):
        raise PriceTableError(f"it is not `version` and a table `buys` of {', '.join(_BUYS)}")
    numbers = {"version": table["version"], **table["buys"]}
    for name, value in numbers.items():
        if type(value) is not int or value < 1:
            raise PriceTableError(f"`{name}` is no whole number from 1")
    return Prices(**numbers)
