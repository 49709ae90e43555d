"""The table of what each compile target holds, from TOML to rows. Strict and closed.

A row says of one field of one domain, ``resources.pids_max``, whether the target holds it. What it cannot hold has an
id, ``kubernetes.pids-max``, that operators write into scripts: it never changes its meaning.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any, Literal, get_args

from msgspec import Struct

from policy import errors

How = Literal["held", "rounded", "lost-grant", "lost-restriction"]
HOW: tuple[How, ...] = get_args(How)
LOST = ("lost-grant", "lost-restriction")
ALWAYS = "always"

_ID = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FIELD = re.compile(r"\*|[a-z_]+\.[a-z_]+")
_TEST = re.compile(r"[a-z][a-z_]*")
_KEYS = {"field", "how", "says"}


class TargetTableError(ValueError):
    """The table is malformed: the target and the row."""


class TargetRow(Struct, frozen=True):
    """One field, what becomes of it, and why. ``id`` is empty unless something is lost; ``when`` names a test."""

    field: str
    how: How
    says: str
    id: str = ""
    when: str = ALWAYS


class Target(Struct, frozen=True):
    """One target. ``requires`` is what its output depends on and cannot bring about."""

    name: str
    requires: tuple[str, ...]
    rows: tuple[TargetRow, ...]


@functools.cache
def _file() -> dict[str, Any]:
    table = tomllib.loads(resources.files("policy.data").joinpath("targets.toml").read_text("utf-8"))
    if set(table) != {"version", "systemd_implicit_calls", "targets"} or table["version"] != 1:
        raise errors.InstallationError("targets.toml: keys or version are not what this program reads")
    return table


@functools.cache
def targets() -> Mapping[str, Target]:
    """The targets of targets.toml by name.

    Raises:
        errors.InstallationError: the file is malformed.
    """
    try:
        return MappingProxyType(read(_file()["targets"]))
    except TargetTableError as e:
        raise errors.InstallationError(f"targets.toml: {e}") from e


@functools.cache
def implicit_calls() -> frozenset[str]:
    """The system calls that systemd allows in every allow list (systemd.exec, ``SystemCallFilter=``)."""
    return frozenset(_file()["systemd_implicit_calls"])


def read(table: Mapping[str, Any]) -> dict[str, Target]:
    """The targets by name.

    Raises:
        TargetTableError: an unknown key or value, a loss without an id, or an id of two losses.
    """
    return {name: _target(name, one) for name, one in table.items()}


def _target(name: str, table: Any) -> Target:
    if not isinstance(table, dict) or set(table) != {"requires", "rows"} or not _ID.fullmatch(name):
        raise TargetTableError(f"target `{name}` is not `requires` and `rows`")
    rows = tuple(_row(name, row) for row in table["rows"])
    ids = [row.id for row in rows if row.id]
    if len(set(ids)) != len(ids):
        raise TargetTableError(f"target `{name}` has an id twice")
    if not rows or not all(isinstance(line, str) and line for line in table["requires"]):
        raise TargetTableError(f"target `{name}` has no row, or a requirement that is no text")
    return Target(name, tuple(table["requires"]), rows)


def _row(target: str, table: Any) -> TargetRow:
    if not isinstance(table, dict) or not all(isinstance(value, str) and value for value in table.values()):
        raise TargetTableError(f"target `{target}`: a row is a table of texts")
    lost = table.get("how") in LOST
    known = _KEYS | ({"id", "when"} if lost else set())
    wanted = _KEYS | ({"id"} if lost else set())
    if not wanted <= set(table) <= known or table["how"] not in HOW or not _FIELD.fullmatch(table["field"]):
        raise TargetTableError(f"target `{target}`: row `{table.get('field', '')}` has wrong keys or values")
    row = TargetRow(**table)
    if (lost and not _ID.fullmatch(row.id)) or not _TEST.fullmatch(row.when):
        raise TargetTableError(f"target `{target}`: row `{row.field}` has a malformed id or test")
    return row
