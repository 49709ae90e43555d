"""Fingerprint the files, granted paths and limits that an instance was made of, to find changes (sandbox.standby)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from policy import decide
from policy.host import HostFacts
from sandbox.config import SYSTEM_CA, Config, files
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.fs import filesystems
from sandbox.rootfs import covered
from sandbox.rootfs.erofs_image import ImageFile
from sandbox.runner import gvisor
from sandbox.storage import trust_state as states

_RESOLVERS = "/etc/resolv.conf"
# As much as the kernel gives of a file of a cgroup in one read.
_LIMIT_BYTES = 4096


class Files(Struct, frozen=True):
    """Files of the host with what tells each from another of its name: ``few`` to look at always, ``many`` seldom."""

    few: Mapping[str, tuple[int, ...] | None]
    many: Mapping[str, tuple[int, ...] | None] = msgspec.field(default_factory=dict)

    @classmethod
    def of_state(cls, state: states.State) -> Files:
        """The trust root that holds: one file for each version, and each is written once."""
        name = str(state.root_place(state.root_version()))
        return cls({name: _identity(name)})

    @classmethod
    def of_config(cls, config: Config) -> Files:
        """The configuration, the programs that it names, and what is believed and said to its proxy."""
        names = [*files(config.state), config.runsc, config.nft, config.python3, config.node]
        names += [SYSTEM_CA, *config.tls.ca] if config.proxy.tls else []
        if config.proxy.secret:
            # Imported only here: a start without a vault does not pay for it.
            from sandbox.vault import embedded

            names.append(config.state / embedded.FOLDER / embedded.FILE)
        return cls({str(name): _identity(str(name)) for name in names})

    @classmethod
    def of_run(cls, facts: HostFacts, *, networked: bool) -> Files:
        """Return the files that the root directory was copied from, and those that the gates read."""
        closures = (*facts.runtimes.values(), *facts.executables.values())
        sources = {file.source for closure in closures for file in closure.files if file.source}
        few = {_RESOLVERS: _identity(_RESOLVERS)} if networked else {}
        return cls(few, {name: _identity(name) for name in sources})

    @classmethod
    def of_root(cls, file: ImageFile | None) -> Files:
        """Return the one file that has the root, if it has one: the next start compares it with its record."""
        return cls({} if file is None else {str(file.path): _identity(str(file.path))})

    def joined(self, other: Files) -> Files:
        """Both."""
        return Files({**self.few, **other.few}, {**self.many, **other.many})

    def changed(self, *, every_file: bool) -> str | None:
        """The first that is another now."""
        groups = (self.few, self.many) if every_file else (self.few,)
        return next((n for group in groups for n, was in group.items() if _identity(n) != was), None)


class Sources(Struct, frozen=True):
    """Granted paths of the host, each with what was opened there and on which mount: what is mounted stays mounted when
    the name moves, and when another mount covers it. ``plan`` are the mounts of the agent's root, ``links`` the links
    of the host that lead there."""

    opened: Mapping[str, tuple[int, int]]
    mounts: Mapping[str, int]
    plan: Sequence[Mapping[str, Any]]
    links: Mapping[str, str] = msgspec.field(default_factory=dict)

    @classmethod
    def of(cls, decision: decide.Decision, sources: Mapping[str, int]) -> Sources:
        """Those of a decision that were just opened."""
        document = decision.artefacts.json("mounts.json")
        opened, plan = {}, covered.granted(document["mounts"])
        for mount in plan:
            info = os.fstat(sources[mount["destination"]])
            opened[mount["source"]] = (info.st_dev, info.st_ino)
        links = {one["path"]: one["target"] for one in document["root"].get("links", [])}
        return cls(opened, covered.numbers(plan, sources), plan, links)

    def changed(self) -> str | None:
        """The first under whose name lies another now, or what a mount covers."""
        for name, was in self.opened.items():
            found = _identity(name)
            if found is None or found[:2] != was:
                return name
        for link, target in self.links.items():
            if _text(link) != target:
                return link
        if self.plan:
            for path, _ in covered.found(self.plan, self.mounts, [*filesystems.mounts()]):
                return path
        return None


def _text(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _identity(path: str) -> tuple[int, ...] | None:
    try:
        info = os.stat(path)
    except OSError:
        return None
    return info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class LimitFiles:
    """The files of a sandbox's limits, open as long as it waits: the kernel makes what one holds at each read, and to
    open and close it takes seven times as long. Those of a cgroup that is gone can be read no more (ENODEV)."""

    def __init__(self, started: gvisor.StartedSandbox, stack: contextlib.ExitStack) -> None:
        """The files are closed with ``stack``."""
        self._files = [(limit, _opened(started.leaf, limit, stack)) for limit in started.limits]

    def loosened(self) -> str | None:
        """The first whose file does not hold what was written there."""
        return next((limit.file for limit, fd in self._files if not _holds(limit, fd)), None)


def _opened(leaf: cgroup.Leaf, limit: cgroup.Limit, stack: contextlib.ExitStack) -> int | None:
    """None where there is no such file and need not be; -1 where it cannot be read."""
    directory = leaf.paths.get(limit.controller)
    if directory is None:
        return -1
    try:
        fd = os.open(f"{directory}/{limit.file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1 if limit.required else None
    stack.callback(os.close, fd)
    return fd


def _holds(limit: cgroup.Limit, fd: int | None) -> bool:
    if fd is None:
        return True
    try:
        return cgroup.same(os.pread(fd, _LIMIT_BYTES, 0).decode().strip(), limit.value)
    except OSError:
        return False
