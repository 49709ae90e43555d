"""An agent's own connections by the operator's proxy: by it alone, to what is granted, and what it does not carry."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox import doctor_network
from sandbox.config import Config, TlsSettings
from sandbox.network.gate.proxy import Proxy, ProxyError
from sandbox.network.tls.connector import Destinations, is_local
from sandbox.proxy_settings import ProxySettings
from sandbox.rundir import registry
from tests.kernel import internet, live_runs, revoking, tls_servers
from tests.kernel.connect_proxy import ConnectProxy
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.injecting import ASK, InjectWorld, carried, grants, host, net, run, world
from tests.kernel.live_runs import until
from tests.kernel.test_credentials import vault
from tests.kernel.world import HEAD, TAIL

__all__ = ["host", "net", "world"]

WORD = "gate:pass-planted-2"
API, OTHER, BY_ADDRESS, HOST = "93.184.216.34", "9.9.9.9", "198.51.100.7", "10.77.0.2"
REFUSING = {1407: b"HTTP/1.1 407 No\r\n\r\n", 1403: b"HTTP/1.1 403 No\r\n\r\n", 1099: b"SSH-2.0-x\r\n\r\n"}
GRANTS = grants() + internet.entries(
    ("www.example.com", json.dumps([*REFUSING]), "tls"),
    ("rebind.example.com", "[443]", "tls"),
    (BY_ADDRESS, "[443]", "tls"),
    (HOST, "[7002]", "tls"),
)
PROBES = internet.PROBES + internet.TLS_PROBE
HELLO = """
def hello(host, port, name="www.example.com"):
    try:
        with socket.create_connection((host, port), timeout=20) as plain:
            context.wrap_socket(plain, server_hostname=name)
    except OSError as e:
        return type(e).__name__
