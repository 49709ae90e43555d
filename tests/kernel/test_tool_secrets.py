"""Secrets of tool servers: by `$env:` and `$credential:` in env, for the server that names them alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests import tools_kit as kit
from tests.kernel.conftest import leftovers
from tests.kernel.test_credentials import ASK, vault
from tests.kernel.world import World

SECRETS = {"API": "planted-first ü\n\twith a line", "two": "planted-second", "own": "planted-own"}
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}
TOOL = {"name": "seen", "description": "Digest a variable", "input_schema": SCHEMA, "side_effect_class": "read"}
ALIASES = ("snake", "node", "plain")
GRANTS = f"""
[permissions.credentials]
grants = ["API", "two", "own"]

[permissions.skills]
allow = {json.dumps([f"matrix://tool/mcp/{alias}/seen@1.0" for alias in ALIASES])}
side_effects = ["read"]
"""
ADVERTISED = json.dumps([{"name": TOOL["name"], "description": TOOL["description"], "inputSchema": SCHEMA}])
PYTHON = f"""
import hashlib, json, os, sys
if __name__ != "__main__" or sys.argv[1:] != ["--word"]:
    sys.exit("it is started as no script is")
import beside
def digest(name):
    if name == "?":
        return sorted(os.environ)
    return hashlib.sha256(os.environb.get(name.encode(), b"none")).hexdigest()
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result = {{"tools": json.loads({ADVERTISED!r})}}
    if asked["method"] == "initialize":
        result = {{"protocolVersion": "2025-06-18", "capabilities": {{}}, "serverInfo": {{}}}}
    if asked["method"] == "tools/call":
        said = json.dumps(digest(asked["params"]["arguments"]["name"]))
        result = {{"content": [{{"type": "text", "text": said}}]}}
    print(json.dumps({{"jsonrpc": "2.0", "id": asked["id"], "result": result}}), flush=True)
"""
NODE = f"""
import {{ createHash }} from "node:crypto";
import {{ createInterface }} from "node:readline";
const digest = (name) => name === "?" ? Object.keys(process.env).sort()
  : createHash("sha256").update(process.env[name] ?? "none").digest("hex");
for await (const line of createInterface({{ input: process.stdin }})) {{
  const asked = JSON.parse(line);
  if (!("id" in asked)) continue;
  let result = {{ tools: {ADVERTISED} }};
  if (asked.method === "initialize") result = {{ protocolVersion: "2025-06-18", capabilities: {{}}, serverInfo: {{}} }};
  if (asked.method === "tools/call")
    result = {{ content: [{{ type: "text", text: JSON.stringify(digest(asked.params.arguments.name)) }}] }};
  console.log(JSON.stringify({{ jsonrpc: "2.0", id: asked.id, result }}));
}}
"""
AGENT = (
    "import http.client, json, os, sys\nasked = json.loads(json.loads(sys.stdin.readline())['text'])\n"
    + ASK
    + """
