"""Take files of the host one by one into a closure, with each step checked and recorded.

Symlinks are resolved here, so that every component is checked: it must belong to root and be writable only by root. A
file must be readable by everyone, since its copy will be.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

from policy import errors
from policy.host import Closure, ClosureFile
from sandbox.rootfs import closure_cache, loader_patch
from sandbox.storage import atomic_file

PROGRAM_MODE, DATA_MODE, DIRECTORY_MODE = 0o755, 0o644, 0o755

_MAX_FILE = 512 << 20
_MAX_HOPS = 40


def derived(
    directory: Path, name: str, files: Mapping[str, bytes], *, entry: str = "", mode: int = DATA_MODE
) -> Closure:
    """Return files of our own making as a closure. Their copies are in ``directory``, named by content.

    They are derived again after a crash, so nothing is synced here.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    listed: dict[str, ClosureFile] = {}
    for path, content in files.items():
        for above in [str(p) for p in PurePosixPath(path).parents][:-1]:
            listed[above] = ClosureFile(above, "dir", DIRECTORY_MODE)
        digest = hashlib.sha256(content).hexdigest()
        source = directory / f"{name}-{digest[:32]}"
        atomic_file.derive(source, content)
        listed[path] = ClosureFile(path, "file", mode, len(content), digest, source=str(source))
    return Closure(name, entry, tuple(sorted(listed.values())))


def uncovered(paths: Iterable[str], mounted: Collection[str]) -> tuple[str, ...]:
    """Return the paths that no mount of a run covers, by the path itself or by a directory above it."""
    return tuple(path for path in paths if not any((path + "/").startswith(one.rstrip("/") + "/") for one in mounted))