"""


@pytest.fixture(scope="module")
def proxy(world: InjectWorld) -> Iterator[ConnectProxy]:
    made: ConnectProxy = world.internet.within("host", lambda: ConnectProxy(WORD))
    vault(world, "put", "covenant-providers", "proxy", secret=WORD + "\n")
    yield made
    made.listener.close()


@pytest.fixture(scope="module")
def secure(world: InjectWorld, proxy: ConnectProxy) -> Iterator[tuple[ConnectProxy, Path]]:
    """A proxy that speaks TLS as `localhost`, and the file of its authority."""
    folder = world.base / "proxy-tls"
    folder.mkdir()
    certificates = tls_servers.Certificates(folder, "localhost")
    made: ConnectProxy = world.internet.within("host", lambda: ConnectProxy(WORD, certificates.server()))
    yield made, certificates.path
    made.listener.close()


def configured(
    world: InjectWorld, proxy: ConnectProxy, *, port: int = 0, more: str = "", self_test: bool = False, ca: str = ""
) -> None:
    """Write a configuration with a proxy and without an uplink. With ``ca`` the proxy is spoken to over TLS."""
    world.configure(resolvers=[internet.RESOLVER], attest_seconds=1, self_test=self_test)
    place = f"https://localhost:{proxy.port}" if ca else f"http://127.0.0.1:{port or proxy.port}"
    settings = f'[proxy]\nurl = "{place}"\nsecret = "proxy"\n{more}'
    files = json.dumps([str(world.certificate), *([ca] if ca else [])])
    keys = f'[vault]\nkey = "{world.base}/vault.key"\n[tls]\nca = {files}\n'
    with (world.state / "config.toml").open("a") as stream:
        stream.write(keys + settings)
    proxy.asked.clear()


def test_networks_go_by_the_proxy_alone(world: InjectWorld, host: FakeHost, proxy: ConnectProxy) -> None:
    configured(world, proxy)
    proxy.answers.update(REFUSING)
    calls = {
        "secret": "ask('GET', '/user')",
        "plain": "ask('GET', '/user', host='other.example.com')",
        "address": f"tls('edge.example.net', host='{BY_ADDRESS}')",
        # What is not granted, this host under a granted address, and the proxy itself.
        "not granted": "tls('www.example.com')",
        "another": "tcp('8.8.8.8', 443)",
        "inwards": "resolve('rebind.example.com')",
        "this host": f"hello('{HOST}', 7002)",
        "the proxy": f"[tcp(one, {proxy.port}) for one in ('127.0.0.1', '{HOST}', '192.0.0.1')]",
        "udp": "udp('9.9.9.9', 123)",
        "refused": f"[hello('www.example.com', port) for port in {[*REFUSING]}]",
    }
    code = PROBES + HELLO + "answer = {" + ", ".join(f"{key!r}: {call}" for key, call in calls.items()) + "}\n"
    code += "time.sleep(2.5)\n"  # attested twice meanwhile: drift would end the run
    said, rows = run(world, code, GRANTS, files={"ca.pem": world.internet.certificate})
    assert (said["secret"][0], said["plain"][0]) == (200, 200), said
    assert said["address"] == "edge.example.net"
    assert carried(host) == [f"Bearer {SECRET}"]
    assert said["not granted"] in ("ECONNREFUSED", "gaierror"), said
    assert said["another"] == "ECONNREFUSED"
    assert said["inwards"] in ("gaierror -2", "gaierror -5"), said
    assert (said["this host"], said["refused"]) == ("ConnectionResetError", ["ConnectionResetError"] * 3), said
    assert said["the proxy"] == ["ECONNREFUSED"] * 3
    assert said["udp"] == "ECONNREFUSED"
    asked = proxy.asked
    assert {(API, 4443), (OTHER, 4443), (BY_ADDRESS, 443)} <= set(asked), asked
    assert not {place for place, _ in asked} - {API, OTHER, BY_ADDRESS, "93.184.216.35"}, asked
    told = {(row["target"], row["code"]) for row in rows if row["type"] == "denied"}
    codes = {1407: "proxy_auth", 1403: "proxy_refused", 1099: "proxy_malformed"}
    assert {(f"www.example.com:{port}/tls", code) for port, code in codes.items()} <= told, told
    assert ("www.example.com:7002/tls", "proxy_itself") in told, told
    place = f"the proxy 127.0.0.1:{proxy.port}: it "
    notes = sorted(row["reason"].removeprefix(place) for row in rows if row.get("reason", "").startswith(place))
    assert [note.split()[0] for note in notes] == ["answers", "refused", "refuses"], notes
    reached = {row["target"] for row in rows if row["type"] == "reached"}
    assert {"api.example.com:4443/tls", "other.example.com:4443/tls", f"{BY_ADDRESS}:443/tls"} == reached
    assert WORD not in json.dumps(world.rows())
    # Nothing of the run was ever at the host's interface.
    assert world.internet.leftovers() == []


def test_proxy_by_name_and_direct_hosts(world: InjectWorld, host: FakeHost, proxy: ConnectProxy) -> None:
    configured(world, proxy, more='by_name = true\ndirect = ["other.example.com"]\n', self_test=True)
    proxy.names["api.example.com"] = API
    code = "answer = [ask('GET', '/user')[0], ask('GET', '/user', host='other.example.com')[0]]\n"
    said, _ = run(world, code, grants())
    assert said == [200, 200]
    assert proxy.asked == [("api.example.com", 4443)]  # the self-test of the policy asked for nothing
    assert len(host.seen) == 2


ANY_NAME = """
unverified = ssl._create_unverified_context()
def asked(name, host=None, port=443, command=b"name"):
    try:
        with socket.create_connection((host or name, port), timeout=20) as plain:
            with unverified.wrap_socket(plain, server_hostname=name) as secure:
                secure.sendall(command + b"\\n")
                found = b""
                while piece := secure.recv(65536):
                    found += piece
                    if command == b"name":
                        break
                return found.decode() if command == b"name" else len(found)
    except OSError as e:
        return type(e).__name__
