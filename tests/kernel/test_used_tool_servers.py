"""Tool servers as they are published: three of npm and one of the Python SDK, called by the SDK's own client.

All of them, and the agent, are in sandboxes. They are installed without any script of theirs being run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy.manifest.tools import document, http_relay
from sandbox.network.tools.mcp_session import McpSession, ToolCall
from tests import loopback_server
from tests import tools_kit as kit
from tests.kernel import mcp_kit, tls_servers
from tests.kernel.conftest import leftovers
from tests.kernel.injecting import NAME, InjectWorld, net, world
from tests.kernel.live_runs import until
from tests.kernel.mcp_kit import files_of, server
from tests.kernel.session_kit import Home
from tests.kernel.test_tools_endpoint import AGENT as ASKER
from tests.kernel.test_tools_endpoint import request, text_of
from tests.kernel.world import ROOT

__all__ = ["net", "world"]

SERVERS = {"memory": "2026.8.31", "everything": "2026.8.31", "filesystem": "2026.8.31"}
# A server by the SDK, which is installed beside it.
SUMS = """
import os, sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "site"))
from mcp.server.mcpserver import MCPServer

server = MCPServer("sums")


@server.tool()
def add(a: int, b: int) -> int:
    "Add two numbers"
    return a + b


server.run("stdio")
"""
# The same server over streamable HTTP.
SUMS_HTTP = SUMS.replace(
    'server.run("stdio")',
    """
import uvicorn
port, files, host = int(sys.argv[1]), sys.argv[2], sys.argv[3]
uvicorn.run(server.streamable_http_app(host=host), host=host, port=port, ssl_certfile=files, log_level="error")
""",
)
AGENT = """
import asyncio, json, sys

sys.path.insert(0, SITE)
from mcp.client import Client

CALLS = [
    ["everything__echo", {"message": "hello"}],
    ["everything__get-sum", {"a": 2, "b": 40}],
    ["memory__create_entities", {"entities": [{"name": "Ada", "entityType": "person", "observations": ["counts"]}]}],
    ["memory__search_nodes", {"query": "Ada"}],
    ["filesystem__write_file", {"path": "/tmp/note", "content": "written"}],
    ["filesystem__read_text_file", {"path": "/tmp/note"}],
    ["filesystem__read_text_file", {"path": "/etc/passwd"}],
    ["sums__add", {"a": 20, "b": 22}],
    ["filesystem__move_file", {"source": "/tmp/note", "destination": "/tmp/moved"}],
]

async def main():
    async with Client("http://tools.covenant/mcp") as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        said = []
        for name, arguments in CALLS:
            try:
                found = await client.call_tool(name, arguments)
                said.append([bool(found.is_error), found.content[0].text])
            except Exception as e:
                said.append([True, str(e)])
        return [names, said]

