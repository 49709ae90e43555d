"""The published SDK of A2A in a sandbox without a network: it asks a granted agent by both versions of the protocol."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest

from tests import daemon_kit
from tests.kernel.serving import Served
from tests.kernel.test_agents_endpoint import PROVIDERS, home_of, served
from tests.kernel.test_credentials import vault
from tests.kernel.world import HEAD, SLOWNESS, TAIL

__all__ = ["served"]

pytestmark = pytest.mark.anyio

GRANTS = """
[services.agents]
allow = ["wordcount"]

[permissions.filesystem]
read = ["{place}"]
"""
CLIENT = """
import asyncio
sys.path.insert(0, PLACE)
import httpx
from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
from a2a.types import a2a_pb2 as types

def asks(name):
    message = types.Message(message_id=name, role=types.ROLE_USER, parts=[types.Part(text="one two")])
    return types.SendMessageRequest(message=message)

async def by(version, streaming):
    async with httpx.AsyncClient(timeout=100) as http:
        card = await A2ACardResolver(http, "http://agents.covenant/wordcount").get_agent_card()
        kept = [one for one in card.supported_interfaces if one.protocol_version == version]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(kept)
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=["JSONRPC"], streaming=streaming)
        client = ClientFactory(config).create(card)
        found = [event async for event in client.send_message(asks(f"{version} {streaming}"))]
        if streaming:
            return [one.WhichOneof("payload") for one in found][-2:]
        task = await client.get_task(types.GetTaskRequest(id=found[0].task.id))
        return [types.TaskState.Name(task.status.state), task.artifacts[0].parts[0].text]

async def all_of():
    return {f"{version} {streaming}": await by(version, streaming)
            for version in ("1.0", "0.3") for streaming in (False, True)}

answer = asyncio.run(all_of())
"""


def _needed(name: str, found: dict[str, importlib.metadata.Distribution]) -> None:
    """Collect the installed distribution ``name``, and those that it needs."""
    if name in found:
        return
    found[name] = importlib.metadata.distribution(name)
    for wanted in found[name].requires or ():
        named, _, marker = wanted.partition(";")
        if "extra" in marker:
            continue
        match = re.match(r"[A-Za-z0-9._-]+", named)
        assert match is not None
        try:
            _needed(match[0].lower(), found)
        except importlib.metadata.PackageNotFoundError:
            assert marker, f"{match[0]} is not installed"  # it is for another system


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """The SDK as locks/dev.txt has it, with what it needs, in a directory that an agent can be granted."""
    found: dict[str, importlib.metadata.Distribution] = {}
    _needed("a2a-sdk", found)
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        os.chmod(made, 0o755)
        for one in found.values():
            for file in one.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    target = Path(made, file)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(str(one.locate_file(file)), target)
        yield Path(made)


async def test_sdk_asks_granted_agent_by_both_versions(served: Served, site: Path) -> None:
    world = served.world
    code = HEAD + CLIENT.replace("PLACE", repr(str(site))) + TAIL
    more = GRANTS.format(place=site)
    made = world.package({"main.py": code}, id="asker", more=more, memory_mb=512, cpu_ms=300_000 * SLOWNESS)
    asker = world.sign(made)
    async with daemon_kit.running(home_of(world), socket=served.path, http_port=0) as daemon:
        (world.state / "providers.toml").write_text(PROVIDERS.replace(":8421", f":{daemon.http_port}"))
        peer = {"display": "asker@local", "pubkey": None, "actions": ["memory.write", "a2a.send.wordcount@agent"]}
        token = (await daemon.ask("enroll_peer", **peer))["token_b58"]
        await daemon.grant("a2a.recv.asker@local")
        vault(world, "put", "covenant-providers", "a2a.asker", secret=token + "\n")
        run = await anyio.to_thread.run_sync(world.run, asker)
    assert run.result is not None, (run.error, run.stderr[-500:])
    said = json.loads(run.result.text)
    whole, parts = ["TASK_STATE_COMPLETED", '"ONE TWO"'], ["artifact_update", "status_update"]
    assert said == {
        f"{one} {streams}": parts if streams else whole for one in ("1.0", "0.3") for streams in (False, True)
    }
