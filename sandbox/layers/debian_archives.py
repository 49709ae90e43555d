"""Put Debian packages into a layer that this host has not installed.

apt downloads them with their dependencies into a directory of its own, and verifies them by the signed lists of the
host. ``dpkg-deb`` unpacks them. Both run as an ordinary user without rights. No script of a package is run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from policy import errors
from sandbox.layers import host_packages, tree_walk, unprivileged
from sandbox.layers.packing import Packing

_APT, _DPKG_DEB = Path("/usr/bin/apt-get"), Path("/usr/bin/dpkg-deb")
_HINT = "run `apt-get update`, and see `apt-cache policy` for the names of the packages"
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?(=[A-Za-z0-9.+:~-]+)?")
# A line of `apt-get --simulate`: Inst NAME (VERSION SOURCE [ARCHITECTURE]) and more.
_PLANNED = re.compile(r"^Inst (\S+) (?:\[[^\]]*\] )?\((\S+) ", re.MULTILINE)


def fill(pack: Packing, packages: Sequence[str], *, options: Mapping[str, str] | None = None) -> None:
    """Download, verify and unpack these packages and what they depend on.

    ``options`` are settings of apt besides ours; tests name their own repository by them.

    Raises:
        errors.LayerToolError: Raised when apt or dpkg-deb is missing or fails; the message has its last line.
        errors.LayerError: Raised when a word is no package name, or the unpacked tree is refused.
    """
    for name in packages:
        if not _PACKAGE.fullmatch(name):
            raise errors.LayerError(f"`{name[:80]}` cannot name a Debian package")
    for tool in (_APT, _DPKG_DEB):
        if not tool.exists():
            raise errors.LayerToolError(f"`{tool}` is missing", hint="build the layer on a Debian host, or use --from")
    with unprivileged.directory() as own:
        _directories(own)
        archives = _download(own, packages, options or {})
        for archive in archives:
            unprivileged.run([str(_DPKG_DEB), "-x", str(archive), str(own / "tree")], own, hint=_HINT)
        top = tree_walk.open_top(own / "tree")
        try:
            _copy(pack, top)
        finally:
            os.close(top)
        pack.notes.append(f"unpacked: {', '.join(archive.name for archive in archives)}")


def _directories(own: Path) -> None:
    for name in ("tree", "archives", "cache", "cache/archives", "cache/archives/partial"):
        (own / name).mkdir()
        os.chown(own / name, unprivileged.NOBODY, unprivileged.NOBODY)
    # With an empty list of installed packages, apt downloads everything that the packages depend on.
    (own / "status").touch()


def _download(own: Path, packages: Sequence[str], options: Mapping[str, str]) -> list[Path]:
    settings = {
        "Dir::State::status": str(own / "status"),
        "Dir::Cache": str(own / "cache"),
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
        "Debug::NoLocking": "true",
        "APT::Install-Recommends": "false",
        "APT::Get::AllowUnauthenticated": "false",
        "Acquire::AllowInsecureRepositories": "false",
        **options,
    }
    words = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
    planned = unprivileged.run(
        [str(_APT), *words, "-q", "-y", "--simulate", "install", "--", *packages], own, hint=_HINT
    )
    wanted = [f"{name}={version}" for name, version in _PLANNED.findall(planned)]
    if wanted:
        # `download` verifies each file, and copies it here also from a repository on a disk.
        unprivileged.run([str(_APT), *words, "-q", "download", "--", *wanted], own / "archives", hint=_HINT)
    found = sorted((own / "archives").glob("*.deb"))
    if not wanted or len(found) != len(wanted):
        raise errors.LayerToolError("apt did not download every package", hint="apt-get update; then repeat")
    return found


def _copy(pack: Packing, top: int) -> None:
    skip = frozenset(found.path for found in tree_walk.walk(top) if host_packages.is_left_out(found.path))
    pack.tree(top, skip=skip)
