"""A package of a git revision (``REVISION:PATH``), as files in a directory of its own while it is read."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from covenant.visible import visible
from policy import errors, package

_GIT = "git"
_SECONDS = 120
# A package has at most 10,000 files and 256 MiB (sandbox.storage.package_reader refuses more).
_MOST_FILES = 10_000
_MOST_BYTES = 256 << 20
_SAFE = "git config --global --add safe.directory "
_LINK = "120000"
_MODES = {"100644": 0o644, "100755": 0o755, _LINK: 0}


@contextlib.contextmanager
def place(path: Path) -> Iterator[Path]:
    """Give the directory of a path: itself, or one with the files of ``REVISION:PATH``, which is gone afterwards.

    A name that exists is itself, also with a colon in it.

    Raises:
        errors.RevisionError: git has no such revision or tree, or it holds a submodule.
        errors.PackageError: a package cannot have one of its paths.
    """
    revision, colon, below = str(path).partition(":")
    if not colon or not revision or os.path.lexists(path):
        yield path
        return
    if below in {".", ".."}:
        below += "/"  # a path of pathlib has lost it, and only with it git takes the path from this directory
    with tempfile.TemporaryDirectory(prefix="covenant-revision-") as made:
        _write(f"{revision}:{below}", Path(made))
        yield Path(made)


def _write(tree: str, out: Path) -> None:
    """Write the files and links of a tree. Attributes of the repository (export-ignore, filters) change nothing of it.

    ls-tree(1) prints the names of a tree as they are, also `..` and names with a slash: git checks them at a checkout.
    """
    listed = _git("ls-tree", "-r", "-l", "-z", "--full-tree", "--end-of-options", tree)
    rows = [row.partition(b"\t") for row in listed.split(b"\0") if row]
    if len(rows) > _MOST_FILES:
        raise errors.RevisionError(f"`{tree}` has more than {_MOST_FILES} files", hint="name the package's directory")
    total, wanted = 0, list[tuple[str, int, str, int]]()
    for about, _, raw in rows:
        mode, _, blob, size = about.decode().split()
        name = os.fsdecode(raw)
        if mode not in _MODES:
            message = f"`{tree}` has a submodule: `{visible(name)}`"
            raise errors.RevisionError(message, hint="a package holds files and links alone")
        total += int(size)
        if total > _MOST_BYTES:
            raise errors.RevisionError(f"`{tree}` has more than {_MOST_BYTES >> 20} MiB", hint="name the package")
        wanted.append((name, _MODES[mode], blob, int(size)))
    # INVARIANT: before the first write. No path leaves the directory, or has a link in front of its last part.
    package.check_paths(name for name, _, _, _ in wanted if name != package.ENVELOPE_NAME)
    # One process for all files. Of each: a line with name, kind and size, the bytes, and a newline (git-cat-file(1)).
    found = _git("cat-file", "--batch", given="".join(f"{blob}\n" for _, _, blob, _ in wanted).encode())
    at = 0
    for name, permissions, blob, length in wanted:
        head = f"{blob} blob {length}\n".encode()
        if not found.startswith(head, at):
            raise errors.RevisionError(f"`{tree}`: git has no content of `{name}`", hint="fetch the revision whole")
        begin = at + len(head)
        _make(out / name, found[begin : begin + length], permissions)
        at = begin + length + 1


def _make(place: Path, content: bytes, permissions: int) -> None:
    """Write a file, or a link where there are no permissions. A tree may name a path twice: nothing is overwritten."""
    try:
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        if not permissions:
            os.symlink(content, os.fsencode(place))
            return
        with place.open("xb") as stream:
            stream.write(content)
            os.fchmod(stream.fileno(), permissions)
    except (OSError, ValueError) as e:
        raise errors.RevisionError(f"`{place.name}` cannot be written: {e}", hint="take it out of the tree") from e


def _git(*arguments: str, given: bytes = b"") -> bytes:
    try:
        done = subprocess.run([_GIT, *arguments], input=given, capture_output=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise errors.RevisionError(f"git cannot be run: {e}", hint="install git, or name directories") from e
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise errors.RevisionError(f"git has no such tree: {''.join(said[:1])}", hint=_fix(said))
    return done.stdout


def _fix(said: Sequence[str]) -> str:
    """Return the fix for what git says on stderr."""
    if said and "not a git repository" in said[0]:
        return "run it in the checkout, or name directories"
    if said and "dubious ownership" in said[0]:
        # git's own line alone: the owner of the checkout chose its name, which may have lines as well.
        found = [line.strip() for line in said[1:] if "safe.directory" in line]
        return found[0] if len(found) == 1 and found[0].startswith(_SAFE) else "run it as the owner of the checkout"
    return (
        "write REVISION:PATH, with the path from the root of this repository; a shallow clone has few revisions: git "
        "fetch --unshallow"
    )
