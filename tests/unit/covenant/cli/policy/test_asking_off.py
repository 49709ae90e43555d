"""A denial of a host with `on_deny` says whether this host asks operators, and where that is set."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.cli.policy import denials


def test_denied_host_says_where_asking_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path))
    state = tmp_path / "supervisor"
    state.mkdir(mode=0o700)
    file = state / "config.toml"
    one = {"layer": "dns", "target": "example.org", "code": "not_approved"}
    file.write_text("")
    said = "\n".join(denials.explained(one, None))
    assert f"`ask_operators` is off, so no operator is asked: set it to true in {file}" in said
    assert "leave `on_deny` out of the entry, which grants the host" in said
    assert "an operator is asked" not in said
    call = {"layer": "tool", "target": "matrix://tool/mcp/fs/read@1", "code": "not_approved"}
    assert "`ask_operators` is off" in "\n".join(denials.explained(call, None))
    # Control: with it an operator is asked, and nothing of that is said.
    file.write_text("ask_operators = true\n")
    assert "`ask_operators`" not in "\n".join(denials.explained(one, None))
