"""Searches: the request to a provider of each kind, and its answer in the one form that agents get.

Sources: the API references of Brave Search (web/search), SerpApi (search.json, engine google) and SearXNG (search, with
``format=json``).
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from policy.manifest.services import RESULTS
from sandbox.network.service.shapes import RefusedError

QUERY_CHARACTERS: Final = 400
RESULTS_IF_NOT_SAID: Final = 5
_TITLE, _URL, _SNIPPET = 300, 2048, 1000
_TAG: Final = re.compile(r"<[^<>]{0,200}>")


class Question(Struct, frozen=True):
    """The words of a search, and how many results are wanted."""

    words: str
    count: int


class SearchCall(Struct, frozen=True):
    """One request to a provider: path below its endpoint, parameters and headers."""

    path: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str]


def question(query: Mapping[str, str], most: int | None) -> Question:
    """Read ``q`` and ``count`` of a request; ``most`` is the run's largest number of results.

    Raises:
        RefusedError: a parameter is unknown, missing or not of its form.
    """
    if set(query) - {"q", "count"}:
        raise RefusedError(400, "malformed", "a search has the parameters q and count")
    words = query.get("q", "").strip()
    if not 1 <= len(words) <= QUERY_CHARACTERS or not words.isprintable():
        raise RefusedError(400, "malformed", f"q is 1 to {QUERY_CHARACTERS} printable characters")
    count = query.get("count", str(RESULTS_IF_NOT_SAID))
    if not re.fullmatch(r"[1-9][0-9]?", count) or int(count) > RESULTS:
        raise RefusedError(400, "malformed", f"count is a number from 1 to {RESULTS}")
    return Question(words, min(int(count), RESULTS if most is None else most))


def call(kind: str, asked: Question, key: str) -> SearchCall:
    """Return the request to a provider of this kind, with the operator's key."""
    if kind == "brave":
        parameters = {"q": asked.words, "count": str(asked.count), "text_decorations": "false"}
        return SearchCall("/res/v1/web/search", parameters, {"X-Subscription-Token": key})
    if kind == "serpapi":
        parameters = {"engine": "google", "q": asked.words, "num": str(asked.count), "api_key": key}
        return SearchCall("/search.json", parameters, {})
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return SearchCall("/search", {"q": asked.words, "format": "json"}, headers)


def results(kind: str, body: bytes, count: int) -> list[dict[str, str]]:
    """Return title, URL and snippet of each result of a provider's answer.

    Raises:
        RefusedError: the answer is no answer of such a provider.
    """
    try:
        document = json.loads(body.decode())
        rows = _rows(kind, document)
        found = [_row(one, url="link" if kind == "serpapi" else "url", text=_SNIPPETS[kind]) for one in rows]
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as e:
        raise RefusedError(502, "provider_failed", "the provider's answer is no list of results") from e
    return [one for one in found if one["url"].startswith(("https://", "http://"))][:count]


_SNIPPETS: Final = {"brave": "description", "serpapi": "snippet", "searxng": "content"}


def _rows(kind: str, document: Any) -> list[Any]:
    if kind == "brave":
        return list(document.get("web", {}).get("results", []))
    if kind == "serpapi":
        # Without a result it answers with `error`, and status 200.
        return list(document.get("organic_results", []))
    return list(document["results"])


def _row(one: Any, *, url: str, text: str) -> dict[str, str]:
    link = str(one[url])
    return {
        "title": _plain(one.get("title"), _TITLE),
        "url": link if len(link) <= _URL and link.isprintable() and " " not in link else "",
        "snippet": _plain(one.get(text), _SNIPPET),
    }


def _plain(value: Any, most: int) -> str:
    """Text without tags, in one line."""
    text = html.unescape(_TAG.sub("", value if isinstance(value, str) else ""))
    return " ".join(text.split())[:most]


def mock(asked: Question) -> list[dict[str, str]]:
    """The results of a provider of kind ``mock``: pages of ``mock.example``, which need not be there."""
    return [
        {
            "title": f"Result {number} about {asked.words}",
            "url": f"https://mock.example/{number}",
            "snippet": f"The mock found {asked.words}, for the {number}. time.",
        }
        for number in range(1, asked.count + 1)
    ]
