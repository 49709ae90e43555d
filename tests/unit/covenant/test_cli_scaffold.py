"""``covenant manifest new``: what it makes is acceptable, and nothing that was there is touched."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from covenant import scaffold
from covenant.cli.main import cli
from policy import errors
from policy.manifest import parse

INTENT = {"id": "1", "text": 'héllo "you"\nthere', "parent": None}


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments])


def document(*arguments: str | Path) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    value = json.loads(result.stdout)
    assert isinstance(value, dict)
    return value


def refused(kind: type[errors.CovenantError], *arguments: str | Path) -> errors.CovenantError:
    result = call(*arguments)
    assert isinstance(result.exception, kind), (result.output, result.exception)
    return result.exception


@pytest.mark.parametrize(
    ("runtime", "files"),
    [
        ("python3", {"agent.toml", "main.py"}),
        ("node", {"agent.toml", "main.js"}),
        ("rust-bin", {"agent.toml", "src/main.rs"}),
    ],
)
def test_new_package_is_acceptable_and_can_be_signed(tmp_path: Path, runtime: str, files: set[str]) -> None:
    package = tmp_path / "my-agent"
    made = document("manifest", "new", package, "--runtime", runtime)
    assert (made["agent_id"], set(made["files"])) == ("my-agent", files)
    checked = document("manifest", "check", package)
    assert checked["notes"] == []
    missing = ["entry `bin/my-agent` is not a file of the package"] if runtime == "rust-bin" else []
    assert [one["message"] for one in checked["refusals"] if one["code"] == "rule_1_schema"] == missing
    assert checked["unknown_sections"] == []
    parse.require_network(parse.parse((package / "agent.toml").read_bytes()))
    assert call("keys", "new", "ann", "--no-passphrase").exit_code == 0
    assert document("manifest", "sign", package, "--key", "ann")["statement"]["agent_id"] == "my-agent"


@pytest.mark.parametrize(
    ("runtime", "program"), [("python3", [sys.executable, "main.py"]), ("node", ["node", "main.js"])]
)
def test_agent_keeps_contract(tmp_path: Path, runtime: str, program: list[str]) -> None:
    document("manifest", "new", tmp_path / "a", "--runtime", runtime)
    done = subprocess.run(
        program, cwd=tmp_path / "a", input=json.dumps(INTENT).encode() + b"\n", capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(b"\n") == 1
    assert json.loads(done.stdout) == {"text": f"You said: {INTENT['text']}", "sources": []}


def test_program_is_copied_in(tmp_path: Path) -> None:
    program = Path(sys.executable).resolve()
    made = document("manifest", "new", tmp_path / "a", "--runtime", "rust-bin", "--binary", program, "--id", "x.1")
    assert made["missing_entry"] is None
    copy = tmp_path / "a" / "bin" / "x.1"
    assert copy.read_bytes() == program.read_bytes()
    assert copy.stat().st_mode & 0o111
    assert document("manifest", "check", tmp_path / "a")["notes"] == []


def test_what_binary_may_not_be(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\n")
    new = ("manifest", "new", tmp_path / "a", "--binary")
    assert "no ELF file" in refused(errors.UsageError, *new, script, "--runtime", "rust-bin").message
    assert "goes with" in refused(errors.UsageError, *new, sys.executable).message
    assert "cannot be read" in refused(errors.PackageError, *new, tmp_path, "--runtime", "rust-bin").message
    assert not (tmp_path / "a").exists()


def test_people_are_told_what_comes_next(tmp_path: Path) -> None:
    said = call("manifest", "new", tmp_path / "a", "--runtime", "rust-bin").stdout
    assert f"put the program at {tmp_path}/a/bin/a" in said
    assert f"covenant manifest sign {tmp_path}/a --key NAME" in said
    assert (tmp_path / "a" / "bin").is_dir()
    assert "-o bin/a src/main.rs" in (tmp_path / "a" / "src" / "main.rs").read_text()


def test_empty_directory_is_taken_and_another_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    document("manifest", "new", tmp_path / "empty")
    before = {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()}
    assert (
        "is not empty"
        in refused(errors.PackageError, "manifest", "new", tmp_path / "empty", "--runtime", "node").message
    )
    assert {p.name: p.read_bytes() for p in (tmp_path / "empty").iterdir()} == before
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / ".keep").write_bytes(b"")
    refused(errors.PackageError, "manifest", "new", tmp_path / "hidden")
    assert os.listdir(tmp_path / "hidden") == [".keep"]


def test_neither_file_nor_symlink_nor_missing_parent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for bad in ("file", "link", "missing/a"):
        refused(errors.PackageError, "manifest", "new", tmp_path / bad, "--id", "a")
    assert (tmp_path / "file").read_bytes() == b"x"
    assert os.listdir(tmp_path / "real") == []
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize("name", ["a b", "", "..", "a@b", 'x"\nrole = "y', "é", "x" * 129, "a\n"])
def test_id_that_cannot_be_one(tmp_path: Path, name: str) -> None:
    assert (
        "cannot be an agent id" in refused(errors.UsageError, "manifest", "new", tmp_path / "a", "--id", name).message
    )
    assert not (tmp_path / "a").exists()


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    # The second file's name is too long for any file system.
    broken = scaffold.Scaffold("a", {"agent.toml": (b"x", 0o644), f"src/{'x' * 300}": (b"y", 0o644)})
    with pytest.raises(errors.PackageError, match="cannot be written"):
        scaffold.write(tmp_path / "a", broken)
    assert os.listdir(tmp_path) == []
    (tmp_path / "there").mkdir()
    with pytest.raises(errors.PackageError):
        scaffold.write(tmp_path / "there", broken)
    assert os.listdir(tmp_path / "there") == []


def test_directory_that_another_swaps_for_link_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = tmp_path / "a", tmp_path / "elsewhere"
    theirs.mkdir()
    (theirs / "main.rs").write_bytes(b"kept")
    mkdir, listdir = os.mkdir, os.listdir

    def planted(path: int) -> list[str]:
        found = listdir(path)
        os.symlink(theirs, "src", dir_fd=path)
        return found

    def swapped(path: str, mode: int, *, dir_fd: int | None = None) -> None:
        mkdir(path, mode, dir_fd=dir_fd)
        if path == "src":
            os.rename("src", "other", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            os.symlink(theirs, "src", dir_fd=dir_fd)

    for name, attack in (("listdir", planted), ("mkdir", swapped)):
        with monkeypatch.context() as patched:
            patched.setattr(f"covenant.scaffold.os.{name}", attack)
            with pytest.raises(errors.PackageError, match="cannot be written"):
                scaffold.write(mine, scaffold.Scaffold("a", {"src/new.rs": (b"x", 0o644)}))
        assert {path.name: path.read_bytes() for path in theirs.iterdir()} == {"main.rs": b"kept"}
        shutil.rmtree(mine)


def test_more_directories_than_descriptors_are_made(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = {f"lib/d{number}/a.txt": (b"x", 0o644) for number in range(300)}
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        scaffold.write(tmp_path / "wide", scaffold.Scaffold("wide", files, links={"l/one": "../lib/d1/a.txt"}))
        # The last one cannot be made: nothing of the others is left.
        with pytest.raises(errors.PackageError, match="cannot be written: File exists"):
            scaffold.write(tmp_path / "none", scaffold.Scaffold("none", {**files, "lib/d1": (b"", 0o644)}))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sum(path.is_file() for path in (tmp_path / "wide" / "lib").rglob("*")) == 300
    assert (tmp_path / "wide" / "l" / "one").read_text() == "x"
    assert not (tmp_path / "none").exists()
