"""Changes that earlier applies of a workspace made, so that a later apply does not take them for changes of the host.

The record has contents and names, no times: a path that has exactly what was applied holds nothing that an apply could
lose, also when a crash lost the record of a moment. Without a record each such path is a conflict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from policy.workspace.entries import AppliedRecord, LowerEntry


def is_own(record: AppliedRecord, path: str, base: LowerEntry, entries: str = "") -> bool:
    """Whether the directory has at a path what an apply wrote there: kind, mode and content.

    ``entries`` are those of an index of git in the directory (LowerView.indexes): an index with the entries of the
    applied one is that index.
    """
    own = record.paths.get(path)
    if own is None or own.kind != base.kind or base.kind not in ("file", "link"):
        return False
    if own.kind == "link":
        return own.target == base.target
    if own.entries and own.entries == entries:
        return True
    return bool(own.sha256) and (own.mode, own.size, own.sha256) == (base.mode, base.size, base.sha256)


def has_names(record: AppliedRecord, directory: str, names: Collection[str]) -> bool:
    """Whether a directory has the names that an apply left in it."""
    return record.names.get(directory) == names_digest(names)


def names_digest(names: Iterable[str]) -> str:
    """Return the SHA-256 (hex) of the names of a directory."""
    return hashlib.sha256("\0".join(sorted(names)).encode()).hexdigest()
