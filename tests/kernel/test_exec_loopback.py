"""Loopback TCP and UDP and unix sockets of a session without a network; nothing outside is reached."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home

# What FastAPI's TestClient, Vite, pytest-asyncio and tmux rest on (tests/kernel/test_loopback_programs.py has them):
# servers and clients of one sandbox.
PROBE = """
import asyncio, errno, json, os, socket, threading
found = {}
def answer(listener):
    one, _ = listener.accept()
    with one: one.sendall(one.recv(9).upper())
def stream(name, listener, place, family):
    threading.Thread(target=answer, args=(listener,)).start()
    with socket.socket(family) as client:
        client.settimeout(20)
        client.connect(place)
        client.sendall(name.encode())
        found[name] = client.recv(9).decode()
for name, host in (("tcp", "127.0.0.1"), ("name", "localhost"), ("any", "0.0.0.0")):
    listener = socket.create_server((host, 0))
    stream(name, listener, ("127.0.0.1", listener.getsockname()[1]), socket.AF_INET)
for name, place in (("unix", "/tmp/a.sock"), ("abstract", chr(0) + "a")):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place); listener.listen(1)
    stream(name, listener, place, socket.AF_UNIX)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as near, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as far:
    near.bind(("127.0.0.1", 0)); near.settimeout(20)
    far.sendto(b"udp", near.getsockname())
    found["udp"] = near.recv(9).decode().upper()
async def own():
    async def serve(reader, writer):
        writer.write((await reader.readline()).upper()); await writer.drain(); writer.close()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    writer.write(b"asyncio\\n")
    found["asyncio"] = (await reader.readline()).decode().strip()
asyncio.run(own())
for host in ("192.0.0.1", "198.18.0.1", "169.254.169.254"):
    with socket.socket() as client:
        client.settimeout(10)
        found[host] = errno.errorcode.get(client.connect_ex((host, 443)), "open")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("loopback"), "debian-minimal", "python3")
    yield made
    assert leftovers(made.world) == []


def test_sockets_inside_need_no_network(home: Home) -> None:
    done = home.exec("--quiet", "--", "python3", "-c", PROBE)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    outside = {found.pop(host) for host in ("192.0.0.1", "198.18.0.1", "169.254.169.254")}
    assert found == {name: name.upper() for name in ("tcp", "name", "any", "unix", "abstract", "udp", "asyncio")}
    assert outside <= {"ENETUNREACH", "EHOSTUNREACH", "ECONNREFUSED"}
