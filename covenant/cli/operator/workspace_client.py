"""Ask about workspaces: root in this process, other users by the supervisor, which answers for their own alone."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from covenant.cli import common
from policy import errors

if TYPE_CHECKING:
    from policy.workspace.changes import Change

# The paths of one request for contents, so that it fits its frame.
_PATHS: Final = 200
# Those of any request: a supervisor takes 1,024 values.
_MOST_PATHS: Final = 900


def ask(verb: str, *, here: bool = False, **fields: Any) -> dict[str, Any]:
    """Return the answer to one request about workspaces. ``here`` says that the run was one of this process.

    Raises:
        errors.CovenantError: it is refused, or failed.
        errors.PrivilegeError: this is not root, and no supervisor listens.
    """
    from covenant.cli.run import supervisor_client

    root = os.geteuid() == 0
    if len(fields.get("paths", ())) > _MOST_PATHS:
        raise errors.UsageError(f"more than {_MOST_PATHS} paths are named", hint="name their directories")
    fields = {name: value for name, value in fields.items() if value not in (None, "", (), False, 0)}
    if not root or ("COVENANT_SOCKET" in os.environ and not here):
        from sandbox.serve.api import client

        with supervisor_client.supervisor() as sock:
            if sock is not None:
                return client.ask(sock, "workspace", verb=verb, **fields)
    if not root:
        raise errors.PrivilegeError(
            "workspaces of this user are with a supervisor, and none listens",
            hint=f"{supervisor_client.start()} (docs/supervisor.md), or run it with sudo and COVENANT_HOME",
        )
    return _here(verb, fields)


def find(run: str, *, here: bool = False) -> dict[str, Any]:
    """Return the row of the workspace whose run a word begins.

    Raises:
        errors.WorkspaceError: this user has none, or several.
    """
    rows = ask("list", here=here)["workspaces"]
    found = [row for row in rows if run and row["run_id"].startswith(run)]
    exact = [row for row in found if row["run_id"] == run]
    if len(exact or found) != 1:
        several = "several workspaces begin" if found else "no workspace begins"
        raise errors.WorkspaceError(f"{several} with `{run[:80]}`", hint="covenant workspace list")
    row: dict[str, Any] = (exact or found)[0]
    return row


def _here(verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    from covenant.cli import times
    from covenant.keys import identity
    from sandbox import config
    from sandbox.supervisor import open_ledger
    from sandbox.workspace import requests, store

    state = common.state()

    def log(kind: str, about: Mapping[str, Any]) -> None:
        with open_ledger(state) as ledger:
            ledger.append(kind, about, issuer=identity.issuer(common.home()), now_ms=times.now_ms())

    settings = config.load(state)
    limits = store.UserLimits(settings.kept_workspaces, settings.kept_workspaces_mb)
    who = requests.WorkspaceRequester(identity.OPERATOR)
    return requests.WorkspaceRequests(state, who, log, limits).answer(verb, **fields)


def changes(rows: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Return the changes of an answer."""
    from policy.workspace.changes import Change
    from policy.workspace.entries import LowerEntry

    found = []
    for row in rows:
        was = row["was"]
        base = (
            None
            if was is None
            else LowerEntry(row["path"], was["kind"], was["mode"], was["size"], target=was.get("target", ""))
        )
        found.append(Change(**{name: value for name, value in row.items() if name != "was"}, base=base))
    return found


def texts(run: str, paths: Sequence[str], *, here: bool = False) -> dict[str, tuple[bytes, bytes]]:
    """Return the two contents of each path: that of the directory, and that of the workspace."""
    found: dict[str, tuple[bytes, bytes]] = {}
    left = list(paths)
    while left:
        for row in ask("texts", here=here, run=run, paths=left[:_PATHS])["texts"]:
            found[row["path"]] = base64.b64decode(row["old"]), base64.b64decode(row["new"])
        left = [path for path in left if path not in found]
    return found


def content(run: str, path: str) -> Iterator[tuple[Change, bytes]]:
    """Yield a change and its content, piece by piece. There is one piece at least.

    Raises:
        errors.WorkspaceError: the agent left no change at this path.
    """
    offset = 0
    while True:
        answer = ask("show", run=run, path=path, offset=offset)
        (change,), data = changes([answer["change"]]), base64.b64decode(answer["data"])
        yield change, data
        offset += len(data)
        if not data or offset >= change.size:
            return
