"""The requests about workspaces, as documents: for root in its own process, for others in the supervisor's.

Each user sees and touches the workspaces of its own runs, root all of them. The workspace of another is answered as one
that is not there. A directory is accessed with the rights that the caller has now.
"""

from __future__ import annotations

import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from policy import errors
from policy.signing import approval as approvals
from policy.workspace import selection
from policy.workspace.changes import Change
from sandbox.storage.trust_state import State
from sandbox.workspace import operations, store
from sandbox.workspace.caller import CallerIdentity
from sandbox.workspace.operations import OpenWorkspace, Permit
from sandbox.workspace.store import WorkspaceDirectory, WorkspaceRecord

# A content that is compared or shown, in bytes, and all contents of one answer.
TEXT_BYTES: Final = 1024 * 1024
_ANSWER_BYTES: Final = 8 * 1024 * 1024
# The changes of one answer, in bytes of their paths and a number for the rest of each.
_ROWS_BYTES: Final = 16 * 1024 * 1024
_ROW_BYTES: Final = 400

# Writes the row of an act into the log, before the act.
Log = Callable[[str, Mapping[str, Any]], object]


class WorkspaceRequester(Struct, frozen=True):
    """The user that asks. ``identity`` are its rights, None for root, which acts with those of the caller of the run.

    ``name`` stands in the log, and ``seconds`` bound each access to a directory (0: nothing does).
    """

    name: str
    identity: CallerIdentity | None = None
    seconds: int = 0

    @property
    def uid(self) -> int:
        """Return the user's id, 0 for root."""
        return 0 if self.identity is None else self.identity.uid


class WorkspaceRequests(Struct, frozen=True):
    """The workspaces of one state for one user. ``log`` writes into its audit log."""

    state: Path
    who: WorkspaceRequester
    log: Log
    limits: store.UserLimits = store.NO_LIMITS

    def answer(self, verb: str, **fields: Any) -> dict[str, Any]:
        """Answer one request.

        Raises:
            errors.CovenantError: it is refused, or failed.
        """
        verbs: dict[str, Callable[..., dict[str, Any]]] = {
            "list": self._list,
            "diff": self._diff,
            "texts": self._texts,
            "show": self._show,
            "apply": self._apply,
            "branch": self._branch,
            "fork": self._fork,
            "discard": self._discard,
        }
        return verbs[verb](**fields)

    def _list(self) -> dict[str, Any]:
        rows, damaged = [], []
        for one in store.listed(self.state, self.who.uid):
            try:
                record = one.record()
            except errors.WorkspaceError:
                damaged.append(one.path.name)
            else:
                rows.append((record.started_ns, record.run_id, _listed(one, record)))
        rows.sort(key=lambda row: row[:2])
        return {"kind": "workspaces", "workspaces": [row for _, _, row in rows], "damaged": damaged}

    def _diff(self, run: str, paths: Sequence[str] = (), *, exact: bool = False) -> dict[str, Any]:
        place = self._find(run)
        with self._opened(place) as one:
            found, record = one.changes(), one.record
            _count(place, found)
        asked = selection.asked(found, paths, exact=exact)
        chosen = selection.chosen(found, paths, exact=exact)
        rows, more = _rows(asked)
        return {
            "kind": "workspace_diff",
            **_about(record),
            "apply": record.apply,
            "digest": selection.digest(chosen),
            "applicable": len(chosen),
            "held": _held(asked),
            "changes": rows,
            "more": more,
            "apart": record.terms.apart,
        }

    def _texts(self, run: str, paths: Sequence[str]) -> dict[str, Any]:
        """The two contents of each path, of as many as one answer takes: the first ones."""
        place, left = self._find(run), _ANSWER_BYTES
        found: list[dict[str, str]] = []
        with self._opened(place) as one:
            for path in paths:
                old, new = one.contents([path], TEXT_BYTES)[path]
                left -= len(old) + len(new)
                if found and left < 0:
                    break
                found.append({"path": path, "old": _encoded(old), "new": _encoded(new)})
        return {"kind": "workspace_texts", "texts": found}

    def _show(self, run: str, path: str, offset: int = 0) -> dict[str, Any]:
        with self._opened(self._find(run)) as one:
            change = next((c for c in one.changes() if c.path == path), None)
            if change is None or change.action == "delete":
                left = "left no change at" if change is None else "removed"
                raise errors.WorkspaceError(
                    f"the agent {left} `{path[:300]}`",
                    hint=f"covenant workspace diff {one.record.run_id[:8]} lists the paths",
                )
            data = one.content(path, offset, _ANSWER_BYTES) if change.kind == "file" else b""
        return {
            "kind": "workspace_content",
            "run_id": one.record.run_id,
            "change": document(change),
            "offset": offset,
            "data": _encoded(data),
        }

    def _apply(
        self, run: str, paths: Sequence[str] = (), *, exact: bool = False, digest: str = "", approval: str = ""
    ) -> dict[str, Any]:
        place = self._find(run)
        with self._opened(place) as one:
            permit = self._permit(one.record, digest, approval)

            def log(changes: Sequence[Change]) -> None:
                self._log("workspace_applied", one.record, _about_changes(changes, permit))

            done = one.apply(paths, exact=exact, permit=permit, log=log)
            _count(place, done.left)
        # Removed when nothing is left in it.
        if not done.left and not done.kept and not one.record.keeps:
            operations.discard(place, seconds=self.who.seconds)
        rows, more = _rows(done.applied)
        left, more_left = _rows(done.left)
        return {
            "kind": "workspace_applied",
            "run_id": place.path.name,
            "digest": selection.digest(done.applied),
            "approved_by": list(_approvers(permit)),
            "count": len(done.applied),
            "applied": rows,
            "left": left,
            "more": more + more_left,
            "kept": [{"path": kept.path, "name": kept.name} for kept in done.kept],
        }

    def _branch(self, run: str, name: str, digest: str = "", approval: str = "") -> dict[str, Any]:
        place = self._find(run)
        with self._opened(place) as one:
            permit = self._permit(one.record, digest, approval)

            def log(changes: Sequence[Change]) -> None:
                self._log("workspace_branched", one.record, {"branch": name, **_about_changes(changes, permit)})

            commit, left = one.branch(name, permit=permit, log=log)
        rows, more = _rows(left)
        return {
            "kind": "workspace_branch",
            "run_id": place.path.name,
            "branch": name,
            "commit": commit,
            "left": rows,
            "more": more,
        }

    def _fork(self, run: str) -> dict[str, Any]:
        place, other = self._find(run), store.place(self.state, str(uuid.uuid4()))
        place.forked(other, self.limits)
        return {"kind": "workspace_forked", "run_id": place.path.name, "fork": other.path.name}

    def _discard(self, run: str) -> dict[str, Any]:
        place = self._find(run)
        record = place.record()
        operations.discard(
            place,
            seconds=self.who.seconds,
            log=lambda: self._log("workspace_discarded", record, {"changes": record.changes}),
        )
        return {"kind": "workspace_discarded", "run_id": place.path.name}

    def _find(self, run: str) -> WorkspaceDirectory:
        return store.find(self.state, run, self.who.uid)

    def _opened(self, place: WorkspaceDirectory) -> contextlib.AbstractContextManager[OpenWorkspace]:
        return operations.opened(place, self.who.seconds, self.who.identity)

    def _permit(self, record: WorkspaceRecord, digest: str, raw: str) -> Permit:
        """Return what the caller brings, the approval verified under the trust root that is in force.

        Raises:
            errors.CovenantError: the approval does not hold.
        """
        if not raw:
            return Permit(digest)
        now_ms = int(time.time() * 1000)
        with State(self.state) as state:
            found = approvals.verify(
                raw.encode(),
                state.trust_root(now_ms),
                role=record.role,
                now_ms=now_ms,
                greatest_time_ms=state.greatest_time_ms(),
            )
        return Permit(digest, found)

    def _log(self, kind: str, record: WorkspaceRecord, fields: Mapping[str, Any]) -> None:
        run = {"run_id": record.run_id, "operator": self.who.name, "policy_digest": record.policy_digest}
        self.log(kind, {**run, **fields})


