"""Operations on a workspace whose run is over: compare it with the directory, apply it, discard it."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

from msgspec import Struct, structs

from policy import errors
from policy.signing.approval import Approval
from policy.workspace import changes as policy_changes
from policy.workspace import selection
from policy.workspace import steps as policy_steps
from policy.workspace.changes import Change
from policy.workspace.entries import AppliedRecord, LowerView, UpperEntry
from sandbox.workspace import apply as applying
from sandbox.workspace import branch as branches
from sandbox.workspace import caller, git_content, image, lower, session, store
from sandbox.workspace.apply import Kept
from sandbox.workspace.caller import CallerIdentity
from sandbox.workspace.lower import Tops

T = TypeVar("T")

# How long a start waits for a caller's directory.
RECOVERY_SECONDS = 30


class Applied(Struct, frozen=True):
    """The result of an apply: the changes that were applied, those that were not, and what the host kept."""

    applied: tuple[Change, ...]
    left: tuple[Change, ...]
    kept: tuple[Kept, ...]


class Permit(Struct, frozen=True):
    """Hold what a caller brings to an apply: the digest of the changes that were looked at, an operator's approval.

    An empty ``digest`` is that of any changes.
    """

    digest: str = ""
    approval: Approval | None = None


NO_PERMIT: Final = Permit()


class OpenWorkspace:
    """A workspace that this process holds, with its image attached and an apply that was cut off brought to its end.

    Use ``opened``.
    """

    def __init__(
        self,
        place: store.WorkspaceDirectory,
        attached: image.AttachedImage,
        seconds: int,
        identity: CallerIdentity | None = None,
    ) -> None:
        self.place = place
        self.record = place.record()
        self._identity = identity or self.record.caller
        self._attached = attached
        self._seconds = seconds
        self._entries: list[UpperEntry] | None = None

    def entries(self) -> list[UpperEntry]:
        """Return what the agent changed."""
        if self._entries is None:
            linked = self.record.repository is not None
            self._entries = session.read_upper(self._attached, self.record.caller, linked=linked)
        return self._entries

    def changes(self) -> tuple[Change, ...]:
        """Compare with the directory as it is now.

        Raises:
            errors.WorkspaceError: the directory is not the one that was given, or cannot be read by the caller.
        """
        return self._compared(self.place.applied())[1]

    def _compared(self, own: AppliedRecord) -> tuple[LowerView, tuple[Change, ...]]:
        entries, record = self.entries(), self.record
        with self.upper() as top:
            view = self._as_caller(lambda: self._view(top, entries, own), LowerView)
        return view, policy_changes.compare(entries, view, terms=record.terms, started_ns=record.started_ns, own=own)

    def _as_caller(self, does: Callable[[], T], kind: type[T]) -> T:
        """Call ``does`` with the caller's rights (caller.work)."""
        return caller.work(self._identity, does, kind, self._seconds)

    def _view(self, upper: Tops, entries: Sequence[UpperEntry], own: AppliedRecord) -> LowerView:
        linked = self.record.repository
        with self._directory() as top:
            view = structs.replace(
                lower.view(top, entries, own.paths), worktree="" if linked is None else linked.worktree
            )
            found = git_content.findings(top, upper, entries, view)
            return structs.replace(view, findings=found.refusals, indexes=found.indexes)

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Tops]:
        """Open the caller's directory, and its common directory of git, as the caller."""
        record = self.record
        with contextlib.ExitStack() as stack:
            fds = [
                stack.enter_context(_given(one.directory, one.device, one.inode))
                for one in (record, record.repository)
                if one is not None
            ]
            yield Tops(*fds)

    @contextlib.contextmanager
    def upper(self) -> Iterator[Tops]:
        """Open the upper layers, read-only."""
        self.entries()  # from now on the caller can read it
        layers = (image.DIRECTORY, *(() if self.record.repository is None else (image.REPOSITORY,)))
        with contextlib.ExitStack() as stack:
            changes = self._attached.mounted(writable=False)
            stack.callback(os.close, changes)
            fds = []
            for one in layers:
                fds.append(os.open(one.upper, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=changes))
                stack.callback(os.close, fds[-1])
            yield Tops(*fds)

    def contents(self, paths: Collection[str], most: int) -> dict[str, tuple[bytes, bytes]]:
        """Return the first ``most`` bytes of each path: of the directory, and of the workspace. As the caller."""
        with self.upper() as top:
            return self._as_caller(lambda: self._contents(top, paths, most), dict[str, tuple[bytes, bytes]])

    def content(self, path: str, offset: int, most: int) -> bytes:
        """Return at most ``most`` bytes of a file of the workspace, from ``offset`` on. As the caller."""
        with self.upper() as top:
            return self._as_caller(lambda: _part(top, path, offset, most), bytes)

    def _contents(self, upper: Tops, paths: Collection[str], most: int) -> dict[str, tuple[bytes, bytes]]:
        with self._directory() as top:
            return {path: (_start(top, path, most), _start(upper, path, most)) for path in paths}

    def branch(
        self, name: str, *, permit: Permit = NO_PERMIT, log: Callable[[Sequence[Change]], None]
    ) -> tuple[str, tuple[Change, ...]]:
        """Commit the changes that are not refused on a new branch. Returns the commit, and the changes that it lacks.

        ``log`` is called with them before, and stops it when it raises.

        Raises:
            errors.WorkspaceError: there is no repository, the branch exists, or the manifest allows no apply.
            errors.WorkspaceApprovalError: an operator has to approve these changes, and did not.
        """
        record, found = self.record, self.changes()
        wanted = [one for one in found if not one.refused]
        self._check_permit(wanted, permit)
        log(wanted)
        message = f"Changes of agent {record.agent_id}\n\nRun: {record.run_id}\nPolicy: {record.policy_digest}\n"
        owner = self._identity
        with self.upper() as top, branches.scratch(owner.uid, owner.gid) as index:
            author = f"{record.agent_id} (covenant)"
            commit = functools.partial(branches.commit, record.directory, index, top.directory)
            try:
                made = caller.work(
                    owner,
                    lambda: commit(wanted, name, author, message),
                    str,
                    self._seconds,
                    starts_programs=True,
                )
            except errors.WorkspaceError as e:
                e.hint = e.hint or branches.fix(e.message)
                raise
        return made, tuple(one for one in found if one.refused)

    def _check_permit(self, wanted: Sequence[Change], permit: Permit) -> None:
        """Check that these very changes may reach the directory.

        Raises:
            errors.WorkspaceError: the manifest says that nothing is applied.
            errors.WorkspaceDigestError: they are not those that the caller looked at.
            errors.WorkspaceApprovalError: an operator has to approve them, and did not.
        """
        record, found = self.record, selection.digest(wanted)
        if record.apply == "never":
            raise errors.WorkspaceError(
                "the manifest says that these changes are never applied", hint="look at them: covenant workspace diff"
            )
        if permit.digest and permit.digest != found:
            raise errors.WorkspaceDigestError(
                f"the changes have the digest {found}, not {permit.digest}",
                hint=f"covenant workspace diff {record.run_id[:8]} shows them and their digest",
            )
        if record.apply == "ask":
            return
        if permit.approval is None:
            raise errors.WorkspaceApprovalError(
                "the manifest says that an operator approves these changes before they are applied",
                hint=f"covenant workspace approve {record.run_id[:8]} --digest {found} --key NAME --out FILE; "
                "then apply with --approval FILE",
            )
        approved = permit.approval.statement
        for what, here, there in (
            ("run", record.run_id, approved.run_id),
            ("agent", record.agent_id, approved.agent_id),
            ("policy digest", record.policy_digest, approved.policy_digest),
            ("digest of the changes", found, approved.changes_sha256),
        ):
            if here != there:
                raise errors.WorkspaceApprovalError(
                    f"the approval is for another {what}: {there}, and not {here}",
                    hint="have an operator approve what `covenant workspace diff` shows now",
                )

    def apply(
        self,
        paths: Collection[str] = (),
        *,
        exact: bool = False,
        permit: Permit = NO_PERMIT,
        log: Callable[[Sequence[Change]], None],
    ) -> Applied:
        """Apply all changes that can be applied, or those at and below ``paths``; with ``exact`` those at them alone.

        ``log`` is called with them before the first one is done, and stops the apply when it raises.

        Raises:
            errors.WorkspaceConflictError: the host changed one of them.
            errors.WorkspaceError: the manifest allows no apply, or a step failed.
            errors.WorkspaceDigestError, errors.WorkspaceApprovalError: as ``_check_permit``.
        """
        own = self.place.applied()
        view, found = self._compared(own)
        asked = selection.asked(found, paths, exact=exact)
        if paths and not asked:
            raise errors.WorkspaceError("no change is at or below what was named", hint="covenant workspace diff RUN")
        if conflicts := [one for one in asked if one.conflict]:
            hint = "covenant workspace diff shows both; apply other paths by name, or discard"
            if any(one.path.startswith(f"{lower.REPOSITORY}/") for one in conflicts):
                # Git writes the index also when it looks at files alone.
                hint = f"covenant workspace branch {self.record.run_id} NAME, then git merge NAME; or: {hint}"
            raise errors.WorkspaceConflictError(
                f"the host changed {len(conflicts)} of the paths: {', '.join(one.path for one in conflicts[:5])}",
                hint=hint,
            )
        chosen = selection.chosen(found, paths, exact=exact)
        self._check_permit(chosen, permit)
        after = policy_steps.record_after(own, chosen, view, self.record.started_ns)
        kept = self._applied(chosen, after, log) if chosen else []
        done = {(one.path, one.action) for one in chosen}
        rest = tuple(one for one in found if (one.path, one.action) not in done)
        return Applied(tuple(chosen), rest, tuple(kept))

    def _applied(
        self, chosen: list[Change], after: AppliedRecord, log: Callable[[Sequence[Change]], None]
    ) -> list[Kept]:
        record, place = self.record, self.place
        existing = self._as_caller(lambda: self._existing(chosen), list[str])
        staged = policy_steps.staging(chosen, f"{policy_changes.STAGED[1:]}{record.run_id[:8]}-", existing)
        place.note(store.Journal(staged))
        try:
            with self.upper() as top:
                changed = self._as_caller(lambda: self._stage(top, chosen, staged), list[str])
            if changed:
                raise errors.WorkspaceConflictError(
                    f"the host changed {', '.join(changed[:5])} at this moment", hint="apply again"
                )
            log(chosen)
        except BaseException:
            self.unstage(staged)
            raise
        bases = {one.path: one.base for one in chosen if one.base is not None}
        journal = store.Journal(staged, policy_steps.steps(chosen, staged), bases, after)
        place.note(journal)
        return self.commit(journal)

    def _existing(self, chosen: Sequence[Change]) -> list[str]:
        """The directories of the changes that exist, and stay. As the caller."""
        gone = {one.path for one in chosen if one.action == "delete"}
        with self._directory() as top:
            above = {path for one in chosen for path in policy_changes.ancestors(one.path)} - gone
            return ["", *(path for path in sorted(above) if _is_directory(top, path))]

    def _stage(self, upper: Tops, chosen: Sequence[Change], staged: dict[str, str]) -> list[str]:
        with self._directory() as top:
            return applying.stage(top, upper, chosen, staged)

    def commit(self, journal: store.Journal) -> list[Kept]:
        """Do the steps of a journal, and close it."""
        steps = journal.steps or []
        kept = self._as_caller(lambda: self._commit(steps, journal), list[Kept])
        # Before the journal goes: a process that is killed in between does the steps, and this, once more.
        self.place.write_applied(journal.applied)
        self.place.note(None)
        return kept

    def _commit(self, steps: Sequence[policy_steps.ApplyStep], journal: store.Journal) -> list[Kept]:
        with self._directory() as top:
            return applying.commit(top, steps, journal.bases)

    def unstage(self, staged: dict[str, str]) -> None:
        """Take back what an apply wrote that did not come to its steps."""
        does = functools.partial(self._unstage, list(staged.values()))
        self._as_caller(does, int)
        self.place.note(None)

    def _unstage(self, names: Sequence[str]) -> int:
        with self._directory() as top:
            return applying.unstage(top, names)


