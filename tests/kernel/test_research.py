"""agents/research under Covenant: with the operator's mocks, and with providers of each part that speak over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policy import errors
from sandbox.network.service import providers
from tests.kernel import fake_provider, fake_web
from tests.kernel.fake_web import PAGE
from tests.kernel.world import ROOT, World

AGENT = ROOT / "agents" / "research"
MOCKS = (AGENT / "README.md").read_text().partition("```toml\n")[2].partition("```")[0]
REAL = """
[providers.local]
kind = "searxng"
endpoint = "http://{search}"
[providers.model]
kind = "openai-compatible"
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


def test_model_reads_what_was_found(world: World) -> None:
    with (
        fake_web.serving() as (search, _),
        fake_web.serving("x.example") as (pages, ca),
        fake_provider.serving() as model,
    ):
        pages.pages["/"] = (200, {}, PAGE.encode())
        text = REAL.format(search=search.place, model=model.url, page=pages.place, ca=ca)
        (world.state / "providers.toml").write_text(text)
        changed = {"models": 'provider = "model", models = ["llama3.2"]', "hosts": '"x.example"'}
        answer = world.run(package(world, **changed), "what is a filter")
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        assert answer.result.text == f"from {model.server_port}"
        assert list(answer.result.sources) == ["https://x.example/"]
        (asked,) = model.seen
        assert "One bold word." in json.dumps(asked["body"]["messages"])
        assert asked["body"]["model"] == "llama3.2"
        (found,) = search.seen
        assert found["query"]["q"] == "what is a filter"


def test_mock_that_is_missing_is_told(world: World) -> None:
    with pytest.raises(errors.NotEnforceableError) as refused:
        world.run(package(world), "a")
    assert "[providers.local]" in refused.value.hint
