"""Find a child's package by its agent id, in directories that the operator named.

The agent sends an id and nothing else. Each directory holds packages side by side. The package whose manifest has the
id is read once, into memory, and verified anew like any package. A foreign package in its place is no danger: a package
starts only with a valid signature for that id.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from policy import errors
from policy.manifest import syntax
from policy.manifest.agent import AGENT_ID
from policy.package import MANIFEST_BYTES, Package
from sandbox.config import check_owner
from sandbox.kernel import libc
from sandbox.storage import package_reader as packages

MANIFEST = "agent.toml"
# A directory with more entries is no catalogue of agents.
MOST_ENTRIES = 4096
# So much is parsed to find one id, a second or two of work: the owner of a directory must not decide how long root
# reads.
PARSED_BYTES = 4 * 1024 * 1024

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_RESOLVE = libc.RESOLVE_BENEATH | libc.RESOLVE_NO_SYMLINKS | libc.RESOLVE_NO_MAGICLINKS | libc.RESOLVE_NO_XDEV
_GONE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV, errno.EACCES)


class Found(Struct, frozen=True):
    """Hold a package, and its place in the operator's words."""

    package: Package
    name: str


def find(
    agent_id: str,
    directories: Sequence[Path],
    beside: int | None,
    *,
    rights: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Found:
    """Find the package of an agent id in the configured ``directories``, which only root may write, else in ``beside``.

    ``beside`` is the open directory of the operator's own package. It is read with the ``rights`` of the requester.

    Raises:
        errors.PackageError: there is none, there are two in one directory, or it cannot be read.
        errors.HostError: a configured directory is in other hands.
    """
    if re.fullmatch(AGENT_ID, agent_id) is None:
        raise errors.PackageError("that is no agent id", hint="1 to 128 of A-Z a-z 0-9 _ . -")
    for path in directories:
        for part in (*reversed(path.parents), path):
            check_owner(part)
        fd = os.open(path, _DIRECTORY)
        try:
            found = _in(fd, agent_id)
        finally:
            os.close(fd)
        if found is not None:
            return found
    with rights():
        found = None if beside is None else _in(beside, agent_id)
    if found is None:
        raise errors.PackageError(
            f"no package of agent `{agent_id}` is where children are looked for",
            hint="put it beside its parent's package, or into a directory of `agents` in config.toml",
        )
    return found


def _in(directory: int, agent_id: str) -> Found | None:
    names = []
    with _listed(directory) as own, os.scandir(own) as entries:
        for number, entry in enumerate(entries):
            if number >= MOST_ENTRIES:
                raise errors.PackageError(f"a directory of agents has more than {MOST_ENTRIES} entries")
            if entry.is_dir(follow_symlinks=False):
                names.append(entry.name)
    # Most packages are named by their agent's id. The manifest decides, and no name.
    holders: list[str] = []
    left = PARSED_BYTES
    for name in sorted(names):
        with _opened(directory, name) as fd:
            raw = b"" if fd is None else _manifest(fd)
        # An id is ASCII: an id that a manifest spells with escapes matches no request.
        if agent_id.encode() not in raw:
            continue
        left -= len(raw)
        if left < 0:
            raise errors.PackageError(
                f"the manifests beside each other that name agent `{agent_id}` have more than {PARSED_BYTES} bytes",
                hint="put its package where fewer others lie",
            )
        if _id(raw, name) == agent_id:
            holders.append(name)
        if len(holders) > 1:
            shown = " and ".join(f"`{one}`" for one in holders)
            raise errors.PackageError(f"agent `{agent_id}` has two packages, {shown}", hint="take one of them away")
    if not holders:
        return None
    with _opened(directory, holders[0]) as fd:
        if fd is None:
            return None
        return Found(packages.read(fd), os.readlink(f"/proc/self/fd/{fd}"))


@contextlib.contextmanager
def _listed(directory: int) -> Iterator[int]:
    """Open the directory once more, to list it.

    The position of a listing belongs to the open description (getdents(2)), which a fork shares. Of siblings that list
    at once, one would see nothing, and another each package twice.
    """
    fd = os.open(".", _DIRECTORY, dir_fd=directory)
    try:
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened(directory: int, name: str) -> Iterator[int | None]:
    try:
        fd = libc.openat2(name, _DIRECTORY, dir_fd=directory, resolve=_RESOLVE)
    except OSError as e:
        if e.errno not in _GONE:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _manifest(package: int) -> bytes:
    """Return the bytes of a directory's manifest; empty where none can be read."""
    try:
        fd = libc.openat2(MANIFEST, _FILE, dir_fd=package, resolve=_RESOLVE)
        with os.fdopen(fd, "rb") as stream:
            raw = stream.read(MANIFEST_BYTES + 1) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    except OSError:
        return b""
    return raw if len(raw) <= MANIFEST_BYTES else b""


def _id(raw: bytes, name: str) -> str | None:
    """Read the agent id of an unverified manifest. None: it has none.

    The text has the bounds of a verified manifest, since tomllib is quadratic in the parts of a key.
    """
    try:
        agent = syntax.load(raw, name)[1].get("agent")
    except errors.ManifestSyntaxError:
        return None
    found = agent.get("id") if isinstance(agent, dict) else None
    return found if isinstance(found, str) else None
