"""An agent of the daemon that asks models: by the same gate, for its own budget."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from covenant.handlers import billing
from policy import errors
from tests import daemon_kit
from tests.kernel import serving
from tests.kernel.serving import Served
from tests.kernel.test_service_gate import ASK
from tests.kernel.world import HEAD, TAIL, World

pytestmark = pytest.mark.anyio

PROVIDERS = """
[providers.dear]
kind = "mock"
input_price = 50_000_000
output_price = 50_000_000
request_price = 7
"""
MORE = """
[services.models]
allow = [{ provider = "dear", models = ["test-*"] }]
[services.search]
allow = ["dear"]
[settlement]
budget_credits_per_hour = 1500
"""
CODE = """
search = ask("GET", "/search?q=a", host="search.covenant")[0]
found = [chat("test-1") for _ in range(6)]
answer = {"search": search, "statuses": [status for status, _ in found], "last": found[-1][1],
          "again": ask("GET", "/search?q=a", host="search.covenant")[0]}
"""


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made
        made.quiet()


async def test_agent_of_the_daemon_pays_for_what_it_asks(served: Served) -> None:
    world, home = served.world, served.world.base / "daemon"
    (home / "agents").mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    (world.state / "providers.toml").write_text(PROVIDERS)
    package = world.package({"main.py": HEAD + ASK + CODE + TAIL}, name="thinks", id="thinks", more=MORE)
    shutil.copytree(world.sign(package), home / "agents" / "thinks")
    async with daemon_kit.running(home, socket=served.path) as daemon:
        await daemon.grant("memory.write")
        result = await daemon.ask("submit_intent", text="x", agent="thinks")
        said = json.loads(result["text"])
        kinds = [row["kind"] for row in world.rows()]
        prices = [row["credits"] for row in kinds if row["type"] == "model_asked"]
        assert [row["credits"] for row in kinds if row["type"] == "web_asked"] == [7]
        passed = said["statuses"].count(200)
        assert said["statuses"] == [200] * passed + [429] * (6 - passed)
        assert (said["search"], said["again"]) == (200, 429)
        # What was left before the last request that passed was something, and nothing after it.
        spent = 7 + sum(prices)
        assert len(prices) == passed < 6
        assert spent - prices[-1] < 1499 <= spent
        assert f"the budget of this run is spent: {spent} of 1499 credits" in said["last"]["error"]["message"]
        assert spent < result["settlement"]["credits_consumed"] < spent + 100
        assert daemon.server.budget.tokens(billing.budget_of("thinks")) == 0
        assert not daemon.server.budget.unsettled()
        with pytest.raises(errors.BudgetExhaustedError):
            await daemon.ask("submit_intent", text="x", agent="thinks")
