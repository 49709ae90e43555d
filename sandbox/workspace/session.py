"""The workspace of one run: checked before it starts, laid over the caller's directory, settled when it has ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from msgspec import Struct, structs

from policy import data, errors
from policy.compile.mounts import REPOSITORY_PLACE
from policy.workspace.changes import Terms
from policy.workspace.entries import UpperEntry
from sandbox.kernel import libc
from sandbox.kernel.fs import filesystems, hanging
from sandbox.rootfs import host_paths
from sandbox.workspace import image, lower, masks, nested, overlay, repository, store, upper
from sandbox.workspace.caller import CallerIdentity
from sandbox.workspace.repository import LinkedRepository

# Those of this machine's own kernel that take idmapped mounts.
_FILE_SYSTEMS = frozenset({"btrfs", "ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs"})
# The coarse clock of the kernel, by which files are stamped, is behind by at most one tick.
_TICK_NS = 10_000_000
# What stays free in COVENANT_STATE beside the changes of a run.
_SPARE_MB = 64


class GivenDirectory(Struct, frozen=True):
    """The directory that a caller gives to a run: an open descriptor, and who the caller is.

    ``resumes`` begins the id of an earlier run, with whose changes this one goes on. ``uid`` is the user that asked for
    the run, and ``keeps`` says that the workspace stays when nothing is changed in it. ``repository`` is the open
    common directory of git, where the directory is a linked worktree; -1 without one.
    """

    fd: int
    caller: CallerIdentity
    resumes: str = ""
    uid: int = 0
    keeps: bool = False
    repository: int = -1


class About(Struct, frozen=True):
    """The run of a workspace, the path of the directory, and the path of the package, if it has one.

    ``repository`` is that of a linked worktree.
    """

    run_id: str
    agent_id: str
    policy_digest: str
    directory: str
    role: str | None = None
    package: str = ""
    repository: LinkedRepository | None = None


class MountedWorkspace(Struct, frozen=True):
    """Detached mounts of the overlays: of the directory, and of its common directory of git, or an empty one."""

    directory: int
    repository: int


def check(given: GivenDirectory, terms: Mapping[str, Any], never: Mapping[str, str]) -> str:
    """Check a directory against the terms of a manifest (mounts.json, ``workspace``). Returns its path.

    Raises:
        errors.WorkspaceError: it lies elsewhere than the manifest says, is another's, or is none.
        errors.NeverGrantableError: no manifest is granted it.
    """
    return _checked(given.fd, given.caller, terms, never)


def check_repository(
    given: GivenDirectory, path: str, terms: Mapping[str, Any], never: Mapping[str, str]
) -> LinkedRepository | None:
    """Check the common directory of git of the directory at ``path``, if one is given, by the same terms.

    Raises:
        errors.WorkspaceError: as ``check``, or it is not that of the directory.
        errors.NeverGrantableError: no manifest is granted it.
    """
    if given.repository < 0:
        return None
    _checked(given.repository, given.caller, terms, never)
    return repository.checked(given.fd, path, given.repository)


def _checked(fd: int, who: CallerIdentity, terms: Mapping[str, Any], never: Mapping[str, str]) -> str:
    kind = filesystems.mount_of(fd).kind
    if kind not in _FILE_SYSTEMS:
        # Others belong to a process or another machine, which may keep the supervisor waiting, or take no idmapping.
        raise errors.WorkspaceError(
            f"the directory lies on `{kind}`", hint=f"give one on {', '.join(sorted(_FILE_SYSTEMS))}"
        )
    path = os.readlink(f"/proc/self/fd/{fd}")
    info = os.fstat(fd)
    if not stat.S_ISDIR(info.st_mode) or not path.startswith("/") or not info.st_nlink:
        raise errors.WorkspaceError(f"`{path}` is no directory", hint="give a directory that exists")
    if not upper.is_text(path):
        raise errors.WorkspaceError(f"`{upper.shown(path)}` is no UTF-8", hint="give a directory with another name")
    if info.st_uid != who.uid or info.st_gid not in (who.gid, *who.groups):
        # In the overlay the agent has the rights of owner and group, and a caller can give no others than its own.
        raise errors.WorkspaceError(
            f"`{path}` belongs to uid {info.st_uid} and gid {info.st_gid}, and uid {who.uid} gives it",
            hint="give a directory of your own, or have its owner start the agent",
        )
    if not any(path == one or path.startswith(one.rstrip("/") + "/") for one in terms["below"]):
        raise errors.WorkspaceError(
            f"`{path}` lies outside of {', '.join(terms['below'])}",
            hint="give a directory below one of these, or have the operator sign workspace.from with its place",
        )
    host_paths.check_never(path, never)
    _check_here(path, info)
    return path


def _check_here(path: str, info: os.stat_result) -> None:
    """Refuse a directory that this machine does not have at its path: the path is one of the caller's own mounts.

    Raises:
        errors.WorkspaceError: another directory or none is there.
    """
    try:
        with hanging.within("the path of the workspace"):
            found = os.stat(path)
    except OSError:
        found = None
    if found is None or (found.st_dev, found.st_ino) != (info.st_dev, info.st_ino):
        raise errors.WorkspaceError(
            f"`{path}` is another directory on the host", hint="give a directory that no other mount covers"
        )


class MountedLayers(Struct, frozen=True):
    """The layers of one overlay, whether it has masked files, and the paths that it shows read-only."""

    names: image.LayerNames
    masks: bool
    held: tuple[str, ...]


class RunWorkspace:
    """As a context manager: what is left at the end is kept when the agent changed something, and removed otherwise.

    ``mounted`` is called once within the block, which ends after the last process of the run. ``stays`` is False for a
    trial sandbox: nothing of its workspace is kept.
    """

    def __init__(
        self,
        state: Path,
        given: GivenDirectory,
        terms: Mapping[str, Any],
        about: About,
        limits: store.UserLimits = store.NO_LIMITS,
        *,
        stays: bool = True,
    ) -> None:
        self._state = state
        self._limits = limits
        self._stays = stays
        self._given = given
        self._terms = terms
        self._about = about
        self.place = store.place(state, about.run_id)
        # Once it is mounted.
        self.layers: list[MountedLayers] = []
        self._stack = contextlib.ExitStack()
        self._attached: image.AttachedImage | None = None
        self._resumed = False
        self.changes = 0

    def __enter__(self) -> RunWorkspace:
        return self

    def throw_away(self, run_id: str) -> RunWorkspace:
        """Return an empty workspace of the same directory and terms, for the trial sandbox of a run."""
        given = structs.replace(self._given, resumes="", keeps=False)
        about = structs.replace(self._about, run_id=run_id)
        return RunWorkspace(self._state, given, self._terms, about, stays=False)

    @property
    def device(self) -> str:
        """The path of the loop device that has its changes, once it is mounted."""
        return "" if self._attached is None else self._attached.path

    def check_resumed(self) -> None:
        """Check that the run may go on with the changes that it resumes. Nothing is taken over yet.

        Raises:
            errors.WorkspaceError: there are none of this user, or they are of a run that was bound otherwise.
        """
        if self._given.resumes:
            earlier = store.find(self._state, self._given.resumes, self._given.uid)
            store.check_resumes(earlier.record(), self._record())

    def _record(self) -> store.WorkspaceRecord:
        info, about = os.fstat(self._given.fd), self._about
        files = data.workspace_files()
        git = (tuple(files.git_shared), tuple(files.git_own))
        return store.WorkspaceRecord(
            run_id=about.run_id,
            agent_id=about.agent_id,
            policy_digest=about.policy_digest,
            directory=about.directory,
            device=info.st_dev,
            inode=info.st_ino,
            caller=self._given.caller,
            started_ns=time.time_ns() - _TICK_NS,
            max_mb=self._terms["max_mb"],
            apply=self._terms["apply"],
            terms=Terms(tuple(self._terms["mask"]), tuple(self._terms["protect"]), *git),
            uid=self._given.uid,
            role=about.role,
            package=about.package,
            keeps=self._given.keeps,
            repository=about.repository,
        )

    def mounted(self, uid: int) -> MountedWorkspace:
        """Return detached mounts of the overlays for the run's user. They are closed with the block.

        Raises:
            errors.WorkspaceError: it cannot be made.
        """
        info, record = os.fstat(self._given.fd), self._record()
        owner = overlay.Owner(info.st_uid, info.st_gid)
        if self._given.resumes:
            # Before it is there: a failure from here on must not remove the changes of the earlier run.
            self._resumed = True
            store.find(self._state, self._given.resumes, self._given.uid).resumed(self.place, record)
            self._stack.enter_context(self.place.locked())
        else:
            self.place.make(record, self._limits)
            self._stack.enter_context(self.place.locked())
            self._check_free()
            image.create(self.place.image, self._terms["max_mb"], self._state / "workspaces" / store.TEMPLATES)
        self._attached = self._stack.enter_context(image.AttachedImage(self.place.image))
        linked, contents = self._about.repository, dict[str, bytes]()
        if linked is not None:
            # Before the directory: its `.git` file leads there.
            contents[lower.REPOSITORY] = repository.file_inside(linked.worktree, REPOSITORY_PLACE)
        directory = self._overlay(self._given.fd, owner, uid, image.DIRECTORY, contents)
        if linked is None:
            common = overlay.empty()
        else:
            common = self._overlay(self._given.repository, owner, uid, image.REPOSITORY, {})
        for fd in (directory, common):
            self._stack.callback(os.close, fd)
        return MountedWorkspace(directory, common)

    def _overlay(
        self, below: int, owner: overlay.Owner, uid: int, layers: image.LayerNames, contents: Mapping[str, bytes]
    ) -> int:
        """Lay an overlay over an open directory. ``contents`` are files of its own in the mask's layer."""
        assert self._attached is not None, "its image is there"
        changes = self._attached.mounted()
        try:
            within, flags = (f"{lower.REPOSITORY}/", libc.MOUNT_ATTR_NOEXEC) if layers == image.REPOSITORY else ("", 0)
            remembered = self._state / "workspaces" / store.LISTINGS
            seen = masks.walk(below, tuple(self._terms["mask"]), within, remembered)
            if layers == image.DIRECTORY and seen.apart:
                self._note_apart(seen.apart)
            hidden = [*seen.hidden, *(path for path in contents if path not in seen.hidden)]
            self._lay_out(changes, below, hidden, owner, layers, contents)
            held = self._hold(changes, below, seen.held, layers)
            self.layers.append(MountedLayers(layers, bool(hidden), held))
            return overlay.made(
                below,
                changes,
                owner=owner,
                uid=uid,
                masks=bool(hidden),
                scratch=self.place.path,
                layers=layers,
                flags=flags,
            )
        finally:
            os.close(changes)

    @staticmethod
    def _hold(changes: int, below: int, paths: list[str], layers: image.LayerNames) -> tuple[str, ...]:
        """Make the parts that are not applied read-only. Returns their paths (nested.hold)."""
        layer = os.open(layers.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=changes)
        try:
            return nested.hold(below, layer, paths)
        finally:
            os.close(layer)

    def _note_apart(self, apart: dict[str, str]) -> None:
        """Write the parts down that are not applied, with those of the earlier runs."""
        record = self.place.record()
        terms = structs.replace(record.terms, apart={**record.terms.apart, **apart})
        self.place.write(structs.replace(record, terms=terms))

    def _check_free(self) -> None:
        """Refuse a workspace that could fill COVENANT_STATE, which holds the audit log.

        Raises:
            errors.WorkspaceError: there is too little space.
        """
        system, needed = os.statvfs(self._state), self._terms["max_mb"] + _SPARE_MB
        if system.f_bavail * system.f_frsize < needed * 1024 * 1024:
            raise errors.WorkspaceError(
                f"COVENANT_STATE has less than {needed} MiB of free space",
                hint="covenant workspace list; apply or discard what is there",
            )

    @staticmethod
    def _lay_out(
        changes: int,
        below: int,
        hidden: list[str],
        owner: overlay.Owner,
        layers: image.LayerNames,
        contents: Mapping[str, bytes],
    ) -> None:
        """Make the directories of the layers. The mode of the upper one is that of the directory ``below``.

        In an image that is used again the masked files are made anew.
        """
        mode = os.fstat(below).st_mode & 0o777
        for name in (layers.work, layers.mask):
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(name, dir_fd=changes)
        for name in layers:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=changes)
            os.chown(name, owner.uid, owner.gid, dir_fd=changes)
            os.chmod(name, mode, dir_fd=changes)
        if hidden:
            layer = os.open(layers.mask, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=changes)
            try:
                masks.put(below, layer, hidden, (owner.uid, owner.gid), contents)
            finally:
                os.close(layer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if not self._stays:
                self.place.remove()
                return
            if self._attached is None:
                # The changes of an earlier run are settled when they are next opened.
                if not self._resumed:
                    self.place.remove()
                return
            try:
                linked = self._about.repository is not None
                self.changes = len(read_upper(self._attached, self._given.caller, linked=linked))
                if self.changes or self._given.keeps:
                    self.place.settle(self.changes)
            except (errors.WorkspaceError, OSError):
                # It is repaired when it is next opened: nothing is thrown away here.
                return
        if not self.changes and not self._given.keeps:
            self.place.remove()


def read_upper(attached: image.AttachedImage, caller: CallerIdentity, *, linked: bool = False) -> list[UpperEntry]:
    """Return what the agent changed. Of a ``linked`` worktree the changes of the repository are below `.git`.

    Raises:
        errors.WorkspaceError: it cannot be read.
    """
    changes = attached.mounted()
    try:
        found = _read(changes, image.DIRECTORY, caller)
        if not linked:
            return found
        # A directory that the agent made in the place of the `.git` file is no part of the repository.
        own = [one for one in found if not one.path.startswith(f"{lower.REPOSITORY}/")]
        own = [UpperEntry(one.path, "other") if _is_made(one) else one for one in own]
        inside = _read(changes, image.REPOSITORY, caller)
        return own + [structs.replace(one, path=f"{lower.REPOSITORY}/{one.path}") for one in inside]
    finally:
        os.close(changes)


def _is_made(entry: UpperEntry) -> bool:
    return entry.path == lower.REPOSITORY and entry.kind == "dir"


def _read(changes: int, layers: image.LayerNames, caller: CallerIdentity) -> list[UpperEntry]:
    top = os.open(layers.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=changes)
    try:
        return upper.read(top, (caller.uid, caller.gid))
    finally:
        os.close(top)
