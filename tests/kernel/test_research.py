"""agents/research under Covenant: with the operator's mocks, and with providers of each part over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from policy import errors
from sandbox.network.service import providers
from scripts import ollama_server
from tests.kernel import fake_provider, fake_web
from tests.kernel.fake_web import PAGE, Web
from tests.kernel.world import ROOT, World

AGENT = ROOT / "agents" / "research"
MOCKS = (AGENT / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
REAL = """
[providers.local]
kind = "searxng"
endpoint = "http://{search}"
[providers.model]
kind = "{kind}"
endpoint = "{model}"
[fetch."x.example"]
connect = "{page}"
ca = "{ca}"
"""


def package(world: World, **changed: str) -> Path:
    manifest = (AGENT / "agent.toml").read_text()
    for old, new in changed.items():
        before = {"models": 'provider = "local", models = ["*"]', "hosts": '"mock.example"'}[old]
        assert before in manifest
        manifest = manifest.replace(before, new)
    files = {"main.py": (AGENT / "main.py").read_bytes(), "agent.toml": manifest.encode()}
    path = world.package(dict.fromkeys(files, b""))
    for name, content in files.items():
        (path / name).write_bytes(content)
    return world.sign(path)


def test_question_is_answered_by_mocks(world: World) -> None:
    assert providers.parse(MOCKS.encode(), file="providers.toml")
    (world.state / "providers.toml").write_text(MOCKS)
    answer = world.run(package(world), "what is  a filter")
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == "mock: what is a filter"
    assert list(answer.result.sources) == [f"https://mock.example/{number}" for number in range(1, 6)]
    kinds = [row["kind"]["type"] for row in world.rows()]
    assert (kinds.count("web_asked"), kinds.count("model_asked"), kinds.count("denied")) == (6, 1, 0)


CHANGED = {"models": 'provider = "model", models = ["llama3.2"]', "hosts": '"x.example"'}


@contextmanager
def found(world: World, kind: str, model: str) -> Iterator[Web]:
    """Providers of searches and pages, and one of models, in the operator's file. Yields the searches'."""
    with fake_web.serving() as (search, _), fake_web.serving("x.example") as (pages, ca):
        pages.pages["/"] = (200, {}, PAGE.encode())
        text = REAL.format(kind=kind, search=search.place, model=model, page=pages.place, ca=ca)
        (world.state / "providers.toml").write_text(text)
        yield search


def test_model_reads_what_was_found(world: World) -> None:
    with fake_provider.serving() as model, found(world, "openai-compatible", model.url) as search:
        answer = world.run(package(world, **CHANGED), "what is a filter")
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        assert answer.result.text == f"from {model.server_port}"
        assert list(answer.result.sources) == ["https://x.example/"]
        (asked,) = model.seen
        assert "One bold word." in json.dumps(asked["body"]["messages"])
        assert asked["body"]["model"] == "llama3.2"
        (one,) = search.seen
        assert one["query"]["q"] == "what is a filter"


def test_ollama_answers_with_sources(world: World) -> None:
    before = len(world.rows()) if (world.state / "audit").exists() else 0
    with ollama_server.running("llama3.2") as endpoint, found(world, "ollama", endpoint):
        answer = world.run(package(world, **CHANGED), "what is a filter")
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == "mock: what is a filter"
    assert list(answer.result.sources) == ["https://x.example/"]
    (asked,) = [row["kind"] for row in world.rows()[before:] if row["kind"]["type"] == "model_asked"]
    assert (asked["provider"], asked["model"], asked["status"], asked["counted"]) == ("model", "llama3.2", 200, True)
    # The server counted the instructions and the page too.
    assert asked["input_tokens"] > 50
    assert asked["output_tokens"] == 5


def test_mock_that_is_missing_is_told(world: World) -> None:
    with pytest.raises(errors.NotEnforceableError) as refused:
        world.run(package(world), "a")
    assert "[providers.local]" in refused.value.hint
