"""Grants that need the host's network, under a supervisor that is not in it: refused until the fix is applied."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests.kernel import serving
from tests.kernel.fake_provider import Provider
from tests.kernel.serving import Served
from tests.kernel.test_service_gate import ASK
from tests.kernel.world import HEAD, TAIL, World

HOST_PORT, PUBLISHED = 19731, 19732
PROVIDERS = """
[providers.near]
kind = "openai-compatible"
endpoint = "{url}"
[providers.pretended]
kind = "mock"
[providers.finds]
kind = "searxng"
endpoint = "http://127.0.0.1:8888"
[providers.daemon]
kind = "a2a"
secret = "a2a"
[fetch."made.example.com"]
mock = true
"""
SETTINGS: dict[str, Any] = {"host_ports": [HOST_PORT], "publish_ports": [PUBLISHED]}
MORE_SETTINGS = '[export]\nagents = "http://127.0.0.1:4318"\n'
MODELS = '[services.models]\nallow = [{{ provider = "{}", models = ["*"] }}]\n'
PORT = f'[[permissions.network]]\nhost = "host.covenant"\nports = [{HOST_PORT}]\nprotocol = "tcp"\n'
# The grants, the key that the error is of, and what it says.
REFUSED = {
    "models": (MODELS.format("near"), "provider `near` is reached by"),
    "search": ('[services.search]\nallow = ["pretended", "finds"]\n', "provider `finds` is reached by"),
    "fetch": ('[services.fetch]\nhosts = ["*.example.org"]\n', "pages of `*.example.org` are fetched by"),
    "page beside a mock": (
        '[services.fetch]\nhosts = ["made.example.com", "wiki.example.org"]\n',
        "pages of `wiki.example.org` are fetched by",
    ),
    "agents": ('[services.agents]\nallow = ["other"]\n', "agents are asked by"),
    "telemetry": ('[services.telemetry]\nsignals = ["logs"]\n', "the collector of telemetry is reached by"),
    "host ports": (PORT, f"port {HOST_PORT} of host.covenant is in"),
    "publish": (
        f'[[publish]]\nport = 80\nto = "127.0.0.1:{PUBLISHED}"\n',
        f"publishing at 127.0.0.1:{PUBLISHED} needs",
    ),
}
# Each needs a gate, and no gate of these needs the host's network.
MADE_UP = MODELS.format("pretended") + '[services.fetch]\nhosts = ["made.example.com"]\n'
ASKS = """
found = raw("GET", "/fetch?url=https://made.example.com/", host="fetch.covenant")
answer = [chat("test-1")[0], found.status]
"""
REACHES = f"""
with socket.create_connection(("host.covenant", {HOST_PORT}), 20) as line:
    line.settimeout(20)
    answer = [chat("test-1")[0], line.recv(5).decode()]
"""


@pytest.fixture(scope="module")
def served(warm: Path, provider: Provider) -> Iterator[Served]:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        made = Served(world, **SETTINGS)
        with (world.state / "config.toml").open("a") as stream:
            stream.write(MORE_SETTINGS)
        (world.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
        with made:
            yield made
            made.quiet()


def _package(served: Served, more: str, code: str = "answer = []\n") -> Path:
    return served.world.sign(served.world.package({"main.py": HEAD + ASK + code + TAIL}, more=more))


@pytest.mark.parametrize("name", REFUSED)
def test_grant_that_can_do_nothing_is_refused(served: Served, name: str) -> None:
    grants, says = REFUSED[name]
    with pytest.raises(errors.NotEnforceableError) as refused:
        served.run(_package(served, grants))
    assert refused.value.message == f"{says} the host's network, and the supervisor is not in it"
    assert re.fullmatch(r"agent\.toml:\d+", refused.value.where)
    assert f"in {served.world.state}/config.toml" in refused.value.hint
    last = served.world.rows()[-1]["kind"]
    assert (last["type"], last["code"]) == ("manifest_rejected", "not_enforceable")


def test_made_up_services_need_no_network(served: Served) -> None:
    done = served.run(_package(served, MADE_UP, ASKS))
    assert done.result is not None, (done.error, done.stderr)
    assert json.loads(done.result.text) == [200, 200]


def test_named_uplink_is_the_fix(served: Served, provider: Provider) -> None:
    package = _package(served, MODELS.format("near") + PORT, REACHES)
    with pytest.raises(errors.NotEnforceableError) as refused:
        served.run(package)
    assert refused.value.hint.startswith('write uplink = "NAME", an interface')
    assert "reload the supervisor" in refused.value.hint
    config = served.world.state / "config.toml"
    # A run without a network of its own sends nothing by it.
    config.write_text('uplink = "eth0"\n' + config.read_text())
    os.kill(served.pid, signal.SIGHUP)
    with socket.create_server(("127.0.0.1", HOST_PORT)) as listener:
        answering = threading.Thread(target=_greet, args=(listener,))
        answering.start()
        done = served.run(package)
        listener.shutdown(socket.SHUT_RDWR)
        answering.join()
    assert done.result is not None, (done.error, done.stderr)
    assert json.loads(done.result.text) == [200, "hello"]
    assert [one["path"] for one in provider.seen][-1:] == ["/v1/chat/completions"]


def _greet(listener: socket.socket) -> None:
    try:
        with listener.accept()[0] as line:
            line.sendall(b"hello")
    except OSError:
        return  # the run was refused
