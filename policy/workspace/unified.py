"""The changes of a workspace as a unified diff."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from policy.workspace.changes import Change


def has_text(change: Change) -> bool:
    """Whether the two contents of a change are compared line by line, if both are text."""
    return change.kind == "file" and change.action in ("add", "modify", "delete")


def lines(change: Change, old: bytes, new: bytes) -> Iterator[str]:
    """Yield the lines of one change, without their ends. A binary file is told by its size."""
    why = change.refused or change.conflict
    if why:
        yield f"# {change.path}: {'refused' if change.refused else 'conflict'}: {why}"
    if change.action == "modify" and change.base is not None and change.mode != change.base.mode:
        yield f"# {change.path}: mode {change.base.mode:o} becomes {change.mode:o}"
    if change.kind == "link" and change.action != "delete":
        yield f"link {change.path} -> {change.target}"
        return
    if not has_text(change):
        yield f"{change.action} {change.kind} {change.path} {change.mode:o}"
        return
    before, after = ("/dev/null" if change.action == "add" else f"a/{change.path}"), f"b/{change.path}"
    after = "/dev/null" if change.action == "delete" else after
    texts = _text(old), _text(b"" if change.action == "delete" else new)
    if texts[0] is None or texts[1] is None:
        yield f"binary {before} {after}: {change.size} bytes"
        return
    was = 0 if change.base is None else change.base.size
    if was > len(old) or (change.action != "delete" and change.size > len(new)):
        yield f"# {change.path}: only the first {max(len(old), len(new))} bytes are compared"
    yield from difflib.unified_diff(texts[0], texts[1], before, after, lineterm="")


def _text(data: bytes) -> list[str] | None:
    """The lines of a text; None for what is none."""
    if b"\0" in data:
        return None
    try:
        return data.decode().split("\n") if data else []
    except UnicodeDecodeError:
        return None
