"""Read dpkg's database: which packages are installed, what they need, which files they have.

Source: deb-control(5), dpkg-query(1), update-alternatives(1).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from msgspec import Struct

from policy import errors

DEBIAN = Path("/var/lib/dpkg")
# What maintainer scripts use, and no program.
_MAINTAINER_ONLY = frozenset({"debconf", "cdebconf", "dpkg", "ucf", "init-system-helpers", "sensible-utils"})
_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")


class DebianPackage(Struct, frozen=True):
    """An installed package. ``needs`` has one tuple of alternatives for each dependency."""

    name: str
    arch: str
    version: str
    needs: tuple[tuple[str, ...], ...]
    provides: tuple[str, ...]


class Dpkg:
    """The database below one directory.

    Raises:
        errors.LayerToolError: Raised when this host has none.
    """

    def __init__(self, admin: Path = DEBIAN) -> None:
        self._admin = admin
        try:
            text = (admin / "status").read_text(errors="surrogateescape")
        except OSError as e:
            raise errors.LayerToolError(
                f"`{admin}/status` cannot be read: {e.strerror}",
                hint="this host has no Debian packages: build the layer with --from DIR",
                where=str(admin / "status"),
            ) from e
        self.installed: dict[str, DebianPackage] = {}
        for stanza in text.split("\n\n"):
            package = _parsed(stanza)
            if package is not None:
                self.installed.setdefault(package.name, package)
        self._providers: dict[str, str] = {}
        for package in self.installed.values():
            for name in package.provides:
                self._providers.setdefault(name, package.name)

    def closure(self, names: Collection[str]) -> list[DebianPackage]:
        """Return these packages with everything that they depend on, sorted by name.

        Raises:
            errors.LayerError: Raised when one is not installed.
        """
        found: dict[str, DebianPackage] = {}
        pending = [(name, "") for name in names]
        while pending:
            name, by = pending.pop()
            package = self.installed.get(name)
            if package is None:
                because = f", which `{by}` needs" if by else ""
                raise errors.LayerError(
                    f"package `{name[:80]}`{because} is not installed",
                    hint=f"apt-get install {name}" if _NAME.fullmatch(name) else "name a Debian package",
                )
            if name in found:
                continue
            found[name] = package
            pending += [(need, name) for need in self._needed(package)]
        return [found[name] for name in sorted(found)]

    def _needed(self, package: DebianPackage) -> Iterator[str]:
        for alternatives in package.needs:
            if not _MAINTAINER_ONLY.isdisjoint(alternatives):
                continue
            there = [name for name in alternatives if name in self.installed]
            provided = [self._providers[name] for name in alternatives if name in self._providers]
            yield (*there, *provided, *alternatives)[0]

    def files(self, package: DebianPackage) -> list[str]:
        """Return the paths of a package, directories too.

        Raises:
            errors.LayerToolError: Raised when the database has no list of them.
        """
        text = self._info(package, "list")
        if text is None:
            raise errors.LayerToolError(
                f"dpkg has no list of the files of `{package.name}`",
                hint=f"apt-get install --reinstall {package.name}",
            )
        return [line for line in text.splitlines() if line not in ("", "/.")]

    def md5sums(self, package: DebianPackage) -> dict[str, str]:
        """Return the MD5 of each file that the package was built with; configuration files have none."""
        text = self._info(package, "md5sums") or ""
        return {f"/{path}": digest for digest, _, path in (line.partition("  ") for line in text.splitlines())}

    def diversions(self) -> dict[str, tuple[str, str]]:
        """Return for each diverted path where the file is, and the package that has another file in its place."""
        try:
            lines = (self._admin / "diversions").read_text().splitlines()
        except OSError:
            return {}
        return {path: (moved, by) for path, moved, by in zip(lines[::3], lines[1::3], lines[2::3], strict=False)}

    def alternatives(self) -> dict[str, str]:
        """Return the links of update-alternatives: from the path of the link to its name in /etc/alternatives."""
        found: dict[str, str] = {}
        for place in sorted((self._admin / "alternatives").glob("*")):
            head = place.read_text(errors="replace").partition("\n\n")[0].splitlines()
            names = [place.name, *head[2::2]]
            found.update(zip(head[1::2], names, strict=False))
        return found

    def _info(self, package: DebianPackage, kind: str) -> str | None:
        for name in (package.name, f"{package.name}:{package.arch}"):
            try:
                return (self._admin / "info" / f"{name}.{kind}").read_text()
            except OSError:
                continue
        return None


def _parsed(stanza: str) -> DebianPackage | None:
    fields: dict[str, str] = {}
    for line in re.sub(r"\n[ \t]+", " ", stanza).splitlines():
        key, _, value = line.partition(":")
        fields[key] = value.strip()
    if not fields.get("Status", "").endswith(" installed"):
        return None
    needs = [
        tuple(_bare(one) for one in group.split("|"))
        for key in ("Pre-Depends", "Depends")
        for group in fields.get(key, "").split(",")
        if group.strip()
    ]
    provides = tuple(_bare(one) for one in fields.get("Provides", "").split(",") if one.strip())
    version, arch = fields.get("Version", ""), fields.get("Architecture", "")
    return DebianPackage(fields["Package"], arch, version, tuple(needs), provides)


def _bare(text: str) -> str:
    """The name of a dependency without version, architecture and restrictions."""
    return re.split(r"[ (:\[<]", text.strip(), maxsplit=1)[0]
