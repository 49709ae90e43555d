"""Check the laws of the router: for any agents and text, the answer depends on their words alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from covenant.handlers.intents import text_router

_WORDS = st.sampled_from(["count", "words", "search", "hello", "web", "summary", "größe", "Ünïcode", "x1"])
_AGENTS = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.frozensets(_WORDS, max_size=5), max_size=6).map(
    lambda found: {agent_id: frozenset().union(*map(text_router.words, own)) for agent_id, own in found.items()}
)
_TEXTS = st.lists(_WORDS | st.just("the") | st.just("zebra"), max_size=8).map(" ".join)


@given(_TEXTS, _AGENTS, st.randoms())
def test_order_in_which_agents_are_known_does_not_matter(
    text: str, agents: dict[str, frozenset[str]], shuffle: random.Random
) -> None:
    known = list(agents.items())
    shuffle.shuffle(known)
    assert text_router.route(text, known) == text_router.route(text, sorted(agents.items()))


@given(_TEXTS, _AGENTS)
def test_case_and_number_of_word_do_not_matter(text: str, agents: dict[str, frozenset[str]]) -> None:
    known = list(agents.items())
    match = text_router.route(text, known)
    assert text_router.route(text.upper(), known) == match
    assert text_router.route(f"{text}! ({text})", known) == match


@given(_TEXTS, _AGENTS)
def test_best_is_taken_and_of_equals_first_by_id(text: str, agents: dict[str, frozenset[str]]) -> None:
    match = text_router.route(text, agents.items())
    scores = {agent_id: len(own & text_router.words(text)) for agent_id, own in agents.items()}
    if match is None:
        assert not any(scores.values())
        return
    assert match.score == max(scores.values())
    assert match.agent_id == min(agent_id for agent_id, score in scores.items() if score == match.score)


@given(_TEXTS, _AGENTS, st.frozensets(_WORDS, min_size=1, max_size=3))
def test_another_agent_takes_intent_only_by_words_of_its_own(
    text: str, agents: dict[str, frozenset[str]], more: frozenset[str]
) -> None:
    before = text_router.route(text, agents.items())
    own = frozenset[str]().union(*map(text_router.words, more))
    after = text_router.route(text, [*agents.items(), ("zz", own)])
    if after is not None and after.agent_id == "zz":
        assert after.score == len(own & text_router.words(text)) > (before.score if before else 0)
    else:
        assert after == before
