"""docs/workspaces.md from its first command to its last, as typed; its manifest is parsed."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy.manifest import parse
from sandbox.layers import sources
from sandbox.layers.store import LayerStore
from tests.kernel.test_page_exec import Typist
from tests.kernel.world import ROOT

PAGE = (ROOT / "docs/workspaces.md").read_text()
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HEAD = '[agent]\nid = "x"\nname = "x"\nversion = "0"\nruntime = "command"\nentry = "/bin/sh"\n'


@pytest.fixture
def typist() -> Iterator[Typist]:
    """A place on a file system that takes idmapped mounts, with a project in it."""
    with tempfile.TemporaryDirectory(dir="/srv", prefix="covenant-test-") as place:
        Path(place).chmod(0o755)
        made = Typist(Path(place))
        sources.build(LayerStore(made.home / "supervisor"), "debian-minimal", [])
        project = Path(place) / "project"
        project.mkdir()
        (project / "notes.txt").write_text("notes\n")
        (project / "old.txt").write_text("old\n")
        for path in (project, *project.iterdir()):
            os.chown(path, 1000, 1000)
        yield made


def test_page_can_be_followed(typist: Typist) -> None:
    project = typist.place / "project"
    lines = [line for kind, block in _FENCE.findall(PAGE) if kind == "sh" for line in block.splitlines()]
    shown, run = {}, ""
    for line in lines:
        if "RUN" in line and not run:
            run = json.loads(typist.typed("covenant workspace list --json")[0])["workspaces"][0]["run_id"][:8]
        if line.endswith("discard RUN"):
            # The lines before have applied everything.
            typist.typed("covenant exec --quiet --workspace project -- touch src/b")
            run = json.loads(typist.typed("covenant workspace list --json")[0])["workspaces"][0]["run_id"][:8]
        shown[line] = typist.typed(line.replace("RUN", run))[0]
        if line == "covenant workspace apply RUN notes.txt":
            assert typist.typed("covenant workspace list")[0].endswith(" 3 changes\n")
    assert shown["covenant workspace diff RUN"].splitlines() == [
        *("~ notes.txt  11 bytes", "- old.txt", "+ src/", "+ src/a.txt  4 bytes")
    ]
    assert "+more" in shown["covenant workspace diff RUN --patch"]
    assert "+more" in (typist.place / "changes.html").read_text()
    assert shown["covenant workspace apply RUN notes.txt"].startswith(
        "applied 1 change\nstill in the workspace: 3 changes\n"
    )
    assert shown["covenant workspace apply RUN"] == "applied 3 changes\n"
    assert sorted(str(path.relative_to(project)) for path in project.rglob("*")) == ["notes.txt", "src", "src/a.txt"]
    assert (project / "notes.txt").read_text() == "notes\nmore\n"
    assert typist.typed("covenant workspace list")[0] == ""


def test_manifest_of_page_is_accepted() -> None:
    (block,) = [block for kind, block in _FENCE.findall(PAGE) if kind == "toml"]
    found = parse.parse((HEAD + block).encode()).workspace
    assert (found.mode, found.max_mb, found.exec) == ("overlay", 1024, True)
