"""``covenant tools``, as an author uses it: list, describe, verify and pin, offline."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from covenant.cli.main import cli
from policy import errors
from policy.manifest.tools import document as tools_document
from tests import tools_kit as kit
from tests.tools_corpus import DAEMON


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def document(status: int, *arguments: str | Path) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == status, (result.output, result.exception)
    assert result.stdout.count("\n") == 1
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def refused(kind: type[errors.CovenantError], *arguments: str | Path) -> errors.CovenantError:
    result = call(*arguments)
    assert type(result.exception) is kind, (result.output, result.exception)
    return result.exception


@pytest.fixture
def pinned(tmp_path: Path) -> Path:
    return kit.written(tmp_path / "pkg", kit.package(kit.FULL))


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Not pinned yet, with a placeholder for a digest."""
    return kit.written(tmp_path / "pkg", kit.package(kit.FULL, pin=False))


def test_list(pinned: Path) -> None:
    rows = {row["uri"]: row for row in document(0, "tools", "list", pinned)["tools"]}
    assert {uri: row["side_effect_class"] for uri, row in rows.items()} == {
        kit.READ: "read", kit.WRITE: "write", kit.TODAY: "network", kit.BALANCE: "chain"
    }  # fmt: skip
    assert [uri for uri, row in rows.items() if row["granted"]] == [kit.READ, kit.TODAY]
    assert rows[kit.WRITE]["reason"] == "its URI is not in [permissions.skills] allow"
    lines = call("tools", "list", pinned).stdout.splitlines()
    assert lines[0].split()[:3] == [kit.READ, "read", "granted"]
    assert "not granted: its URI" in lines[1]


def test_describe(pinned: Path) -> None:
    found = document(0, "tools", "describe", pinned, kit.READ)
    assert (found["declared"], found["granted"], found["transport"], found["timeout_ms"]) == (True, True, "stdio", 5000)
    assert found["command"] == ["node", "dist/index.js", "/workspace"]
    assert found["credentials"] == ["FS_KEY", "fs-key"]
    assert found["package_digest"].startswith("sha256:")
    said = call("tools", "describe", pinned, kit.TODAY).stdout
    assert "endpoint: https://weather.example.com:8443/mcp" in said
    assert "granted: yes" in said
    native = document(0, "tools", "describe", pinned, kit.BALANCE)
    assert (native["digest"], native["description"], native["granted"]) == (kit.DIGEST, "Credits left", False)


def test_describe_answers_no_with_status_3(pinned: Path) -> None:
    missing = kit.READ.replace("read_text_file", "delete_file")
    assert document(3, "tools", "describe", pinned, missing) == {"kind": "tool", "uri": missing, "declared": False}
    assert "not in hello's tools.json" in call("tools", "describe", pinned, missing).stdout
    assert (
        "is unpinned"
        in refused(errors.UsageError, "tools", "describe", pinned, kit.READ.replace("2026.1.14", "latest")).message
    )
    refused(errors.UsageError, "tools", "describe", pinned, "read_text_file")


def test_verify(pinned: Path) -> None:
    assert document(0, "tools", "verify", pinned) == {
        "kind": "tools_verified", "agent_id": "hello", "verified": True, "tools": 4, "findings": []
    }  # fmt: skip
    assert call("tools", "verify", pinned).stdout == "hello: 4 tools verified\n"


def test_seeds_example_is_refused_for_its_filler_digest_with_status_3(tmp_path: Path) -> None:
    package = kit.written(tmp_path / "pkg", kit.package(kit.SEED, grants="", pin=False))
    (package / "agent.toml").write_bytes((package / "agent.toml").read_bytes().replace(b'"hello"', b'"default"', 1))
    found = document(3, "tools", "verify", package)
    assert found["verified"] is False
    assert found["findings"][0]["code"] == "filler_digest"
    result = call("tools", "verify", package)
    assert result.exit_code == 3
    assert "tools.json:13:25: the package digest of server `fs` is a placeholder" in result.stdout
    assert "  fix: put the package into tools/fs/ and run covenant tools pin" in result.stdout
    assert len(document(0, "tools", "list", package)["tools"]) == 2


