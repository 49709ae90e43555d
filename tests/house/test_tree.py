"""Forbidden content of the tree: machine paths, registry hosts, envelopes, keys, code in agents/."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess

import pytest

from tests.agents import catalogue, place
from tests.agents.catalogue import Agent

# Where the transcript says that the clone lay.
STAND_IN = "/root/covenant"


def _tracked(clone: pathlib.Path) -> list[pathlib.Path]:
    # Under sudo the clone may belong to another user; the command line may say that it is safe.
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    done = subprocess.run(command, cwd=clone, capture_output=True, check=True)
    paths = [clone / name for name in done.stdout.decode().split("\0") if name]
    assert len(paths) > 20
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def test_nothing_names_place_where_it_was_written(clone: pathlib.Path) -> None:
    place = re.compile(re.escape(str(clone)) + r"(?![\w-])")
    found = [
        str(path.relative_to(clone))
        for path in _tracked(clone)
        if str(clone) != STAND_IN and place.search(path.read_text(errors="replace"))
    ]
    assert found == []


def test_each_test_cited_exists(clone: pathlib.Path) -> None:
    """A comment that names its proof is worth as much as the proof."""
    cited = re.compile(r"\btests/[a-z0-9_/]+\.py\b")
    found = {
        f"{path.relative_to(clone)}: {name}"
        for path in _tracked(clone)
        for name in cited.findall(path.read_text(errors="replace"))
        if not (clone / name).is_file()
    }
    assert found == set()


LOCKS = (
    *("locks/runtime.txt", "locks/server.txt", "locks/dev.txt", "locks/package.txt"),
    *("tests/agents/locks/llm.txt", "tests/agents/locks/shell-gpt.txt"),
)


@pytest.mark.parametrize("name", LOCKS)
def test_lock_names_versions_and_hashes_and_no_host(clone: pathlib.Path, name: str) -> None:
    text = (clone / name).read_text()
    assert not re.search(r"://|index|find-links|trusted-host", text)
    # Every requirement is exact and has at least one hash: `pip --require-hashes` would refuse the rest.
    requirements = re.sub(r"\\\n", " ", text).strip().splitlines()
    assert len(requirements) > 5
    for requirement in requirements:
        assert re.match(r"[a-z0-9-]+==\S+ .*--hash=sha256:[0-9a-f]{64}", requirement), requirement


def test_locks_of_light_agents_hold_their_packages(clone: pathlib.Path) -> None:
    """Also those of npm have a digest for each package, and no address."""
    wanted = {name: catalogue.load()[name] for name in catalogue.LIGHT} | {"node": Agent("node", npm=(place.NODE,))}
    assert {path.stem for path in (clone / "tests/agents/locks").iterdir()} == set(wanted)
    for name, agent in wanted.items():
        locked = place.lock(name)
        assert locked is not None
        text = locked.read_text()
        assert "://" not in text
        if agent.pip:
            pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
        else:
            packages = json.loads(text)["packages"]
            needed = packages.pop("")["dependencies"]
            pins = {path.removeprefix("node_modules/"): one["version"] for path, one in packages.items()}
            assert needed.items() <= pins.items()
            assert all(one["integrity"].startswith("sha512-") for one in packages.values())
        for package in agent.npm + agent.pip:
            head, _, version = package.replace("==", "@").rpartition("@")
            assert pins[head or package] == version or not head, package


def test_locks_agree(clone: pathlib.Path) -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"^[a-z0-9-]+==\S+", (clone / "locks" / name).read_text(), re.MULTILINE))

    assert pins("runtime.txt") < pins("dev.txt")


def test_locks_hold_what_project_asks_for(clone: pathlib.Path) -> None:
    project = (clone / "pyproject.toml").read_text()
    block = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    group = re.search(r"^dev = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    assert block
    assert group
    for found, lock in ((block, "runtime.txt"), (group, "dev.txt")):
        text = (clone / "locks" / lock).read_text()
        for name in re.findall(r'"([a-z0-9-]+)', found[1]):
            assert re.search(rf"^{name}==", text, re.MULTILINE), (name, lock)


def test_agents_are_data(clone: pathlib.Path) -> None:
    tracked = [path.relative_to(clone / "agents") for path in _tracked(clone) if path.is_relative_to(clone / "agents")]
    assert tracked
    assert [path for path in tracked if path.name in ("__init__.py", "agent.dsse.json")] == []


def test_no_key_is_committed(clone: pathlib.Path) -> None:
    marks = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/=]{20}")
    assert [path for path in _tracked(clone) if path.suffix == ".key" or marks.search(path.read_bytes())] == []


def test_scripts_can_be_run(clone: pathlib.Path) -> None:
    for name in ("setup", "undo", "demo", "test", "lock", "build_agents", "sign_agents", "transcript", "vm"):
        path = clone / "scripts" / name
        assert path.stat().st_mode & 0o111 == 0o111, name
        assert path.read_text().startswith(("#!/usr/bin/", "#!/bin/bash\n")), name


# Spelt in pieces, since this file is searched too.
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|\bNot" + r"ImplementedError\b")
EVASIONS = re.compile(
    r"pytest\.(sk" + r"ip|xf" + r"ail|importor" + r"skip)\b|mark\.(sk" + r"ip|xf" + r"ail)|assert Tr" + r"ue\b"
)


def test_nothing_is_left_unfinished(clone: pathlib.Path) -> None:
    found = [
        f"{path.relative_to(clone)}:{number}"
        for path in _tracked(clone)
        if path.suffix in (".py", ".toml", ".sh", ".yml", ".c", ".js", "")
        # Modules of others, unchanged (scripts/vendor_console).
        if "vendor" not in path.parts
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_no_test_evades(clone: pathlib.Path) -> None:
    """The one place that may skip is the capability probe of tests/conftest.py, and not in CI."""
    found = [
        f"{path.relative_to(clone)}:{number}"
        for path in _tracked(clone)
        if path.is_relative_to(clone / "tests") and path.suffix == ".py" and path != clone / "tests/conftest.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if EVASIONS.search(line)
    ]
    assert found == []
