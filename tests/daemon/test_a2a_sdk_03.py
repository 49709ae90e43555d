"""The SDK that speaks version 0.3 alone, in a process of its own, against a daemon: send, stream, get, cancel, push."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import cli_daemon_kit
from tests.cli_kit import done
from tests.mailbox_kit import MANIFEST

WHEELS = Path(__file__).with_name("a2a_03_wheels.txt")
CLIENT = """
import asyncio, json, sys
from importlib.metadata import version

import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.types import Message, Part, Role, TaskIdParams, TaskQueryParams, TextPart

URL, TOKEN = sys.argv[1:]


def message(text, name):
    return Message(message_id=name, role=Role.user, parts=[Part(root=TextPart(text=text))])


async def answers(client, text, name):
    return [event async for event in client.send_message(message(text, name))]


async def main():
    found = {"version": version("a2a-sdk")}
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as http:
        card = await A2ACardResolver(http, URL).get_agent_card()
        found["protocol"] = card.protocol_version
        for transport in ("JSONRPC", "HTTP+JSON"):
            for streaming in (False, True):
                config = ClientConfig(httpx_client=http, supported_transports=[transport], streaming=streaming)
                config.use_client_preference = True
                client = ClientFactory(config).create(card)
                name = f"{transport}-{streaming}"
                task = (await answers(client, "one two", name))[-1][0]
                again = await client.get_task(TaskQueryParams(id=task.id))
                texts = [part.root.text for artifact in again.artifacts for part in artifact.parts]
                found[name] = [type(client._transport).__name__, task.status.state.value, *texts]
                try:
                    await client.cancel_task(TaskIdParams(id=task.id))
                except Exception as e:
                    found[name].append(type(e).__name__)
    print(json.dumps(found))


asyncio.run(main())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    subprocess.run([*pip, "--target", str(place), "-r", str(WHEELS)], check=True, timeout=300)
    return place


def test_sdk_of_03_is_answered(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    monkeypatch.setenv("COVENANT_HOME", str(home))
    cli_daemon_kit.package(home, "upper", MANIFEST.format(id="upper", required="[]"))
    with cli_daemon_kit.running(home, http_port=0) as daemon:
        for action in ("memory.write", "a2a.send.upper@agent"):
            done("capabilities", "grant", action)
        url = f"{daemon.server.console.address}/a2a/agents/upper"
        token = (home / "peers" / "operator.token").read_text().strip()
        environment = {**os.environ, "PYTHONPATH": str(site)}
        ran = subprocess.run(
            [sys.executable, "-c", CLIENT, url, token], capture_output=True, text=True, timeout=120, env=environment
        )
        assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found.pop("version"), found.pop("protocol")) == ("0.3.26", "0.3.0")
    assert {name: one[1:3] for name, one in found.items()} == {key: ["completed", "ONE TWO"] for key in found}
    assert {one[0] for one in found.values()} == {"JsonRpcTransport", "RestTransport"}
    assert len(found) == 4
    assert all(len(one) == 4 for one in found.values()), "an ended task is not cancelled"
