"""The credits of a run are its children's too, counted as they are spent at the gate of each run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.families import BIG, SMALL, answered, member, spawn
from tests.kernel.test_credentials import vault
from tests.kernel.world import World

GRANTED = '[services.models]\nallow = [{ provider = "fake", models = ["big-*"] }]\n'
# Each answer is 11 tokens in and 7 out: 36 credits.
PROVIDERS = """
[providers.fake]
kind = "openai-compatible"
endpoint = "{url}"
secret = "fake"
input_price = 2_000_000
output_price = 2_000_000
"""
CHAT = """
import http.client
def chat():
    line = http.client.HTTPConnection("models.covenant", timeout=60)
    body = json.dumps({"model": "big-1", "messages": []})
    line.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    found = line.getresponse()
    found.read()
    return found.status
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path, provider: Provider) -> Iterator[World]:
    base = tmp_path_factory.mktemp("credits")
    made = World(base, warm=warm)
    with (made.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{base}/vault.key"\n')
    vault(made, "init")
    vault(made, "put", "covenant-providers", "fake", secret=KEY + "\n")
    (made.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
    yield made
    assert leftovers(made) == []


def test_children_spend_the_credits_of_their_tree(world: World) -> None:
    member(world, "spends", CHAT + "answer = [chat() for _ in range(2)]", more=GRANTED, **SMALL)
    code = CHAT + "first = chat()\nanswer = [first, json.loads(child('spends')['ok']['text']), chat()]"
    top = member(world, "top", code, more=GRANTED + spawn(), **BIG)
    # 36 of the parent and 72 of its child are 108: neither has another.
    assert answered(world, top, credits=100) == [200, [200, 200], 429]
    # The control: a budget that is large enough.
    assert answered(world, top, credits=109) == [200, [200, 200], 200]
