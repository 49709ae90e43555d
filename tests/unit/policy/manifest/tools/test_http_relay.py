"""The package of a server of the transport http, and what does not verify of one."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, ClassVar

import pytest

from policy import package
from policy.manifest import parse
from policy.manifest.tools import checks, http_relay, server_package
from policy.manifest.tools import document as tools_document
from policy.manifest.tools.document import Server
from tests import tools_kit as kit

HOST = """
[[permissions.network]]
host = "{host}"
ports = {ports}
protocol = "{protocol}"
"""
GRANTED = kit.GRANTS + HOST.format(host="weather.example.com", ports="[8443]", protocol="tls")


def codes(read: package.Package) -> list[str]:
    tools = tools_document.parse(read.files["tools.json"])
    return [one.code for one in checks.verify(read, kit.manifest(read), tools)]


def server(**changes: Any) -> Server:
    document = kit.full()
    document["servers"][1].update(changes)
    return tools_document.parse(kit.text(document)).servers[1]


def made(**changes: Any) -> package.Package:
    document = kit.full()
    document["servers"][1].update(changes)
    read = kit.package(document)
    tools = tools_document.parse(read.files["tools.json"])
    return server_package.package_of(read, tools, tools.servers[1], seconds=7, with_secrets=True)


def test_relay_reaches_its_host_and_has_no_secret() -> None:
    found = made()
    assert sorted(found.files) == ["agent.toml", "relay.py"]
    manifest = parse.parse(found.manifest)
    (entry,) = manifest.permissions.network
    assert (entry.host, entry.ports, entry.protocol) == ("weather.example.com", ((8443, 8443),), "tls")
    assert entry.inject is not None
    assert (entry.inject.secret, entry.inject.header) == ("weather", "Authorization")
    assert (entry.inject.methods, entry.inject.paths, entry.inject.format) == (("POST",), ("/mcp",), "{}")
    code = found.files["relay.py"]
    compile(code, "relay.py", "exec")
    assert b"Accept" in code
    assert b"$credential" not in code
    assert "credentials" not in tomllib.loads(found.manifest.decode())["permissions"]


def test_relay_without_secret_has_nothing_to_add() -> None:
    (entry,) = parse.parse(made(headers={"X-Words": 'a"b\\n'}).manifest).permissions.network
    assert entry.inject is None


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [
        ("https://a.example.com", ("a.example.com", 443, "/")),
        ("https://a.example.com/", ("a.example.com", 443, "/")),
        ("https://a.example.com:8443/x/y", ("a.example.com", 8443, "/x/y")),
    ],
)
def test_address_of_endpoint(endpoint: str, found: tuple[str, int, str]) -> None:
    assert http_relay.address(server(endpoint=endpoint)) == found


@pytest.mark.parametrize(
    ("host", "ports", "protocol", "is_fine"),
    [
        ("weather.example.com", "[8443]", "tls", True),
        ("weather.example.com", '["8000-9000"]', "tcp", True),
        ("*.example.com", "[8443]", "tls", True),
        ("weather.example.com", "[443]", "tls", False),
        ("weather.example.com", "[8443]", "udp", False),
        ("other.example.com", "[8443]", "tls", False),
        ("*.weather.example.com", "[8443]", "tls", False),
        ("192.0.2.1", "[8443]", "tls", False),
    ],
)
def test_host_must_be_granted(host: str, ports: str, protocol: str, is_fine: bool) -> None:
    if host == "192.0.2.1":
        protocol = "tcp"
    grants = kit.GRANTS + HOST.format(host=host, ports=ports, protocol=protocol)
    assert codes(kit.package(kit.FULL, grants=grants)) == ([] if is_fine else ["host_not_granted"])


def test_relay_of_no_secret_trusts_operator_s_authorities() -> None:
    """A server with a secret is verified by its gate, and its relay trusts that gate alone."""
    pem = b"-----BEGIN CERTIFICATE-----\n"
    for headers, files in (({"X-Plain": "kept"}, {"authorities.pem", "relay.py"}), (TWO, {"relay.py"})):
        found = http_relay.files(server(headers=headers), pem)
        assert found.keys() == files
        assert (b"authorities.pem" in found["relay.py"]) == (len(files) == 2)
    assert http_relay.files(server(headers={"X-Plain": "kept"}), b"").keys() == {"relay.py"}


TWO = {"Authorization": "$credential:weather", "X-Key": "$credential:fs-key", "X-Plain": "kept"}


def test_second_secret_header_is_a_file_of_the_relay() -> None:
    assert codes(kit.package(kit.full("servers", 1, "headers", value=TWO), grants=GRANTED)) == []
    found = made(headers=TWO)
    manifest = parse.parse(found.manifest)
    inject, credentials = manifest.permissions.network[0].inject, manifest.permissions.credentials
    assert inject is not None
    assert (inject.secret, inject.header) == ("weather", "Authorization")
    assert (credentials.grants, credentials.files) == (("fs-key",), True)
    assert b"$credential" not in found.files["relay.py"]


@pytest.mark.parametrize("secret", ["", "a\nb", "a\r", " a", "a ", "\x00", "é", "\n"])
def test_secret_that_is_no_header_ends_the_relay(tmp_path: Path, secret: str) -> None:
    (tmp_path / "relay.py").write_bytes(made(headers=TWO).files["relay.py"])
    (tmp_path / "weather").write_text("Bearer x\n")
    (tmp_path / "fs-key").write_text(secret)
    command, environment = [sys.executable, str(tmp_path / "relay.py")], {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    done = subprocess.run(command, env=environment, input=b"", capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"covenant: secret fs-key is no value of a header\n")
    (tmp_path / "fs-key").write_text("key of two words\n")
    assert subprocess.run(command, env=environment, input=b"", timeout=60, check=False).returncode == 0


CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
PLAIN = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
# Each is one answer of a hostile server.
HOSTILE = (
    CHUNKED + b"f" * 18 + b"\r\nx",
    CHUNKED + b"-5\r\nx",
    PLAIN + b"Mcp-Session-Id: a\r\n\r\n" + b"[" * 70_000,
    PLAIN + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    PLAIN + b"Mcp-Session-Id: \xff\x00\r\n\r\n" + b"9" * 6_000,
    b"HTTP/1.1 307 elsewhere\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    b"\x00\x01\r\n",
)
GOOD = PLAIN + b"Content-Type: application/json\r\n\r\n" + b'{"jsonrpc": "2.0", "id": 1, "result": {}}'


class HostileConnection:
    """A connection whose server gives the next of ``answers``."""

    answers: ClassVar[list[bytes]] = []

    def __init__(self, *place: object, **more: object) -> None:
        self._raw = io.BufferedReader(io.BytesIO(self.answers.pop(0)))

    def makefile(self, mode: str) -> io.BufferedReader[io.BytesIO]:
        return self._raw

    def request(self, *asked: object) -> None:
        """Send nothing."""

    def getresponse(self) -> http.client.HTTPResponse:
        reply = http.client.HTTPResponse(self)  # type: ignore[arg-type]
        reply.begin()
        return reply

    def close(self) -> None:
        """Close nothing."""


def test_hostile_server_ends_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is an error of its request alone. The last one is good, and is the control."""
    HostileConnection.answers = [*HOSTILE, GOOD]
    asked = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}) + "\n"
    out = io.StringIO()
    monkeypatch.setattr(http.client, "HTTPSConnection", HostileConnection)
    monkeypatch.setattr(sys, "stdin", io.StringIO(asked * len(HostileConnection.answers)))
    monkeypatch.setattr(sys, "stdout", out)
    exec(compile(http_relay.files(server(), b"")[http_relay.NAME], "relay.py", "exec"), {})
    said = [sorted(json.loads(line)) for line in out.getvalue().splitlines()]
    assert said == [["error", "id", "jsonrpc"]] * len(HOSTILE) + [["id", "jsonrpc", "result"]]
