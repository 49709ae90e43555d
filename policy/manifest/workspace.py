"""``[workspace]``: the caller's directory, on which the agent works behind an overlay.

Nothing that the agent writes reaches the directory before its owner applies it. Source: decisions.md ("Settled for real
agents").
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field

from policy.manifest import fields, paths, text
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
    """``[workspace]``: the caller's directory, behind an overlay. Absent, the agent has none."""

    mode: Annotated[
        Literal["overlay"] | None,
        says("overlay: changes are kept apart from the directory until `covenant workspace apply`"),
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
