"""Find mounts that cover a granted path, or a file or directory in it.

A run gets a copy of one mount, without the mounts on top of it (open_tree(2)). If another mount covers DIRECTORY/x, the
copy shows the file beneath, which no process on the host sees. So such a path is refused before a run, and a mount that
appears during the run is drift.

A covering mount is found by the id of the mount that the granted path was opened on: its parent is that mount, or one
that this mount is attached to. A name alone says nothing, since mounts may be stacked and directories renamed.
"""

from __future__ import annotations

import os
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from policy import errors
from sandbox.kernel.fs import filesystems
from sandbox.kernel.fs.filesystems import Mount


def granted(plan: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The mounts of granted paths in a plan (mounts.json, ``mounts``)."""
    # Other sources are no paths of the host: copies, volumes and files of the supervisor's own.
    return [mount for mount in plan if mount["type"] == "bind" and mount["source"].startswith("/")]


def numbers(plan: Iterable[Mapping[str, Any]], sources: Mapping[str, int]) -> dict[str, int]:
    """Return the host's mount of each granted path. ``sources`` are open descriptors by the agent's place.

    Raises:
        errors.KernelError: the kernel does not say.
    """
    return {m["source"]: filesystems.number_of(sources[m["destination"]]) for m in granted(plan)}


def over(
    number: int, path: str, table: Collection[Mount], *, beside: Collection[str] = (), root: str = ""
) -> str | None:
    """Return where a mount covers ``path``, which was opened on the mount with this number, or a name in it.

    A mount at a path of ``beside`` is granted itself. A path whose mount is gone from the table is covered. ``root`` is
    where the granted directory lies in its file system now (mountinfo, field 4), which a rename changes.

    Returns:
        The mount point, or None where no mount covers anything.
    """
    by_number = {mount.number: mount for mount in table}
    if number not in by_number:
        return path
    beneath: dict[int, None] = {}
    at = number
    while at in by_number and at not in beneath:
        beneath[at] = None
        at = by_number[at].parent
    for mount in table:
        if mount.number in beneath or mount.parent not in beneath or mount.point in beside:
            continue
        if _holds(mount.point, path) or (mount.parent == number and _holds(path, mount.point)):
            return mount.point
        if root and mount.parent == number and _holds(root, _within(by_number[number], mount.point)):
            return mount.point
    return None


def _within(mount: Mount, path: str) -> str:
    """Return the place in the file system of ``mount`` that is seen at ``path``."""
    return os.path.normpath(os.path.join(mount.root, os.path.relpath(path, mount.point)))


def check(fd: int, path: str, *, beside: Collection[str] = (), where: str = "") -> None:
    """Refuse a granted path, open as ``fd``, that a mount covers now.

    Raises:
        errors.GrantedPathError: Raised with the mount point and a hint when a mount covers the path.
        errors.KernelError: Raised when the kernel does not report the path's mount.
    """
    point = over(filesystems.number_of(fd), path, [*filesystems.mounts()], beside=beside)
    if point is None:
        return
    if _holds(point, path):
        raise errors.GrantedPathError(
            f"path `{path}` cannot be granted: what is mounted at `{point}` covers it since it was looked at",
            hint="run it again: what is mounted there now is granted then",
            where=where,
        )
    raise errors.GrantedPathError(
        f"path `{path}` cannot be granted: a mount at `{point}` covers a part of it, which the agent would see",
        hint=f"umount {point}, or grant in place of `{path}` the files and directories in it that the agent needs",
        where=where,
    )


def check_all(plan: Iterable[Mapping[str, Any]], sources: Mapping[str, int]) -> None:
    """``check`` each granted path of a plan; ``sources`` as for ``numbers``.

    Raises:
        As ``check``.
    """
    for mount, beside in _beside(plan):
        check(sources[mount["destination"]], mount["source"], beside=beside)


def found(
    plan: Iterable[Mapping[str, Any]],
    opened: Mapping[str, int],
    table: Collection[Mount],
    roots: Mapping[str, str] = types.MappingProxyType({}),
) -> Iterator[tuple[str, str]]:
    """Yield each granted path that a mount of the host's ``table`` covers now, with the mount point.

    ``opened`` is what ``numbers`` returned when the path was opened. ``roots`` has by the agent's place where each
    granted directory lies in its file system now; without it a renamed directory is looked for under its old name.
    """
    for mount, beside in _beside(plan):
        path, root = mount["source"], roots.get(mount["destination"], "")
        if path in opened and (point := over(opened[path], path, table, beside=beside, root=root)) is not None:
            yield path, point


def _beside(plan: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Collection[str]]]:
    """Yield each granted path with the places in it where a mount is allowed: a path for writing is its own mount."""
    mounts = granted(plan)
    written = {mount["source"] for mount in mounts if "rw" in mount["options"]}
    for mount in mounts:
        yield mount, () if "rw" in mount["options"] else written


def _holds(directory: str, path: str) -> bool:
    """Whether ``path`` is ``directory`` or is inside it."""
    return path == directory or path.startswith(directory.rstrip("/") + "/")
