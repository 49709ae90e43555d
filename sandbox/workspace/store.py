"""The workspaces below COVENANT_STATE: one directory for each run that has, or had, a workspace.

workspaces/RUN/record.json    whose directory it is, and on what terms
workspaces/RUN/image.ext4     the changes
workspaces/RUN/applied.json   what applies of it wrote, so that it is no change of the host
workspaces/RUN/journal.json   an apply that is under way: what was staged, then the steps
workspaces/RUN/lock           held by the process that uses it
workspaces/templates          empty images
workspaces/listings           listings of directories that were looked through
workspaces/making             held while a workspace is made
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct, structs

from policy import errors
from policy.workspace.changes import Terms
from policy.workspace.entries import AppliedRecord, LowerEntry
from policy.workspace.steps import ApplyStep
from sandbox.workspace import image
from sandbox.workspace.caller import CallerIdentity
from sandbox.workspace.repository import LinkedRepository

# How changes are applied, the strictest first.
STRICTEST: Final = ("never", "operator", "ask")
RECORD, IMAGE, APPLIED, JOURNAL, LOCK = "record.json", "image.ext4", "applied.json", "journal.json", "lock"
_MAKING_SECONDS: Final = 60.0
TEMPLATES: Final = "templates"
LISTINGS: Final = "listings"
# Held while a workspace is made.
_MAKING: Final = "making"
_MIB: Final = 1024 * 1024


class WorkspaceRecord(Struct, frozen=True):
    """One workspace. ``device`` and ``inode`` identify the directory, ``caller`` applies the changes.

    ``repository`` is the common directory of git, where the directory is a linked worktree.

    ``started_ns`` is the time of the overlay (nanoseconds since 1970). ``settled`` says that the run is over and its
    image was left in order. ``uid`` is the user that asked for the run: the workspace is that user's, and root's.
    ``role`` is the agent's, ``package`` the path of its package, empty for a command that was typed. ``keeps`` says
    that it stays when nothing is changed in it. ``changes`` are the entries that the run left, or with ``compared``
    the changes of the latest comparison; ``held`` of them are not applied.
    """

    run_id: str
    agent_id: str
    policy_digest: str
    directory: str
    device: int
    inode: int
    caller: CallerIdentity
    started_ns: int
    max_mb: int
    apply: str
    terms: Terms
    settled: bool = False
    changes: int = 0
    repository: LinkedRepository | None = None
    uid: int = 0
    role: str | None = None
    package: str = ""
    keeps: bool = False
    compared: bool = False
    held: int = 0


class UserLimits(Struct, frozen=True):
    """Bound the workspaces of one user: their number and the MiB in all of them. 0 is no limit."""

    count: int = 0
    mb: int = 0


NO_LIMITS: Final = UserLimits()


class Journal(Struct, frozen=True):
    """An apply under way. Without ``steps`` nothing was changed yet, and ``staged`` is to be removed.

    ``applied`` is the record that the steps leave.
    """

    staged: dict[str, str]
    steps: list[ApplyStep] | None = None
    bases: dict[str, LowerEntry] = {}
    applied: AppliedRecord = AppliedRecord()


class WorkspaceDirectory:
    """One workspace of the store."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.image = path / IMAGE

    def make(self, record: WorkspaceRecord, limits: UserLimits = NO_LIMITS) -> None:
        """Make it, with its record, within the limits of its user.

        Raises:
            errors.WorkspaceLimitError: the user has as many, or as much in them, as it may.
            errors.WorkspaceError: it cannot be made.
        """
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # One maker at a time: two that begin together count each other.
            with _turn(self.path.parent):
                _check_limits(self.path.parent.parent, record, limits)
                self.path.mkdir(mode=0o700)
                self.write(record)
        except OSError as e:
            raise errors.WorkspaceError(f"a workspace cannot be made: {e.strerror}", where=str(self.path)) from e

    def used_bytes(self) -> int:
        """Return the bytes that its image takes of the store's file system."""
        try:
            return self.image.lstat().st_blocks * 512
        except OSError:
            return 0

    def record(self) -> WorkspaceRecord:
        """Return its record.

        Raises:
            errors.WorkspaceError: it is damaged.
        """
        try:
            found = msgspec.json.decode((self.path / RECORD).read_bytes(), type=WorkspaceRecord)
            # A resume that was killed leaves the earlier run's record in the directory of the new one.
            return structs.replace(found, run_id=self.path.name)
        except (OSError, msgspec.MsgspecError) as e:
            raise errors.WorkspaceError(f"the workspace `{self.path.name}` is damaged: {e}") from e

    def record_bytes(self) -> bytes:
        """Return the bytes of its record.

        Raises:
            OSError: there is none.
        """
        return (self.path / RECORD).read_bytes()

    def write(self, record: WorkspaceRecord) -> None:
        """Write its record, durably."""
        _put(self.path / RECORD, msgspec.json.encode(record))

    def applied(self) -> AppliedRecord:
        """Return what applies of it wrote.

        Raises:
            errors.WorkspaceError: it is damaged.
        """
        try:
            return msgspec.json.decode((self.path / APPLIED).read_bytes(), type=AppliedRecord)
        except FileNotFoundError:
            return AppliedRecord()
        except msgspec.MsgspecError as e:
            raise errors.WorkspaceError(
                f"the record of the applies of the workspace `{self.path.name}` is damaged: {e}",
                hint=f"remove {self.path / APPLIED}; then paths that were applied are conflicts",
            ) from e

    def write_applied(self, record: AppliedRecord) -> None:
        """Write what applies of it wrote, durably."""
        _put(self.path / APPLIED, msgspec.json.encode(record))

    def journal(self) -> Journal | None:
        """Return the apply under way, None without one.

        Raises:
            errors.WorkspaceError: it is damaged.
        """
        try:
            return msgspec.json.decode((self.path / JOURNAL).read_bytes(), type=Journal)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as e:
            raise errors.WorkspaceError(f"the journal of the workspace `{self.path.name}` is damaged: {e}") from e

    def note(self, journal: Journal | None) -> None:
        """Write the apply under way, durably; None when it is over."""
        if journal is not None:
            _put(self.path / JOURNAL, msgspec.json.encode(journal))
            return
        (self.path / JOURNAL).unlink(missing_ok=True)
        _sync(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold it for this process.

        Raises:
            errors.WorkspaceBusyError: another process has it.
            errors.WorkspaceError: it is gone.
        """
        try:
            fd = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise errors.WorkspaceError(f"there is no workspace of run `{self.path.name}`") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise errors.WorkspaceBusyError(
                f"the workspace of run `{self.path.name}` is in use", hint="wait until the run or the apply has ended"
            ) from None
        finally:
            os.close(fd)

    def settle(self, changes: int) -> None:
        """Write down that its run is over and how many changes it left."""
        self.write(structs.replace(self.record(), settled=True, changes=changes, compared=False, held=0))

    def count(self, changes: int, held: int) -> None:
        """Write down the numbers of a comparison: of all changes, and of those that are not applied."""
        before = self.record()
        after = structs.replace(before, changes=changes, compared=True, held=held)
        if after != before:
            self.write(after)

    def resumed(self, other: WorkspaceDirectory, record: WorkspaceRecord) -> None:
        """Give the changes to another run: this workspace becomes ``other``, with its record.

        The host's changes since the first of the runs stay conflicts.

        Raises:
            errors.WorkspaceError: it is of another agent, directory or size, or an apply of it was cut off.
            errors.WorkspaceBusyError: another process uses it.
        """
        with self.locked():
            mine = self.record()
            if self.journal() is not None or not mine.settled:
                raise errors.WorkspaceError(
                    f"the workspace of run `{mine.run_id}` was cut off", hint=f"covenant workspace diff {mine.run_id}"
                )
            check_resumes(mine, record)
            terms = structs.replace(record.terms, apart=mine.terms.apart)
            os.rename(self.path, other.path)
            try:
                other.write(structs.replace(record, started_ns=mine.started_ns, terms=terms))
            except OSError as e:
                os.rename(other.path, self.path)
                raise errors.WorkspaceError(
                    f"the workspace of run `{mine.run_id}` cannot be resumed: {e.strerror}",
                    hint="see the free space of COVENANT_STATE",
                ) from e

    def forked(self, other: WorkspaceDirectory, limits: UserLimits = NO_LIMITS) -> None:
        """Copy it, with its changes, to ``other``, within the limits of its user.

        Raises:
            errors.WorkspaceLimitError: as ``make``.
            errors.WorkspaceError: there is no room, or its run was cut off.
            errors.WorkspaceBusyError: another process uses it.
        """
        with self.locked():
            record = self.record()
            if self.journal() is not None or not record.settled:
                raise errors.WorkspaceError(
                    f"the workspace of run `{record.run_id}` was cut off",
                    hint=f"covenant workspace diff {record.run_id}",
                )
            own = self.applied()
            other.make(structs.replace(record, run_id=other.path.name), limits)
            try:
                image.copy(self.image, other.image)
                other.write_applied(own)
            except OSError as e:
                other.remove()
                raise errors.WorkspaceError(f"the workspace cannot be copied: {e.strerror}") from e

    def remove(self) -> None:
        """Remove it with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextlib.contextmanager
def _turn(top: Path) -> Iterator[None]:
    fd = os.open(top / _MAKING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _check_limits(state: Path, record: WorkspaceRecord, limits: UserLimits) -> None:
    """Check that a user may have one workspace more. One whose run goes on counts with its whole size.

    Raises:
        errors.WorkspaceLimitError: it may not.
    """
    hint = "covenant workspace list shows them; apply or discard some"
    count, mb = 1, record.max_mb
    for one in listed(state):
        with contextlib.suppress(errors.WorkspaceError):
            other = one.record()
            if other.uid == record.uid:
                count += 1
                mb += -(-one.used_bytes() // _MIB) if other.settled else other.max_mb
    if limits.count and count > limits.count:
        raise errors.WorkspaceLimitError(f"this user keeps {limits.count} workspaces, as many as one may", hint=hint)
    if limits.mb and mb > limits.mb:
        raise errors.WorkspaceLimitError(
            f"the workspaces of this user would take {mb} MiB, and one may have {limits.mb}", hint=hint
        )


def check_resumes(mine: WorkspaceRecord, record: WorkspaceRecord) -> None:
    """Check that a run may go on with the changes of an earlier one: it is as bound as the earlier one, or more.

    A pattern less would apply what an earlier run was refused.

    Raises:
        errors.WorkspaceError: it is another agent, user, directory or size, or has less of ``mask``, ``protect`` or
            ``apply``.
    """
    for name in ("agent_id", "uid", "device", "inode", "max_mb", "repository"):
        if getattr(mine, name) != getattr(record, name):
            raise errors.WorkspaceError(
                f"the workspace of run `{mine.run_id}` is of another {name}: {getattr(mine, name)}",
                hint="resume it with the same command, directory and profile",
            )
    if (mine.caller.uid, mine.caller.gid) != (record.caller.uid, record.caller.gid):
        raise errors.WorkspaceError(
            f"the workspace of run `{mine.run_id}` is of another caller", hint="resume it as the user that made it"
        )
    for name, less in (
        ("mask", set(mine.terms.mask) - set(record.terms.mask)),
        ("protect", set(mine.terms.protect) - set(record.terms.protect)),
        ("apply", {mine.apply} if STRICTEST.index(mine.apply) < STRICTEST.index(record.apply) else set[str]()),
    ):
        if less:
            raise errors.WorkspaceError(
                f"the run has less of `{name}` than run `{mine.run_id}` had: {', '.join(sorted(less))[:300]}",
                hint="resume it with the same package, or apply or discard its changes first",
            )


def place(state: Path, run_id: str) -> WorkspaceDirectory:
    """Return the workspace of a run, which may not be made yet."""
    return WorkspaceDirectory(state / "workspaces" / run_id)


def listed(state: Path, uid: int = 0) -> list[WorkspaceDirectory]:
    """Return the workspaces of a user, for root all of the store, by run id."""
    top = state / "workspaces"
    names = sorted(one.name for one in top.iterdir() if (one / RECORD).exists()) if top.exists() else []
    return [one for one in map(WorkspaceDirectory, (top / name for name in names)) if not uid or _is_of(one, uid)]


def _is_of(one: WorkspaceDirectory, uid: int) -> bool:
    """Whether a workspace is this user's. A damaged one is root's."""
    try:
        return one.record().uid == uid
    except errors.WorkspaceError:
        return False


def unmade(state: Path) -> list[Path]:
    """Return the directories of workspaces that were killed while they were made: they have no record."""
    top = state / "workspaces"
    found = [one for one in top.iterdir() if one.name not in (TEMPLATES, LISTINGS, _MAKING)] if top.exists() else []
    return [one for one in found if not (one / RECORD).exists() and _is_free(one)]


def _is_free(path: Path) -> bool:
    """Whether no process makes it now: it is older than the making of one takes."""
    return time.time() - path.lstat().st_ctime > _MAKING_SECONDS


def find(state: Path, word: str, uid: int = 0) -> WorkspaceDirectory:
    """Return the workspace of the run that a word begins, of those of a user; for root of all.

    INVARIANT: workspaces of others are left out before anything is compared, so that the answer tells nothing of them.

    Raises:
        errors.WorkspaceError: there is none, or several.
    """
    found = [one for one in listed(state, uid) if word and one.path.name.startswith(word)]
    exact = [one for one in found if one.path.name == word]
    if len(exact or found) != 1:
        several = "several workspaces begin" if found else "no workspace begins"
        hint = (
            "covenant workspace list; an apply of all changes, a discard and a resume end a workspace, and one that is "
            "a volume has nothing to compare or apply"
        )
        raise errors.WorkspaceError(f"{several} with `{word[:80]}`", hint=hint)
    return (exact or found)[0]


def _put(path: Path, data: bytes) -> None:
    making = path.with_name(f".{path.name}.new")
    with open(making, "wb", opener=lambda name, flags: os.open(name, flags | os.O_CLOEXEC, 0o600)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(making, path)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
