"""Which agent an intent is for: the one whose own words the intent uses most.

Pure: text and cards in, a match out. An agent's words are those of its id, its name, its description and the actions
that its manifest requires or lists, without the namespace (``tool.web_search`` says ``web`` and ``search``). A word
counts once, however often it is used; upper and lower case are one. Of several that score the same, the first by id is
taken, so that the answer does not hang on the order in which packages were found.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from covenant.providers.embed import unspaced
from covenant.runtime.packages import Card
from policy.manifest.agent import Manifest

_WORD: Final = re.compile(r"[^\W_]+")
# What nearly every English sentence has says nothing about which agent is meant, nor does the word for all of them.
_STOP: Final = frozenset(
    {"agent", "agents", "assistant", "bot"}
    | {"a", "an", "and", "any", "as", "at", "by", "for", "from", "in", "into"}
    | {"is", "it", "my", "of", "on", "or", "our", "that", "the", "this", "to", "with", "you"}
)


# Version 1's words for its seven actions. They count for agents without a description, which version 1's packages are.
_BRIDGE: Final[Mapping[str, frozenset[str]]] = {
    "tool.web_search": frozenset({"search", "find", "papers", "paper", "news", "web", "lookup", "recent", "latest"}),
    "tool.summarize": frozenset({"summarize", "summarise", "summary", "tldr"}),
    "tool.gpu_inference": frozenset({"gpu", "inference", "train", "generate"}),
    "memory.write": frozenset({"remember", "store", "save"}),
    "memory.read": frozenset({"recall", "memory"}),
    "intent.delegate": frozenset({"delegate"}),
    "intent.subscribe": frozenset({"hello", "hi", "echo", "ping", "test"}),
}
# Questions of two words that are so common that each of them alone means nothing.
_PHRASES: Final[Mapping[str, str]] = {"what is": "search", "who is": "search", "look up": "search"}


@dataclass(frozen=True, slots=True)
class RouteMatch:
    """The agent, and how many of its words the intent has."""

    agent_id: str
    score: int


def words(text: str) -> frozenset[str]:
    """The words of a text that count: letters and digits, case folded, in one Unicode form.

    In scripts without spaces the pairs of characters count as well: a sentence there is one word.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    return frozenset((*_WORD.findall(folded), *unspaced.pairs(folded))) - _STOP


def keywords(manifest: Manifest) -> frozenset[str]:
    """The words by which an agent is found."""
    actions = (*manifest.capabilities.required, *manifest.capabilities.optional)
    agent = manifest.agent
    said = (agent.id, agent.name, agent.description or "", *(action.partition(".")[2] for action in actions))
    found = frozenset[str]().union(*map(words, said))
    if agent.description:
        return found
    return found.union(*(_BRIDGE.get(action, frozenset()) for action in actions))


def route(text: str, known: Iterable[tuple[str, frozenset[str]]]) -> RouteMatch | None:
    """The best of the agents, each as its id and its words; None where no word of any is in the text."""
    asked = words(text)
    said = " ".join(_WORD.findall(text.casefold()))
    asked |= {word for phrase, word in _PHRASES.items() if f" {phrase} " in f" {said} "}
    scored = [RouteMatch(agent_id, len(asked & own)) for agent_id, own in known]
    return min((one for one in scored if one.score), key=lambda one: (-one.score, one.agent_id), default=None)


class Router:
    """``route`` over cards, whose words are taken once for each set of cards that is seen."""

    def __init__(self) -> None:
        self._cards: Sequence[Card] = ()
        self._known: tuple[tuple[str, frozenset[str]], ...] = ()

    def route(self, text: str, cards: Sequence[Card]) -> RouteMatch | None:
        """As the function of that name."""
        if cards is not self._cards:
            self._known = tuple((card.id, keywords(card.manifest)) for card in cards)
            self._cards = cards
        return route(text, self._known)
