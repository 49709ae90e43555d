"""``covenant workspace``: what an agent changed in a directory: look at it, apply it, or throw it away."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from policy.workspace.changes import Change
    from sandbox.workspace.operations import Applied
    from sandbox.workspace.store import WorkspaceDirectory, WorkspaceRecord

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_RUN = click.argument("run_id", metavar="RUN")
_SIGNS = {"add": "+", "modify": "~", "delete": "-", "mode": "m"}
_MOST_BYTES = 1024 * 1024


@click.group()
def workspace() -> None:
    """Look at what agents changed in directories that were given to them, and apply it."""


@workspace.command("list", epilog=common.examples("covenant workspace list"))
@_JSON
def list_workspaces(as_json: bool) -> None:
    """List the workspaces whose changes are neither applied nor discarded."""
    from sandbox.workspace import store

    found = [(one, one.record()) for one in store.listed(_state())]
    if as_json:
        rows = [
            {"run_id": record.run_id, "agent_id": record.agent_id, "directory": record.directory,
             "settled": record.settled, "changes": record.changes}
            for _, record in found
        ]  # fmt: skip
        common.emit({"kind": "workspaces", "workspaces": rows})
        return
    for _, record in found:
        state = f"{record.changes} changes" if record.settled else "in use, or cut off"
        common.say(common.visible(f"{record.run_id[:8]}  {record.agent_id}  {record.directory}  {state}"))


@workspace.command(epilog=common.examples("covenant workspace diff 1f3a", "covenant workspace diff 1f3a --patch"))
@_RUN
@click.option("--patch", is_flag=True, help="Print a unified diff of the text files.")
@click.option(
    "--html", "file", type=click.Path(path_type=Path), metavar="FILE", help="Write a page that needs nothing else."
)
@_JSON
def diff(run_id: str, patch: bool, file: Path | None, as_json: bool) -> None:
    """Compare a workspace with its directory: each change, and why one of them is not applied."""
    from policy.workspace import page, unified
    from sandbox.workspace import operations

    with operations.opened(_find(run_id)) as one:
        found, record = one.changes(), one.record
        wanted = [c.path for c in found if unified.has_text(c)] if patch or file is not None else []
        texts = one.contents(wanted, _MOST_BYTES) if wanted else {}
    if file is not None:
        _write(file, page.page(f"{record.agent_id} in {record.directory}", found, texts))
    if as_json:
        common.emit({"kind": "workspace_diff", "run_id": one.record.run_id, "changes": list(map(_document, found))})
        return
    if patch:
        for change in found:
            for line in unified.lines(change, *texts.get(change.path, (b"", b""))):
                common.say(common.visible(line))
        return
    _show(found)


@workspace.command(epilog=common.examples("covenant workspace apply 1f3a", "covenant workspace apply 1f3a src"))
@_RUN
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@_JSON
def apply(run_id: str, paths: tuple[str, ...], as_json: bool) -> None:
    """Apply the changes of a workspace to its directory, or those at and below PATH: all of them, or none.

    It is done with the rights of the directory's owner. What is refused by name stays in the workspace.
    """
    from sandbox.workspace import operations

    place = _find(run_id)
    done = _applied(place, paths)
    if as_json:
        common.emit(
            {
                "kind": "workspace_applied",
                "run_id": place.path.name,
                "digest": operations.digest(done.applied),
                "applied": list(map(_document, done.applied)),
                "left": list(map(_document, done.left)),
                "kept": [{"path": kept.path, "name": kept.name} for kept in done.kept],
            }
        )
        return
    _say_applied(done)


def _applied(place: WorkspaceDirectory, paths: Sequence[str]) -> Applied:
    """Apply, and remove the workspace when nothing is left in it."""
    from sandbox.workspace import operations

    with operations.opened(place) as one:
        record = one.record

        def log(changes: Sequence[Change]) -> None:
            _log("workspace_applied", record, changes_sha256=operations.digest(changes), changes=len(changes))

        done = one.apply(paths, log=log)
    if not done.left and not done.kept:
        operations.discard(place)
    return done


def end_session(run_id: str, *, ask: bool) -> None:
    """Tell what a session changed in its workspace. On a terminal, show it and ask what becomes of it.

    A caller that is not root is told the command alone: the state is root's.
    """
    from sandbox.workspace import operations, store

    if os.geteuid() != 0:
        common.say(f"the changes of the workspace, if any: sudo covenant workspace diff {run_id[:8]}", err=True)
        return
    place = store.place(common.state(), run_id)
    if not place.path.exists():
        return
    with operations.opened(place) as one:
        found = one.changes()
    if not ask:
        common.say(f"workspace: {len(found)} changes are kept; covenant workspace diff {run_id[:8]}", err=True)
        return
    _show(found)
    word = click.prompt("apply these changes?", type=click.Choice(["yes", "no", "discard"]), default="no")
    if word == "yes":
        _say_applied(_applied(place, ()))
    elif word == "discard":
        _discarded(place)
    if place.path.exists():
        common.say(f"kept: covenant workspace diff {run_id[:8]}")


def _say_applied(done: Applied) -> None:
    common.say(f"applied {len(done.applied)} changes")
    for kept in done.kept:
        common.say(common.visible(f"note: the host changed {kept.path} at that moment; its content is {kept.name}"))
    if done.left:
        common.say(f"not applied, and still in the workspace: {len(done.left)}")
        _show(done.left)


@workspace.command(epilog=common.examples("covenant workspace branch 1f3a agent/fix"))
@_RUN
@click.argument("name")
@_JSON
def branch(run_id: str, name: str, as_json: bool) -> None:
    """Commit the changes of a workspace on a new branch NAME of its repository.

    Files and index of the repository stay as they are. Refused and ignored files are left out; the workspace is kept.
    """
    from sandbox.workspace import operations

    place = _find(run_id)
    with operations.opened(place) as one:
        record = one.record

        def log(changes: Sequence[Change]) -> None:
            about = {"changes_sha256": operations.digest(changes), "changes": len(changes)}
            _log("workspace_branched", record, branch=name, **about)

        commit, left = one.branch(name, log=log)
    if as_json:
        rows = list(map(_document, left))
        common.emit({"kind": "workspace_branch", "run_id": place.path.name, "commit": commit, "left": rows})
        return
    common.say(common.visible(f"branch {name} is {commit}"))
    _show(left)


@workspace.command(epilog=common.examples("covenant workspace fork 1f3a"))
@_RUN
@_JSON
def fork(run_id: str, as_json: bool) -> None:
    """Copy a workspace with its changes, so that two runs can go on from it. Prints the name of the copy."""
    import uuid

    from sandbox.workspace import store

    place = _find(run_id)
    other = store.place(_state(), str(uuid.uuid4()))
    place.forked(other)
    if as_json:
        common.emit({"kind": "workspace_forked", "run_id": place.path.name, "fork": other.path.name})
    else:
        common.say(other.path.name)


@workspace.command(epilog=common.examples("covenant workspace discard 1f3a"))
@_RUN
@_JSON
def discard(run_id: str, as_json: bool) -> None:
    """Throw the changes of a workspace away. Its directory stays as it is."""
    place = _find(run_id)
    _discarded(place)
    if as_json:
        common.emit({"kind": "workspace_discarded", "run_id": place.path.name})
    else:
        common.say(f"discarded the workspace of {place.path.name[:8]}")


def _discarded(place: WorkspaceDirectory) -> None:
    from sandbox.workspace import operations

    record = place.record()
    operations.discard(place, log=lambda: _log("workspace_discarded", record, changes=record.changes))


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as e:
        raise errors.UsageError(f"`{file}` cannot be written: {e.strerror}", hint="name another file") from e


def _show(found: Sequence[Change]) -> None:
    from policy.workspace.changes import renames

    old = renames(found)
    for change in found:
        was = f"  was {old[change.path]}" if change.path in old else ""
        why = change.refused or change.conflict
        size = f"  {change.size} bytes" if change.kind == "file" and change.action != "delete" else ""
        slash = "/" if change.kind == "dir" else ""
        word = "refused" if change.refused else "conflict"
        common.say(
            common.visible(
                f"{_SIGNS[change.action]} {change.path}{slash}{size}{was}" + (f"  {word}: {why}" if why else "")
            )
        )


def _document(change: Change) -> dict[str, Any]:
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
    }


def _find(run_id: str) -> WorkspaceDirectory:
    from sandbox.workspace import store

    return store.find(_state(), run_id)


def _state() -> Any:
    if os.geteuid() != 0:
        raise errors.PrivilegeError("workspaces are root's", hint="run it with sudo, and give COVENANT_HOME")
    return common.state()


def _log(kind: str, record: WorkspaceRecord, **fields: object) -> None:
    """Write the row of an act into the supervisor's log, before the act."""
    import time

    from covenant.keys import identity
    from sandbox.supervisor import open_ledger

    issuer = identity.issuer(common.home())
    with open_ledger(common.state()) as ledger:
        run = {"run_id": record.run_id, "operator": identity.OPERATOR, "policy_digest": record.policy_digest}
        ledger.append(kind, {**run, **fields}, issuer=issuer, now_ms=int(time.time() * 1000))
