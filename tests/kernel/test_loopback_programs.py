"""Programs that serve themselves over the loopback, in sessions without a network: pinned, and run in a sandbox alone.

They are FastAPI's TestClient and pytest-asyncio, Vite's server for developers, and tmux.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home

PINS = Path(__file__).parent
PYTHON = """
import asyncio, pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

app = FastAPI()

@app.get("/")
async def root():
    return {"is": "there"}

def test_client():
    with TestClient(app) as client:
        assert client.get("/").json() == {"is": "there"}

@pytest.mark.asyncio
async def test_server():
    async def serve(reader, writer):
        writer.write((await reader.readline()).upper())
        writer.close()
    server = await asyncio.start_server(serve, "localhost", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
    writer.write(b"asyncio\\n")
    assert await reader.readline() == b"ASYNCIO\\n"
    writer.close()
"""
RUN = """
import os, sys, pytest
os.chdir("/tmp")
open("test_app.py", "w").write(sys.stdin.read())
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "test_app.py"]))
"""
NODE = """
const fs = require("fs");
fs.mkdirSync("/tmp/site");
fs.writeFileSync("/tmp/site/index.html", "<title>made here</title>");
async function main() {
  const { createServer } = await import(process.argv[1] + "/node_modules/vite/dist/node/index.js");
  const server = await createServer({ root: "/tmp/site", logLevel: "error", cacheDir: "/tmp/cache" });
  await server.listen();
  const page = await (await fetch(server.resolvedUrls.local[0])).text();
  console.log(page.includes("made here") && page.includes("/@vite/client"));
  process.exit(0);
}
main().catch((e) => { console.error(e); process.exit(1); });
"""
# The window stays: a server without one ends, and it may do so before the second client has come.
TMUX = "tmux new-session -d 'tty > /tmp/said; tmux wait-for -S done; sleep 600' && tmux wait-for done && cat /tmp/said"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("programs"), "debian-minimal", "python3", "nodejs")
    yield made
    assert leftovers(made.world) == []


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that a session may read: no mount covers it, and root alone can write it."""
    with tempfile.TemporaryDirectory(dir="/var/lib", prefix="covenant-test-") as made:
        os.chmod(made, 0o755)
        yield Path(made)


def test_python_servers_are_asked_inside(home: Home, place: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--only-binary", ":all:"]
    options = ["--disable-pip-version-check", "--root-user-action", "ignore", "--target", str(place / "wheels")]
    subprocess.run([*pip, *options, "--requirement", str(PINS / "loopback_wheels.txt")], check=True, timeout=300)
    subprocess.run(["chmod", "-R", "go-w", str(place)], check=True, timeout=60)
    words: list[str | Path] = ["--quiet", "--no-workspace", "--read", place / "wheels"]
    words += ["--env", f"PYTHONPATH={place}/wheels", "--env", "PYTHONDONTWRITEBYTECODE=1"]
    done = home.exec(*words, "--", "python3", "-c", RUN, stdin=PYTHON.encode())
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert b"2 passed" in done.stdout


def test_vite_serves_inside(home: Home, place: Path) -> None:
    lock = json.loads((PINS / "loopback_modules.json").read_text())
    (place / "package-lock.json").write_text(json.dumps(lock))
    (place / "package.json").write_text(json.dumps(lock["packages"][""]))
    npm = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--silent", "--prefix", str(place)]
    subprocess.run(npm, check=True, timeout=300)
    subprocess.run(["chmod", "-R", "go-w", str(place)], check=True, timeout=60)
    done = home.exec("--quiet", "--no-workspace", "--read", place, "--", "node", "-e", NODE, str(place))
    assert (done.returncode, done.stdout) == (0, b"true\n"), (done.stdout, done.stderr)


def test_tmux_serves_its_clients_inside(home: Home) -> None:
    assert home.covenant("layer", "build", "tmux", "host-packages", "tmux").returncode == 0
    done = home.exec("--quiet", "--no-workspace", "--layer", "tmux", "--env", "TERM=xterm", "--", "sh", "-c", TMUX)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert done.stdout.startswith(b"/dev/pts/")
