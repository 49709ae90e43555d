"""Profiles: what a kind of program needs, as data files with versions. A profile grants nothing that is not shown."""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from typing import Any, Literal

import msgspec
from msgspec import Struct

from policy import errors
from policy.manifest import text

_LARGEST_BYTES = 65_536


class Variable(Struct, frozen=True, forbid_unknown_fields=True):
    """An environment variable of a profile, and why it is set. ``{heap_mb}`` in its value is 3/4 of ``memory_mb``."""

    value: str
    reason: str


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """One profile. ``base`` names a layer of the store, ``programs`` the trees whose programs may be started.

    Sizes are in MiB, ``seconds`` bounds the session, ``commands`` are the names that choose this profile. Where no
    workspace is given, it is the caller's working ``directory``, or that where it is a ``checkout`` of git, or none.
    """

    version: int
    about: str
    base: str
    programs: tuple[str, ...]
    memory_mb: int
    disk_mb: int
    dev_shm_mb: int
    pids_max: int
    cpu_millis: int
    seconds: int
    commands: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    env: dict[str, Variable] = {}
    workspace: Literal["", "checkout", "directory"] = ""


@functools.cache
def names() -> tuple[str, ...]:
    """Return the names of all profiles, sorted."""
    found = resources.files(__package__).joinpath("data").iterdir()
    return tuple(sorted(one.name.removesuffix(".toml") for one in found if one.name.endswith(".toml")))


@functools.cache
def load(name: str) -> Profile:
    """Return a profile.

    Raises:
        errors.UsageError: there is none of that name.
        errors.InstallationError: its file is damaged.
    """
    if name not in names():
        near = text.nearest(name, names())
        meant = f"did you mean `{near}`? " if near else ""
        raise errors.UsageError(f"profile `{name}` is not known", hint=f"{meant}known: {', '.join(names())}")
    raw = resources.files(__package__).joinpath("data", f"{name}.toml").read_bytes()
    try:
        document: dict[str, Any] = tomllib.loads(raw[:_LARGEST_BYTES].decode())
        return msgspec.convert(document, Profile)
    except (ValueError, msgspec.ValidationError) as e:
        raise errors.InstallationError(f"profile `{name}` is damaged: {e}") from e


def chosen(command: str) -> str:
    """Return the profile for a program's name: the one that lists it, else ``shell``."""
    return next((name for name in names() if command in load(name).commands), "shell")


def value_of(profile: Profile, name: str) -> str:
    """Return the value of a profile's variable."""
    return profile.env[name].value.replace("{heap_mb}", str(profile.memory_mb * 3 // 4))