"""


def test_proxy_over_tls_looks_names_up(world: InjectWorld, host: FakeHost, secure: tuple[ConnectProxy, Path]) -> None:
    proxy, ca = secure
    inside = internet.entries(*((f"{name}.corp.example", "[443]", "tls") for name in ("git", "wiki")))
    calls = {
        "secret": "ask('GET', '/user')[0]",
        "git": "asked('git.corp.example')",
        "much": "asked('git.corp.example', command=b'give 3000000')",
        "addresses": "[resolve(name) for name in ('git.corp.example', 'wiki.corp.example')]",
        # Another granted name at the same address; a name and a port that are not granted.
        "wiki": "asked('wiki.corp.example', 'git.corp.example')",
        "not granted": "asked('hr.corp.example', 'git.corp.example')",
        "port": "tcp('git.corp.example', 444)",
        "no grant": "resolve('hr.corp.example')",
    }
    code = PROBES + ANY_NAME + "answer = {" + ", ".join(f"{key!r}: {call}" for key, call in calls.items()) + "}\n"
    code += "time.sleep(1.5)\n"  # attested meanwhile: drift would end the run
    configured(world, proxy, more='resolves = ["*.corp.example"]\n', ca=str(ca))
    proxy.names |= {f"{name}.corp.example": API for name in ("git", "wiki")}
    said, rows = run(world, code, grants() + inside, files={"ca.pem": world.internet.certificate})
    assert (said["secret"], said["git"], said["much"]) == (200, "git.corp.example", 3_000_000), said
    assert [[one.rpartition(".")[0] for one in found] for found in said["addresses"]] == [["192.31.196"]] * 2, said
    assert said["wiki"] == "wiki.corp.example", said
    assert (said["not granted"], said["port"]) == ("ConnectionResetError", "ECONNREFUSED"), said
    assert said["no grant"] == "gaierror -2", said
    assert {place for place, _ in proxy.asked} == {API, "git.corp.example", "wiki.corp.example"}, proxy.asked
    assert not [name for name in world.internet.resolver.names() if "corp" in name]
    denied = {(row["target"], row["code"]) for row in rows if row["type"] == "denied"}
    assert ("hr.corp.example:443/tls", "sni_not_granted") in denied, denied
    assert {"git.corp.example:443/tls"} < {row["target"] for row in rows if row["type"] == "reached"}
    # The control: without the key the host's resolver is asked, and knows no such name.
    configured(world, proxy, ca=str(ca))
    assert run(world, PROBES + "answer = resolve('git.corp.example')\n", inside)[0].startswith("gaierror")
    # A proxy whose certificate is another's gets neither credentials nor destinations.
    proxy.asked.clear()
    configured(world, proxy, ca=str(world.certificate))
    said, rows = run(world, "answer = ask('GET', '/user')\n", grants())
    assert said == [0, "ConnectionResetError"]
    assert "proxy_certificate" in {row["code"] for row in rows if row["type"] == "denied"}
    assert any("its certificate is not believed" in row.get("reason", "") for row in rows)
    assert proxy.asked == []


def test_dead_proxy_is_told_with_its_place(world: InjectWorld, host: FakeHost, proxy: ConnectProxy) -> None:
    configured(world, proxy, port=9)
    said, rows = run(world, "answer = ask('GET', '/user')\n", grants())
    assert said == [0, "ConnectionResetError"]
    assert ("api.example.com:4443/tls", "proxy_unreachable") in {
        (row["target"], row["code"]) for row in rows if row["type"] == "denied"
    }
    assert any("the proxy 127.0.0.1:9: it does not answer" in row.get("reason", "") for row in rows)
    assert not host.seen


STREAMS = """
def endless():
    while True:
        yield b"x" * 1000
        time.sleep(0.01)
