"""Our client of MCP servers over HTTP, as a client scenario of the conformance suite starts it.

``mcp_suite_client.py CERTIFICATE URL``: the relay of the transport http, with a session over its stdin and stdout. The
relay speaks TLS alone, and the suite's servers do not, so that a thread with the certificate stands between them.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from policy.manifest.tools import document, http_relay
from sandbox.network.tools.mcp_session import McpSession, ToolCall
from tests import tools_kit as kit

# What is called where a scenario gives no calls of its own.
ARGUMENTS: dict[str, Any] = {"string": "x", "integer": 1, "number": 1, "boolean": True, "object": {}, "array": []}


def forward(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        source.close()


def serve(listener: socket.socket, address: tuple[str, int]) -> None:
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(address)
        for ends in ((near, far), (far, near)):
            threading.Thread(target=forward, args=ends, daemon=True).start()


def conversed(relay: Path, trust: str, session: McpSession) -> McpSession:
    environment = {**os.environ, "SSL_CERT_FILE": trust}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, str(relay)], stdin=pipe, stdout=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            said = session.start()
            while not session.done:
                process.stdin.write(said)
                process.stdin.flush()
                said = session.take(process.stdout.readline().rstrip())
        finally:
            process.kill()
    return session


def main(trust: str, url: str) -> None:
    parts = urlsplit(url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trust)
    listener = context.wrap_socket(socket.create_server(("localhost", 0)), server_side=True)
    address = (parts.hostname or "", parts.port or 80)
    threading.Thread(target=serve, args=(listener, address), daemon=True).start()
    entry = document.parse(kit.text(kit.full())).servers[1]
    endpoint = f"https://localhost:{listener.getsockname()[1]}{parts.path or '/'}"
    entry = entry.model_copy(update={"endpoint": endpoint, "headers": {}})
    with tempfile.TemporaryDirectory() as made:
        relay = Path(made) / "relay.py"
        relay.write_bytes(http_relay.files(entry, b"")[http_relay.NAME])
        listed = conversed(relay, trust, McpSession(over_http=True))
        context_of = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT") or "{}")
        calls = context_of.get("toolCalls") or [
            {"name": tool.name, "arguments": arguments(tool.input_schema or {}, listed)} for tool in listed.tools
        ]
        for one in calls:
            conversed(relay, trust, McpSession(ToolCall(one["name"], one["arguments"]), over_http=True))


def arguments(schema: dict[str, Any], listed: McpSession) -> dict[str, Any]:
    found = {name: ARGUMENTS[one.get("type", "string")] for name, one in schema.get("properties", {}).items()}
    # What the scenario of schemas wants back: the schema as our client read it.
    return found if "schema" not in found else {"schema": listed.tools[0].input_schema}


if __name__ == "__main__":
    main(*sys.argv[1:])
