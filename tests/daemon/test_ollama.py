"""Ollama's published contract, spoken by a real server on loopback: what is asked, and what comes of answers."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import anyio
import pytest
from aiohttp import web

from covenant.providers.embed import ollama, pick
from covenant.providers.embed.ollama import OllamaEmbedder
from covenant.providers.embed.pick import EmbedSettings
from policy import errors

pytestmark = pytest.mark.anyio

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
TAGS = {
    "models": [{"name": "nomic-embed-text:latest", "digest": "0a109f422b47e3a30ba2b10eca18548e944e8a23073ee3f3e947"}]
}


def said(body: Any, status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(body, status=status)

    return answer


def raw(body: bytes, status: int = 200) -> Answer:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status)

    return answer


@contextlib.asynccontextmanager
async def serving(**routes: Answer) -> AsyncIterator[tuple[str, list[tuple[str, Any]]]]:
    """A server of ``/api/<name>``, its endpoint, and what it was asked."""
    asked: list[tuple[str, Any]] = []

    def noted(name: str, answer: Answer) -> Answer:
        async def handler(request: web.Request) -> web.StreamResponse:
            asked.append((name, await request.json() if request.method == "POST" else None))
            return await answer(request)

        return handler

    app = web.Application()
    for name, answer in routes.items():
        app.router.add_route("GET" if name == "tags" else "POST", f"/api/{name}", noted(name, answer))
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def embedding(endpoint: str, model: str = "nomic-embed-text") -> AsyncIterator[OllamaEmbedder]:
    embedder = OllamaEmbedder(endpoint, model)
    try:
        yield embedder
    finally:
        await embedder.close()


async def test_text_goes_out_and_its_vector_comes_back() -> None:
    answer = said({"model": "nomic-embed-text", "embeddings": [[0.25, -1, 3e-5]], "total_duration": 1})
    async with serving(tags=said(TAGS), embed=answer) as (endpoint, asked), embedding(endpoint + "/") as embedder:
        await embedder.probe()
        assert embedder.name == "ollama/nomic-embed-text@0a109f422b47"
        before = embedder.dimensions
        assert before is None
        assert await embedder.embed("a text") == (0.25, -1.0, 3e-5)
        assert embedder.dimensions == 3
        assert await embedder.embed("  ") == ()
        assert asked == [("tags", None), ("embed", {"model": "nomic-embed-text", "input": "a text"})]


async def test_older_server_is_asked_at_its_own_route() -> None:
    async with (
        serving(embeddings=said({"embedding": [1.0, 2.0]})) as (endpoint, asked),
        embedding(endpoint) as embedder,
    ):
        for _ in range(2):
            assert await embedder.embed("t") == (1.0, 2.0)
        assert asked == [("embeddings", {"model": "nomic-embed-text", "prompt": "t"})] * 2


async def test_only_so_much_of_text_is_sent() -> None:
    answer = said({"embeddings": [[1.0]]})
    async with serving(embed=answer) as (endpoint, asked), embedding(endpoint) as embedder:
        await embedder.embed("é" * 100_000)
        assert asked[0][1]["input"] == "é" * ollama.MAX_CHARACTERS
        await embedder.embed("half \ud800")
        assert asked[1][1]["input"] == "half ?"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said({"error": 'model "x" not found, try pulling it first'}, 404), "404: model"),
        (said({}, 500), "status 500"),
        (raw(b"not json"), "no vector"),
        (raw(b"[" * 100_000), "no vector"),
        (said([1.0]), "no vector"),
        (said({"embeddings": []}), "no vector"),
        (said({"embeddings": [[1.0], [2.0]]}), "no vector"),
        (said({"embeddings": [[]]}), "no vector"),
        (said({"embeddings": [["1.0"]]}), "no vector"),
        (said({"embeddings": [[True]]}), "no vector"),
        (raw(b'{"embeddings": [[NaN]]}'), "no vector"),
        (raw(b'{"embeddings": [[1e999]]}'), "no vector"),
        (said({"embeddings": [[1e39]]}), "no vector"),
        (said({"embeddings": [[0.0] * 20_000]}), "no vector"),
        (raw(b"x" * (ollama.MAX_BODY_BYTES + 1)), "more than"),
        (raw(b"", 307), "status 307"),
    ],
)
async def test_what_is_no_vector_is_refused(answer: Answer, reason: str) -> None:
    async with serving(embed=answer) as (endpoint, _), embedding(endpoint) as embedder:
        with pytest.raises(errors.EmbedderError, match=reason):
            await embedder.embed("t")


async def test_vectors_of_other_dimensions_are_refused() -> None:
    answers = [[1.0, 2.0], [1.0, 2.0, 3.0]]

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response({"embeddings": [answers.pop(0)]})

    async with serving(embed=answer) as (endpoint, _), embedding(endpoint) as embedder:
        await embedder.embed("t")
        with pytest.raises(errors.EmbedderError, match="3 dimensions, and had 2"):
            await embedder.embed("t")


async def test_redirect_is_not_followed() -> None:
    async def elsewhere(_: web.Request) -> web.StreamResponse:
        raise web.HTTPTemporaryRedirect("/api/other")

    async with (
        serving(embed=elsewhere, other=said({"embeddings": [[1.0]]})) as (endpoint, asked),
        embedding(endpoint) as embedder,
    ):
        with pytest.raises(errors.EmbedderError):
            await embedder.embed("t")
        assert [name for name, _ in asked] == ["embed"]


async def test_who_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ollama, "TIMEOUT_SECONDS", 0.2)

    async def never(_: web.Request) -> web.StreamResponse:
        await anyio.sleep(1)
        raise AssertionError

    async with serving(tags=never, embed=never) as (endpoint, _), embedding(endpoint) as embedder:
        with pytest.raises(errors.EmbedderError, match=r"within 0\.2 s"):
            await embedder.embed("t")
        with pytest.raises(errors.EmbedderError, match=r"within 0\.3 s"):
            await embedder.probe()


@pytest.mark.parametrize(
    ("tags", "reason"),
    [(said({"models": []}), "no model"), (said({}), "status 200"), (said({"models": [1]}), "no model")],
)
async def test_probe_that_fails_is_warning_and_embedder_stays(tags: Answer, reason: str) -> None:
    async with serving(tags=tags, embed=said({"embeddings": [[1.0]]})) as (endpoint, _):
        picked = await pick.pick(EmbedSettings(provider="ollama", endpoint=endpoint))
        assert reason in picked.warning
        assert picked.embedder.name == "ollama/nomic-embed-text"
        assert await picked.embedder.embed("t") == (1.0,)
        await picked.embedder.close()


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:1", "nonsense", "http://"])
async def test_nobody_there_is_error_of_ours(endpoint: str) -> None:
    async with embedding(endpoint) as embedder:
        with pytest.raises(errors.EmbedderError, match="cannot be reached"):
            await embedder.embed("t")
    picked = await pick.pick(EmbedSettings(provider="ollama", endpoint=endpoint))
    assert "cannot be reached" in picked.warning
    await picked.embedder.close()


async def test_probe_that_succeeds_warns_of_nothing() -> None:
    async with serving(tags=said(TAGS)) as (endpoint, _):
        picked = await pick.pick(EmbedSettings(provider="ollama", endpoint=endpoint))
        assert picked.warning == ""
        await picked.embedder.close()
