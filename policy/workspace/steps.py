"""The steps that apply the changes of a workspace, in an order in which each can be done, and done again.

Beside them the record of what an apply wrote (policy.workspace.applied).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from msgspec import Struct

from policy.workspace import applied
from policy.workspace.changes import Change
from policy.workspace.entries import AppliedPath, AppliedRecord, LowerView

Verb = Literal["unlink", "rmdir", "mkdir", "rename", "chmod"]
_PERMISSIONS: Final = 0o777


class ApplyStep(Struct, frozen=True):
    """One step. ``staged`` is where a new file or link lies until it is renamed, relative to the same directory."""

    verb: Verb
    path: str
    mode: int = 0
    staged: str = ""


def staging(changes: Iterable[Change], prefix: str, existing: Iterable[str]) -> dict[str, str]:
    """Return where each new file and link is staged: beside its place, or in the nearest directory that exists.

    ``existing`` are the directories that exist and stay. A name begins with ``prefix``.
    """
    there, out = set(existing), dict[str, str]()
    for one in changes:
        if one.action in ("add", "modify") and one.kind in ("file", "link"):
            above = one.path.rpartition("/")[0]
            while above and above not in there:
                above = above.rpartition("/")[0]
            out[one.path] = f"{above}/{prefix}{len(out)}".lstrip("/")
    return out


def steps(changes: Sequence[Change], staged: dict[str, str]) -> list[ApplyStep]:
    """Return the steps: removals from the deepest, then directories, then files and links, then modes from the deepest.

    A new directory gets its mode at the end, so that files can be put into it.
    """
    removed = [one for one in reversed(changes) if one.action == "delete"]
    made = [one for one in changes if one.action == "add" and one.kind == "dir"]
    modes = [one for one in reversed(changes) if one.action == "mode" or (one.action == "add" and one.kind == "dir")]
    return [
        *(ApplyStep("rmdir" if one.kind == "dir" else "unlink", one.path) for one in removed),
        *(ApplyStep("mkdir", one.path, 0o700) for one in made),
        *(
            ApplyStep("rename", one.path, one.mode, staged[one.path])
            for one in changes
            if one.path in staged and one.action in ("add", "modify")
        ),
        *(ApplyStep("chmod", one.path, one.mode) for one in modes),
    ]


def record_after(record: AppliedRecord, chosen: Sequence[Change], view: LowerView, started_ns: int) -> AppliedRecord:
    """Return the record with the changes of one more apply.

    The names of a directory are noted only where the host had not changed them before: what it removed stays a
    conflict.
    """
    removed = {one.path for one in chosen if one.action == "delete"}
    paths = {path: own for path, own in record.paths.items() if path not in removed}
    for one in chosen:
        if one.action != "delete" and one.kind in ("file", "link"):
            _, entries = view.indexes.get(one.path, ("", ""))
            mode = one.mode & _PERMISSIONS
            paths[one.path] = AppliedPath(one.kind, mode, one.size, one.sha256, one.target, entries)
    added = {one.path for one in chosen if one.action == "add"}
    made = {one.path for one in chosen if one.action == "add" and one.kind == "dir"}
    names = {path: digest for path, digest in record.names.items() if path not in removed}
    for above in made | {path.rpartition("/")[0] for path in removed | added}:
        names.pop(above, None)
        before = view.names.get(above, ())
        if above in made:
            before = ()
        elif view.changed_ns.get(above, started_ns) >= started_ns and not applied.has_names(record, above, before):
            continue
        left = {name for name in before if _below(above, name) not in removed}
        left |= {path.rpartition("/")[2] for path in added if path.rpartition("/")[0] == above}
        names[above] = applied.names_digest(left)
    return AppliedRecord(paths, names)


def _below(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name
