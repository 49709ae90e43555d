"""`http://agents.covenant`: a confined agent gives tasks to another over A2A, by the commands of docs/a2a.md."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from policy import errors
from tests import daemon_kit
from tests.kernel import serving
from tests.kernel.serving import Served
from tests.kernel.test_credentials import vault
from tests.kernel.test_daemon_mail import BURNS, QUICK
from tests.kernel.world import HEAD, ROOT, SLOWNESS, TAIL, World

pytestmark = pytest.mark.anyio

PAGE = (ROOT / "docs" / "a2a.md").read_text()
MANIFEST, PROVIDERS = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
GRANTS = MANIFEST.partition("\n\n")[2].replace('"wordcount"', '"wordcount", "endless"')
FROM_PAGE = "\n".join(
    re.findall(r"^    (.*)$", PAGE.partition("Any client of A2A")[2].partition("## Push")[0], re.MULTILINE)
)
ASK = """
import http.client
def raw(method, path, body=None, **headers):
    line = http.client.HTTPConnection("agents.covenant", timeout=60)
    line.request(method, path, body, {"Content-Type": "application/json", **headers})
    found = line.getresponse()
    return [found.status, found.read().decode()]
def rpc(agent, method, params, **headers):
    call = {"jsonrpc": "2.0", "id": "c", "method": method, "params": params}
    status, text = raw("POST", "/" + agent, json.dumps(call), **headers)
    return [status, json.loads(text)]
def message(name, **more):
    return {"message": {"messageId": name, "role": "ROLE_USER", "parts": [{"text": "three"}]}, **more}
V1 = {"A2A-Version": "1.0"}
NOW = {"returnImmediately": True}
"""
CALLS = """
card = json.loads(raw("GET", "/wordcount/.well-known/agent-card.json")[1])
streamed = raw("POST", "/wordcount", json.dumps({"jsonrpc": "2.0", "id": 1, "method": "SendStreamingMessage",
    "params": message("streamed")}), **V1)
