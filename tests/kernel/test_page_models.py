"""docs/models.md: its manifest, its providers and its agent, as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from sandbox.network.service import providers
from tests.kernel.world import ROOT, World

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "models.md").read_text()
    return [block for name, block in _FENCE.findall(text) if name == language]


def test_page_can_be_followed(world: World) -> None:
    first, config, limits = blocks("toml")
    assert list(providers.parse(config.encode(), file="providers.toml")) == ["local", "anthropic", "vllm"]
    (world.state / "providers.toml").write_text(config)
    for services in (first.partition("\n\n")[2], limits):
        package = world.package({"main.py": blocks("python")[0]}, more=services)
        answer = world.run(world.sign(package), "two words")
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        assert answer.result.text == "mock: two words"
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    said = []
    for line in blocks("sh")[0].splitlines():
        words = [sys.executable, "-m", *line.split()]
        said.append(subprocess.run(words, env=environment, capture_output=True, check=True, text=True).stdout)
    assert said[0].startswith("local  mock\nanthropic  anthropic  https://api.anthropic.com/v1  key anthropic\n")
    assert said[1] == "local: answers, as every mock\n"
    assert re.match(r"probe  local/test-1  2 requests, \d+ tokens in, 6 out, 0 credits\n", said[2])
    rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "model_asked"]
    assert [(row["provider"], row["status"]) for row in rows] == [("local", 200)] * 2
