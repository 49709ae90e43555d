"""Whose words are whose."""

from __future__ import annotations

import pytest

from covenant.respond import router
from policy.manifest import parse
from tests import runtime_kit


def _keywords(agent_id: str, **fields: str) -> frozenset[str]:
    return router.keywords(parse.parse(runtime_kit.manifest(agent_id, **fields).encode()))


def test_an_agent_s_words_are_its_id_its_name_and_its_actions_without_the_namespace() -> None:
    found = _keywords(
        "word-count", name="The Counter of Größe", required='["tool.web_search"]', optional='["memory.read"]'
    )
    assert found == {"word", "count", "counter", "grösse", "web", "search", "read"}


@pytest.mark.parametrize(
    ("text", "agent_id"),
    [
        ("count the words, please", "wordcount"),
        ("SEARCH the web", "finder"),
        ("search", "finder"),
        ("research", None),  # a word, and not a part of one
        ("the of and", None),
        ("", None),
    ],
)
def test_who_is_meant(text: str, agent_id: str | None) -> None:
    known = [
        ("wordcount", _keywords("wordcount", name="Count words")),
        ("finder", _keywords("finder", name="The", required='["tool.web_search"]')),
    ]
    match = router.route(text, known)
    assert (None if match is None else match.agent_id) == agent_id
