"""Layers that are built in: a name stands for a list of installed packages and a few files.

``debian-minimal`` is what programs expect of any machine: a shell, the usual tools, git, certificates, time zones.
``python3`` and ``nodejs`` are the interpreters of this host, for the profiles of sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from policy import errors
from sandbox.layers import host_packages
from sandbox.layers.dpkg import DEBIAN, Dpkg
from sandbox.layers.packing import Packing

_NEEDED = (
    *("base-files", "dash", "bash", "coreutils", "grep", "sed", "findutils", "diffutils", "tar", "gzip"),
    *("ca-certificates", "tzdata", "ncurses-base", "libc-bin", "libstdc++6"),
)
_WANTED = ("git", "procps", "netbase", "debianutils", "hostname")
_AWK = ("gawk", "mawk", "original-awk")
_NPM = ("/usr/lib/node_modules", "/usr/bin/npm", "/usr/bin/npx", "/usr/bin/corepack")
_DIRECTORIES = ("/root", "/home", "/tmp", "/var/tmp")  # noqa: S108 - of the agent's own root


def debian_minimal(pack: Packing, *, admin: Path = DEBIAN) -> None:
    """Put the packages of `debian-minimal` into a layer, as far as this host has them.

    Raises:
        errors.LayerError: Raised when a package that it needs is not installed, or a file was changed.
    """
    installed = Dpkg(admin).installed
    awk = [name for name in _AWK if name in installed][:1]
    if not awk:
        raise errors.LayerError("no package for awk is installed", hint="apt-get install mawk")
    host_packages.fill(pack, [*_NEEDED, *awk, *(name for name in _WANTED if name in installed)], admin=admin)
    for name in _WANTED:
        if name not in installed:
            pack.notes.append(f"{name} is not installed on this host, so the layer lacks it: apt-get install {name}")
    for path in _DIRECTORIES:
        pack.directory(path)
    if not pack.has("/etc/localtime"):
        pack.link("/etc/localtime", "/usr/share/zoneinfo/Etc/UTC")


def python3(pack: Packing) -> None:
    """Put this host's Python and its standard library into a layer.

    Raises:
        errors.LayerError: Raised when it is not installed, or a file was changed.
    """
    host_packages.fill(pack, ["python3"])


def nodejs(pack: Packing) -> None:
    """Put this host's Node into a layer, without npm, which some packages of Node bring along.

    Raises:
        errors.LayerError: Raised when it is not installed, or a file was changed.
    """
    host_packages.fill(pack, ["nodejs"], without=_NPM)


PRESETS: dict[str, Callable[[Packing], None]] = {
    "debian-minimal": debian_minimal,
    "python3": python3,
    "nodejs": nodejs,
}
