"""Put the files of installed Debian packages into a layer, with those of the packages that they depend on.

Each file is compared with the MD5 that dpkg has for it, if it has one. Links on the way, as /bin on a merged /usr, are
kept. Documentation and translations are left out, and of /etc everything but a short list.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from policy import errors
from policy.host import ClosureFile
from sandbox.layers.dpkg import DEBIAN, DebianPackage, Dpkg
from sandbox.layers.packing import Packing
from sandbox.rootfs.closure_files import Builder

_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CHUNK_BYTES = 1 << 20
_LEFT_OUT = (
    *("/usr/share/doc", "/usr/share/man", "/usr/share/info", "/usr/share/locale", "/usr/share/lintian"),
    *("/usr/share/bug", "/usr/share/doc-base", "/usr/share/menu", "/usr/share/applications", "/usr/share/icons"),
    *("/usr/share/pixmaps", "/usr/share/bash-completion", "/usr/share/zsh", "/usr/lib/systemd", "/usr/lib/udev"),
    *("/lib/systemd", "/lib/udev", "/boot", "/dev", "/proc", "/run", "/sys", "/tmp", "/var"),  # noqa: S108
)
# Of /etc: what programs read in its default form.
_OF_ETC = (
    *("/etc/ssl/openssl.cnf", "/etc/services", "/etc/protocols", "/etc/os-release", "/etc/debian_version"),
    *("/etc/mime.types", "/etc/magic", "/etc/fonts", "/etc/terminfo", "/etc/inputrc", "/etc/alternatives"),
    *("/etc/python3", "/etc/python3.11", "/etc/python3.12", "/etc/python3.13", "/etc/ssl/certs"),
)
_CERTIFICATES, _BUNDLE = "/etc/ssl/certs", "/etc/ssl/certs/ca-certificates.crt"


class HostFiles:
    """Copies files of the host into a layer.

    ``root`` and ``owners`` are other than / and root only in tests, which build small machines.
    """

    def __init__(self, pack: Packing, *, root: str = "", owners: Collection[int] = (0,)) -> None:
        self._pack, self._root = pack, root
        self._builder = Builder(root, owners)

    def add(self, path: str, *, md5: str = "", optional: bool = False) -> bool:
        """Add one file or link with the links and directories on its way. Returns False if it is not there.

        Raises:
            errors.HostError: Raised when another user may change it.
            errors.LayerError: Raised when it is missing and not ``optional``, or is not what dpkg installed.
        """
        real = self._parent(path)
        try:
            info = None if real is None else os.lstat(self._root + real)
        except OSError:
            info = None
        if real is None or info is None:
            if optional:
                return False
            raise errors.LayerError(f"`{path}` is missing on this host", where=path)
        if stat.S_ISDIR(info.st_mode):
            return True
        if stat.S_ISLNK(info.st_mode):
            self._pack.link(real, os.readlink(self._root + real))
        elif stat.S_ISREG(info.st_mode):
            self._file(real, info, md5)
        return True

    def add_with_target(self, path: str) -> None:
        """Add a link with the file that it leads to, or a file.

        Raises:
            errors.HostError, errors.LayerError: As ``add``.
        """
        for _ in range(8):
            if not self.add(path, optional=True):
                return
            real = self._parent(path)
            if real is None or self._pack.kind(real) != "link":
                return
            path = os.path.normpath(os.path.join(os.path.dirname(real), os.readlink(self._root + real)))

    def below(self, folder: str) -> list[str]:
        """Return the paths directly in a directory of the host."""
        try:
            return [f"{folder}/{name}" for name in sorted(os.listdir(self._root + folder))]
        except OSError:
            return []

    def _parent(self, path: str) -> str | None:
        """Return the path with the links of its directory resolved; these links are added. None without a directory."""
        found: dict[str, ClosureFile] = {}
        above, _, name = path.rpartition("/")
        real = self._builder.resolve(above or "/", found)
        for place, entry in found.items():
            if entry.kind == "symlink":
                self._pack.link(place, entry.target)
        return None if real is None else f"{real.rstrip('/')}/{name}"

    def _file(self, path: str, info: os.stat_result, md5: str) -> None:
        if self._pack.has(path):
            return
        self._builder.resolve(path, {})
        if not info.st_mode & stat.S_IROTH:
            self._pack.notes.append(f"left out: {path} (not every user may read it)")
            return
        fd = os.open(self._root + path, _FILE)
        try:
            if md5 and _md5(fd) != md5:
                raise errors.LayerError(f"`{path}` is not the file that dpkg installed", where=path)
            self._pack.file(path, fd)
        finally:
            os.close(fd)


def fill(
    pack: Packing,
    names: Sequence[str],
    *,
    admin: Path = DEBIAN,
    root: str = "",
    owners: Collection[int] = (0,),
    without: Collection[str] = (),
) -> None:
    """Put these packages and what they depend on into a layer, but for the files below the paths of ``without``.

    Raises:
        errors.LayerError: Raised when a package is not installed, or a file is not what dpkg installed.
        errors.HostError: Raised when another user may change a file.
    """
    database = Dpkg(admin)
    files = HostFiles(pack, root=root, owners=owners)
    packages = database.closure(names)
    diverted = database.diversions()
    for package in packages:
        _add_package(files, database, package, diverted, without)
    _add_alternatives(pack, database, root)
    if any(package.name == "ca-certificates" for package in packages):
        for path in files.below(_CERTIFICATES):
            files.add_with_target(path)
        if pack.has(_BUNDLE):
            # Where OpenSSL, and Python with it, look for one file.
            if not pack.has("/usr/lib/ssl/cert.pem"):
                pack.link("/usr/lib/ssl/cert.pem", _BUNDLE)
        else:
            pack.notes.append(f"{_BUNDLE} is missing on this host: run update-ca-certificates")


def _md5(fd: int) -> str:
    digest, at = hashlib.md5(usedforsecurity=False), 0
    while piece := os.pread(fd, _CHUNK_BYTES, at):
        digest.update(piece)
        at += len(piece)
    return digest.hexdigest()


def _add_package(
    files: HostFiles,
    database: Dpkg,
    package: DebianPackage,
    diverted: Mapping[str, tuple[str, str]],
    without: Collection[str],
) -> None:
    sums = database.md5sums(package)
    for listed in database.files(package):
        moved, by = diverted.get(listed, (listed, package.name))
        path = listed if by == package.name else moved
        if is_left_out(path) or _is_below(path, without):
            continue
        try:
            files.add(path, md5=sums.get(listed, ""))
        except errors.LayerError as e:
            e.hint = e.hint or f"apt-get install --reinstall {package.name}"
            raise


def is_left_out(path: str) -> bool:
    """Whether a path of a package is left out of layers."""
    if path.startswith("/etc/"):
        return not _is_below(path, _OF_ETC)
    return _is_below(path, _LEFT_OUT)


def _is_below(path: str, places: Collection[str]) -> bool:
    return any((path + "/").startswith(place + "/") for place in places)


def _add_alternatives(pack: Packing, database: Dpkg, root: str) -> None:
    """Add the links of update-alternatives that lead to a file of the layer, as `awk` to `mawk`."""
    for link, name in database.alternatives().items():
        middle = f"/etc/alternatives/{name}"
        try:
            target = os.readlink(root + middle)
        except OSError:
            continue
        real = os.path.realpath(root + os.path.dirname(link)).removeprefix(root)
        place = f"{real}/{os.path.basename(link)}"
        if pack.has(os.path.realpath(root + target).removeprefix(root)) and not pack.has(place):
            pack.link(middle, target)
            pack.link(place, middle)
