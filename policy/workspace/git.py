"""Changes of git's own files: only listed ones are applied, and only with the content that their names promise.

git trusts its directory. An index with the path `.git/hooks/post-checkout` makes the next checkout write a hook; an
object with another content, a replacement or a graft gives a commit another meaning on the host. So the files that may
change are a list (policy/data/workspace.toml), and the content of most of them is checked (``checks``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, Literal

from msgspec import Struct

from policy.workspace import globs

Check = Literal["object", "pack", "packed refs", "reference", "index"]

NAME: Final = ".git"
PACKED, REFERENCES = "packed-refs", "refs/"
# The names of a git directory without a directory of files around it.
_BARE: Final = frozenset({"head", "objects", "refs"})
_OBJECTS: Final = "objects/"
_OBJECT: Final = re.compile(r"objects/([0-9a-f]{2})/([0-9a-f]{38}|[0-9a-f]{62})")
_LOCK: Final = ".lock"
_PACK: Final = re.compile(r"objects/pack/pack-(?:[0-9a-f]{40}|[0-9a-f]{64})\.(?:pack|idx)")
_REPLACED: Final = re.compile(r"(?:.*/)?refs/replace(?:/.*)?", re.IGNORECASE)
_REFERENCE: Final = re.compile(rb"(?:[0-9a-f]{40}|[0-9a-f]{64}|ref: refs/[^\x00-\x20\x7f~^:?*\[\\]+)\n*")
_NEEDED: Final = ("HEAD", "objects", "refs", PACKED)
# The extension of an index with the files that a file system monitor called unchanged, of version 1 or 2.
MONITORED: Final = re.compile(rb"FSMN.{4}\0\0\0[\1\2]", re.DOTALL)
_OTHERS: Final = {
    "worktrees": "protected: it belongs to another worktree",
    "modules": "protected: it belongs to a submodule",
    "shallow": "protected: it takes commits out of the history",
}
_UNLISTED: Final = "protected: of git only references, the index and new objects are applied"


class GitDirectories(Struct, frozen=True):
    """The git directories of a workspace.

    ``bare`` are those that have another name than `.git`. ``worktree`` is the name of the linked worktree whose common
    directory is shown as `.git`; empty for a repository of its own. ``findings`` say why the content of a path is
    refused, and nothing for a content that was checked (LowerView). ``shared`` and ``own`` are the patterns of the
    files that may change: of all checkouts, and of this one.
    """

    bare: frozenset[str]
    worktree: str
    findings: Mapping[str, str]
    shared: tuple[str, ...] = ()
    own: tuple[str, ...] = ()

    def split(self, path: str) -> tuple[str, str] | None:
        """Return the outermost git directory of a path, and the path within it. None where it lies in none."""
        at = 0
        while at >= 0:
            end = path.find("/", at)
            above = path if end < 0 else path[:end]
            if above[at:].lower() == NAME or above in self.bare:
                return above, "" if end < 0 else path[end + 1 :]
            at = -1 if end < 0 else end + 1
        return None

    def check(self, path: str) -> Check | None:
        """Return how the content of a file is checked, None where it is not."""
        found = self.split(path)
        if found is None:
            return None
        inside = self._own(found)
        if inside is None:
            inside = found[1]
        if _OBJECT.fullmatch(inside):
            return "object"
        if _PACK.fullmatch(inside):
            return "pack"
        if inside == PACKED:
            return "packed refs"
        if inside == "HEAD" or inside.startswith(REFERENCES):
            return "reference"
        return "index" if inside == "index" else None

    def refusal(self, path: str, kind: str, action: str) -> str:
        """Return why a change in a git directory is not applied, nothing where it is or lies in none."""
        found = self.split(path)
        if found is None or not found[1]:
            return ""
        own = self._own(found)
        inside = found[1] if own is None else own
        if kind == "link":
            return "protected: no file of git is a link"
        if _REPLACED.fullmatch(inside):
            return "protected: a replacement gives a commit another content"
        if not self._is_listed(inside, kind, own=own is not None, shared=own is None or not self._is_linked(found)):
            return _OTHERS.get(inside.partition("/")[0].lower(), _UNLISTED)
        if action != "delete" and any(part.endswith(_LOCK) for part in inside.lower().split("/")):
            return "protected: git takes it for a lock of its own"
        if action == "delete" and inside in _NEEDED:
            return "protected: git needs it"
        if inside.startswith(_OBJECTS) and (refused := _of_objects(inside, kind, action)):
            return refused
        if kind == "file" and action in ("add", "modify") and self.check(path) is not None:
            return self.findings.get(path, "protected: its content was not checked")
        return self.findings.get(path, "") if action == "delete" else ""

    def _is_linked(self, found: tuple[str, str]) -> bool:
        return bool(self.worktree) and found[0] == NAME

    def _own(self, found: tuple[str, str]) -> str | None:
        """Return the path among the files of this checkout. None for a file of the whole repository alone."""
        if not self._is_linked(found):
            return found[1]
        mine = f"worktrees/{self.worktree}"
        # The directory itself, and the one above it, may get no other mode.
        return found[1].removeprefix(mine + "/") if found[1].startswith(mine + "/") else None

    def _is_listed(self, inside: str, kind: str, *, own: bool, shared: bool) -> bool:
        patterns = (*(self.own if own else ()), *(self.shared if shared else ()))
        if kind == "dir":
            patterns = globs.with_directories(patterns)
        # Patterns take each case, git does not.
        exact = {pattern.partition("/")[0] for pattern in patterns}
        return inside.partition("/")[0] in exact and bool(globs.matching(patterns)(inside))

    def checks(self, paths: Iterable[str]) -> Iterator[tuple[str, Check]]:
        """Yield the paths whose content must be checked."""
        for path in paths:
            check = self.check(path)
            if check is not None:
                yield path, check

    def is_object(self, path: str) -> bool:
        """Whether a path is a file with objects of a repository."""
        return self.check(path) in ("object", "pack")


def bare(names: Mapping[str, Collection[str]]) -> frozenset[str]:
    """Return the git directories of another name than `.git`.

    ``names`` are all names of each directory in which something changed.
    """
    return frozenset(above for above, found in names.items() if above and {one.lower() for one in found} >= _BARE)


def _of_objects(inside: str, kind: str, action: str) -> str:
    if kind == "dir":
        return "protected: git's objects stay" if action == "delete" else ""
    if inside.startswith("objects/info/"):
        return "protected: git trusts it in place of its objects"
    if action != "add":
        return "protected: an object that exists does not change"
    return "" if _OBJECT.fullmatch(inside) or _PACK.fullmatch(inside) else "protected: it is no object of git"


def name_of_object(path: str) -> str:
    """Return the digest (hex) that the path of an object promises."""
    return "".join(path.rsplit("/", 2)[1:])


def reference_refusal(content: bytes) -> str:
    """Return why a reference is not applied: it must be a digest, or name another reference."""
    if not _REFERENCE.fullmatch(content) or b".." in content or b"/." in content:
        return "protected: it is no reference"
    return "protected: it leads to a replacement" if b"refs/replace" in content.lower() else ""


def packed_refusal(new: bytes, old: bytes, held: Collection[str] = ()) -> str:
    """Return why packed references are not applied: they have other replacements than those of the host.

    ``held`` are references without a file of their own that stay as they are (``held_refusal``).
    """
    if _replacements(new) != _replacements(old):
        return "protected: a replacement gives a commit another content"
    values, before = _packed(new), _packed(old)
    moved = next((one for one in sorted(held) if values.get(one) != before.get(one)), "")
    return f"protected: it moves `{moved}`, which another worktree has checked out" if moved else ""


def _packed(packed: bytes) -> dict[str, bytes]:
    """Return the digest of each packed reference."""
    lines = [line.split(b" ", 1) for line in packed.splitlines() if line[:1] not in (b"#", b"^")]
    return {line[1].decode("utf-8", "surrogateescape"): line[0] for line in lines if len(line) == 2}


def target(content: bytes) -> str:
    """Return the reference that the content of a HEAD or of another reference names. Empty for a digest."""
    name = content.removeprefix(b"ref:").strip() if content.startswith(b"ref:") else b""
    return name.decode("utf-8", "surrogateescape")


def held_refusal(worktree: str) -> str:
    """Return why a branch is not applied that another worktree has checked out; without a name it is the main one."""
    which = f"the worktree `{worktree}`" if worktree else "the main worktree"
    return f"protected: {which} has this branch checked out (`git switch --detach` there frees it)"


def _replacements(packed: bytes) -> list[bytes]:
    return sorted(line for line in packed.splitlines() if b"refs/replace" in line.lower())


def index_refusal(listed: bytes, before: bytes = b"") -> str:
    """Return why an index is not applied, by its entries, each ended by a zero byte (`git ls-files -v -s -z`).

    git writes the files of an index as they are named, also into its own directory. It takes the files that the index
    says to be unchanged for unchanged, also when they are not: only those of the index ``before`` may be such.
    """
    hidden = _hidden(before)
    for path, is_hidden in _listed(listed):
        parts = path.split("/")
        if any(part in ("", ".", "..") or _is_git(part) for part in parts):
            return "protected: a file of it would lie in git's directory, or outside"
        if is_hidden and path not in hidden:
            return f"protected: it hides changes of `{path[:200]}` (assume-unchanged or skip-worktree)"
    return ""


def _hidden(listed: bytes) -> set[str]:
    return {path for path, is_hidden in _listed(listed) if is_hidden}


def _listed(listed: bytes) -> Iterator[tuple[str, bool]]:
    """Yield each path of an index, and whether git takes its file for unchanged: a small letter, or S."""
    for raw in listed.split(b"\0"):
        if raw:
            # A tag, mode, object and stage, then a tabulator and the path.
            path = raw.partition(b"\t")[2].decode("utf-8", "replace")
            yield path, raw[:1].islower() or raw[:1] == b"S"


def _is_git(name: str) -> bool:
    """Whether a file system may take a name for `.git`."""
    plain = "".join(ch for ch in name if ch.isprintable()).casefold().rstrip(". ")
    return plain == NAME or plain.startswith((f"{NAME}:", f"{NAME}\\", "git~"))


def needed(chosen: Sequence[str], new: Sequence[str]) -> set[str]:
    """Return the objects among ``new`` paths that references and indexes among the ``chosen`` paths may name.

    Which ones they do is not known here: those of the same repository.
    """
    tops: dict[str, list[str]] = {}
    for path in new:
        at = path.rfind(_OBJECTS)
        if at >= 0 and (_OBJECT.fullmatch(path[at:]) or _PACK.fullmatch(path[at:])):
            tops.setdefault(path[:at], []).append(path)
    found = set[str]()
    for top, objects in tops.items():
        if any(path.startswith(top) and not path.startswith(f"{top}{_OBJECTS}") for path in chosen):
            found.update(objects)
    return found
