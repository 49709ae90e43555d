"""Rows of the table in docs/operations.md: services follow a change that the operator makes while they live.

tests/daemon/test_lifecycle.py, test_network_recovery.py and test_standby_rests_on.py have others.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from policy import errors
from tests.kernel import connect_proxy, serving
from tests.kernel.connect_proxy import ConnectProxy
from tests.kernel.fake_provider import Provider
from tests.kernel.internet import entries
from tests.kernel.serving import Served, open_place
from tests.kernel.test_credentials import vault
from tests.kernel.test_serve import eventually
from tests.kernel.test_service_gate import ASK, MODELS
from tests.kernel.test_standby import _await, _said, _until, _warmed
from tests.kernel.world import HEAD, TAIL, World

NAME = "agents-2.example"
PROVIDERS = """
[providers.fake]
kind = "openai-compatible"
endpoint = "http://later.example:{port}/v1"
[providers.local]
kind = "mock"
"""
# Until the name leads to the provider.
CHATS = """
until, statuses = time.monotonic() + 120, []
while 200 not in statuses and time.monotonic() < until:
    statuses.append(chat("big-1")[0])
    time.sleep(0.2)
answer = sorted(set(statuses))
"""
CONNECTS = """
import socket, ssl
try:
    with socket.create_connection(("api.example.com", 443), 20) as line:
        ssl.create_default_context().wrap_socket(line, server_hostname="api.example.com")
except OSError:
    pass
answer = {"run": os.environ["COVENANT_RUN_ID"]}
"""


def test_new_name_of_host_counts_after_reload(warm: Path) -> None:
    with open_place() as base, Served(World(base, warm=warm), before=["unshare", "--uts"]) as served:
        package = served.world.sign(served.world.copy("hello"), audience=NAME)
        name = ["nsenter", f"--uts=/proc/{served.pid}/ns/uts", "sysctl", "-qw", f"kernel.hostname={NAME}"]
        subprocess.run(name, check=True)
        with pytest.raises(errors.SignatureError, match="host"):
            served.run(package)
        os.kill(served.pid, signal.SIGHUP)
        eventually(lambda: _is_run(served, package))


def _is_run(served: Served, package: Path) -> bool:
    with contextlib.suppress(errors.SignatureError):
        return served.run(package).error is None
    return False


def test_live_run_follows_hosts_file_for_providers(warm: Path, provider: Provider) -> None:
    """Its gate looks the operator's names up by the host's libc; the agent's own names are asked of resolvers alone."""
    with open_place() as base:
        hosts = base / "hosts"
        hosts.write_text("127.0.0.1 localhost\n")
        mount = ["unshare", "--mount", "/bin/bash", "-c", 'mount --bind "$0" /etc/hosts; exec "$@"', str(hosts)]
        world = World(base, warm=warm)
        # Without a name there the connectors have no network (docs/hardening.md). This agent has none itself.
        with Served(world, before=mount, uplink="eth0") as served:
            (world.state / "providers.toml").write_text(PROVIDERS.format(port=provider.server_port))
            package = world.sign(world.package({"main.py": HEAD + ASK + CHATS + TAIL}, more=MODELS))
            with serving.asked(served.path, package) as sock:
                eventually(lambda: _asked(world))
                assert provider.seen == []
                with hosts.open("a") as file:
                    file.write("127.0.0.1 later.example\n")
                eventually(lambda: 200 in _asked(world))
                sock.recv(1)
                served.quiet()
        assert _asked(world)[0] == 0, "there was no connection"
        assert len(provider.seen) == 1


def _asked(world: World) -> list[int]:
    return [row["kind"]["status"] for row in world.rows() if row["kind"]["type"] == "model_asked"]


@pytest.fixture
def proxy() -> ConnectProxy:
    made = connect_proxy.ConnectProxy("gate:first")
    made.says = b"HTTP/1.1 403 No\r\n\r\n"
    return made


def test_instance_is_made_anew_for_password_of_proxy(warm: Path, proxy: ConnectProxy) -> None:
    more = f'[proxy]\nurl = "http://127.0.0.1:{proxy.port}"\nsecret = "proxy"\nby_name = true\nresolves = ["*"]\n'
    grants = entries(("api.example.com", "[443]", "tls"))
    with open_place() as base:
        world = World(base, warm=warm)
        served = Served(world)
        with (world.state / "config.toml").open("a") as stream:
            stream.write(f'[vault]\nkey = "{base}/vault.key"\n{more}')
        vault(world, "init")
        vault(world, "put", "covenant-providers", "proxy", secret="gate:first\n")
        with served:
            path, (waits,) = _warmed(served, "proxied", HEAD + CONNECTS + TAIL, network="full", more=grants)
            assert len(proxy.asked) == 1
            proxy.accept("gate:second")
            vault(world, "rotate", "covenant-providers", "proxy", secret="gate:second\n")
            _until(lambda: not waits.path.exists(), served)
            (fresh,) = _await(served, "proxied")
            assert _said(served.run(path, "x"))["run"] == fresh.run_id
            assert len(proxy.asked) == 2
        proxy.listener.close()
