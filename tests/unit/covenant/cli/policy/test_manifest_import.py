"""``covenant manifest import``: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json
import pathlib
import re
import shlex

import pytest

from covenant.cli.policy import manifest_import
from policy.importing import formats
from policy.importing.vocabulary import MAX_BYTES
from tests import cli_kit as cli

ROOT = pathlib.Path(__file__).resolve().parents[5]
UNIT = "[Service]\nExecStart=/usr/bin/worker\nReadOnlyPaths=/usr/share/doc\nEnvironment=TOKEN=swordfish\n"


def test_formats_of_verb_are_those_of_policy() -> None:
    assert manifest_import.FORMATS == formats.NAMES


def test_manifest_goes_to_stdout_and_losses_to_stderr(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.service").write_text(UNIT)
    result = cli.call("manifest", "import", "--from", "systemd", tmp_path / "a.service", "--id", "mine")
    assert result.exit_code == 0
    assert 'id = "mine"' in result.stdout
    assert 'read = ["/usr/share/doc"]' in result.stdout
    assert "variable `TOKEN` is not copied" in result.stderr
    assert 'grants = ["TOKEN"]' in result.stderr
    assert "swordfish" not in result.output


def test_package_is_written_and_checks(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.service").write_text(UNIT.replace("/usr/bin/worker", "/usr/bin/cat"))
    made = cli.document("manifest", "import", "--from", "systemd", tmp_path / "a.service", "--out", tmp_path / "worker")
    assert made["kind"] == "manifest_imported"
    assert (tmp_path / "worker" / "agent.toml").read_text() == made["manifest"]
    assert {"kind", "place", "message", "line"} == set(made["losses"][0])
    checked = cli.document("manifest", "check", tmp_path / "worker")
    assert checked["agent_id"] == "worker"
    assert checked["grants"]


def test_directory_with_files_is_left_alone(tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.service").write_text(UNIT)
    cli.refused("package_invalid", "manifest", "import", "--from", "systemd", tmp_path / "a.service", "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["a.service"]


def test_source_comes_from_stdin() -> None:
    assert "/usr/share/doc" in cli.done("manifest", "import", "--from", "systemd", "-", stdin=UNIT)


@pytest.mark.parametrize("raw", [b"\xff", b"a\0b", b"{", b"[]", b'{"a": 1.5}', b"x" * (MAX_BYTES + 5)])
def test_malformed_source_is_refused_with_place_and_fix(raw: bytes) -> None:
    for source in ("srt", "systemd"):
        error = cli.call("manifest", "import", "--from", source, "-", stdin=raw).exception
        assert getattr(error, "code", "") == "import_refused"
        assert getattr(error, "where", "")
        assert getattr(error, "hint", "")


def test_missing_file_is_refused(tmp_path: pathlib.Path) -> None:
    cli.refused("usage", "manifest", "import", "--from", "srt", tmp_path / "absent")


@pytest.mark.parametrize("base", ["site", "/srv/../etc", "/srv/./x"])
def test_base_that_is_no_plain_path_is_refused(base: str) -> None:
    cli.refused("usage", "manifest", "import", "--from", "srt", "-", "--base", base, stdin="{}")


def test_hidden_characters_reach_no_terminal() -> None:
    source = json.dumps({"network": {"allowedDomains": ["\x1b]0;x\x07.example"]}, "\x1b[2J": 1})
    result = cli.call("manifest", "import", "--from", "srt", "-", stdin=source)
    assert result.exit_code == 0
    assert "\x1b" not in result.output


def test_page_can_be_followed(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fence of the page is a file, named in the line above it, or commands."""
    page = (ROOT / "docs" / "import.md").read_text()
    monkeypatch.chdir(tmp_path)
    for name, content in re.findall(r"^`([\w.-]+)`:\n\n```\w+\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        (tmp_path / name).write_text(content)
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) >= 3
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        assert program == "covenant"
        result = cli.call(*words)
        assert result.exit_code == 0, (line, result.output, result.exception)
