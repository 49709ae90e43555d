"""NUL in the arguments or variables of a manifest: refused by every verb that reads it, with the place and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from covenant.cli.main import cli
from tests import signing_kit as kit
from tests.cli_kit import done, refused

# TOML writes NUL so; the byte itself is no TOML.
NUL = r'"a\u0000b"'
CLEAN = '"ab"'
HEAD = kit.MANIFEST.decode().replace('runtime = "python3"', 'runtime = "command"')


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "pkg"
    folder.mkdir()
    (folder / "main.py").write_bytes(b"#!/usr/bin/env python3\n")
    return folder


@pytest.mark.parametrize("line", ["args = [{}]", "env = {{ WORD = {} }}", "cwd = {}"])
def test_nul_in_manifest_is_refused(package: Path, line: str) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    (package / "agent.toml").write_text(HEAD + f'[process]\ncontract = "text"\n{line.format(NUL)}\n')
    number = (package / "agent.toml").read_text().count("\n")
    for words in (("check",), ("sign", "--key", "ann")):
        error = refused("manifest_invalid", "manifest", words[0], package, *words[1:])
        assert error.where.startswith(f"agent.toml:{number}:")
        assert "U+0000" in error.message
        assert error.hint.startswith("remove the character")
    assert not (package / "agent.dsse.json").exists()
    # The fix.
    good = line.format('"/tmp"' if line.startswith("cwd") else CLEAN)
    (package / "agent.toml").write_text(HEAD + f'[process]\ncontract = "text"\n{good}\n')
    done("manifest", "check", package)
    done("manifest", "sign", package, "--key", "ann")


@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--", "sh", "-c", "a\0b"), "argument 2 of the command"),
        (("--", "s\0h"), "the command"),
        (("--env", "WORD=a\0b", "--", "sh"), "the value of --env WORD"),
    ],
)
def test_nul_in_session_is_refused(words: tuple[str, ...], place: str) -> None:
    # A shell cannot pass it; a caller of this program's own code can.
    found = CliRunner().invoke(cli, ["exec", *words], standalone_mode=False)
    assert found.return_value == 125
    assert place in found.stderr
    assert "\n  fix: " in found.stderr
