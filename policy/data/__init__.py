"""The versioned data files, read once: roles, deny list, system call numbers, profiles, never-grantable paths,
argument rules.

The one place of ``policy`` that reads files, and only those of its own package (docs/adr/0013-package-data.md):
they are part of the program, so what they say is as fixed as code. Each loader is strict (an unknown key, a missing
reason or a wrong type is an error of the build) and cached for the life of the process.

    deny.toml               version, [calls] name = "reason"
    profiles/NAME.toml      version, [calls] and [kept] name = "reason"
    additions/NAME.toml     version, [calls] and [kept] name = "reason"
    arguments.toml          version, [calls.NAME] and [host] (policy.data.argument_table)
    syscalls/ARCH.toml      version, arch, linux, [numbers] name = number
    never_grantable.toml    version, [trees] and [write_trees] "/path" = "reason"
    roles.toml              version, [roles.NAME] (policy.data.role_table)
    learning.toml           version, [sensitive] and [units] "pattern" = "reason", [presets.NAME] reason and hosts
    workspace.toml          version, [mask], [protect], [git_shared] and [git_own] "pattern" = "reason"
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

import msgspec

from policy import errors
from policy.data import argument_table, role_table
from policy.data.types import (
    ArgumentRule,
    ArgumentRules,
    Condition,
    DenyList,
    Learning,
    NeverGrantable,
    Preset,
    Profile,
    SyscallTable,
    ValueCondition,
    WorkspaceFiles,
)
from policy.grants.roles import Roles

__all__ = [
    "ArgumentRule",
    "ArgumentRules",
    "Condition",
    "DenyList",
    "Learning",
    "NeverGrantable",
    "Preset",
    "Profile",
    "Roles",
    "SyscallTable",
    "ValueCondition",
    "WorkspaceFiles",
    "addition",
    "additions",
    "arguments",
    "deny",
    "learning",
    "never_grantable",
    "profile",
    "profile_names",
    "profiles",
    "roles",
    "syscall_names",
    "syscalls",
    "workspace_files",
]

ARCHES = ("aarch64", "x86_64")
_CALL = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_PATH = re.compile(r"/|(/[^/\0]+)+")
_PATTERN = re.compile(r"[^/\0\[\]{}\\]+(/[^/\0\[\]{}\\]+)*")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def load(path: str, keys: Mapping[str, type]) -> dict[str, Any]:
    """Return the table of one data file, which must have exactly ``keys`` of these types.

    Raises:
        errors.InstallationError: the file has another form.
    """
    raw = resources.files(__name__).joinpath(*path.split("/")).read_bytes()
    table = tomllib.loads(raw.decode("utf-8"))
    if set(table) != set(keys):
        raise errors.InstallationError(f"{path}: keys {sorted(table)} instead of {sorted(keys)}")
    for key, kind in keys.items():
        if type(table[key]) is not kind:
            raise errors.InstallationError(f"{path}: `{key}` is no {kind.__name__}")
    if table["version"] < 1:
        raise errors.InstallationError(f"{path}: version below 1")
    return table


def _reasons(path: str, table: Mapping[str, Any], names: re.Pattern[str]) -> Mapping[str, str]:
    """The table checked to be ``name = "reason"``, in the order of the names."""
    for name, reason in table.items():
        if not names.fullmatch(name) or not isinstance(reason, str) or not reason.strip():
            raise errors.InstallationError(f"{path}: `{name}` is no name with a reason")
    return MappingProxyType({name: table[name] for name in sorted(table)})


@functools.cache
def syscalls(arch: str) -> SyscallTable:
    """The system call numbers of ``arch`` (``x86_64`` or ``aarch64``).

    Raises:
        errors.InstallationError: there is no table for ``arch``, or it is not as this program was shipped with.
    """
    if arch not in ARCHES:
        raise errors.InstallationError(f"no table of system calls for `{arch}`")
    path = f"syscalls/{arch}.toml"
    table = load(path, {"version": int, "arch": str, "linux": str, "numbers": dict})
    numbers = table["numbers"]
    for name, number in numbers.items():
        if not _CALL.fullmatch(name) or type(number) is not int or number < 0:
            raise errors.InstallationError(f"{path}: `{name}` is no name with a number")
    return SyscallTable(arch, table["version"], table["linux"], MappingProxyType(dict(sorted(numbers.items()))))


@functools.cache
def syscall_names() -> frozenset[str]:
    """Every name that at least one architecture knows: what a manifest may name."""
    return frozenset().union(*(syscalls(arch).numbers for arch in ARCHES))


@functools.cache
def deny() -> DenyList:
    """The permanent deny list."""
    table = load("deny.toml", {"version": int, "calls": dict})
    return DenyList(table["version"], _reasons("deny.toml", table["calls"], _CALL))


@functools.cache
def arguments() -> ArgumentRules:
    """Read the argument rules of granted calls.

    Raises:
        errors.InstallationError: the data file is not as this program was shipped with.
    """
    table = load("arguments.toml", {"version": int, "calls": dict, "host": dict})
    try:
        rules = argument_table.read(table["version"], table["calls"], table["host"])
    except argument_table.ArgumentTableError as e:
        raise errors.InstallationError(f"arguments.toml: {e}") from e
    for call in sorted({*rules.rules, *rules.refused_on_host} - syscall_names()):
        raise errors.InstallationError(f"arguments.toml: `{call}` is no system call")
    return rules


@functools.cache
def profile_names() -> tuple[str, ...]:
    """The names of the built-in profiles, sorted."""
    found = resources.files(__name__).joinpath("profiles").iterdir()
    return tuple(sorted(f.name.removesuffix(".toml") for f in found if f.name.endswith(".toml")))


@functools.cache
def profile(name: str) -> Profile:
    """The built-in profile ``name``.

    Raises KeyError for a name that is not in ``profile_names()``.
    """
    if name not in profile_names():
        raise KeyError(name)
    return _profile(f"profiles/{name}.toml", name)


def _profile(path: str, name: str) -> Profile:
    table = load(path, {"version": int, "calls": dict, "kept": dict})
    traced, kept = (_reasons(path, table[key], _CALL) for key in ("calls", "kept"))
    for call in sorted(set(traced) & set(kept)):
        raise errors.InstallationError(f"{path}: `{call}` stands in both tables")
    reasons = MappingProxyType(dict(sorted({**traced, **kept}.items())))
    return Profile(name, table["version"], frozenset(reasons), reasons, frozenset(kept))


@functools.cache
def addition(name: str) -> Profile:
    """The calls that another grant brings into the filter: ``network`` (not off) or ``executables`` (any path).

    Raises KeyError for another name.
    """
    if name not in ("executables", "network"):
        raise KeyError(name)
    return _profile(f"additions/{name}.toml", name)


@functools.cache
def profiles() -> Mapping[str, Profile]:
    """Every built-in profile by name: what ``Effective.from_manifest`` takes."""
    return MappingProxyType({name: profile(name) for name in profile_names()})


@functools.cache
def additions() -> Mapping[str, Profile]:
    """Every addition by the grant that brings it."""
    return MappingProxyType({name: addition(name) for name in ("executables", "network")})


@functools.cache
def never_grantable() -> NeverGrantable:
    """The host paths that no manifest is granted."""
    path = "never_grantable.toml"
    table = load(path, {"version": int, "trees": dict, "write_trees": dict})
    trees, write_trees = (_reasons(path, table[key], _PATH) for key in ("trees", "write_trees"))
    return NeverGrantable(table["version"], trees, write_trees)


@functools.cache
def roles() -> Roles:
    """The built-in roles with their computed order.

    Raises:
        errors.InstallationError: the data file is not as this program was shipped with.
    """
    table = load("roles.toml", {"version": int, "roles": dict})
    for name in table["roles"]:
        if not _NAME.fullmatch(name):
            raise errors.InstallationError(f"roles.toml: `{name}` is no name of a role")
    try:
        return role_table.read(table["version"], table["roles"])
    except ValueError as e:
        raise errors.InstallationError(f"roles.toml: {e}") from e


@functools.cache
def learning() -> Learning:
    """Paths that are never proposed and groups of hosts, for manifests that are learnt.

    Raises:
        errors.InstallationError: the data file is not as this program was shipped with.
    """
    path = "learning.toml"
    table = load(path, {"version": int, "sensitive": dict, "units": dict, "presets": dict})
    try:
        presets = msgspec.convert(table["presets"], dict[str, Preset])
    except msgspec.ValidationError as e:
        raise errors.InstallationError(f"{path}: {e}") from e
    sensitive, units = (_reasons(path, table[key], _PATTERN) for key in ("sensitive", "units"))
    return Learning(table["version"], sensitive, units, presets)


@functools.cache
def workspace_files() -> WorkspaceFiles:
    """The files of every workspace that are shown empty, and those whose changes are never applied."""
    path = "workspace.toml"
    keys = ("mask", "protect", "git_shared", "git_own")
    table = load(path, {"version": int, **dict.fromkeys(keys, dict)})
    return WorkspaceFiles(table["version"], *(_reasons(path, table[key], _PATTERN) for key in keys))
