"""The links of an agent's root in mounts.json: names of what is granted, and of nothing else."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from policy import symlinks
from policy.decompile.documents import closed, normalised, refuse, shown

_WHERE = "mounts.json:root/links"


def read(
    value: list[Any],
    *,
    mounted: Collection[str],
    read: Collection[str],
    written: Collection[str],
    entries: Collection[str],
) -> dict[str, str]:
    """The links, each with its text. ``read`` and ``written`` are the granted places of ``mounted``.

    ``entries`` are the programs that can be started. No link hides a mount or a program, lies in a mount of ours, or
    leads to what an agent or the supervisor fills.

    Raises:
        errors.ArtefactError: one does, or is no link.
    """
    links: dict[str, str] = {}
    for item in value:
        own = closed(item, _WHERE, {"path": str, "target": str})
        where = f"{_WHERE}/{shown(own['path'])}"
        path = normalised(own["path"], where)
        if links and path <= next(reversed(links)):
            raise refuse(where, "it is not sorted, or stands twice")
        links[path] = _text(own["target"], where)
    if not links:
        raise refuse(_WHERE, "there is none")
    kept = [place for place in mounted if place not in read]
    ours = [place for place in kept if place not in written]
    for path in links:
        where = f"{_WHERE}/{shown(path)}"
        if hidden := next((one for one in (*mounted, *entries) if _within(one, path)), None):
            raise refuse(where, f"{shown(hidden)} would be behind it")
        if taken := next((place for place in kept if _within(path, place)), None):
            raise refuse(where, f"it lies in the mount at {shown(taken)}")
        real = symlinks.follow(path, links)
        if real is None:
            raise refuse(where, "it leads through too many links")
        if place := next((place for place in ours if _within(real, place)), None):
            raise refuse(where, f"it leads into the mount at {shown(place)}")
    return links


def _text(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise refuse(where, f"{shown(value)} is no text of a link") from None
    if not value or "\0" in value:
        raise refuse(where, f"{shown(value)} is no text of a link")
    return value


def _within(path: str, directory: str) -> bool:
    return (path + "/").startswith(directory.rstrip("/") + "/")
