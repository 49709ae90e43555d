"""A world whose agents reach hosts at which the gate adds a secret: its fixtures, and the words of its agents."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kernel import fake_host, internet, tls_servers
from tests.kernel.conftest import leftovers
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.test_credentials import vault
from tests.kernel.world import HEAD, TAIL

NAME, OTHER, PORT = "api.example.com", "other.example.com", 4443
INJECT = """
[[permissions.network]]
host = "api.example.com"
ports = [4443]
protocol = "tls"
inject = {{ secret = "github", format = "Bearer {{}}", methods = {methods}, paths = {paths}{more} }}

[[permissions.network]]
host = "other.example.com"
ports = [443, 4443]
protocol = "tls"
"""
ASK = """
import http.client, socket, ssl, time
context = ssl.create_default_context()
def raw(method, path, body=None, headers=None, host="api.example.com", port=4443):
    line = http.client.HTTPSConnection(host, port, timeout=30, context=context)
    line.request(method, path, body, headers or {})
    return line.getresponse()
def ask(*args, **more):
    try:
        found = raw(*args, **more)
        return [found.status, found.read().decode("latin-1")]
    except (OSError, http.client.HTTPException) as e:
        return [0, type(e).__name__]
"""


RAW = """
def opened(sni="api.example.com", verify=context, alpn=None):
    plain = socket.create_connection(("api.example.com", 4443), timeout=20)
    if alpn:
        verify = ssl.create_default_context()
        verify.set_alpn_protocols(alpn)
    return verify.wrap_socket(plain, server_hostname=sni)
def said(line):
    out = b""
    try:
        while piece := line.recv(65536):
            out += piece
    except OSError:
        pass
    return out
def send(data, **more):
    try:
        with opened(**more) as line:
            line.sendall(data)
            return said(line).decode("latin-1")
    except OSError as e:
        return type(e).__name__
"""


class InjectWorld(NetworkedWorld):
    """A networked world that knows the certificate of the real host."""

    certificate: Path


def grants(methods: Sequence[str] = ("GET", "POST", "HEAD"), paths: Sequence[str] = ("/*",), more: str = "") -> str:
    """The networks of an agent, one of them with a secret."""
    return INJECT.format(methods=json.dumps(list(methods)), paths=json.dumps(list(paths)), more=more)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Internet, FakeHost, Path]]:
    """An internet with the host behind both names."""
    certificates = tls_servers.Certificates(tmp_path_factory.mktemp("host"), NAME, OTHER)
    certificate = certificates.path.with_name("ca.pem")
    text = certificates.path.read_text()
    certificate.write_text(text[text.index("-----BEGIN CERT") :])
    with internet.made() as made, contextlib.ExitStack() as stack:
        listener = made.bound("world", "0.0.0.0", PORT)
        host = stack.enter_context(fake_host.serving(listener, certificates.server()))
        yield made, host, certificate


@contextlib.contextmanager
def opened(base: Path, warm: Path, net: tuple[Internet, FakeHost, Path], **settings: Any) -> Iterator[InjectWorld]:
    """A world whose vault holds the secret of the agent `probe`, with more settings of config.toml."""
    made = InjectWorld(base, warm=warm)
    internet.configured(made, net[0], **settings)
    made.certificate = net[2]
    with (made.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{base}/vault.key"\n[tls]\nca = ["{net[2]}"]\n')
    vault(made, "init")
    vault(made, "put", "probe", "github", secret=SECRET + "\n")
    yield made
    assert leftovers(made) == []
    assert net[0].leftovers() == []


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path, net: Any) -> Iterator[InjectWorld]:
    with opened(tmp_path_factory.mktemp("inject"), warm, net) as made:
        yield made


@pytest.fixture
def host(net: Any) -> FakeHost:
    """The host, which has seen nothing."""
    net[1].seen.clear()
    found: FakeHost = net[1]
    return found


def run(world: InjectWorld, code: str, more: str, **fields: Any) -> tuple[Any, Sequence[dict[str, Any]]]:
    """Return the agent's answer and the rows of its run."""
    before = len(world.rows())
    fields = {"network": "full", "memory_mb": 256, "cpu_ms": 60000, **fields}
    answer = world.run_code(HEAD + ASK + code + TAIL, more=more, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    return json.loads(answer.result.text), [row["kind"] for row in world.rows()[before:]]


def carried(host: FakeHost) -> list[str]:
    """The headers Authorization of the requests that the host saw."""
    return [value for one in host.seen for name, value in one["headers"] if name == "authorization"]
