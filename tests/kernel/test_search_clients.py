"""Published clients of Brave Search, SerpApi and SearXNG in a sandbox: what the fakes of the search providers answer
is what these clients expect.

Brave's own MCP server and SerpApi's own SDK know one address, so the test has an internet in which the fake has it.
SearXNG has no client of its own; mcp-searxng is the most used one. Two of them ask at the gate that adds a secret, and
have a placeholder for a key. SerpApi takes its key in the query, where the gate adds none: its SDK has one here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.network.service.web import search
from tests.kernel import fake_web, installed_packages, internet
from tests.kernel.conftest import leftovers
from tests.kernel.fake_web import KEY, Web
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.test_credentials import vault
from tests.kernel.test_inject_programs import REDIRECTED

WHEELS, MODULES = (Path(__file__).with_name(f"search_{name}") for name in ("wheels.txt", "modules.json"))
BRAVE, SERPAPI, SEARXNG = "api.search.brave.com", "serpapi.com", "searx.example.com"
GRANTED = """
[[permissions.network]]
host = "{brave}"
ports = [443]
protocol = "tls"
[permissions.network.inject]
secret = "brave"
header = "X-Subscription-Token"
format = "{{}}"
methods = ["GET"]
paths = ["/res/v1/*"]
env = "BRAVE_API_KEY"

[[permissions.network]]
host = "{searxng}"
ports = [443]
protocol = "tls"
[permissions.network.inject]
secret = "searxng"
format = "Bearer {{}}"
methods = ["GET"]
paths = ["/search"]

[[permissions.network]]
host = "{serpapi}"
ports = [443]
protocol = "tls"

[permissions.filesystem]
read = {read}
[permissions.executables]
allow = ["/usr/bin/node"]
[permissions.syscalls]
profile = "command"
"""
CODE = """
import json, os, subprocess, sys
sys.path.insert(0, WHEELS)
import serpapi

def called(script, tool, arguments, **variables):
    "Call one tool of an MCP server over stdio."
    command = ["/usr/bin/node", MODULES + "/node_modules/" + script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env={**os.environ, **variables}, cwd="/tmp", text=True, **pipes) as server:
        def say(**message):
            server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n")
            server.stdin.flush()
        def heard(number):
            for line in server.stdout:
                if (message := json.loads(line)).get("id") == number:
                    return message["result"]
        about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "t", "version": "1"}}
        say(id=1, method="initialize", params=about)
        heard(1)
        say(method="notifications/initialized")
        say(id=2, method="tools/call", params={"name": tool, "arguments": arguments})
        found = heard(2)
        server.kill()
    return [found.get("isError", False), [one["text"] for one in found["content"]]]

client = serpapi.Client(api_key="of-the-agent", timeout=60)
found = client.search(engine="google", q="two words", num=5)
try:
    serpapi.Client(api_key="", timeout=60).search(engine="google", q="none")
except serpapi.HTTPError as e:
    refused = [e.status_code, e.error]
words = {"query": "two words"}
answer = {
    "serpapi": [[one["position"], one["title"], one["link"]] for one in found["organic_results"]],
    "status": found["search_metadata"]["status"], "refused": refused,
    "brave": called("@brave/brave-search-mcp-server/dist/index.js", "brave_web_search", {**words, "count": 2}),
    "searxng": called("mcp-searxng/dist/cli.js", "searxng_web_search", words, SEARXNG_URL=SEARXNG),
    "key": os.environ["BRAVE_API_KEY"],
}
"""


class SearchWorld(NetworkedWorld):
    """A networked world with the three hosts, behind one server."""

    web: Web


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[SearchWorld]:
    base = tmp_path_factory.mktemp("searches")
    with internet.made() as net:
        _name_hosts(net)
        listener = net.bound("world", "0.0.0.0", 4443)
        with fake_web.serving(BRAVE, SERPAPI, SEARXNG, listener=listener) as (web, certificate):
            made = SearchWorld(base, warm=warm)
            internet.configured(made, net)
            made.web = web
            text = certificate.read_text()
            (base / "ca.pem").write_text(text[text.index("-----BEGIN CERT") :])
            with (made.state / "config.toml").open("a") as stream:
                stream.write(f'[vault]\nkey = "{base}/vault.key"\n[tls]\nca = ["{base}/ca.pem"]\n')
            vault(made, "init")
            for name in ("brave", "searxng"):
                vault(made, "put", "probe", name, secret=f"{name}-{KEY}")
            yield made
            assert leftovers(made) == []
        assert net.leftovers() == []


def _name_hosts(net: Internet) -> None:
    for name in (BRAVE, SERPAPI, SEARXNG):
        net.resolver.zone[(name, "A")] = ["93.184.216.34"]
    net.run("world", "nft", "-f", "-", given=REDIRECTED)


def test_published_clients_are_answered_by_the_fakes(world: SearchWorld) -> None:
    with installed_packages.wheels(WHEELS) as wheels, installed_packages.modules(MODULES) as modules:
        head = f"WHEELS, MODULES, SEARXNG = {str(wheels)!r}, {str(modules)!r}, 'https://{SEARXNG}'"
        read = json.dumps([str(wheels.parent), str(modules)])
        said = world.ask(
            head + CODE,
            more=GRANTED.format(brave=BRAVE, serpapi=SERPAPI, searxng=SEARXNG, read=read),
            network="full", memory_mb=1024, disk_mb=64, cpu_ms=240_000,
            resources="pids_max = 256\ncpu_millis = 2000",
        )  # fmt: skip
    failed, parts = said["brave"]
    rows = [{name: one[name] for name in ("url", "title", "description")} for one in map(json.loads, parts)]
    assert (failed, rows) == (False, [
        {"url": f"https://b.example/{n}", "title": f"<strong>two words</strong> {n}", "description": "a &amp; <b>b</b>"}
        for n in range(2)
    ])  # fmt: skip
    assert said["serpapi"] == [[1, "two words", "https://s.example/"], [2, "x", "ftp://x/"]]
    assert (said["status"], said["refused"][0], "Invalid API key" in said["refused"][1]) == ("Success", 401, True)
    failed, (text,) = said["searxng"]
    assert not failed
    assert all(one in text for one in ("two words", "https://x.example/", "searx")), text
    # Each sends what our own gate sends: the same path, and its key where the gate has it.
    seen = {one["headers"]["host"]: one for one in world.web.seen if one["query"].get("q") == "two words"}
    for host, kind in ((BRAVE, "brave"), (SEARXNG, "searxng")):
        own = search.call(kind, search.Question("two words", 2), KEY)
        assert seen[host]["path"] == own.path
        assert {name.lower() for name in own.headers} <= set(seen[host]["headers"])
        assert set(own.parameters) - {"text_decorations"} <= set(seen[host]["query"])
    assert seen[BRAVE]["headers"]["x-subscription-token"] == f"brave-{KEY}"
    assert seen[SEARXNG]["headers"]["authorization"] == f"Bearer searxng-{KEY}"
    assert KEY not in json.dumps([said, world.rows()])
    own = search.call("serpapi", search.Question("two words", 5), KEY)
    assert set(own.parameters) <= set(seen[SERPAPI]["query"])
