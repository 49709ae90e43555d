"""The agents of this repository are found by the words of README and of their descriptions."""

from __future__ import annotations

from pathlib import Path

import pytest

from covenant.handlers.intents import text_router
from policy.manifest import parse

AGENTS = Path(__file__).resolve().parents[4] / "agents"


@pytest.mark.parametrize(
    ("text", "agent"),
    [
        ("which package mentions seccomp", "librarian"),
        ("count the words of this text", "wordcount"),
        ("the checksum of abc", "checksum"),
        ("xyzzy", None),
    ],
)
def test_sample_agent_is_found_by_words(text: str, agent: str | None) -> None:
    manifests = [parse.parse(path.read_bytes()) for path in sorted(AGENTS.glob("*/agent.toml"))]
    found = text_router.route(text, [(one.agent.id, text_router.keywords(one)) for one in manifests])
    assert (found and found.agent_id) == agent
