"""The sample packages: each manifest parses, and hello's is the whole schema, since authors copy it."""

from __future__ import annotations

import pathlib
import re

import pytest

from policy.manifest import parse
from scripts import manifest_page

AGENTS = pathlib.Path(__file__).resolve().parents[4] / "agents"
FILES = sorted(AGENTS.rglob("agent.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(AGENTS).parent))
def test_sample_manifest_parses(path: pathlib.Path) -> None:
    manifest = parse.parse(path.read_bytes())
    parse.require_network(manifest)
    assert manifest.unknown_sections == ()


def test_there_are_samples() -> None:
    assert AGENTS / "hello" / "agent.toml" in FILES


def test_hello_shows_every_section_and_key() -> None:
    hello = (AGENTS / "hello" / "agent.toml").read_text()
    heading, missing = "", []
    for line in "".join(manifest_page.pages().values()).splitlines():
        if found := re.fullmatch(r"## (\[.*\])", line):
            heading = found[1]
        elif found := re.match(r"\| `(\w+)` \|", line):
            section = re.split(r"^(?:# )?\[", hello.split(heading, 1)[-1], maxsplit=1, flags=re.MULTILINE)[0]
            if heading not in hello or not re.search(rf"^(?:# )?{found[1]} = ", section, re.MULTILINE):
                missing.append(f"{heading} {found[1]}")
    assert missing == []