sent = rpc("endless", "SendMessage", message("endless", configuration=NOW), **V1)
held = sent[1]["result"]["task"]["id"]
wrong = {"messageId": "1", "kind": "message", "role": "user", "parts": [{"kind": "text", "text": "x"}]}
answer = {
    "page": task,
    "again": rpc("wordcount", "tasks/get", {"id": task["id"]})[1]["result"]["status"]["state"],
    "card": [card["url"], card["supportedInterfaces"], card["capabilities"]["pushNotifications"]],
    "streamed": streamed[1],
    "held": [rpc("endless", "GetTask", {"id": held}, **V1), rpc("endless", "CancelTask", {"id": held}, **V1)],
    "other": rpc("other", "message/send", {"message": wrong}),
    "refused": [
        rpc("wordcount", "message/send", {"message": wrong, "configuration": {"pushNotificationConfig": {"url": "x"}}}),
        rpc("wordcount", "tasks/pushNotificationConfig/set", {}),
        rpc("wordcount", "agent/getAuthenticatedExtendedCard", {}),
        [raw("POST", "/wordcount", "[")[0], {}],
        [raw("GET", "/wordcount/v1/card")[0], {}],
        [raw("POST", "/wordcount/../other", "{}")[0], {}],
        [raw("POST", "/wordcount", b"{" + b" " * (1 << 20))[0], {}],
    ],
}
"""


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        made = Served(world)
        with (world.state / "config.toml").open("a") as stream:
            stream.write(f'[vault]\nkey = "{base}/vault.key"\n')
        vault(world, "init")
        with made:
            yield made
            made.quiet()


def home_of(world: World) -> Path:
    home = world.base / f"agents-{os.urandom(4).hex()}"
    (home / "agents").mkdir(parents=True)
    home.chmod(0o700)
    for name, program in (("wordcount", QUICK), ("other", QUICK), ("endless", BURNS)):
        package = world.package({"main.py": program}, name=name, id=name, cpu_ms=120_000 * SLOWNESS)
        shutil.copytree(world.sign(package), home / "agents" / name)
    return home


async def test_agent_asks_granted_agents_alone(served: Served) -> None:
    world = served.world
    home = home_of(world)
    code = HEAD + FROM_PAGE + ASK + CALLS + TAIL
    asker = world.sign(world.package({"main.py": code}, id="asker", more=GRANTS, cpu_ms=300_000 * SLOWNESS))
    with pytest.raises(errors.NotEnforceableError) as lacking:
        await anyio.to_thread.run_sync(world.run, asker)
    assert "of kind a2a" in lacking.value.hint
    async with daemon_kit.running(home, socket=served.path, http_port=0) as daemon:
        (world.state / "providers.toml").write_text(PROVIDERS.replace(":8421", f":{daemon.http_port}"))
        with pytest.raises(errors.VaultError) as locked:
            await anyio.to_thread.run_sync(world.run, asker)
        put = re.findall(r"^    covenant (vault put .*)$", PAGE, re.MULTILINE)[0]
        assert locked.value.hint == f"covenant {put}"
        # The peer may send to `other` too: what refuses it is the manifest.
        actions = ["memory.write", *(f"a2a.send.{name}@agent" for name in ("wordcount", "other", "endless"))]
        made = await daemon.ask("enroll_peer", display="asker@local", pubkey=None, actions=actions)
        await daemon.grant("a2a.recv.asker@local")
        vault(world, *put.split()[1:], secret=made["token_b58"] + "\n")
        run = await anyio.to_thread.run_sync(world.run, asker)
        assert run.error is None, run.stderr[-300:]
        assert run.result is not None
        said = json.loads(run.result.text)
    _judge(said)
    _judge_rows([row["kind"] for row in world.rows()], said)


def _judge(said: dict[str, Any]) -> None:
    assert said["page"]["status"]["state"] == said["again"] == "completed"
    assert said["page"]["artifacts"][0]["parts"][0]["text"] == '"ONE TWO"'
    url, interfaces, push = said["card"]
    assert (url, push) == ("http://agents.covenant/wordcount", False)
    assert {(one["url"], one["protocolBinding"]) for one in interfaces} == {(url, "JSONRPC")}
    events = [json.loads(line[6:]) for line in said["streamed"].splitlines() if line.startswith("data: ")]
    assert events[-2]["result"]["artifactUpdate"]["artifact"]["parts"][0]["text"] == '"THREE"'
    assert events[-1]["result"]["statusUpdate"]["status"]["state"] == "TASK_STATE_COMPLETED"
    (_, seen), (_, ended) = said["held"]
    assert seen["result"]["status"]["state"] in ("TASK_STATE_SUBMITTED", "TASK_STATE_WORKING")
    assert ended["result"]["status"]["state"] == "TASK_STATE_CANCELED"
    status, other = said["other"]
    assert (status, other["error"]["data"][0]["reason"]) == (403, "AGENT_NOT_GRANTED")
    numbers = [(status, answer.get("error", {}).get("code")) for status, answer in said["refused"]]
    assert numbers == [(200, -32003), (200, -32003), (200, -32601), (400, None), (404, None), (404, None), (413, None)]


def _judge_rows(kinds: list[dict[str, Any]], said: dict[str, Any]) -> None:
    asked = [row for row in kinds if row["type"] == "agent_asked"]
    assert [(row["peer"], row["method"], row["status"]) for row in asked[:4]] == [
        ("wordcount", "message/send", 200),
        ("wordcount", "card", 200),
        ("wordcount", "SendStreamingMessage", 200),
        ("endless", "SendMessage", 200),
    ]
    assert len(asked) == 7
    assert all(re.fullmatch("[0-9a-f]{64}", row["request_sha256"]) for row in asked)
    text = json.dumps(asked)
    assert "three" not in text
    assert said["page"]["id"] not in text
    denied = {(row["code"], row["grant"]) for row in kinds if row["type"] == "denied"}
    assert ("agent_not_granted", "services.agents") in denied
