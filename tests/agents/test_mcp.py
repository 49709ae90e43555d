"""A coding agent as the MCP client of a confined tool server: ``covenant tools serve`` is what its settings start."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.agents import catalogue, place
from tests.agents.fake import model
from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home
from tests.kernel.test_tool_servers import GRANTS, calls_in_log, package, server

SECONDS = 300
PROVIDER = {"npm": "@ai-sdk/openai-compatible", "name": "fake", "models": {"fake": {"name": "fake"}}}


@pytest.mark.parametrize("agent", ["opencode"])
def test_client_calls_tool_of_confined_server(agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    top, _ = place.install(agent, catalogue.load()[agent])
    home, made = Home(tmp_path), package(tmp_path, server(), GRANTS)
    monkeypatch.setattr(model, "TOOL", ("loud_shout", {"text": "hello"}))
    monkeypatch.setattr(model, "ECHO", True)
    command = [sys.executable, "-m", "covenant", "tools", "serve", str(made), "loud"]
    with ThreadingHTTPServer(("127.0.0.1", 0), model.Handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{served.server_address[1]}/v1"
        own = {"type": "local", "command": command, "environment": home.environment(), "timeout": SECONDS * 1000}
        settings = {
            "model": "fake/fake",
            "small_model": "fake/fake",
            "provider": {"fake": {**PROVIDER, "options": {"baseURL": url, "apiKey": "none"}}},
            "mcp": {"loud": own},
        }
        user = tmp_path / "user"
        user.mkdir()
        environment = {**home.environment(), "HOME": str(user), "OPENCODE_CONFIG_CONTENT": json.dumps(settings)}
        words = [str(top / "node_modules" / ".bin" / catalogue.load()[agent].program), "run", "Shout hello."]
        done = subprocess.run(words, cwd=user, env=environment, capture_output=True, text=True, timeout=SECONDS)
        served.shutdown()
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert "HELLO" in done.stdout, (done.stdout, done.stderr)
    kinds = [(row["type"], row.get("status")) for row in calls_in_log(home)]
    assert kinds == [("tool_called", None), ("tool_answered", "ok")]
    assert leftovers(home.world) == []
