"""The two sides of a workspace: what the agent left in the upper layer, and what the directory has now."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

UpperKind = Literal["file", "dir", "link", "gone", "other"]
LowerKind = Literal["file", "dir", "link", "other"]


class UpperEntry(Struct, frozen=True, order=True):
    """One path of the upper layer, relative to the workspace's directory.

    ``gone`` is a removed path. An ``opaque`` directory hides what the lower directory has. ``copied`` says that the
    file was copied up from the lower layer. ``mode`` are the permission bits, ``size`` counts bytes, ``names`` the
    names of the file. ``sha256`` (hex) belongs to files, ``target`` to links. A file without a digest was too
    large to read.
    """

    path: str
    kind: UpperKind
    mode: int = 0
    size: int = 0
    names: int = 1
    opaque: bool = False
    copied: bool = False
    sha256: str = ""
    target: str = ""


class LowerEntry(Struct, frozen=True, order=True):
    """One path of the caller's directory. ``changed_ns`` (ctime) and ``modified_ns`` (mtime) are in nanoseconds.

    The rest is as in UpperEntry. ``sha256`` is empty where the size alone tells that the content differs.
    """

    path: str
    kind: LowerKind
    mode: int = 0
    size: int = 0
    names: int = 1
    changed_ns: int = 0
    modified_ns: int = 0
    device: int = 0
    inode: int = 0
    sha256: str = ""
    target: str = ""


class LowerView(Struct, frozen=True):
    """The part of the caller's directory that a comparison needs.

    ``entries`` has each path of the upper layer that exists, and everything below a directory that the upper layer
    removes, replaces or hides. ``names`` are the names in each directory in which the upper layer has a path, and
    ``changed_ns`` its status change time. ``worktree`` is the name of the linked worktree whose common directory is
    shown as `.git`. ``findings`` have each file of git whose content was checked, with the reason why it is refused,
    or none. ``indexes`` have the entries (SHA-256) of each index of git that changed: in the directory, and as the
    agent left it.
    """

    entries: dict[str, LowerEntry]
    names: dict[str, tuple[str, ...]]
    changed_ns: dict[str, int] = {}
    worktree: str = ""
    findings: dict[str, str] = {}
    indexes: dict[str, tuple[str, str]] = {}


class AppliedPath(Struct, frozen=True):
    """A file or link as an apply wrote it. The fields are as in LowerEntry.

    ``entries`` is the SHA-256 of the entries of an index: git writes it also when it looks at the files alone.
    """

    kind: LowerKind
    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    entries: str = ""


class AppliedRecord(Struct, frozen=True):
    """The paths that applies of a workspace wrote, and the names (SHA-256) that they left in directories."""

    paths: dict[str, AppliedPath] = {}
    names: dict[str, str] = {}