line = http.client.HTTPSConnection("other.example.com", 4443, timeout=30, context=context)
line.request("POST", "/taken", endless(), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
answer = None
"""


def test_revoked_run_sends_nothing_more_by_the_proxy(world: InjectWorld, host: FakeHost, proxy: ConnectProxy) -> None:
    configured(world, proxy)
    proxy.last = 0.0
    code = HEAD + ASK + STREAMS + TAIL
    with live_runs.live(world, code, network="full", memory_mb=256, cpu_ms=60000, more=grants()) as one:
        began = until(lambda: proxy.last)
        until(lambda: proxy.last > began + 1)  # the control: it streams on
        (entry,) = registry.agents(registry.live(world.state / "runs"))
        raw = revoking.next_root(world, revoking.manifest_of(world, entry.payload_digest))
        world.internet.within("host", lambda: revoking.revoke(world, raw))
        enforced = time.monotonic()
        error = one.wait().error
        assert error is not None
        assert error.code == "revoked"
    # The gateway has no link to cut: its gates end with the agent.
    assert proxy.last < enforced + 0.5


def test_doctor_says_whether_the_proxy_answers(world: InjectWorld, proxy: ConnectProxy) -> None:
    def said(port: int) -> tuple[str, str, str]:
        asked = Config(proxy=ProxySettings(url=f"http://127.0.0.1:{port}"))
        return world.internet.within("host", lambda: doctor_network.interface(asked, None, 10))

    assert said(proxy.port)[0] == "ok"
    status, found, fix = said(9)
    assert status == "missing"
    assert "the proxy 127.0.0.1:9 does not answer" in found
    assert "[proxy] url in /" in fix


def test_doctor_checks_the_certificate(world: InjectWorld, secure: tuple[ConnectProxy, Path]) -> None:
    proxy, ca = secure

    def said(ca: Path) -> tuple[str, str, str]:
        settings = ProxySettings(url=f"https://localhost:{proxy.port}")
        asked = Config(proxy=settings, tls=TlsSettings(ca=(ca,)))
        return world.internet.within("host", lambda: doctor_network.interface(asked, None, 10))

    assert said(ca)[0] == "ok"
    status, found, fix = said(world.certificate)
    assert status == "missing"
    assert f"the proxy localhost:{proxy.port} is not believed" in found
    assert "as [tls] ca in /" in fix


def test_proxy_in_clear_is_not_taken_for_tls(tmp_path: Path) -> None:
    bundle = str(tls_servers.Certificates(tmp_path, "localhost").path)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            with listener.accept()[0] as client:
                client.recv(1)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        place = "127.0.0.1", listener.getsockname()[1]
        with pytest.raises(ProxyError) as refused:
            Proxy(*place, WORD, bundles=(bundle,)).connected("git.corp.example", 443, 20)
        thread.join()
    assert refused.value.code == "proxy_malformed"


def test_plain_entries_beside_a_proxy_are_refused(world: InjectWorld, proxy: ConnectProxy) -> None:
    configured(world, proxy)
    for listed, network, at in (
        (internet.entries(("api.example.com", "[443]", "tcp")), "full", "permissions.network[0]"),
        ("", "full", "resources.network"),
    ):
        package = world.sign(world.package({"main.py": ""}, network=network, more=listed))
        with pytest.raises(errors.NotEnforceableError, match="the operator's proxy") as refused:
            world.run(package)
        assert refused.value.where == at or at in str(refused.value.details), refused.value.details
        assert "take [proxy] out of config.toml" in refused.value.hint


def test_this_host_and_proxy_are_never_asked_for() -> None:
    plan: dict[str, list[str]] = {"names": [], "addresses": []}
    found = Destinations({**plan, "proxy": Proxy("203.0.113.9", 3128, by_name=True).plan()}, lambda name: [])
    for address in ("203.0.113.9", "127.0.0.1", "127.9.9.9", "::1"):
        with pytest.raises(ProxyError) as refused:
            found.connected("", [address], 443)
        assert refused.value.code == "proxy_itself"
    assert not is_local("93.184.216.34")
