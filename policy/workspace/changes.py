"""The changes of a workspace: paths that an agent added, modified and removed, and why one of them is not applied.

A change is refused by name, and with it every change that needs it. A conflict is a path that the host changed since
the session began: it is never overwritten.
"""

from __future__ import annotations

import bisect
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal, Self

from msgspec import Struct, structs

from policy.workspace import applied, git, globs
from policy.workspace.entries import AppliedRecord, LowerEntry, LowerView, UpperEntry

# The kinds of parts of a workspace that are not applied, and why.
APART: Final = {
    "checkout": "another checkout of git (a submodule, a linked worktree)",
    "mount": "another file system on the host",
}
Action = Literal["add", "modify", "delete", "mode"]
Kind = Literal["file", "dir", "link", "other"]

_PERMISSIONS: Final = 0o777
_SPECIAL_BITS: Final = 0o7000
_STICKY: Final = 0o1000
# How the name of a staged file begins (policy.workspace.steps).
STAGED: Final = "/.covenant-"
# Everything below a directory is sorted before its path with this character.
_AFTER_SLASH: Final = chr(ord("/") + 1)
# The names of a bare repository: with all of them in a directory, git starts the programs that its `config` names.
_BARE: Final = frozenset({"head", "objects", "refs", "config"})
NOTHING_APPLIED: Final = AppliedRecord()