def read_source(file: ClosureFile) -> bytes:
    """The bytes of one file of a closure as they belong in an agent's root: the loader's are patched.

    Raises:
        OSError: the host's file is gone.
    """
    fd = os.open(file.source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as stream:
        data = stream.read(_MAX_FILE + 1)
    return as_delivered(file.path, data)


def as_delivered(path: str, data: bytes) -> bytes:
    """Bytes of a host file as the agent's root holds them."""
    if not _is_loader(path):
        return data
    try:
        return loader_patch.patch(data, name=path)
    except errors.NotEnforceableError:
        # The plain loader serves every run without executables; granting one is refused (sandbox.host.facts).
        return data


def _is_loader(path: str) -> bool:
    return os.path.basename(path).startswith(("ld-linux-", "ld-2."))


class Builder:
    """Collects files of the host, following symlinks by hand so that each step is checked and recorded.

    ``root`` and ``owners`` are other than / and root only in tests, which build small machines.
    """

    def __init__(self, root: str = "", owners: Collection[int] = (0,)) -> None:
        self.root, self.owners = root, frozenset(owners)
        self.files: dict[str, ClosureFile] = {}
        self.watch: dict[str, closure_cache.Signature] = {}
        self._data: dict[str, bytes] = {}

    def add(self, path: str, *, mode: int = DATA_MODE) -> str:
        """Add one file with the directories and links on its way; its real path.

        Raises:
            errors.HostError: missing, not a regular file, or in other hands.
        """
        found: dict[str, ClosureFile] = {}
        real = self.resolve(path, found)
        if real is None or found[real].kind != "file":
            raise errors.HostError(f"`{path}` is not there or not a file", where=path)
        known = self.files.get(real)
        if known is None:
            data = as_delivered(real, self.read(real))
            digest = hashlib.sha256(data).hexdigest()
            known = ClosureFile(real, "file", mode, len(data), digest, "", self.root + real)
        elif mode & 0o111:
            known = ClosureFile(real, "file", mode, known.size, known.sha256, "", known.source)
        found[real] = known
        self.files.update(found)
        return real

    def add_link(self, path: str) -> None:
        """Add one symlink or directory of the host by itself, if it is there."""
        found: dict[str, ClosureFile] = {}
        if self.resolve(path, found) is not None:
            self.files.update({p: f for p, f in found.items() if f.kind != "file"})

    def read(self, real: str) -> bytes:
        """A regular file's bytes, refused when an ordinary user could not read them.

        Raises:
            errors.HostError: that, or it is larger than a file of a closure may be.
            OSError: it cannot be opened or read.
        """
        if real not in self._data:
            fd = os.open(self.root + real, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            with os.fdopen(fd, "rb") as stream:
                info = os.fstat(fd)
                if not info.st_mode & stat.S_IROTH:
                    raise errors.HostError(f"`{real}` cannot be read by everyone", where=real)
                if info.st_size > _MAX_FILE:
                    raise errors.HostError(f"`{real}` is larger than {_MAX_FILE} bytes", where=real)
                self._data[real] = stream.read(_MAX_FILE + 1)
        return self._data[real]

    def tree(self, top: str, *, skip: Collection[str]) -> list[str]:
        """Real paths of the regular files below ``top``; links that lead out of it and ``skip`` left out."""
        out: list[str] = []
        pending = [top]
        while pending:
            folder = pending.pop()
            self._trusted(folder)
            for item in sorted(os.scandir(self.root + folder), key=lambda i: i.name):
                path = f"{folder}/{item.name}"
                if item.name in skip:
                    continue
                if item.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif item.is_file(follow_symlinks=False) or _is_link_to_neighbour(item):
                    out.append(path)
        return out

    def fork(self) -> Builder:
        """A copy to try something with; ``adopt`` takes what it found."""
        other = Builder(self.root, self.owners)
        other.files, other.watch, other._data = dict(self.files), dict(self.watch), self._data
        return other

    def adopt(self, other: Builder) -> None:
        self.files, self.watch = other.files, other.watch

    def closure(self, name: str, entry: str) -> Closure:
        return Closure(name, entry, tuple(sorted(self.files.values())))

    def resolve(self, path: str, found: dict[str, ClosureFile]) -> str | None:
        """Return the real path, and add every component of it to ``found``. None if there is no such file.

        Raises:
            errors.HostError: Raised when another user may change a component, or there are too many symlinks.
        """
        pending, current, hops = deque(path.split("/")), "", 0
        while pending:
            part = pending.popleft()
            if part in ("", "."):
                continue
            if part == "..":
                current = os.path.dirname(current).rstrip("/")
                continue
            here = f"{current}/{part}"
            info = self._trusted(here, missing_ok=True)
            if info is None:
                return None
            if stat.S_ISLNK(info.st_mode):
                hops += 1
                target = os.readlink(self.root + here)
                if hops > _MAX_HOPS:
                    raise errors.HostError(f"`{path}` goes through too many symlinks", where=path)
                found[here] = ClosureFile(here, "symlink", target=target, source=self.root + here)
                pending.extendleft(reversed(target.split("/")))
                current = "" if target.startswith("/") else current
            elif stat.S_ISDIR(info.st_mode):
                found[here] = ClosureFile(here, "dir", DIRECTORY_MODE, source=self.root + here)
                current = here
            elif stat.S_ISREG(info.st_mode) and not any(pending):
                found[here] = ClosureFile(here, "file", source=self.root + here)
                current = here
            else:
                return None
        return current or "/"

    def _trusted(self, path: str, *, missing_ok: bool = False) -> os.stat_result | None:
        try:
            info = os.lstat(self.root + path)
        except (FileNotFoundError, NotADirectoryError):
            if missing_ok:
                return None
            raise errors.HostError(f"`{path}` is not there", where=path) from None
        if info.st_uid not in self.owners or (info.st_mode & 0o022 and not stat.S_ISLNK(info.st_mode)):
            raise errors.HostError(
                f"`{path}` belongs to the closure of a program and is in other hands than root's",
                hint=f"chown root {path}; chmod go-w {path}",
                where=path,
            )
        self.watch[path] = closure_cache.signature(info)
        return info


def _is_link_to_neighbour(item: os.DirEntry[str]) -> bool:
    return item.is_symlink() and "/" not in os.readlink(item.path)
