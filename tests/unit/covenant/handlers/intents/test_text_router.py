"""Whose words are whose."""

from __future__ import annotations

import pytest

from covenant.handlers.intents import text_router
from policy.manifest import parse
from tests import runtime_kit


def _keywords(agent_id: str, description: str = "", **fields: str) -> frozenset[str]:
    written = runtime_kit.manifest(agent_id, **fields)
    if description:
        written = written.replace("[agent]\n", f'[agent]\ndescription = "{description}"\n')
    return text_router.keywords(parse.parse(written.encode()))


def test_agent_s_words_are_its_id_its_name_and_its_actions_without_namespace() -> None:
    found = _keywords(
        "word-count", name="The Counter of Größe", required='["tool.web_search"]', optional='["memory.read"]'
    )
    own = {"word", "count", "counter", "grösse", "web", "search", "read"}
    assert found >= own
    # Version 1's words for its actions, since there is no description.
    assert {"find", "papers", "news", "recall"} <= found - own
    assert "find" not in _keywords("word-count", "Counts", required='["tool.web_search"]')


def test_what_it_says_that_it_does_are_words_of_it_too() -> None:
    found = _keywords("teller", "Tells how LONG a text is, in the given words.", name="Teller")
    assert found == {"teller", "tells", "how", "long", "text", "given", "words"}
    silent = ("asker", _keywords("asker", name="Long"))
    assert text_router.route("how long is this text", [silent, ("teller", found)]) == text_router.RouteMatch(
        "teller", 3
    )
    assert text_router.route(
        "how long is this text", [silent, ("teller", _keywords("teller"))]
    ) == text_router.RouteMatch("asker", 1)


def test_of_those_that_have_as_many_of_words_it_is_first_by_id_in_whatever_order() -> None:
    known = [(agent_id, _keywords(agent_id, name="Same words")) for agent_id in ("c", "a", "b")]
    for order in (known, known[::-1]):
        assert text_router.route("same words", order) == text_router.RouteMatch("a", 2)


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
    match = text_router.route(text, known)
    assert (None if match is None else match.agent_id) == agent_id


@pytest.mark.parametrize(
    ("text", "agent_id"),
    [
        ("find recent papers on agent memory", "research"),
        ("what is rust", "research"),
        ("search the news", "research"),
        ("say hi", "hello-agent"),
        ("echo this", "hello-agent"),
        ("the agent", None),
        ("what a day it is", None),
    ],
)
def test_version_1s_packages_get_its_sentences(text: str, agent_id: str | None) -> None:
    known = [
        ("hello-agent", _keywords("hello-agent", name="Hello Agent", required='["intent.subscribe"]')),
        ("research", _keywords("research", name="Research Agent", required='["tool.web_search"]')),
    ]
    match = text_router.route(text, known)
    assert (match.agent_id if match else None) == agent_id


@pytest.mark.parametrize(
    ("text", "agent_id"),
    [
        ("会議は水曜日の午後三時ですか", "planner"),
        ("翻訳してください", "translator"),
        ("번역해 주세요", "korean"),
        ("いい天気", None),
    ],
)
def test_words_without_spaces_find_agent(text: str, agent_id: str | None) -> None:
    described = {"planner": "会議の予定を決める", "translator": "文章を翻訳する", "korean": "글을 번역합니다"}
    known = [(name, _keywords(name, about)) for name, about in described.items()]
    found = text_router.route(text, known)
    assert (found and found.agent_id) == agent_id