def call(alias, name):
    line = http.client.HTTPConnection("tools.covenant", timeout=60)
    params = {"name": "seen", "arguments": {"name": name}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    line.request("POST", "/mcp/" + alias, json.dumps(message), {"Content-Type": "application/json"})
    result = json.load(line.getresponse())["result"]
    return json.loads(result["content"][0]["text"]) if not result.get("isError") else result["content"][0]["text"]
token = ask(kind="token")["ok"]["token"]
found = {"calls": [call(*one) for one in asked], "environment": sorted(os.environ)}
for name in ("own", "API", "two"):
    found[name] = "ok" in ask(kind="credential", name=name, token=token)
print(json.dumps({"text": json.dumps(found)}))
"""
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path) -> Iterator[World]:
    base = tmp_path_factory.mktemp("tool-secrets")
    made = World(base, warm=warm)
    with (made.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{base}/vault.key"\n')
    vault(made, "init")
    for name, value in SECRETS.items():
        vault(made, "put", "hello", name, secret=value)
    yield made
    assert leftovers(made) == []


def server(alias: str, env: list[str], **more: Any) -> dict[str, Any]:
    command = {"command": "python3", "args": ["lib/server.py", "--word"], "env": env, **more}
    return {
        "alias": alias, "transport": "stdio", "package_digest": kit.FILLER, "version": "1.0", "tools": [TOOL],
        **command,
    }  # fmt: skip


def package(tmp_path: Path, servers: list[dict[str, Any]], grants: str = GRANTS) -> Path:
    document = {
        "schema_version": 1, "agent": "matrix://agent/hello", "allowed_side_effects": ["read"], "servers": servers,
    }  # fmt: skip
    files = {"main.py": AGENT.encode()}
    for alias in ALIASES:
        files |= {f"tools/{alias}/lib/server.py": PYTHON.encode(), f"tools/{alias}/lib/beside.py": b""}
        files |= {f"tools/{alias}/server.mjs": NODE.encode()}
    made = kit.written(tmp_path / "hello", kit.package(document, grants=grants, files=files))
    manifest = made / "agent.toml"
    manifest.write_text(manifest.read_text().replace("[resources]", "[resources]\ncpu_ms_per_task = 250000"))
    return made


SERVERS = [
    server("snake", ["$env:API", "SECOND_KEY=$credential:two", "MODE=plain"]),
    server("node", ["SECOND_KEY=$credential:two"], command="node", args=["server.mjs"]),
    server("plain", ["MODE=plain"]),
]


def digest(name: str) -> str:
    return hashlib.sha256(SECRETS[name].encode()).hexdigest()


def test_secret_reaches_server_that_names_it_alone(world: World, tmp_path: Path) -> None:
    none = hashlib.sha256(b"none").hexdigest()
    asked = {
        ("snake", "API"): digest("API"), ("snake", "SECOND_KEY"): digest("two"), ("node", "SECOND_KEY"): digest("two"),
        ("node", "API"): none, ("plain", "API"): none, ("plain", "SECOND_KEY"): none,
    }  # fmt: skip
    listings = [("snake", "?"), ("plain", "?")]
    before = len(world.rows())
    answer = world.run(world.sign(package(tmp_path, SERVERS)), json.dumps([*asked, *listings]))
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    found = json.loads(answer.result.text)
    assert found["calls"][:-2] == list(asked.values())
    snake, plain = found["calls"][-2:]
    assert {"API", "SECOND_KEY", "MODE"} <= set(snake)
    assert set(plain) & {"API", "SECOND_KEY", "CREDENTIALS_DIRECTORY"} == set()
    assert not {"API", "SECOND_KEY"} & set(found["environment"])
    assert [found["own"], found["API"], found["two"]] == [True, False, False], "own is the control"
    rows = [row["kind"] for row in world.rows()[before:]]
    given = [(row["run_id"], row["name"]) for row in rows if row["type"] == "credential_granted"]
    assert sorted(name for _, name in given) == ["API", "own", "two", "two"]
    agent = answer.run_id
    assert [name for run, name in given if run == agent] == ["own"]
    for path in world.state.rglob("*"):
        if path.is_file():
            assert b"planted-" not in path.read_bytes(), path


def test_secret_that_cannot_be_given_is_refused(world: World, tmp_path: Path) -> None:
    made = package(tmp_path, SERVERS, GRANTS.replace('"API", ', ""))
    with pytest.raises(errors.ToolsError, match=r"`API`.*\(tools\.json:") as refused:
        world.run(world.sign(made), "[]")
    assert '"API"' in refused.value.hint
    vault(world, "rm", "hello", "two")
    answer = world.run(world.sign(package(tmp_path, SERVERS)), json.dumps([["node", "SECOND_KEY"], ["plain", "API"]]))
    vault(world, "put", "hello", "two", secret=SECRETS["two"])
    assert answer.result is not None, (answer.error, answer.stderr)
    absent, plain = json.loads(answer.result.text)["calls"]
    assert ("ended" in absent, len(plain)) == (True, 64)
    denied = [row["kind"] for row in world.rows() if row["kind"]["type"] == "denied"]
    assert ("two", "absent") in [(row["target"], row["code"]) for row in denied]
