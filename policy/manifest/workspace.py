"""``[workspace]``: the caller's directory, on which the agent works behind an overlay, or a volume of its own.

Nothing that the agent writes reaches a directory before its owner applies it. Source: decisions.md ("Settled for real
agents").
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from policy.manifest import fields, paths, permissions, text
from policy.workspace import globs

says, whole = fields.says, fields.whole

# The tree of programs that ``permissions.executables.allow`` may name.
TREE: Final = "workspace"
_MIB = 1024 * 1024
PATTERN_CHARACTERS: Final = 200
# One character of a name; in a set it would have to be escaped.
_REFUSED = re.compile(r"[\[\]{}\\]")


def pattern(value: str) -> str:
    """Return a pattern as it is.

    Raises:
        PydanticCustomError: it is empty, too long, absolute, or has a component that no path has.
    """
    text.plain(value)
    if len(value) > PATTERN_CHARACTERS:
        raise text.wrong(
            f"{text.quote(value)} has {len(value)} characters", f"at most {PATTERN_CHARACTERS} are accepted"
        )
    if _REFUSED.search(value):
        raise text.wrong(f"pattern {text.quote(value)} has a set or an escape", "use `*`, `**` and `?` alone")
    parts = value.split("/")
    if any(part in ("", ".", "..") for part in parts):
        hint = "write it from the workspace's directory, without a slash at an end, `.` or `..`"
        raise text.wrong(f"pattern {text.quote(value)} is no pattern of paths", hint)
    if any(globs.ANY_DIRECTORIES in part and part != globs.ANY_DIRECTORIES for part in parts):
        raise text.wrong(f"pattern {text.quote(value)} has `**` within a name", "write `**/` or `/**`")
    return value


Globs = Annotated[tuple[Annotated[str, AfterValidator(pattern)], ...], fields.LIST, AfterValidator(fields.unique)]
HostPaths = Annotated[
    tuple[Annotated[str, AfterValidator(paths.absolute)], ...], fields.LIST, AfterValidator(fields.unique)
]


class Workspace(fields.Section):
    """``[workspace]``: the caller's directory, behind an overlay, or a volume. Absent, the agent has none."""

    mode: Annotated[
        Literal["overlay", "volume"] | None,
        says(
            "overlay: changes are kept apart from the directory until `covenant workspace apply`; volume: the agent "
            "keeps its files in a volume, and nothing is applied"
        ),
    ] = None
    volume: Annotated[
        Annotated[str, AfterValidator(permissions.volume_name)] | None,
        says("the volume of mode `volume`; what is below but `path` and `exec` goes with mode `overlay` alone"),
    ] = None
    path: Annotated[str, AfterValidator(paths.absolute), says("where the agent finds it")] = "/work"
    below: Annotated[
        HostPaths,
        Field(alias="from", description="host directories in or below which the caller's directory must lie"),
    ] = ()
    exec: Annotated[
        bool, says('whether its programs can be started; goes with `"workspace"` in permissions.executables.allow')
    ] = False
    mask: Annotated[
        Globs, says("files that are shown empty and never applied, beside the built-in list; `*`, `**` and `?`")
    ] = ()
    protect: Annotated[
        Globs, says("files whose changes are never applied, beside the built-in list; `*`, `**` and `?`")
    ] = ()
    max_mb: Annotated[int, whole(8, _MIB, "size of all that the agent changes, MiB; a part of disk_mb")] = 64
    apply: Annotated[
        Literal["ask", "operator", "never"],
        says(
            "ask: the caller applies the changes; operator: with an operator's approval of these very changes; "
            "never: they can only be looked at"
        ),
    ] = "ask"


def volume_problems(one: Workspace, filesystem: str) -> Iterator[tuple[str, str, str]]:
    """The rules of a workspace that is a volume: it has a name, a file system of mode host, and nothing to apply."""
    if one.volume is None:
        yield "workspace", "[workspace] of mode `volume` names none", 'write volume = "NAME"'
    for name, key in (("below", "from"), *((same, same) for same in ("mask", "protect", "max_mb", "apply"))):
        if name in one.model_fields_set:
            mend = 'take it out: nothing of a volume is applied; mode = "overlay" works on a directory of the caller'
            yield f"workspace.{key}", f"`workspace.{key}` is written while mode is `volume`", mend
    if filesystem != "host":
        yield "workspace.mode", f"mode is `volume` while filesystem is `{filesystem}`", 'filesystem = "host"'


def exec_problems(one: Workspace, trees: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """``exec = true`` goes with the tree in permissions.executables.allow."""
    if one.exec and TREE not in trees:
        message = "workspace.exec is `true` while permissions.executables.allow has no `workspace`"
        yield "workspace.exec", message, 'write allow = ["workspace"] below [permissions.executables], or exec = false'


def written_problems(
    table: permissions.Filesystem, volumes: Sequence[tuple[str, permissions.VolumeGrant]]
) -> Iterator[tuple[str, str, str]]:
    """``shared`` goes with something that is written; each volume, and each place of one, is named once.

    ``volumes`` has the dotted key of each.
    """
    if table.shared and not (table.write or volumes):
        message = "permissions.filesystem.shared is `true` while nothing is granted for writing"
        yield "permissions.filesystem.shared", message, "take shared out, or grant a write path"
    names = [name for _, one in volumes for name in one]
    for key, name in [(key, name) for key, one in volumes for name in one if names.count(name) > 1]:
        yield key, f"{text.quote(name)} is named twice", "name each volume once, at a place of its own"
