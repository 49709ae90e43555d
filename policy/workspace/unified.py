"""The changes of a workspace as a patch that ``git apply`` takes."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from policy.workspace.changes import Change, Kind

_NOTHING: Final = "/dev/null"
_NO_NEWLINE: Final = "\\ No newline at end of file"
_EXECUTABLE: Final = 0o100
_ESCAPED: Final = {"\t": "\\t", "\n": "\\n", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def has_text(change: Change) -> bool:
    """Whether the two contents of a change are compared line by line, if both are text."""
    return change.kind == "file" and change.action in ("add", "modify", "delete")


def patch(change: Change, old: bytes, new: bytes) -> Iterator[str]:
    """Yield the lines of one change for a patch, without their ends.

    `git apply` skips lines that begin with `#`: changes that are not applied, those that are shown in part, and git's
    own files, which it would refuse with the whole patch.
    """
    found = list(lines(change, old, new))
    own = ".git" in change.path.casefold().split("/")
    skipped = own or not change.is_applicable() or bool(_cut(change, old, new))
    yield from (f"# {line}" if skipped and not line.startswith("# ") else line for line in found)


def lines(change: Change, old: bytes, new: bytes) -> Iterator[str]:
    """Yield the header of one change as git writes it, then its ``hunks``. Directories and binary files have none."""
    why = change.refused or change.conflict
    if why:
        yield f"# {quoted(change.path)}: {'refused' if change.refused else 'conflict'}: {why}"
    if change.kind not in ("file", "link"):
        yield f"# {change.action} {change.kind} {quoted(change.path)} {change.mode:o}"
        return
    found = list(hunks(change, old, new))
    if has_text(change) and (_text(old) is None or _text(new) is None):
        yield from found
        return
    # git takes no note between a header and its hunks.
    yield from (line for line in found if line.startswith("#"))
    found = [line for line in found if not line.startswith("#")]
    before, after = quoted(f"a/{change.path}"), quoted(f"b/{change.path}")
    yield f"diff --git {before} {after}"
    mode = _mode(change.kind, change.mode)
    was = mode if change.base is None else _mode(change.kind, change.base.mode)
    if change.action == "add":
        before = _NOTHING
        yield f"new file mode {mode}"
    elif change.action == "delete":
        after = _NOTHING
        yield f"deleted file mode {was}"
    elif mode != was:
        yield from (f"old mode {was}", f"new mode {mode}")
    if found:
        yield from (_header("---", before), _header("+++", after))
    yield from found


def hunks(change: Change, old: bytes, new: bytes) -> Iterator[str]:
    """Yield the differences of the two contents, without the ends of the lines. A binary file is told by its size."""
    if change.kind == "link":
        target = change.target.encode(errors="surrogateescape")
        before = b"" if change.base is None else change.base.target.encode(errors="surrogateescape")
        old, new = (target, b"") if change.action == "delete" else (before, target)
    elif not has_text(change):
        return
    elif change.base is not None and change.action == "modify" and change.mode != change.base.mode:
        yield f"# {quoted(change.path)}: mode {change.base.mode:o} becomes {change.mode:o}"
    texts = _text(old), _text(b"" if change.action == "delete" else new)
    if texts[0] is None or texts[1] is None:
        yield f"# binary {quoted(change.path)}: {change.size} bytes"
        return
    if change.kind == "file" and (cut := _cut(change, old, new)):
        yield f"# {quoted(change.path)}: only the first {cut} bytes are compared"
    for number, line in enumerate(difflib.unified_diff(texts[0], texts[1])):
        if number > 1:  # behind the two lines of its header
            yield line.removesuffix("\n")
            if not line.endswith("\n"):
                yield _NO_NEWLINE


def quoted(path: str) -> str:
    """Return a path as git writes it: in quotes, with escapes, if it has quotes, controls or hidden characters."""
    if path.isprintable() and not set(path) & set(_ESCAPED):
        return path
    return '"' + "".join(_escaped(ch) for ch in path) + '"'


def _escaped(ch: str) -> str:
    if ch in _ESCAPED:
        return _ESCAPED[ch]
    return ch if ch.isprintable() else "".join(f"\\{byte:03o}" for byte in ch.encode(errors="surrogateescape"))


def _header(sign: str, name: str) -> str:
    """Return a line of the header. Behind a name with a space comes a tab, or `patch` ends the name there."""
    return f"{sign} {name}\t" if " " in name and not name.startswith('"') else f"{sign} {name}"


def _mode(kind: Kind, mode: int) -> str:
    if kind == "link":
        return "120000"
    return "100755" if mode & _EXECUTABLE else "100644"


def _cut(change: Change, old: bytes, new: bytes) -> int:
    """Return how many bytes of the contents are compared, or 0 where all are."""
    if not has_text(change):
        return 0
    was = 0 if change.base is None else change.base.size
    part = was > len(old) or (change.action != "delete" and change.size > len(new))
    return max(len(old), len(new)) if part else 0


def _text(data: bytes) -> list[str] | None:
    """The lines of a text with their ends; None for what is none."""
    if b"\0" in data:
        return None
    try:
        found = data.decode().split("\n")
    except UnicodeDecodeError:
        return None
    last = found.pop()
    return [f"{line}\n" for line in found] + ([last] if last else [])