def test_pin_then_verify(fresh: Path) -> None:
    before = {path: path.read_bytes() for path in fresh.rglob("*") if path.is_file()}
    (fresh / "tools.json").chmod(0o600)
    assert document(3, "tools", "verify", fresh)["findings"][0]["code"] == "filler_digest"
    assert document(0, "tools", "pin", fresh)["changed"] == ["tools.json", "tools.lock.json"]
    assert document(0, "tools", "verify", fresh)["verified"] is True
    after = {path: path.read_bytes() for path in fresh.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {fresh / "tools.lock.json"}
    assert [path.name for path in before if before[path] != after[path]] == ["tools.json"]
    digest = json.loads(after[fresh / "tools.json"])["servers"][0]["package_digest"]
    assert after[fresh / "tools.json"] == before[fresh / "tools.json"].replace(kit.FILLER.encode(), digest.encode())
    assert (fresh / "tools.json").stat().st_mode & 0o777 == 0o600
    assert document(0, "tools", "pin", fresh)["changed"] == []
    assert call("tools", "pin", fresh).stdout == "nothing has changed since it was pinned\n"


def test_pin_makes_no_file_that_anybody_may_write_or_run(fresh: Path) -> None:
    (fresh / "tools.json").chmod(0o6777)
    document(0, "tools", "pin", fresh)
    assert (fresh / "tools.json").stat().st_mode & 0o7777 == 0o664
    assert (fresh / "tools.lock.json").stat().st_mode & 0o7777 == 0o644


def test_pin_says_that_signature_no_longer_holds(fresh: Path) -> None:
    (fresh / "agent.dsse.json").write_bytes(b"{}")
    result = call("tools", "pin", fresh)
    assert result.stdout == "wrote tools.json and tools.lock.json\n"
    assert "sign it again" in result.stderr


def test_pin_without_servers_package_writes_nothing(fresh: Path) -> None:
    for path in (fresh / "tools" / "fs").rglob("*"):
        if path.is_file():
            path.unlink()
    before = (fresh / "tools.json").read_bytes()
    error = refused(errors.ToolsError, "tools", "pin", fresh)
    assert "does not lie in `tools/fs/`" in error.message
    assert error.where.startswith("tools.json:")
    assert (fresh / "tools.json").read_bytes() == before
    assert not (fresh / "tools.lock.json").exists()


def test_what_killed_pin_left_is_no_file_of_package(fresh: Path) -> None:
    from sandbox.storage import atomic_file

    (fresh / atomic_file.temporary_name("tools.json")).write_bytes(b"half")
    document(0, "tools", "pin", fresh)
    assert not (fresh / atomic_file.temporary_name("tools.json")).exists()


def test_pinned_tools_are_signed(pinned: Path) -> None:
    assert call("keys", "new", "ann", "--no-passphrase").exit_code == 0
    signed = document(0, "manifest", "sign", pinned, "--key", "ann")
    assert {"tools.json", "tools.lock.json", "tools/fs/dist/index.js"} <= set(signed["statement"]["subjects"])


def test_package_without_tools(pinned: Path) -> None:
    os.unlink(pinned / "tools.json")
    for verb in ("list", "verify", "pin"):
        assert "no `tools.json`" in refused(errors.PackageError, "tools", verb, pinned).message


def test_malformed_document_is_refused_with_its_place(pinned: Path) -> None:
    (pinned / "tools.json").write_bytes(b'{"schema_version": 1,\n "agnet": ""}')
    error = refused(errors.ToolsError, "tools", "verify", pinned)
    assert error.to_json()["errors"][-1] == {
        "message": "unknown key `agnet` in the document",
        "hint": f"did you mean `agent`? known here: {', '.join(tools_document.ToolManifest.model_fields)}",
        "where": "tools.json:2:2",
    }  # fmt: skip


def test_manifest_check_notes_what_does_not_fit(pinned: Path) -> None:
    assert document(0, "manifest", "check", pinned)["notes"] == []
    manifest = (pinned / "agent.toml").read_bytes()
    (pinned / "agent.toml").write_bytes(manifest.replace(b"today@3", b"today@4").replace(b'"weather"', b'"sun"'))
    notes = document(0, "manifest", "check", pinned)["notes"]
    assert [note.split("`")[0] for note in notes] == ["tool ", "server "]


def test_hidden_characters_are_shown_as_escapes(pinned: Path) -> None:
    document_ = kit.full("servers", 0, "tools", 0, "description", value="a\nb")
    (pinned / "tools.json").write_bytes(kit.text(document_))
    assert "description: a\\nb" in call("tools", "describe", pinned, kit.READ).stdout


def test_live_needs_root(pinned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert document(0, "tools", "verify", pinned)["verified"], "control: without --live"
    refusal = refused(errors.PrivilegeError, "tools", "verify", pinned, "--live")
    assert "sudo" in refusal.hint


def test_live_starts_nothing_where_something_is_wrong(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from covenant.session import tool_server

    monkeypatch.setattr(tool_server, "verify", lambda *_, **__: pytest.fail("a server was started"))
    assert not document(3, "tools", "verify", fresh, "--live")["verified"]


@pytest.mark.parametrize("alias", ["weather", "absent"])
def test_serve_takes_stdio_servers_alone(pinned: Path, alias: str) -> None:
    assert "fs" in refused(errors.UsageError, "tools", "serve", pinned, alias).hint


def test_call_of_package_is_refused_before_anything_starts(pinned: Path) -> None:
    arguments = ("--package", pinned, "--args", "{}")
    refused(errors.ToolDeniedError, "tools", "call", "matrix://tool/mcp/fs/absent@1", *arguments)
    denied = refused(errors.ToolDeniedError, "tools", "call", kit.WRITE, *arguments)
    assert "may not be called" in str(denied)
    assert denied.details["add"][1:] == [f'allow = ["{kit.WRITE}"]', 'side_effects = ["write"]']
    assert "a secret of a header" in str(refused(errors.UsageError, "tools", "call", kit.TODAY, *arguments))
    assert "path" in str(
        refused(errors.ToolArgumentsError, "tools", "call", kit.READ, "--package", pinned, "--args", '{"path": 1}')
    )


def test_tools_of_daemon_are_printed_and_called_by_no_package(tmp_path: Path) -> None:
    server = {**DAEMON, "tools": [{"name": "agents_list", "side_effect_class": "read"}]}
    made = kit.written(tmp_path / "pkg", kit.package({**kit.FULL, "servers": [server], "native_tools": []}, grants=""))
    found = document(0, "tools", "advertised", made, "covenant")["tools"]
    drafts = json.loads(call("tools", "advertised", made, "covenant").stdout)
    assert [one | {"side_effect_class": ""} for one in found] == drafts
    assert list(drafts[0])[:2] == ["name", "side_effect_class"]
    (tool,) = [one for one in found if one["name"] == "agents_list"]
    assert tool["description"]
    assert "intent_submit" not in {one["name"] for one in found}
    # Declared as it was printed, it is what the daemon advertises.
    as_printed = {**server, "tools": [{**tool, "side_effect_class": "read"}]}
    for name, one, codes in (("printed", as_printed, []), ("other", server, ["tool_changed"])):
        whole = kit.package({**kit.FULL, "servers": [one], "native_tools": []}, grants="")
        place = kit.written(tmp_path / name, whole)
        found = document(3 if codes else 0, "tools", "verify", place, "--live")["findings"]
        assert [finding["code"] for finding in found] == codes
    assert "is no server of the package" in refused(errors.UsageError, "tools", "serve", made, "covenant").message
