"""The MCP conformance suite: a server of the SDK bare and behind an agent's endpoint, the daemon, and our own client.

The lists here are exact: a scenario that begins to fail, or to pass, is a change of this page and of ADR 0144.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import anyio.to_thread
import pytest
from aiohttp import web

from tests import daemon_kit, loopback_server, tools_kit
from tests.kernel import mcp_kit, tls_servers
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import until
from tests.kernel.mcp_kit import NODE
from tests.kernel.session_kit import Home

SERVER = Path(__file__).with_name("mcp_suite_server.py")
EARLIER, NEWEST = REVISIONS = ("2025-11-25", "2026-07-28")
AGENT = """
import json, subprocess, sys

command = json.loads(json.loads(sys.stdin.readline())["text"])
done = subprocess.run(command, capture_output=True, text=True)
print(json.dumps({"text": done.stdout + done.stderr}))
"""
# What the SDK's server does not give bare: it has no fixture for these, or the SDK lacks the extension.
TASKS = {
    f"tasks-{name}"
    for name in (
        "lifecycle", "capability-negotiation", "wire-fields", "request-state-removal", "mrtr-input", "request-headers",
        "dispatch-and-envelope", "required-task-error", "mrtr-composition",
    )
}  # fmt: skip
NO_FIXTURE = {
    f"input-required-result-{name}"
    for name in (
        "basic-sampling", "basic-list-roots", "request-state", "multiple-input-requests", "multi-round",
        "non-tool-request", "tampered-state", "capability-check",
    )
}  # fmt: skip
BARE_FAILS = {EARLIER: set[str](), NEWEST: TASKS | NO_FIXTURE}
# What the endpoint does not pass on, by the reasons of ADR 0144.
TOOLS_ALONE = {
    *(f"prompts-{name}" for name in ("list", "get-simple", "get-with-args", "get-embedded-resource", "get-with-image")),
    *(f"resources-{name}" for name in ("list", "read-text", "read-binary", "templates-read")),
    "completion-complete",
}
NO_STREAM = {"tools-call-with-progress"}
NOT_LOOPBACK = {"dns-rebinding-protection"}
ASKS_CLIENT = {
    "tools-call-sampling", "tools-call-elicitation", "elicitation-sep1034-defaults", "elicitation-sep1330-enums"
}  # fmt: skip
DIFFERENT = {
    EARLIER: TOOLS_ALONE | NO_STREAM | NOT_LOOPBACK | ASKS_CLIENT
    | {"tools-call-with-logging", "logging-set-level", "resources-subscribe", "resources-unsubscribe"},
    NEWEST: TOOLS_ALONE | NO_STREAM | NOT_LOOPBACK
    | {"caching", "server-stateless", "input-required-result-basic-elicitation", "input-required-result-result-type"},
}  # fmt: skip
# What the daemon passes: the others ask for the tools, prompts and resources of the suite's own server.
DAEMON_PASSES = {
    EARLIER: {"server-initialize", "ping", "tools-list", "dns-rebinding-protection"},
    NEWEST: {
        "tools-list", "dns-rebinding-protection", "http-header-validation", "server-sse-multiple-streams",
        "sep-2164-resource-not-found", "input-required-result-unsupported-methods",
        "input-required-result-missing-input-response", "input-required-result-ignore-extra-params",
        "input-required-result-validate-input",
    },
}  # fmt: skip
# Our client takes no requests of a server, resumes no stream, and logs in nowhere: an operator gives it its token.
CLIENT_FAILS = {
    EARLIER: {"elicitation-sep1034-client-defaults", "sse-retry"},
    NEWEST: {"sep-2322-client-request-state"},
}
CLIENT_PASSES = {
    EARLIER: {"initialize", "tools_call", "json-schema-2020-12-preservation"},
    NEWEST: {
        "tools_call", "request-metadata", "http-standard-headers", "http-custom-headers", "http-invalid-tool-headers",
        "json-schema-ref-no-deref", "json-schema-2020-12-preservation",
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("suite"))
    yield made
    assert leftovers(made.world) == []


@pytest.fixture(scope="module")
def suite() -> Iterator[Path]:
    with mcp_kit.suite() as made:
        yield made


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    with mcp_kit.sdk() as made:
        yield made


@pytest.fixture(scope="module")
def agent(home: Home, suite: Path, site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose agent runs a command, with the suite's server as its tool server."""
    one = mcp_kit.server("suite", "1.0", "python3", ["server.py", "stdio"], [])
    document: dict[str, Any] = {
        "schema_version": 1,
        "agent": "matrix://agent/hello",
        "allowed_side_effects": ["read"],
        "servers": [one],
    }
    made = tmp_path_factory.mktemp("agent") / "hello"
    files = {"tools/suite/server.py": SERVER.read_bytes(), "main.py": AGENT.encode()}
    files |= mcp_kit.files_of(site, "tools/suite/site/")
    tools_kit.written(made, tools_kit.package(document, grants="", files=files))
    done = home.covenant("tools", "advertised", made, "suite")
    assert done.returncode == 0, done.stderr
    one["tools"] = [{**tool, "side_effect_class": "read"} for tool in json.loads(done.stdout)]
    (made / "tools.json").write_text(json.dumps(document))
    uris = [f"matrix://tool/mcp/suite/{tool['name']}@1.0" for tool in one["tools"]]
    grants = f"""
[permissions.filesystem]
read = ["{suite}"]

[permissions.executables]
allow = ["{NODE}"]

[permissions.skills]
allow = {json.dumps(uris)}
side_effects = ["read"]
"""
    manifest = made / "agent.toml"
    manifest.write_text(manifest.read_text() + grants)
    assert home.covenant("tools", "pin", made).returncode == 0
    return made


