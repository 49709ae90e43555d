"""A tool manifest of Matrix run as it is: the command of docs/tool-calls.md, what it grants, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.test_tool_servers import ADVERTISED, package, server
from tests.kernel.test_tools_endpoint import AGENT, call, request, text_of
from tests.kernel.world import ROOT

PAGE = (ROOT / "docs/tool-calls.md").read_text()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("single"))
    yield made
    assert leftovers(made.world) == []


def written(home: Home) -> tuple[Path, Path]:
    """Write the files that the page names: the manifest, its server beside it, and the program."""
    folder = package(home.base, server()).rename(home.base / "agents")
    (folder / "agent.toml").unlink()
    (folder / "tools.lock.json").unlink()
    (folder / "main.py").write_text(AGENT)
    return (folder / "tools.json").rename(folder / "default.json"), folder / "main.py"


def test_file_runs_with_its_tools_alone(home: Home) -> None:
    file, program = written(home)
    (line,) = re.findall(r"^(covenant run agents/default.json .*)$", PAGE, re.MULTILINE)
    words = shlex.split(line)
    asked = [["/mcp", request("tools/list")], call("probe"), call("hi", "loud__whisper")]
    done = home.covenant(*(json.dumps(asked) if word == "read the notes" else word for word in words[1:]), "--json")
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(json.loads(done.stdout)["text"])
    assert found[0][1]["result"]["tools"] == [{**ADVERTISED[0], "name": "loud__shout"}]
    seen = json.loads(text_of(found[1]))
    assert (seen["own file"], seen["host file"], seen["network"]) == ("worked", "FileNotFoundError", "PermissionError")
    assert "error" in found[2][1]
    assert b"dev: signed with a local key" in done.stderr
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({**whole, "allowed_side_effects": ["write"]}))
    listed = home.covenant("run", file, json.dumps([]), "--entry", program, "--json")
    assert (listed.returncode, json.loads(listed.stdout)["text"]) == (0, "[]"), listed.stderr
    assert b"not granted: " in listed.stderr
    assert b"loud/shout@1.0" in listed.stderr
    before = home.starts()
    (file.parent / "tools/loud/server.py").write_text("print()\n")
    refused = home.covenant("run", file, "[]", "--entry", program, "--json")
    assert (refused.returncode, home.starts()) == (1, before)
    assert "package_digest" in json.loads(refused.stdout)["hint"]


def test_options_of_packages_are_refused(home: Home) -> None:
    file = home.base / "other.json"
    file.write_text("{}")
    for words in (["--learn", "x"], ["--keep"], ["--workspace", "."], ["--detach"]):
        done = home.covenant("run", file, "text", "--entry", "main.py", *words)
        assert b"is run with TEXT, --entry, --timeout and --json" in done.stderr
    assert b"names no program" in home.covenant("run", file, "text").stderr