def _held(found: Iterable[Change]) -> int:
    return sum(not one.is_applicable() for one in found)


def _count(place: WorkspaceDirectory, found: Sequence[Change]) -> None:
    """Write the numbers down for `list`. A full disk keeps no one from looking or applying."""
    with contextlib.suppress(OSError, errors.CovenantError):
        place.count(len(found), _held(found))


def document(change: Change) -> dict[str, Any]:
    """Return one change as a document; ``was`` is what the directory has there."""
    base = change.base
    return {
        "path": change.path,
        "action": change.action,
        "kind": change.kind,
        "mode": change.mode,
        "size": change.size,
        "sha256": change.sha256,
        "target": change.target,
        "refused": change.refused,
        "conflict": change.conflict,
        "was": None
        if base is None
        else {"kind": base.kind, "mode": base.mode, "size": base.size, "target": base.target},
    }


def _rows(changes: Iterable[Change]) -> tuple[list[dict[str, Any]], int]:
    """Return the changes as documents, as many as an answer takes, and the number of the rest."""
    found, left, more = list[dict[str, Any]](), _ROWS_BYTES, 0
    for one in changes:
        left -= _ROW_BYTES + 6 * (len(one.path) + len(one.target))
        if left < 0:
            more += 1
        else:
            found.append(document(one))
    return found, more


def _about(record: WorkspaceRecord) -> dict[str, Any]:
    return {
        "run_id": record.run_id,
        "agent_id": record.agent_id,
        "directory": record.directory,
        "policy_digest": record.policy_digest,
    }


def _listed(one: WorkspaceDirectory, record: WorkspaceRecord) -> dict[str, Any]:
    return {
        **_about(record),
        "settled": record.settled,
        "changes": record.changes,
        "compared": record.compared,
        "held": record.held,
        "apply": record.apply,
        "keeps": record.keeps,
        "package": record.package,
        "uid": record.uid,
        "bytes": one.used_bytes(),
        "started_ms": record.started_ns // 1_000_000,
    }


def _about_changes(changes: Sequence[Change], permit: Permit) -> dict[str, Any]:
    one = permit.approval
    return {
        "changes_sha256": selection.digest(changes),
        "changes": len(changes),
        "approved_by": list(_approvers(permit)),
        "approval_sha256": None if one is None else one.sha256,
    }


def _approvers(permit: Permit) -> tuple[str, ...]:
    return () if permit.approval is None else permit.approval.signers


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