@contextlib.contextmanager
def _given(path: str, device: int, inode: int) -> Iterator[int]:
    """Open a directory that was given to a run, and no other one of its name."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        info = os.fstat(fd)
        if (info.st_dev, info.st_ino) != (device, inode):
            raise OSError(0, "it is another directory than the one that was given", path)
        yield fd
    finally:
        os.close(fd)


def _is_directory(top: Tops, path: str) -> bool:
    fd = lower.opened(top, path)
    if fd is None:
        return False
    os.close(fd)
    return True


def _start(top: Tops, path: str, most: int) -> bytes:
    return _part(top, path, 0, most)


def _part(top: Tops, path: str, offset: int, most: int) -> bytes:
    above, _, name = path.rpartition("/")
    directory = lower.opened(top, above)
    if directory is None:
        return b""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return b""
    finally:
        os.close(directory)
    try:
        return os.pread(fd, most, offset)
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(
    place: store.WorkspaceDirectory, seconds: int = 0, identity: CallerIdentity | None = None
) -> Iterator[OpenWorkspace]:
    """Hold a workspace and attach its image. An apply that was cut off is brought to its end first.

    ``seconds`` bound each access to the caller's directory; 0 does not. ``identity`` has the rights that it is accessed
    with; without it those that the caller had when the run started.

    Raises:
        errors.WorkspaceBusyError: its run goes on, or another process applies it.
        errors.WorkspaceError: it cannot be opened.
    """
    with place.locked():
        record = place.record()
        if not record.settled:
            image.check(place.image)
        with image.AttachedImage(place.image) as attached:
            one = OpenWorkspace(place, attached, seconds, identity)
            finish(one)
            if not record.settled:
                # In order by now, also where it has too much to be read: it is not checked at each start.
                place.settle(0)
                place.settle(len(one.entries()))
            yield one


def finish(one: OpenWorkspace) -> None:
    """Bring an apply to its end that was cut off: forward when its steps had begun, back otherwise."""
    journal = one.place.journal()
    if journal is None:
        return
    if journal.steps is None:
        one.unstage(journal.staged)
    else:
        one.commit(journal)


def recover(state: Path) -> None:
    """Finish each apply that was cut off. Settle what runs left that were killed with their supervisor.

    A workspace that is in use, or cannot be repaired, is left as it is: no workspace keeps a supervisor from its start.
    """
    for place in store.listed(state):
        with contextlib.suppress(errors.CovenantError, OSError):
            if place.record().settled and place.journal() is None:
                continue
            with opened(place, RECOVERY_SECONDS) as one:
                left = bool(one.entries())
            if not left and not place.record().keeps:
                discard(place)
    for path in store.unmade(state):
        store.WorkspaceDirectory(path).remove()
    with contextlib.suppress(OSError):
        image.tidy(state / "workspaces" / store.TEMPLATES, image.SECONDS)


def discard(place: store.WorkspaceDirectory, *, seconds: int = 0, log: Callable[[], None] = lambda: None) -> None:
    """Remove a workspace with its changes. ``log`` is called before, and stops it when it raises.

    Raises:
        errors.WorkspaceBusyError: its run goes on, or another process applies it.
    """
    # An apply that was cut off is ended first, where the directory is still there.
    with contextlib.suppress(errors.CovenantError, OSError), opened(place, seconds):
        pass
    with place.locked():
        log()
        place.remove()
