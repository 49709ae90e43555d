"""Follow symbolic links of an agent's root by their text, as the kernel does: component by component."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

MOST_LINKS: Final = 40  # MAXSYMLINKS of linux/namei.h


def follow(path: str, links: Mapping[str, str]) -> str | None:
    """Return the place that an absolute ``path`` leads to. ``links`` maps the path of each link to its text.

    Returns:
        The place, absolute and normalised, or None for more links than the kernel follows.
    """
    pending, current, hops = deque(path.split("/")), "", 0
    while pending:
        part = pending.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            current = current.rpartition("/")[0]
            continue
        here = f"{current}/{part}"
        target = links.get(here)
        if target is None:
            current = here
            continue
        hops += 1
        if hops > MOST_LINKS:
            return None
        pending.extendleft(reversed(target.split("/")))
        current = "" if target.startswith("/") else current
    return current or "/"
