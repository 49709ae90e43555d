"""``covenant agents``: what the table does not show is said beside it."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from covenant.cli.daemon import client
from covenant.cli.main import cli

ONE = {
    "directory": "a",
    "id": "a",
    "version": "1",
    "runtime": "python3",
    "budget_credits_per_hour": 1,
    "routable": True,
    "error": None,
}


@pytest.mark.parametrize(
    ("said", "more"),
    [({"truncated": True}, True), ({"truncated": False}, False), ({}, False)],
    ids=["cut", "all", "old"],
)
def test_cut_list_says_so_beside_table(said: dict[str, Any], more: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ask", lambda kind, **_: {"kind": "agents", "agents": [ONE], **said})
    result = CliRunner().invoke(cli, ["agents", "list"])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].split()[0] == "a"
    assert ("there are more packages" in result.stderr) is more