class Change(Struct, frozen=True):
    """One change. ``kind`` is that of the result, of a removed path for ``delete``.

    ``base`` is the path in the caller's directory, None for a new one. ``refused`` and ``conflict`` say why it is not
    applied; both are empty for a change that can be applied.
    """

    path: str
    action: Action
    kind: Kind
    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    base: LowerEntry | None = None
    refused: str = ""
    conflict: str = ""

    def is_applicable(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.refused and not self.conflict


class Terms(Struct, frozen=True):
    """Patterns of the files that are shown empty, and of those whose changes are never applied.

    ``git_shared`` and ``git_own`` are those of git's own files that may change (policy.workspace.git). ``apart`` are
    directories of which nothing is applied, each with its kind in APART.
    """

    mask: tuple[str, ...]
    protect: tuple[str, ...]
    git_shared: tuple[str, ...] = ()
    git_own: tuple[str, ...] = ()
    apart: dict[str, str] = {}


class _Sides(Struct, frozen=True):
    """The facts that a change is judged by: copied paths, and the names and the change time of each directory.

    ``made`` are the directories of the agent: nothing of the host was ever in them. ``own`` is what applies wrote.
    """

    terms: Terms
    started_ns: int
    copied: frozenset[str]
    made: frozenset[str]
    own: AppliedRecord
    lower: LowerView
    names: Mapping[str, Collection[str]]
    moved: frozenset[str]
    git: git.GitDirectories
    folded: dict[str, dict[str, list[str]]] = {}

    @classmethod
    def of(
        cls, entries: Sequence[UpperEntry], lower: LowerView, terms: Terms, started_ns: int, own: AppliedRecord
    ) -> Self:
        names = all_names(entries, lower)
        # New names change both times of a directory, a rename of it or another mode the first alone.
        moved = frozenset(
            one.path
            for one in lower.entries.values()
            if one.kind == "dir" and one.changed_ns >= started_ns and one.changed_ns > one.modified_ns
        )
        copied = frozenset(one.path for one in entries if one.copied)
        made = frozenset(one.path for one in entries if one.kind == "dir" and not one.copied)
        repositories = git.GitDirectories(
            git.bare(names), lower.worktree, lower.findings, terms.git_shared, terms.git_own
        )
        return cls(terms, started_ns, copied, made, own, lower, names, moved, repositories)


def all_names(entries: Iterable[UpperEntry], lower: LowerView) -> dict[str, set[str]]:
    """Return the names that each directory in which something changed would have."""
    names: dict[str, set[str]] = {above: set(found) for above, found in lower.names.items()}
    for one in entries:
        above, _, name = one.path.rpartition("/")
        if one.kind == "gone":
            names.setdefault(above, set()).discard(name)
        else:
            names.setdefault(above, set()).add(name)
    return names


def compare(
    upper: Iterable[UpperEntry],
    lower: LowerView,
    *,
    terms: Terms,
    started_ns: int,
    own: AppliedRecord = NOTHING_APPLIED,
) -> tuple[Change, ...]:
    """Return the changes in the order of their paths, a removed path before a new one of the same name.

    ``started_ns`` is the time before which the host's changes are part of what the agent saw. ``own`` is what earlier
    applies wrote: it is no change of the host.
    """
    entries = sorted(upper)
    sides = _Sides.of(entries, lower, terms, started_ns, own)
    there = frozenset(one.path for one in entries if one.kind != "gone")
    order = sorted(lower.entries)
    found = [change for entry in entries for change in _of(entry, lower, order, there)]
    judged = [_judged(change, sides) for change in _once(found)]
    return tuple(_together(_with_packed(_with_objects(judged, sides.git), sides.git)))


def _with_objects(found: Sequence[Change], directories: git.GitDirectories) -> list[Change]:
    """Refuse the references and the index of a repository of which a new object is not applied: they may name it."""
    lacking: dict[str, str] = {}
    for one in found:
        if one.action == "add" and not one.is_applicable() and directories.is_object(one.path):
            split = directories.split(one.path)
            assert split is not None, "an object lies in a repository"
            lacking.setdefault(split[0], one.path)
    return [_lacking(one, lacking, directories) for one in found] if lacking else list(found)


def _with_packed(found: Sequence[Change], directories: git.GitDirectories) -> list[Change]:
    """Refuse to remove references of a repository whose packed ones are not applied: git moves them there."""
    stays = {split[0] for one in found if not one.is_applicable() and (split := _packed(one, directories))}
    return [_staying(one, stays, directories) for one in found] if stays else list(found)


def _packed(change: Change, directories: git.GitDirectories) -> tuple[str, str] | None:
    split = directories.split(change.path)
    return split if split is not None and split[1] == git.PACKED else None


def _staying(change: Change, stays: Collection[str], directories: git.GitDirectories) -> Change:
    split = directories.split(change.path)
    if change.action != "delete" or not change.is_applicable() or split is None or split[0] not in stays:
        return change
    if not split[1].startswith(git.REFERENCES):
        return change
    return structs.replace(change, refused=f"`{split[0]}/{git.PACKED}` is not applied")


def _lacking(change: Change, lacking: Mapping[str, str], directories: git.GitDirectories) -> Change:
    split = directories.split(change.path)
    missing = lacking.get(split[0]) if split else None
    if missing is None or not change.is_applicable() or change.kind == "dir" or directories.is_object(change.path):
        return change
    return structs.replace(change, refused=f"`{missing}` is not applied")


def _once(found: Sequence[Change]) -> list[Change]:
    """Sort, and keep one change of each path and action: a directory may be hidden and removed."""
    by_key = {(one.path, one.action != "delete"): one for one in found}
    return [by_key[key] for key in sorted(by_key, key=lambda key: (key[0].split("/"), key[1]))]


def _of(entry: UpperEntry, lower: LowerView, order: Sequence[str], there: Collection[str]) -> Iterator[Change]:
    """Yield the changes of an entry of the upper layer. ``there`` are all paths of the layer.

    ``order`` are the paths of the directory, sorted.
    """
    base = lower.entries.get(entry.path)
    if entry.kind == "gone":
        if base is not None:
            yield from _removed(base, lower, order)
        return
    if base is not None and base.kind != entry.kind:
        yield from _removed(base, lower, order)
        base = None
    if entry.kind == "dir" and base is not None:
        if entry.opaque:
            yield from (one for one in _removed(base, lower, order) if one.path not in there)
        if (entry.mode ^ base.mode) & _PERMISSIONS:
            yield _new(entry, "mode", base)
        return
    if base is None:
        yield _new(entry, "add", None)
    elif entry.kind == "link":
        if entry.target != base.target:
            yield _new(entry, "modify", base)
    elif not entry.sha256 or entry.sha256 != base.sha256 or entry.size != base.size:
        yield _new(entry, "modify", base)
    elif (entry.mode ^ base.mode) & (_PERMISSIONS | _SPECIAL_BITS):
        yield _new(entry, "mode", base)


def _new(entry: UpperEntry, action: Action, base: LowerEntry | None) -> Change:
    kind: Kind = "other" if entry.kind == "gone" else entry.kind
    return Change(entry.path, action, kind, entry.mode, entry.size, entry.sha256, entry.target, base)


def _removed(base: LowerEntry, lower: LowerView, order: Sequence[str]) -> Iterator[Change]:
    """Yield the removal of a path and of everything below it."""
    below = base.path + "/"
    begin = bisect.bisect_left(order, below)
    end = bisect.bisect_left(order, base.path + _AFTER_SLASH)
    for path in (base.path, *order[begin:end]):
        one = lower.entries[path]
        yield Change(path, "delete", one.kind, one.mode, one.size, one.sha256, one.target, one)


def _judged(change: Change, sides: _Sides) -> Change:
    """Return the change with the reason why it is not applied, if there is one."""
    refused = _apart(change, sides.terms) or _bare(change, sides) or _hidden(change)
    refused = refused or _refusal(change, sides) or _twin(change, sides)
    if refused:
        return structs.replace(change, refused=refused)
    base = change.base
    if base is None and change.path in sides.copied and _is_newer(change.path, sides):
        return structs.replace(change, conflict="removed on the host since the session began")
    entries, _ = sides.lower.indexes.get(change.path, ("", ""))
    own = base is not None and applied.is_own(sides.own, change.path, base, entries)
    if base is not None and base.kind != "dir" and base.changed_ns >= sides.started_ns and not own:
        return structs.replace(change, conflict="changed on the host since the session began")
    if base is not None and any(one in sides.moved for one in (change.path, *ancestors(change.path))):
        # What is in it now may be older than the session, and no part of what the agent saw.
        return structs.replace(
            change, conflict="its directory was moved or changed on the host since the session began"
        )
    return change


def _is_newer(path: str, sides: _Sides) -> bool:
    """Whether the host may have removed a path: its directory has other names than as the session began, or is gone.

    A file that was copied up keeps the mark when the agent renames it: a missing name alone says nothing.
    """
    directory = path.rpartition("/")[0]
    if directory in sides.made or applied.has_names(sides.own, directory, sides.lower.names.get(directory, ())):
        return False
    return sides.lower.changed_ns.get(directory, sides.started_ns) >= sides.started_ns


def _apart(change: Change, terms: Terms) -> str:
    paths = (change.path, *ancestors(change.path)) if terms.apart else ()
    kind = next((terms.apart[path] for path in paths if path in terms.apart), None)
    return "" if kind is None else f"it is of {APART[kind]}"


def _hidden(change: Change) -> str:
    if _is_hidden(change.path):
        return "its name has characters that are not shown"
    return "it leads to a name with characters that are not shown" if _is_hidden(change.target) else ""


def _refusal(change: Change, sides: _Sides) -> str:
    terms = sides.terms
    if globs.matching(terms.mask)(change.path):
        return "masked: the agent does not see it"
    protected = globs.with_directories(terms.protect) if change.kind == "link" else terms.protect
    if globs.matching(protected)(change.path):
        return "protected: it can start a program or steer a tool on the host"
    if change.path.rpartition("/")[2].lower() == git.NAME and (change.kind != "dir" or change.action == "delete"):
        return "protected: it would name another repository"
    if refused := sides.git.refusal(change.path, change.kind, change.action):
        return refused
    if STAGED in f"/{change.path}" and change.action != "delete":
        return "its name is one of an apply"
    if change.kind == "link" and change.action != "delete" and _leads_out(change):
        return "it leads out of the directory"
    if change.kind == "other":
        return "neither a file, a directory nor a link, or its name is not UTF-8"
    if change.kind == "file" and change.action in ("add", "modify") and not change.sha256:
        return "it is larger than a workspace can hold"
    if change.action != "delete" and change.mode & _SPECIAL_BITS & ~(_STICKY if change.kind == "dir" else 0):
        return "it has a setuid, setgid or sticky bit"
    base = change.base
    if base is not None and base.kind == "file" and base.names > 1:
        return "the host has another name of this file"
    return ""


def _leads_out(change: Change) -> bool:
    """Whether a link may lead out of the directory: absolute, or with more `..` than it is deep.

    A `..` after a name counts too: the name may be a link.
    """
    parts = [part for part in change.target.split("/") if part not in ("", ".")]
    up = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return change.target.startswith("/") or up > change.path.count("/") or ".." in parts[up:]


def _is_hidden(name: str) -> bool:
    """Whether a name has a control, a format character, or bytes that are no UTF-8."""
    return any(unicodedata.category(ch) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp") for ch in name)


def _folded(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def _twin(change: Change, sides: _Sides) -> str:
    """Refuse a new name that differs from another in its directory only in case or composition."""
    if change.action != "add":
        return ""
    above, _, name = change.path.rpartition("/")
    if above not in sides.folded:
        by_fold = sides.folded.setdefault(above, {})
        for one in sorted(sides.names.get(above, ())):
            by_fold.setdefault(_folded(one), []).append(one)
    twin = next((one for one in sides.folded[above].get(_folded(name), ()) if one != name), None)
    return "" if twin is None else f"it differs from `{twin}` only in case"


def _bare(change: Change, sides: _Sides) -> str:
    """Refuse what makes a directory a bare repository with a ``config``, whichever of its names comes last."""
    above, _, name = change.path.rpartition("/")
    if name.lower() not in _BARE or above.rpartition("/")[2] == git.NAME or change.action == "delete":
        return ""
    if name.lower() != "config" and change.action != "add":
        return ""  # it was one before
    names = {one.lower() for one in sides.names.get(above, ())}
    return "protected: git would take its directory for a repository" if names >= _BARE else ""


def _together(found: Sequence[Change]) -> Iterator[Change]:
    """Refuse each change that needs another one which is not applied."""
    stays = {one.path for one in found if one.action == "delete" and not one.is_applicable()}
    holding = {above: path for path in stays for above in ancestors(path)} | {path: path for path in stays}
    removed = {one.path for one in found if one.action == "delete"}
    unmade = {one.path for one in found if one.action == "add" and (one.path in holding or not one.is_applicable())}
    replaced = removed & unmade
    missing: set[str] = set()
    # Sorted by components: what a change needs comes before it, but for what a directory holds.
    for one in found:
        needs = next((f"`{above}` is not applied" for above in ancestors(one.path) if above in missing), "")
        if not needs and one.path in holding and one.action in ("add", "delete"):
            needs = f"`{holding[one.path]}` stays"
        if not needs and one.action == "delete":
            above = next((path for path in (one.path, *ancestors(one.path)) if path in replaced), "")
            needs = f"what replaces `{above}` is not applied" if above else ""
        judged = structs.replace(one, refused=needs) if needs and one.is_applicable() else one
        if judged.action == "add" and not judged.is_applicable():
            missing.add(judged.path)
        yield judged


def ancestors(path: str) -> Iterator[str]:
    """Yield the directories that a relative path lies in, the innermost first."""
    while path := path.rpartition("/")[0]:
        yield path


def renames(found: Iterable[Change]) -> dict[str, str]:
    """Return the old path of each new file that has the whole content of a removed one. Each old path is used once."""
    found = tuple(found)
    old: dict[tuple[str, int], list[str]] = {}
    for one in found:
        if one.action == "delete" and one.kind == "file" and one.sha256:
            old.setdefault((one.sha256, one.size), []).append(one.path)
    new = {}
    for one in found:
        if one.action == "add" and one.sha256 and (paths := old.get((one.sha256, one.size))):
            new[one.path] = paths.pop(0)
    return new
