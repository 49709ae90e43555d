"""Sensitive paths, which are never proposed, and the named groups of hosts that belong to one service."""

from __future__ import annotations

import functools

from policy import data
from policy.workspace import globs


@functools.cache
def _patterns() -> tuple[str, ...]:
    return tuple(sorted({*data.learning().sensitive, *data.workspace_files().mask}))


def is_sensitive(path: str) -> bool:
    """Whether a host path is, or is below, a path that no proposal names."""
    # A name of bytes that are no UTF-8 has surrogates, which RE2 does not take.
    return bool(globs.matching(_patterns())(path.lstrip("/").encode(errors="replace").decode()))


def group_of(host: str) -> str | None:
    """Return the name of the preset that a host belongs to."""
    return next((name for name, one in data.learning().presets.items() if host in one.hosts), None)


def missing_of(name: str, hosts: frozenset[str]) -> tuple[str, ...]:
    """Return the hosts of a preset that are not among ``hosts``."""
    return tuple(one for one in data.learning().presets[name].hosts if one not in hosts)
