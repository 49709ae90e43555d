"""Host facts: what a machine is and can enforce, as plain values that the pure half is given.

``sandbox.host.facts`` makes them; tests make them by hand. Everything here is frozen and ordered, so that the
same facts compile to the same bytes.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec
from msgspec import Struct


@dataclass(frozen=True, slots=True, order=True)
class ClosureFile:
    """One entry of a runtime's closure, as it appears in the agent's root.

    ``kind`` is ``file``, ``dir`` or ``symlink``; ``target`` is the symlink's text, else empty;
    ``sha256`` is the hex digest of a file's bytes, else empty; ``mode`` holds permission bits only;
    ``size`` is in bytes. ``source`` is the path on the host that it was read from (not part of the digest).
    """

    path: str
    kind: Literal["file", "dir", "symlink"]
    mode: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    source: str = field(default="", compare=False)


@dataclass(frozen=True)
class Closure:
    """The files that a program needs: itself, its loader, its libraries, its standard library.

    ``name`` is the runtime (``python3``, ``node``) or the granted executable's path; ``entry`` is the path in
    the agent's root of the program to start; ``files`` are sorted by path. A static program of a package
    has an empty closure. ``layered``: the program stands in a layer of the root, which holds what it needs; ``files``
    is then the program alone, or empty.
    """

    name: str
    entry: str
    files: tuple[ClosureFile, ...]
    layered: bool = False

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over the sorted listing; what the policy digest carries."""
        h = hashlib.sha256()
        for f in sorted(self.files):
            h.update(f"{f.path}\0{f.kind}\0{f.mode:o}\0{f.sha256}\0{f.target}\n".encode())
        return h.hexdigest()

    @cached_property
    def file_paths(self) -> tuple[str, ...]:
        """Every path but directories, as tuples of components would sort: a tree's paths stand together."""
        return tuple(sorted(f.path + "/" for f in self.files if f.kind != "dir"))

    def below(self, directory: str) -> str | None:
        """The first file that is ``directory`` or lies below it, by component; None when there is none."""
        prefix = directory.rstrip("/") + "/"
        index = bisect.bisect_left(self.file_paths, prefix)
        found = self.file_paths[index] if index < len(self.file_paths) else ""
        return found.rstrip("/") if found.startswith(prefix) else None


class CgroupFacts(Struct, frozen=True):
    """The hierarchies that carry the controllers we need.

    ``version`` is 1 or 2 for where memory, pids and cpu live, 0 when one of them is nowhere.
    """

    version: Literal[0, 1, 2]
    controllers: frozenset[str]
    swap_accounting: bool = False


class RunscFacts(Struct, frozen=True):
    """The runsc binary that runs would use, after a live probe."""

    path: str
    version: str
    sha256: str
    platform: str = "systrap"


class NetworkFacts(Struct, frozen=True):
    """The network that this host can give: ``lacks`` names the missing part, ``mend`` the fix; empty if none.

    ``stack`` names the network stack of an agent: gVisor's own (``sandbox``), or that of the host's
    kernel within the agent's namespace (``host``), as runsc's flag has it. ``links`` says whether an agent can have a
    link to a gateway at least, for services; only the way out is then lacking.
    """

    lacks: str = "a look at this host"
    mend: str = "run `covenant doctor`"
    stack: Literal["sandbox", "host"] = "sandbox"
    links: bool = False


class GrantedPath(Struct, frozen=True):
    """A granted host path as it was found, component by component.

    ``room_mb`` is what can be written there at most, by whomever, in MiB: the size of the file system of its own that
    is mounted there. It is 0 where nothing bounds that, and for a path that is only read; ``unbounded`` says why.
    ``real`` is the path without links, empty for ``path`` itself. ``links`` are the links on the way, each with its
    text; only a path for reading has any. ``device`` is the number of the file system of a path for writing.
    """

    path: str
    kind: Literal["file", "dir"]
    room_mb: int = 0
    unbounded: str = ""
    real: str = ""
    links: tuple[tuple[str, str], ...] = ()
    device: int = 0

    @property
    def place(self) -> str:
        """The path without links: what is mounted, at the same place in the agent's root."""
        return self.real or self.path


class VolumeFacts(Struct, frozen=True):
    """A volume of this host: ``mb`` is the size of its image in MiB."""

    mb: int


class HostFacts(Struct, frozen=True):
    """Facts about the machine for the compiler. Memory and disk in MiB, cpus as a count.

    ``providers`` are the names of the operator's providers of models, ``searchers`` those of searches,
    ``agent_servers`` those of agents, ``collects`` whether there is a collector for the telemetry of agents,
    ``publish_ports`` the loopback ports at which agents may publish, ``host_ports`` those that they
    may reach, ``tools`` the tools of the package's stdio servers, by URI, and
    ``proxied`` says whether connections go by the operator's proxy alone. ``made_up_providers`` and ``made_up_pages``
    are the providers and hosts of pages that the operator declared as a mock. ``isolates_runs`` says that runs of
    covenant-supervisor reach nothing by the host's network.
    """

    arch: Literal["x86_64", "aarch64"]
    kernel: str
    audience: str
    cpus: int
    memory_mb: int
    memory_available_mb: int
    disk_free_mb: int
    pids_free: int
    cgroup: CgroupFacts
    runsc: RunscFacts | None
    network: NetworkFacts = NetworkFacts()
    runtimes: Mapping[str, Closure] = msgspec.field(default_factory=dict)
    executables: Mapping[str, Closure] = msgspec.field(default_factory=dict)
    granted: Mapping[str, GrantedPath] = msgspec.field(default_factory=dict)
    providers: tuple[str, ...] = ()
    volumes: Mapping[str, VolumeFacts] = msgspec.field(default_factory=dict)
    publish_ports: tuple[int, ...] = ()
    host_ports: tuple[int, ...] = ()
    proxied: bool = False
    searchers: tuple[str, ...] = ()
    agent_servers: tuple[str, ...] = ()
    collects: bool = False
    tools: frozenset[str] = frozenset()
    made_up_providers: tuple[str, ...] = ()
    made_up_pages: tuple[str, ...] = ()
    isolates_runs: bool = False
