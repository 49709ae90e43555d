"""docs/search.md: its manifest, its operator's file and its agent, as they are there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from policy import errors
from sandbox.network.service import providers
from tests.kernel.world import ROOT, World

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "search.md").read_text()
    return [block for name, block in _FENCE.findall(text) if name == language]


ASK = """
import http.client, json, socket
def get(host, path):
    line = http.client.HTTPConnection(host, timeout=20)
    line.request("GET", path)
    found = line.getresponse()
    return [found.status, found.read().decode()]
def named(name):
    try:
        socket.getaddrinfo(name, 80)
    except OSError:
        return False
    return True
answer = {
    "commands": [get(*place) for place in PLACES],
    "other": get("fetch.covenant", "/fetch?url=https://other.example/")[0],
    "names": [named(name) for name in ("search.covenant", "fetch.covenant", "models.covenant", "mock.example")],
}
"""


def test_page_can_be_followed(world: World) -> None:
    granted, config = blocks("toml")
    more = granted.partition("\n\n")[2]
    code = blocks("python")[0]
    with pytest.raises(errors.NotEnforceableError) as refused:
        world.run(world.sign(world.package({"main.py": code}, more=more)))
    assert "[providers.local]" in refused.value.hint
    trial = config.replace('[providers.brave]\nkind = "brave"\nsecret = "brave"', '[providers.brave]\nkind = "mock"')
    assert list(providers.parse(config.encode(), file="providers.toml")) == ["brave", "own", "local"]
    trial = trial.replace('connect = "10.0.0.5:443"', "").replace('ca = "/etc/ssl/internal.pem"', "mock = true")
    (world.state / "providers.toml").write_text(trial)
    answer = world.run(world.sign(world.package({"main.py": code}, more=more)), "two words")
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == "Result 1 about two words: # Mock page"
    places = [re.findall(r"'http://([^/]+)(/[^']+)'", block)[0] for block in blocks("text")]
    found = world.ask(f"PLACES = {places!r}\n{ASK}", more=more)
    assert [status for status, _ in found["commands"]] == [200, 200]
    assert found["commands"][0][1].count('"title": "Result') == 3
    assert "About /start" in found["commands"][1][1]
    assert (found["other"], found["names"]) == (403, [True, True, False, False])
    kinds = [row["kind"] for row in world.rows()]
    rows = [
        (row["service"], row["target"], row["status"], row["results"]) for row in kinds if row["type"] == "web_asked"
    ]
    assert rows == [
        ("search", "local", 200, 1),
        ("fetch", "mock.example", 200, 0),
        ("search", "local", 200, 3),
        ("fetch", "docs.example.com", 200, 0),
    ]
    (denied,) = [row for row in kinds if row["type"] == "denied"]
    assert (denied["layer"], denied["code"], denied["grant"]) == ("model", "host_not_granted", "services.fetch")
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    for more_words in ([], ["--json"]):
        command = [sys.executable, "-m", "covenant", "models", "usage", *more_words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        if not more_words:
            assert "probe  search local  2 requests, 4 results, 0 credits\n" in done.stdout
            assert re.search(
                r"^probe  fetch docs\.example\.com  1 requests, [1-9][0-9]* bytes", done.stdout, re.MULTILINE
            )
        else:
            web = json.loads(done.stdout)["web"]
            assert [(one["service"], one["target"], one["requests"]) for one in web] == [
                ("fetch", "docs.example.com", 1),
                ("fetch", "mock.example", 1),
                ("search", "local", 2),
            ]
