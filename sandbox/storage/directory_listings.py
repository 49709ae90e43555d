"""The listings of directories that earlier walks over a workspace remembered, so that only changed ones are read again.

A directory is as it was while its device, inode and status change time (ctime) are the same: each name that comes or
goes sets that time, and no user can set it. That is so where this kernel stamps the directory itself: of a file system
of the network, of FUSE or of a virtual machine's host nothing is remembered. A directory that changed in the moment
before it was read is not remembered: a second change in the same tick of the kernel's clock would not be seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, structs

from sandbox.kernel.fs import filesystems

# A walk over fewer names is as fast.
LEAST_NAMES: Final = 2_000
_MOST_BYTES: Final = 16 * 1024 * 1024
_MOST_FILES: Final = 32
_SETTLED_NS: Final = 1_000_000_000
# ext2 to ext4, XFS, Btrfs, tmpfs, F2FS, ZFS and bcachefs (linux/magic.h).
_STAMPED_HERE: Final = frozenset({
    0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0xF2F52010, 0x2FC12FC1, 0xCA451A4E,
})  # fmt: skip
_DIGEST: Final = hashlib.sha256().digest_size


class Listing(Struct, frozen=True, array_like=True):
    """Keep what a walk needs of one directory: names of directories and of masked files, and how many there are.

    ``is_checkout`` says that it has a `.git` that is no directory.
    """

    device: int
    inode: int
    changed_ns: int
    directories: list[str]
    hidden: list[str]
    count: int
    is_checkout: bool


class RememberedListings:
    """The listings of one directory with one set of patterns, in a file of ``place``. Without a place it is empty.

    ``rules`` tell the program that matches the patterns from an older or newer one.
    """

    def __init__(
        self, place: Path | None, top: int, above: str, patterns: tuple[str, ...], rules: Sequence[object] = ()
    ) -> None:
        info, system = os.fstat(top), os.fstatvfs(top)
        known = (info.st_dev, info.st_ino, system.f_fsid, above, patterns, *rules)
        name = hashlib.sha256(repr(known).encode("utf-8", "surrogatepass")).hexdigest()
        self._path = place / name if place is not None and filesystems.type_of(top) in _STAMPED_HERE else None
        self._before = {} if self._path is None else _read(self._path)
        self._after: dict[str, Listing] = {}
        self._fresh = 0
        self._now = time.time_ns()

    def get(self, path: str, info: os.stat_result) -> Listing | None:
        """Return the listing of a directory that did not change, None without one."""
        one = self._before.get(path)
        if one is None or (one.device, one.inode, one.changed_ns) != (info.st_dev, info.st_ino, info.st_ctime_ns):
            return None
        self._after[path] = one
        return one

    def put(self, path: str, info: os.stat_result, listing: Listing) -> Listing:
        """Remember the listing that was read after ``info``, and return it."""
        self._fresh += listing.count
        is_settled = info.st_ctime_ns < self._now - _SETTLED_NS
        if is_settled and _are_text(path, *listing.directories, *listing.hidden):
            self._after[path] = structs.replace(
                listing, device=info.st_dev, inode=info.st_ino, changed_ns=info.st_ctime_ns
            )
        return listing

    def write(self) -> None:
        """Write the listings, when many were read. They are no more than a help: without room there are none."""
        if self._path is None or self._fresh < LEAST_NAMES:
            return
        data = msgspec.msgpack.encode(self._after)
        if len(data) > _MOST_BYTES:
            return
        making = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                with open(making, "xb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
                    file.write(hashlib.sha256(data).digest() + data)
                os.rename(making, self._path)
            finally:
                making.unlink(missing_ok=True)
            _bound(self._path.parent)


def _are_text(*names: str) -> bool:
    """Whether the names are UTF-8: others cannot be written."""
    try:
        "/".join(names).encode()
    except UnicodeEncodeError:
        return False
    return True


def _read(path: Path) -> dict[str, Listing]:
    """Return the listings of a file, none when it is damaged, as after a power cut."""
    try:
        raw = path.read_bytes()
        if hashlib.sha256(raw[_DIGEST:]).digest() != raw[:_DIGEST]:
            return {}
        return msgspec.msgpack.decode(raw[_DIGEST:], type=dict[str, Listing])
    except (OSError, msgspec.MsgspecError):
        return {}


def _bound(top: Path) -> None:
    """Remove the oldest files, and what a killed process was writing."""
    files = sorted(((one.lstat().st_mtime_ns, one) for one in top.iterdir()), reverse=True)
    for _, one in files[_MOST_FILES:]:
        one.unlink(missing_ok=True)
