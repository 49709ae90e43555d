"""The operator's proxy: the service gate reaches providers by it alone, with credentials that no gate's plan tells."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from tests.kernel import connect_proxy, internet, tls_servers
from tests.kernel.conftest import leftovers
from tests.kernel.connect_proxy import ConnectProxy
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.test_credentials import covenant, vault
from tests.kernel.test_service_gate import run
from tests.kernel.world import World

WORD = "gate:pass-planted-1"
GRANTED = '[services.models]\nallow = [{ provider = "fake", models = ["big-*"] }]\n'
ASK = 'answer = chat("big-1")'
PROVIDERS = '[providers.fake]\nkind = "openai-compatible"\nendpoint = "{url}"\nsecret = "fake"\ntimeout_seconds = 30\n'


@pytest.fixture(scope="module")
def proxy() -> Iterator[ConnectProxy]:
    with connect_proxy.serving(WORD) as made:
        yield made


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path, provider: Provider) -> Iterator[World]:
    base = tmp_path_factory.mktemp("proxied")
    made = World(base, warm=warm)
    configured(made, "")
    vault(made, "init")
    vault(made, "put", "covenant-providers", "fake", secret=KEY + "\n")
    (made.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
    yield made
    assert leftovers(made) == []


def configured(world: World, more: str) -> None:
    world.configure()
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{world.base}/vault.key"\n{more}')


def test_double_speaks_as_curl_expects(provider: Provider, proxy: ConnectProxy) -> None:
    curl = ["curl", "-sS", "--proxytunnel", "-o", "/dev/null", "-w", "%{http_connect} %{http_code}", provider.url]
    for credentials, said in ((WORD, "200 200"), ("gate:other", "407 000")):
        by = ["--noproxy", "", "--proxy", f"http://127.0.0.1:{proxy.port}", "--proxy-user", credentials]
        assert subprocess.run([*curl, *by], capture_output=True, text=True).stdout == said


def test_provider_is_reached_by_the_proxy(world: World, provider: Provider, proxy: ConnectProxy) -> None:
    settings = f'[proxy]\nurl = "http://127.0.0.1:{proxy.port}"\nsecret = "proxy"\n'
    configured(world, settings)
    package = world.sign(world.package({"main.py": ""}, more=GRANTED))
    with pytest.raises(errors.VaultError, match="the secret of the proxy is not in the vault") as refused:
        world.run(package)
    assert refused.value.hint == "covenant vault put covenant-providers proxy"
    vault(world, "put", "covenant-providers", "proxy", secret=WORD + "\n")
    proxy.asked.clear()
    provider.seen.clear()
    said, _ = run(world, ASK, more=GRANTED)
    assert said[0] == 200, said
    assert proxy.asked == [("127.0.0.1", provider.server_port)]
    assert [one["headers"]["authorization"] for one in provider.seen] == [f"Bearer {KEY}"]
    assert "proxy-authorization" not in provider.seen[0]["headers"]
    tested = covenant(world, "models", "test", "fake")
    assert len(proxy.asked) == 2, tested.stderr
    # The words of a proxy that is none, or that refuses, reach no agent: the provider fails.
    for words in (
        b"HTTP/1.1 403 No\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 9000 + b"\r\n\r\n",
    ):
        proxy.says = words
        said, _ = run(world, ASK, more=GRANTED)
        assert said[0] == 502, said
    proxy.says = None
    assert WORD not in json.dumps(world.rows())
    # The control: a host that is reached directly, and a gate without a proxy.
    for more in (settings + 'direct = ["127.0.0.1"]\n', ""):
        configured(world, more)
        before = len(proxy.asked)
        assert run(world, ASK, more=GRANTED)[0][0] == 200
        assert len(proxy.asked) == before


def test_provider_is_reached_by_tls_to_the_proxy(world: World, provider: Provider) -> None:
    folder = world.base / "proxy-tls"
    folder.mkdir()
    certificates = tls_servers.Certificates(folder, "localhost")
    vault(world, "put", "covenant-providers", "tls-proxy", secret=WORD + "\n")
    # With a network too, so that the threads of both connectors are in the cgroup of the gates.
    granted = GRANTED + internet.entries(("198.51.100.7", "[443]", "tls"))
    with connect_proxy.serving(WORD, certificates.server()) as proxy:
        place = f"https://localhost:{proxy.port}"
        curl = ["curl", "-sS", "--proxytunnel", "--noproxy", "", "-o", "/dev/null", "-w", "%{http_connect}"]
        by = ["--proxy", place, "--proxy-user", WORD, "--proxy-cacert", str(certificates.path), provider.url]
        assert subprocess.run([*curl, *by], capture_output=True, text=True).stdout == "200"
        settings = f'[proxy]\nurl = "{place}"\nsecret = "tls-proxy"\n'
        configured(world, settings + f'[tls]\nca = ["{certificates.path}"]\n')
        proxy.asked.clear()
        said, _ = run(world, ASK, more=granted, network="full", memory_mb=256)
        assert said[0] == 200, said
        assert b"gives no list of models" in covenant(world, "models", "test", "fake").stdout
        assert proxy.asked == [("127.0.0.1", provider.server_port)] * 2
        configured(world, settings)  # without its authority
        assert run(world, ASK, more=GRANTED)[0][0] == 502
        assert len(proxy.asked) == 2


def test_network_beside_the_proxy_is_refused(world: World, proxy: ConnectProxy) -> None:
    configured(world, f'[proxy]\nurl = "http://127.0.0.1:{proxy.port}"\n')
    package = world.sign(world.package({"main.py": ""}, network="full"))
    with pytest.raises(errors.NotEnforceableError, match="the operator's proxy") as refused:
        world.run(package)
    assert "take [proxy] out of config.toml" in refused.value.hint
