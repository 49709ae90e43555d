"""Check the content of git's own files in the changes of a workspace, as the caller (policy.workspace.git)."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import resource
import subprocess
import tempfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

from policy.workspace import changes, git
from policy.workspace.entries import LowerView, UpperEntry
from sandbox.workspace import git_worktrees, lower
from sandbox.workspace.lower import Tops

_GIT: Final = "/usr/bin/git"
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_PIECE: Final = 1 << 20
_MOST_REFERENCE: Final = 4096
_MOST_PACKED: Final = 64 << 20
# Bytes of all objects together that are unpacked, and the memory and seconds of a program of git.
MOST_UNPACKED: Final = 4 << 30
_MEMORY: Final = 4 << 30
# Bytes that a program of git may say.
MOST_LISTED: Final = 256 << 20
_SECONDS: Final = 300
_TOO_LARGE: Final = "it is too large to be checked"
_NOT_ITS_NAME: Final = "protected: its content is not what its name says"


class GitFindings(NamedTuple):
    """Findings in files of git (LowerView): the reason why each one is not applied, and the entries of each index."""

    refusals: dict[str, str]
    indexes: dict[str, tuple[str, str]]


def findings(top: Tops, upper: Tops, entries: Sequence[UpperEntry], view: LowerView) -> GitFindings:
    """Check each file of git that has to be checked.

    ``top`` are the open directories and ``upper`` the open upper layers, which no process writes to any more.

    Raises:
        OSError: one cannot be read.
    """
    directories = git.GitDirectories(git.bare(changes.all_names(entries, view)), view.worktree, {})
    kinds = {one.path: one.kind for one in entries}
    packs, room = dict[str, str](), _Room(MOST_UNPACKED)
    tops = {split[0] for one in entries if (split := directories.split(one.path)) is not None}
    found: dict[str, str] = {}
    indexes: dict[str, tuple[str, str]] = {}
    for one in tops:
        mine = view.worktree if view.worktree and one == lower.REPOSITORY else None
        found |= git_worktrees.held(top, one, mine, lambda path: _is_bare(top, path))
    held = frozenset(found)
    for path, check in directories.checks(path for path, kind in kinds.items() if kind == "file"):
        if found.get(path):
            continue
        if check == "pack":
            stem = path.rpartition(".")[0]
            if stem not in packs:
                packs[stem] = _pack(upper, stem, kinds)
            found[path] = packs[stem]
            continue
        with _opened(upper, path) as fd:
            if check == "object":
                found[path] = "" if fd is None else _object(fd, git.name_of_object(path), room)
            elif check == "index":
                found[path], indexes[path] = ("", ("", "")) if fd is None else _index(top, fd, path)
            elif check == "reference":
                found[path] = git.reference_refusal(_read(fd, _MOST_REFERENCE))
            else:
                found[path] = _packed(top, fd, path, held)
    return GitFindings(found, indexes)


class _Room:
    """The bytes that are still unpacked."""

    def __init__(self, left: int) -> None:
        self.left = left


@contextlib.contextmanager
def _opened(top: Tops, path: str) -> Iterator[int | None]:
    """Open a file below a directory, through no link. None where there is none."""
    above, _, name = path.rpartition("/")
    directory = lower.opened(top, above)
    if directory is None:
        yield None
        return
    try:
        fd = os.open(name, _FILE, dir_fd=directory)
    except FileNotFoundError:
        fd = -1
    finally:
        os.close(directory)
    try:
        yield fd if fd >= 0 else None
    finally:
        if fd >= 0:
            os.close(fd)


def _read(fd: int | None, most: int) -> bytes:
    """Return the content of a file, or one byte more than the most."""
    if fd is None:
        return b""
    with open(fd, "rb", closefd=False) as file:
        return file.read(most + 1)


def _object(fd: int, name: str, room: _Room) -> str:
    """Return why a loose object is not applied: it must unpack to the content of which its name is the digest."""
    digest = hashlib.new("sha1" if len(name) == 40 else "sha256", usedforsecurity=False)
    stream = zlib.decompressobj()
    with open(fd, "rb", closefd=False) as file:
        try:
            while not stream.eof:
                piece = stream.unconsumed_tail or file.read(_PIECE)
                plain = stream.decompress(piece, _PIECE)
                if not piece and not plain:
                    return _NOT_ITS_NAME  # it was cut off
                room.left -= len(plain)
                if room.left < 0:
                    return _TOO_LARGE
                digest.update(plain)
        except zlib.error:
            return _NOT_ITS_NAME
        more = stream.unused_data or stream.unconsumed_tail or file.read(1)
    return "" if digest.hexdigest() == name and not more else _NOT_ITS_NAME


def _packed(top: Tops, fd: int | None, path: str, held: Collection[str]) -> str:
    """Return why packed references are not applied. A file of the directory has a reference before they have."""
    new, above = _read(fd, _MOST_PACKED), path.rpartition("/")[0]
    with _opened(top, path) as was:
        old = _read(was, _MOST_PACKED)
    mine = [one for one in held if one.startswith(f"{above}/refs/") and not git_worktrees.read(top, one)]
    if len(new) > _MOST_PACKED:
        return _TOO_LARGE
    return git.packed_refusal(new, old, [one.removeprefix(f"{above}/") for one in mine])


def _is_bare(top: Tops, path: str) -> bool:
    """Whether the configuration at a path says that its repository has no files of its own."""
    with _opened(top, path) as fd:
        if fd is None:
            return False
        words = ("config", "--file", f"/proc/self/fd/{fd}", "--type=bool", "--get", "core.bare")
        return _git(*words, fd=fd) == b"true\n"


def _pack(upper: Tops, stem: str, kinds: Collection[str]) -> str:
    """Return why a pack is not applied: git must find the same index for it, and the objects that it names."""
    if not {f"{stem}.pack", f"{stem}.idx"} <= set(kinds):
        return "protected: a pack and its index belong together"
    above, _, name = stem.rpartition("/")
    directory = lower.opened(upper, above)
    if directory is None:
        return _NOT_ITS_NAME
    try:
        length = len(name.removeprefix("pack-"))
        words = ("index-pack", "--verify", f"--object-format={'sha1' if length == 40 else 'sha256'}", "--threads=1")
        done = _git(*words, f"/proc/self/fd/{directory}/{name}.pack", fd=directory)
    finally:
        os.close(directory)
    return "" if done is not None else _NOT_ITS_NAME


def _index(top: Tops, fd: int, path: str) -> tuple[str, tuple[str, str]]:
    """Return why an index is not applied, by its entries as git reads them, and by those of the directory's index.

    The digests of both entries follow, the directory's first.
    """
    listed = _index_entries(fd)
    if listed is None:
        return "protected: it is no index that stands alone", ("", "")
    with _opened(top, path) as was:
        before = None if was is None else _index_entries(was)
    digests = ("" if before is None else _sha256(before), _sha256(listed))
    if _is_monitored(fd):
        return "protected: it names files that a file system monitor called unchanged (core.fsmonitor)", digests
    return git.index_refusal(listed, before or b""), digests


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_monitored(fd: int) -> bool:
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as content:
        return git.MONITORED.search(content) is not None


def _index_entries(fd: int) -> bytes | None:
    """Return the entries of an index with their tags (`git ls-files -v -s`). None where git cannot read it alone."""
    with tempfile.TemporaryDirectory(prefix="covenant-index-") as scratch:
        for name in ("objects", "refs"):
            os.mkdir(f"{scratch}/{name}")
        with open(f"{scratch}/HEAD", "x", encoding="ascii") as head:
            head.write("ref: refs/heads/none\n")
        return _git("ls-files", "-v", "-s", "-z", fd=fd, GIT_DIR=scratch, GIT_INDEX_FILE=f"/proc/self/fd/{fd}")


def _git(*words: str, fd: int, **variables: str) -> bytes | None:
    """Run git without any configuration, in bounds. Returns its output, or None when it failed or is not there."""
    if not os.access(_GIT, os.X_OK):
        return None
    environment = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CEILING_DIRECTORIES": "/",
        **variables,
    }
    process = subprocess.Popen(
        [_GIT, *words],
        env=environment,
        cwd="/proc",  # in no repository
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[fd],
    )
    with process:
        for limit, most in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _SECONDS)):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(process.pid, limit, (most, most))
        assert process.stdout is not None, "it is a pipe"
        # Names of an index may be packed a thousandfold. The limit of CPU time ends a program that goes on.
        output = process.stdout.read(MOST_LISTED + 1)
        if len(output) > MOST_LISTED:
            process.kill()
            return None
    return output if process.returncode == 0 else None
