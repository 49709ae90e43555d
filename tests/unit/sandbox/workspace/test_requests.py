"""Answers about the workspaces of a state."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from policy.workspace.changes import Terms
from sandbox.workspace import requests, store
from sandbox.workspace.caller import CallerIdentity


def _plant(state: Path, run_id: str, started_ns: int) -> None:
    record = store.WorkspaceRecord(
        run_id=run_id,
        agent_id="probe",
        policy_digest="1" * 64,
        directory="/srv/site",
        device=1,
        inode=1,
        caller=CallerIdentity(0, 0),
        started_ns=started_ns,
        max_mb=16,
        apply="ask",
        terms=Terms((), ()),
        settled=True,
    )
    store.place(state, run_id).make(record)


def test_workspaces_are_listed_oldest_first(tmp_path: Path) -> None:
    for run_id, started_ns in (("a" * 32, 3 * 10**9), ("b" * 32, 10**9), ("d" * 32, 10**9), ("c" * 32, 2 * 10**9)):
        _plant(tmp_path, run_id, started_ns)
    asked = requests.WorkspaceRequests(tmp_path, requests.WorkspaceRequester("root"), lambda *_: None)
    found = asked.answer("list")["workspaces"]
    assert [row["run_id"][0] for row in found] == ["b", "d", "c", "a"]


def test_run_without_workspace_says_what_ends_one(tmp_path: Path) -> None:
    with pytest.raises(errors.WorkspaceError, match="no workspace begins with `abc`") as caught:
        store.find(tmp_path, "abc")
    assert "an apply of all changes, a discard and a resume end a workspace" in caught.value.hint
