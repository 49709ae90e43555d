"""The ceiling of an observed run, and what is known of the host's directories below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from policy.learn import presets
from policy.manifest.permissions import VOLUME, VolumeGrant


class HostPlace(Struct, frozen=True):
    """A directory of the host, and where the sandbox has it."""

    directory: str
    place: str


class Directory(Struct, frozen=True):
    """A directory of the host below the ceiling: how many entries it has, and whether a sensitive path is below it.

    The same as an unknown directory, one that is ``sensitive`` is never proposed as a whole.
    """

    entries: int
    sensitive: bool = False


class Ceiling(Struct, frozen=True):
    """The most that an observed run may do: a proposal is never wider.

    - ``reads`` are host paths, at their own place in the sandbox. ``volumes`` are places that can be written.
    - ``workspace`` is the caller's directory behind an overlay.
    - ``kept`` says why no single file of the workspace can be granted, empty where one can.
    - ``hosts`` are the named destinations, as HOST:PORT.
    - ``programs`` says whether programs of the root may be started, and ``reach`` whether hosts may be reached.
    - ``trees`` are the trees of programs that may be started as a whole, and ``named`` single programs.
    - ``strange`` are programs of the root that are neither of a tree nor named.
    - ``never`` are the trees that no manifest is granted, with their reasons.
    - ``links`` are opened host paths that go through a link, with the paths that they lead to.
    - ``directories`` are facts about directories of the host, by path.
    """

    reads: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    workspace: HostPlace | None = None
    kept: str = ""
    hosts: tuple[str, ...] = ()
    programs: bool = False
    trees: frozenset[str] = frozenset()
    named: tuple[str, ...] = ()
    strange: frozenset[str] = frozenset()
    reach: bool = False
    never: Mapping[str, str] = msgspec.field(default_factory=dict)
    links: Mapping[str, str] = msgspec.field(default_factory=dict)
    directories: Mapping[str, Directory] = msgspec.field(default_factory=dict)

    def host_path(self, path: str) -> str | None:
        """Return the host path of a path of the sandbox that is below a granted path, None for every other."""
        if self.workspace is not None and below(path, self.workspace.place):
            return self.workspace.directory + path[len(self.workspace.place) :]
        return path if any(below(path, one) for one in self.reads) else None

    def root_of(self, path: str) -> str | None:
        """Return the widest granted path that a host path is below."""
        tops = [*self.reads, *(() if self.workspace is None else (self.workspace.directory,))]
        return min((one for one in tops if below(path, one)), key=len, default=None)

    def whole(self, directory: str) -> bool:
        """Whether a directory may be proposed as a whole."""
        known = self.directories.get(directory)
        return known is not None and not known.sensitive and not presets.is_sensitive(directory)


def place_of(written: str) -> str:
    """Return where the sandbox has an entry of ``permissions.filesystem.write``: a host path, or a volume's place."""
    return VolumeGrant.of(written.removeprefix(VOLUME)).place if written.startswith(VOLUME) else written


def target(host: str, port: int) -> str:
    """Return a destination as HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parts(written: str) -> tuple[str, int]:
    """Return host and port of a destination that ``target`` made."""
    host, _, port = written.rpartition(":")
    return host.strip("[]"), int(port)


def below(path: str, top: str) -> bool:
    """Whether a path is ``top`` or below it."""
    return path == top or path.startswith(top if top.endswith("/") else f"{top}/")


def narrowest(paths: Sequence[str]) -> list[str]:
    """Return the paths that are below no other of them, sorted."""
    found: list[str] = []
    for path in sorted(set(paths)):
        if not found or not below(path, found[-1]):
            found.append(path)
    return found
