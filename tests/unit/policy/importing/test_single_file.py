"""A tool manifest of Matrix as a whole package: what it grants, what is refused, and that each fix works."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from policy import errors
from policy.importing import single_file
from policy.manifest import parse
from policy.manifest.tools import document, pins
from policy.package import Package
from tests import tools_kit as kit

SERVERS = {"tools/fs/server.py": b"# a server\n"}
FS: dict[str, Any] = {
    "alias": "fs",
    "transport": "stdio",
    "command": "python3",
    "args": ["server.py"],
    "version": "1.0",
    "tools": [{"name": name, "side_effect_class": effect} for name, effect in (("look", "read"), ("wipe", "write"))],
}
DIGEST = str(pins.package_digest(Package({**SERVERS, "agent.toml": b""}), "fs"))


def text(**changes: Any) -> bytes:
    server = {**FS, "package_digest": DIGEST, **changes.pop("server", {})}
    whole = {"schema_version": 1, "agent": "matrix://agent/neo", "allowed_side_effects": ["read"], "servers": [server]}
    return kit.text({**whole, **changes})


def made(raw: bytes, entry: str = "main.py", lock: bytes | None = None) -> single_file.SingleFile:
    beside = SERVERS if lock is None else {**SERVERS, pins.LOCK: lock}
    return single_file.package_of(raw, entry, b"print()\n", beside)


def refusal(raw: bytes, entry: str = "main.py", lock: bytes | None = None) -> errors.CovenantError:
    with pytest.raises(errors.CovenantError) as caught:
        made(raw, entry, lock)
    return caught.value


def test_file_grants_its_allowed_classes_and_no_more() -> None:
    found = made(text())
    manifest = parse.parse(found.package.manifest)
    assert (manifest.agent.id, manifest.agent.runtime, manifest.agent.entry) == ("neo", "python3", "main.py")
    assert manifest.permissions.skills.allow == ("matrix://tool/mcp/fs/look@1.0",)
    assert manifest.permissions.skills.side_effects == ("read",)
    assert [re.findall("`(.*?)`", one.message) for one in found.losses] == [["matrix://tool/mcp/fs/wipe@1.0", "write"]]
    assert manifest.resources.network == "off"
    assert (manifest.sandbox.required, manifest.sandbox.filesystem) == (True, "read-only-package")
    permissions = manifest.permissions
    assert (permissions.network, permissions.credentials.grants, manifest.spawn.allowed) == ((), (), False)
    assert (permissions.filesystem.read, permissions.executables.allow) == ((), ())
    assert found.package.files[document.FILE] == text()


def test_file_that_allows_nothing_grants_nothing() -> None:
    found = made(text(allowed_side_effects=[]))
    assert parse.parse(found.package.manifest).permissions.skills.allow == ()
    assert len(found.losses) == 2


@pytest.mark.parametrize(
    ("entry", "runtime"),
    [("a.py", "python3"), ("a.js", "node"), ("a.mjs", "node"), ("a", "rust-bin"), ("py", "rust-bin")],
)
def test_ending_of_program_says_its_runtime(entry: str, runtime: str) -> None:
    assert parse.parse(made(text(), entry).package.manifest).agent.runtime == runtime


@pytest.mark.parametrize("entry", ["agent.toml", "tools.json", "tools.lock.json"])
def test_program_named_as_file_of_package_is_refused(entry: str) -> None:
    assert refusal(text(), entry).hint == "rename it"


@pytest.mark.parametrize("digest", [kit.FILLER, f"sha256:{'0123456789abcdef' * 4}"])
def test_wrong_digest_is_refused_and_its_fix_works(digest: str) -> None:
    raw = text(server={"package_digest": digest})
    error = refusal(raw)
    assert error.where.startswith("tools.json:")
    fixed = json.loads("{" + error.hint.partition("write ")[2] + "}")
    assert made(text(server=fixed)).package.files["main.py"] == b"print()\n"


def test_missing_package_is_refused() -> None:
    with pytest.raises(errors.ToolsError, match="does not lie in `tools/fs/` beside the file") as caught:
        single_file.package_of(text(), "main.py", b"", {})
    assert "unpack" in caught.value.hint


def test_fetching_command_is_refused() -> None:
    error = refusal(text(server={"command": "npx", "args": ["-y", "@scope/fs"]}))
    assert ("fetches what it runs" in error.message, "start its own program" in error.hint) == (True, True)


def test_needs_of_other_grants_are_refused_with_import() -> None:
    http: dict[str, Any] = {"alias": "far", "transport": "http", "endpoint": "https://a.example/mcp", "version": "1"}
    http["tools"] = [{"name": "today", "side_effect_class": "read"}]
    server = {**FS, "package_digest": DIGEST}
    for raw, named in (
        (text(servers=[server, http]), "[[permissions.network]]"),
        (text(server={"env": ["$env:KEY"]}), '"KEY" to grants'),
    ):
        error = refusal(raw)
        assert named in error.hint
        assert "covenant manifest import --from tools-json" in error.hint


def test_lock_beside_file_holds_what_was_pinned() -> None:
    lock = made(text()).package.files[pins.LOCK]
    assert made(text(), lock=lock).package.files[pins.LOCK] == lock
    changed = [{**FS["tools"][0], "description": "Look, and obey"}, FS["tools"][1]]
    error = refusal(text(server={"tools": changed}), lock=lock)
    assert "another than when it was pinned" in error.message


def test_seed_of_matrix_is_refused_with_first_fix() -> None:
    assert "is a placeholder" in refusal(kit.SEED).message
    whole = json.loads(kit.SEED)
    whole["servers"][0]["package_digest"] = DIGEST
    assert "`npx` fetches what it runs" in refusal(kit.text(whole)).message
    whole["servers"][0] |= {"command": "python3", "args": ["server.py", "/workspace"]}
    assert parse.parse(made(kit.text(whole)).package.manifest).agent.id == "default"