sys.stdin.readline()
print(json.dumps({"text": json.dumps(asyncio.run(main()))}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("used"))
    yield made
    assert leftovers(made.world) == []


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """The SDK, in a directory that an agent can be granted."""
    with mcp_kit.sdk() as made:
        yield made


def published(tmp_path: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """The servers of npm, each with what it needs in its own directory."""
    found: list[dict[str, Any]] = []
    files: dict[str, bytes] = {}
    for name, version in SERVERS.items():
        folder = tmp_path / name
        folder.mkdir()
        mcp_kit.npm_install(folder, f"@modelcontextprotocol/server-{name}@{version}")
        files |= files_of(folder / "node_modules", f"tools/{name}/node_modules/")
        program = f"node_modules/.bin/mcp-server-{name}"
        more = {"memory": ["MEMORY_FILE_PATH=/tmp/memory.jsonl"]}.get(name, [])
        arguments = {"everything": ["stdio"], "filesystem": ["/tmp"]}.get(name, [])
        found.append(server(name, version, "node", [program, *arguments], more))
    return found, files


def test_published_servers_are_called_by_published_client(home: Home, tmp_path: Path, site: Path) -> None:
    servers, files = published(tmp_path)
    servers.append(server("sums", "1.0", "python3", ["server.py"], []))
    files |= files_of(site, "tools/sums/site/") | {"tools/sums/server.py": SUMS.encode()}
    document = {
        "schema_version": 1,
        "agent": "matrix://agent/hello",
        "allowed_side_effects": ["read", "write"],
        "servers": servers,
    }
    main = AGENT.replace("SITE", repr(str(site))).encode()
    made = tmp_path / "hello"
    kit.written(made, kit.package(document, grants="", files={**files, "main.py": main}))
    for name in SERVERS:
        place = made / f"tools/{name}/node_modules/.bin"
        shutil.rmtree(place)
        shutil.copytree(tmp_path / name / "node_modules/.bin", place, symlinks=True)
    assert home.covenant("tools", "pin", made).returncode == 0
    # An operator takes what each server says, and gives each tool its class.
    for one in servers:
        done = home.covenant("tools", "advertised", made, one["alias"])
        assert done.returncode == 0, (one["alias"], done.stderr)
        told = json.loads(done.stdout)
        one["tools"] = [{k: v for k, v in tool.items() if v} | {"side_effect_class": "write"} for tool in told]
    (made / "tools.json").write_text(json.dumps(document))
    denied = "move_file"
    names = [(one, tool["name"]) for one in servers for tool in one["tools"] if tool["name"] != denied]
    uris = [f"matrix://tool/mcp/{one['alias']}/{name}@{one['version']}" for one, name in names]
    more = f'\n[permissions.filesystem]\nread = ["{site}"]\n\n[permissions.skills]\nallow = {json.dumps(uris)}\n'
    manifest = made / "agent.toml"
    patient = manifest.read_text().replace("[resources]", "[resources]\ncpu_ms_per_task = 100000")
    manifest.write_text(patient + more + 'side_effects = ["write"]\n')
    assert home.covenant("tools", "pin", made).returncode == 0
    done = home.covenant("dev", made, "go", "--json", "--timeout", "100")
    assert done.returncode == 0, (done.stdout, done.stderr)
    listed, said = json.loads(json.loads(done.stdout)["text"])
    assert sorted(listed) == sorted(f"{one['alias']}__{name}" for one, name in names)
    assert [is_error for is_error, _ in said] == [False] * 6 + [True, False, True]
    texts = [text for _, text in said]
    assert "hello" in texts[0]
    assert "42" in texts[1]
    assert "counts" in texts[3]
    assert texts[5] == "written"
    assert "Access denied" in texts[6] or "denied" in texts[6], "by the server itself: it has no such file anyway"
    assert texts[7] == "42"
    assert "permissions.skills" in texts[8], "by the manifest"


def test_relay_speaks_to_server_of_sdk(tmp_path: Path, site: Path) -> None:
    """The program that a sandbox runs for a server of the transport http, against the SDK's own server."""
    certificates = tls_servers.Certificates(tmp_path, "localhost")
    (tmp_path / "site").symlink_to(site)
    (tmp_path / "server.py").write_text(SUMS_HTTP)
    port = loopback_server.free_port()
    entry = document.parse(kit.text(kit.full())).servers[1]
    entry = entry.model_copy(update={"endpoint": f"https://localhost:{port}/mcp", "headers": {}})
    for name, content in http_relay.files(entry, certificates.path.read_bytes()).items():
        (tmp_path / name).write_bytes(content)
    pipe, words = subprocess.PIPE, [str(port), str(certificates.path), "localhost"]
    session = McpSession(ToolCall("add", {"a": 20, "b": 22}), lambda found: None)
    with subprocess.Popen([sys.executable, str(tmp_path / "server.py"), *words]) as served:
        try:
            until(lambda: _listens(port))
            command = [sys.executable, str(tmp_path / "relay.py")]
            with subprocess.Popen(command, stdin=pipe, stdout=pipe) as relay:
                assert relay.stdin is not None
                assert relay.stdout is not None
                said = session.start()
                while not session.done:
                    relay.stdin.write(said)
                    relay.stdin.flush()
                    said = session.take(relay.stdout.readline().rstrip())
                relay.stdin.close()
                assert relay.wait(60) == 0
        finally:
            served.terminate()
    assert [tool.name for tool in session.tools] == ["add"]
    assert session.result is not None
    assert session.result["content"][0]["text"] == "42"


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def served(world: InjectWorld, site: Path, port: int) -> Iterator[None]:
    """A server of the SDK over HTTPS behind NAME, with the certificate that `[tls] ca` of the world trusts."""
    program = world.base / "sdk" / "server.py"
    program.parent.mkdir()
    program.write_text(SUMS_HTTP)
    (program.parent / "site").symlink_to(site)
    space = f"/proc/{os.getpid()}/fd/{world.internet.spaces['world']}"
    words = [str(program), str(port), str(world.certificate.with_name("certificate.pem")), "0.0.0.0"]
    with subprocess.Popen(["nsenter", f"--net={space}", sys.executable, *words]) as running:
        try:
            until(lambda: world.internet.within("world", lambda: _listens(port)))
            yield
        finally:
            running.terminate()


def test_server_of_private_authority_is_verified_and_called(world: InjectWorld, tmp_path: Path, site: Path) -> None:
    """It has no secret, so that no gate speaks TLS for it: its relay trusts `[tls] ca`, live and in a run."""
    port, uri = 4445, "matrix://tool/mcp/sums/add@1.0"
    grants = f"""
[[permissions.network]]
host = "{NAME}"
ports = [{port}]
protocol = "tls"

[permissions.skills]
allow = ["{uri}"]
side_effects = ["read"]
"""
    one = {"alias": "sums", "transport": "http", "endpoint": f"https://{NAME}:{port}/mcp", "version": "1.0"}
    tools: list[Any] = [{"name": "add", "description": "", "side_effect_class": "read"}]
    about = {"schema_version": 1, "agent": "matrix://agent/hello", "allowed_side_effects": ["read"]}
    document = {**about, "servers": [{**one, "tools": tools}]}
    made = kit.written(tmp_path / "hello", kit.package(document, grants=grants, files={"main.py": ASKER.encode()}))
    environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}

    def covenant(*words: str, check: bool = True) -> str:
        command = [sys.executable, "-m", "covenant", "tools", *words]
        return world.internet.run("host", *command, check=check, env=environment)

    config = world.state / "config.toml"
    trusting = config.read_text()
    with served(world, site, port):
        config.write_text(trusting.partition("[tls]")[0])
        (failed,) = json.loads(covenant("verify", str(made), "--live", "--json", check=False))["findings"]
        assert (failed["code"], "CERTIFICATE_VERIFY_FAILED" in str(failed)) == ("server_failed", True), failed
        config.write_text(trusting)
        (told,) = json.loads(covenant("advertised", str(made), "sums"))
        tools[:] = [{**told, "side_effect_class": "read"}]
        (made / "tools.json").write_text(json.dumps(document))
        covenant("pin", str(made))
        assert json.loads(covenant("verify", str(made), "--live", "--json"))["verified"]
        called = covenant("call", uri, "--package", str(made), "--args", '{"a": 20, "b": 22}')
        assert called.strip() == "42"
        manifest = made / "agent.toml"
        manifest.write_text(manifest.read_text().replace("[resources]", "[resources]\ncpu_ms_per_task = 120000"))
        asked = [["/mcp", request("tools/call", name="sums__add", arguments={"a": 1, "b": 2})]]
        answer = world.run(world.sign(made), json.dumps(asked))
    assert answer.result is not None, (answer.error, answer.stderr)
    (said,) = json.loads(answer.result.text)
    assert text_of(said) == "3"
