"""docs/trust.md and trust-changes.md, from their first command to their last, as two operators would type it."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from covenant.cli import common, times
from policy.signing import keyfile
from sandbox.storage.trust_state import State
from tests import signing_kit as kit
from tests import ssh_agent_kit
from tests.cli_kit import document, done

_FENCE = re.compile(r"^(Ann|Bob|With both keys)[^\n]*:\n\n```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MANIFEST = kit.MANIFEST.replace(b'runtime = "python3"', b'runtime = "python3"\nrole = "reader"')


def test_page_can_be_followed(clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "read_passphrase", lambda *_, **__: b"open sesame")
    cheap = keyfile.Argon2Parameters(memory_kib=8 * 1024, iterations=1, lanes=1)
    monkeypatch.setattr(keyfile, "seal", functools.partial(keyfile.seal, parameters=cheap))
    package = tmp_path / "agents" / "hello"
    for name, data in {**kit.FILES, "agent.toml": _MANIFEST}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(data)
    monkeypatch.chdir(tmp_path)
    folders = {name: tmp_path / f"{name}-agent" for name in ("ann", "bob")}
    for folder in folders.values():
        folder.mkdir()
    page = (clone / "docs" / "trust.md").read_text() + (clone / "docs" / "trust-changes.md").read_text()
    ran = 0
    with ssh_agent_kit.running(folders["ann"]) as ann, ssh_agent_kit.running(folders["bob"]) as bob:
        ann.add("ann@laptop")
        bob.add("bob@laptop")
        agents = {"ann": ann.socket, "bob": bob.socket}
        assert len(_FENCE.findall(page)) == page.count("```sh")
        for heading, block in _FENCE.findall(page):
            who = "bob" if heading == "Bob" else "ann"
            monkeypatch.setenv("COVENANT_HOME", str(tmp_path / f"{who}-home"))
            monkeypatch.setenv("SSH_AUTH_SOCK", agents[who])
            if heading == "With both keys":
                shutil.copy(tmp_path / "bob-home" / "keys" / "bob.key", tmp_path / "ann-home" / "keys" / "bob.key")
                done("keys", "new", "bob-2027")
            for line in block.splitlines():
                _run(line, tmp_path, monkeypatch)
                ran += 1
    assert ran >= 25
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "ann-home"))
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)
    shown = document("trust", "show")
    with State(tmp_path / "ann-home" / "supervisor") as state:
        assert state.root_version() == shown["version"]
    assert [k["name"] for k in shown["keys"]] == ["ann"]
    assert {name: len(entries) for name, entries in shown["revoked"].items()} == {
        "keys": 2,
        "manifests": 1,
        "serials": 1,
    }
    assert shown["threshold"] == 1


def _run(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(line)
    root = words[0] == "sudo"
    words = words[1:] if root else words
    assert words[0] == "covenant"
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: root)
    stand_ins: dict[str, Callable[[], str]] = {
        "BOB": lambda: json.loads((folder / "bob-home" / "keys" / "bob.key").read_text())["public"],
        "SERIAL": lambda: str(times.now_ms()),
        "DIGEST": lambda: _digest(folder / "present.json"),
    }
    if words[1] == "manifest" and "--key" in words and words[-1] == "bob":
        assert document(*words[1:])["how"] == "added"
        return
    done(*(stand_ins[word]() if word in stand_ins else word for word in words[1:]))


def _digest(file: Path) -> str:
    from policy.signing import proposal

    return proposal.decode(file.read_bytes()).payload_digest