@pytest.fixture(scope="module")
def bare(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the same server over HTTP, in no sandbox."""
    made = tmp_path_factory.mktemp("bare")
    (made / "site").symlink_to(site)
    (made / SERVER.name).write_bytes(SERVER.read_bytes())
    port = loopback_server.free_port()
    with subprocess.Popen([sys.executable, str(made / SERVER.name), str(port)]) as process:
        try:
            until(lambda: listens(port))
            yield f"http://localhost:{port}/mcp"
        finally:
            process.terminate()


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def failed(results: dict[str, tuple[int, int]]) -> set[str]:
    return {name for name, (_, failures) in results.items() if failures}


def passed(results: dict[str, tuple[int, int]]) -> set[str]:
    return {name for name, (successes, failures) in results.items() if successes and not failures}


@pytest.mark.parametrize("revision", REVISIONS)
def test_server_behind_endpoint_gives_what_it_gives_bare(
    home: Home, agent: Path, suite: Path, bare: str, revision: str
) -> None:
    outside = mcp_kit.ran(suite, "server", "--url", bare, "--requirements", revision)
    command = mcp_kit.command(suite, "server", "--url", "http://tools.covenant/mcp/suite", "--requirements", revision)
    done = home.covenant("dev", agent, json.dumps(command), "--json", "--timeout", "110")
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-3000:])
    inside = mcp_kit.results(json.loads(done.stdout)["text"])
    assert inside.keys() == outside.keys()
    assert failed(outside) == BARE_FAILS[revision]
    assert failed(inside) - failed(outside) == DIFFERENT[revision]
    assert failed(outside) - failed(inside) == set()


async def served(covenant_home: Path, suite: Path, revision: str) -> dict[str, tuple[int, int]]:
    """Run the suite against a daemon, by way of a server that adds the operator's token to each request."""
    port = loopback_server.free_port()
    origins = (f"http://localhost:{port}",)
    async with (
        daemon_kit.running(covenant_home, http_port=0, http_origins=origins) as daemon,
        aiohttp.ClientSession() as session,
    ):
        token = (daemon.home / "peers" / "operator.token").read_text().strip()
        names = {f"localhost:{port}": f"localhost:{daemon.http_port}"}

        async def pass_on(request: web.Request) -> web.Response:
            headers = {name: value for name, value in request.headers.items() if name != "Host"}
            headers |= {"Authorization": f"Bearer {token}", "Host": names.get(request.host, request.host)}
            url = f"http://127.0.0.1:{daemon.http_port}{request.path}"
            async with session.request(request.method, url, data=await request.read(), headers=headers) as answer:
                kind = answer.content_type
                return web.Response(status=answer.status, body=await answer.read(), content_type=kind)

        app = web.Application()
        app.router.add_route("*", "/mcp", pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "localhost", port).start()
        try:
            words = ("server", "--url", f"http://localhost:{port}/mcp", "--requirements", revision)
            return await anyio.to_thread.run_sync(mcp_kit.ran, suite, *words)
        finally:
            await runner.cleanup()


@pytest.mark.parametrize("revision", REVISIONS)
def test_daemon_is_server(tmp_path: Path, suite: Path, revision: str) -> None:
    assert passed(anyio.run(served, tmp_path / "home", suite, revision)) == DAEMON_PASSES[revision]


@pytest.mark.parametrize("revision", REVISIONS)
def test_relay_is_client(tmp_path: Path, suite: Path, revision: str) -> None:
    certificate = tls_servers.Certificates(tmp_path, "localhost").path
    client = tmp_path / "client"
    words = shlex.join([sys.executable, "-m", "tests.kernel.mcp_suite_client", str(certificate)])
    client.write_text(
        f'#!/bin/sh\ncase "$MCP_CONFORMANCE_SCENARIO" in auth/*|elicitation-*) exit 1 ;; esac\nexec {words} "$1"\n'
    )
    client.chmod(0o755)
    found = mcp_kit.ran(suite, "client", "--command", str(client), "--requirements", revision, "--timeout", "90000")
    assert passed(found) == CLIENT_PASSES[revision]
    assert {name for name in failed(found) if not name.startswith("auth/")} == CLIENT_FAILS[revision]
