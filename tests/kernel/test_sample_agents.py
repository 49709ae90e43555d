"""The sample agents answer under real gVisor, before any policy of ours is added: unprivileged, without capabilities.

What fails here fails for the agent's own sake; what fails only under Covenant, for the policy's.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import hostile_table, plain_runsc

AGENTS = hostile_table.HOSTILE.parent
NOBODY = 65534


def _ask(package: Path, argv: list[str], text: str, **more: Any) -> dict[str, Any]:
    result = plain_runsc.run(
        argv,
        stdin=json.dumps({"id": "1", "text": text, "parent": None}).encode() + b"\n",
        trees={"/workspace": package},
        cwd="/workspace",
        uid=NOBODY,
        gid=NOBODY,
        capabilities=(),
        **more,
    )
    assert result.status == 0, result.stderr.decode(errors="replace")[-2000:]
    assert result.stdout.count(b"\n") == 1
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """Set-up has built the compiled agent; a clone without it is built here in the same way."""
    subprocess.run([str(AGENTS.parent / "scripts" / "build_agents")], check=True, timeout=120, capture_output=True)


@pytest.mark.parametrize(
    ("name", "argv", "expected"),
    [
        ("hello", ["/usr/bin/python3", "main.py"], "Hello! You said: one two"),
        ("wordcount", ["/usr/bin/node", "main.js"], "1 line, 2 words, 7 characters; most often: one (1), two (1)"),
        ("checksum", ["/workspace/bin/checksum"], "crc32 cd07892f, fnv1a 108ab07fb9e724e1, 7 bytes: one two"),
    ],
)
def test_it_answers(name: str, argv: list[str], expected: str) -> None:
    assert _ask(AGENTS / name, argv, "one two") == {"text": expected, "sources": []}


def test_librarian_quotes_machines_own_documents() -> None:
    """Each source is a real file of the granted directory, and each quoted line stands in it at that number."""
    answer = _ask(AGENTS / "librarian", ["/usr/bin/python3", "main.py"], "which package has a license of Debian")
    assert answer["sources"]
    quoted = 0
    for block in re.split(r"\n(?=/)", answer["text"])[1:]:
        path, *lines = block.split("\n")
        assert path in answer["sources"]
        assert path.startswith("/usr/share/doc/")
        assert Path(path).is_file()
        assert lines
        if path.endswith(".gz"):
            continue
        there = Path(path).read_text(errors="replace").splitlines()
        for line in lines:
            number, text = line.strip().split(": ", 1)
            found = " ".join(there[int(number) - 1].split())
            assert text.removeprefix("...").removesuffix("...") in found
            quoted += 1
    assert quoted


@pytest.mark.parametrize("package", ["python", "exec", "bombs"])
def test_gate_opens_to_agent_without_rights(package: str) -> None:
    """The signs of gVisor are read without privilege, so that the same gate stands in a filtered sandbox."""
    answer = _ask(hostile_table.HOSTILE / package, ["/usr/bin/python3", "main.py"], "no_such_probe")
    row = hostile_table.rows(answer["text"])["no_such_probe"]
    assert (row.outcome, row.errno) == ("broken", None)


def test_broken_probe_is_neither_blocked_nor_success() -> None:
    probes, _ = hostile_table.load()
    row = hostile_table.Row(probes[0].id, "broken", None, "a bug")
    assert hostile_table.wrong_under_covenant(probes[0], row) is not None
    assert hostile_table.wrong_in_plain(probes[0], row) is not None
