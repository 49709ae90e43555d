"""Secrets that the gate adds, as an agent under gVisor meets them: the host gets them, and the agent never does.

Each refusal stands beside a request of the same run that is granted, and arrives with the secret.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.inject_kit import CHUNKED, PROBES, post, statuses
from tests.kernel import fake_host, internet, tls_servers
from tests.kernel.conftest import leftovers
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.test_credentials import family, memory, vault
from tests.kernel.world import HEAD, ROOT, TAIL

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


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, warm: Path, net: Any) -> Iterator[InjectWorld]:
    """A world whose vault holds the secret of the agent `probe`."""
    base = tmp_path_factory.mktemp("inject")
    made = InjectWorld(base, warm=warm)
    internet.configured(made, net[0])
    made.certificate = net[2]
    with (made.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{base}/vault.key"\n[tls]\nca = ["{net[2]}"]\n')
    vault(made, "init")
    vault(made, "put", "probe", "github", secret=SECRET + "\n")
    yield made
    assert leftovers(made) == []
    assert net[0].leftovers() == []


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


def test_secret_is_added_at_gate(world: InjectWorld, host: FakeHost) -> None:
    code = """
answer = {
    "plain": ask("GET", "/user", headers={"Authorization": "Bearer mine", "X-Mine": "kept"}),
    "other": ask("GET", "/user", headers={"Authorization": "Bearer mine"}, host="other.example.com"),
    "env": dict(os.environ), "ca": open("/run/covenant/ca.pem").read(),
}
"""
    said, rows = run(world, code, grants(more=', env = "GITHUB_TOKEN"'))
    assert [said["plain"][0], said["other"][0]] == [200, 200], said
    # The agent's own is taken away, and a host without a secret is passed through unread.
    assert carried(host) == [f"Bearer {SECRET}", "Bearer mine"]
    assert ("x-mine", "kept") in host.seen[0]["headers"]
    assert said["env"]["GITHUB_TOKEN"] == "covenant-placeholder"
    assert said["ca"].count("BEGIN CERTIFICATE") > 1
    assert SECRET not in json.dumps(said)
    (used,) = [row for row in rows if row["type"] == "request_injected"]
    assert (used["host"], used["name"], used["method"], used["path"], used["status"], used["whole"]) == (
        NAME, "github", "GET", "/user", 200, True
    )  # fmt: skip
    (first,) = [row for row in rows if row["type"] == "credential_injected"]
    assert (first["name"], first["version"], first["host"]) == ("github", 1, NAME)
    assert SECRET not in json.dumps(world.rows())


# --- what a hostile agent sends -----------------------------------------------------------------------------------


def test_hostile_requests_get_no_secret(world: InjectWorld, host: FakeHost) -> None:
    sent = json.dumps([data for _, data, _, _ in PROBES])
    chunk = post(CHUNKED, "ZZ\r\nhi\r\n0\r\n\r\n")
    code = f"""
probes = json.loads({sent!r})
answer = {{"raw": [send(one.encode("latin-1")) for one in probes]}}
answer["chunk"] = send({chunk!r}.encode())
granted = probes[0].encode()
answer["sni"] = send(granted, sni="other.example.com")
try:
    with socket.create_connection(("api.example.com", 4443), timeout=20) as line:
        line.sendall(granted)
        answer["clear"] = said(line).decode("latin-1")
except OSError as e:
    answer["clear"] = type(e).__name__
with opened(alpn=["h2", "http/1.1"]) as line:
    answer["alpn"] = [line.selected_alpn_protocol(), line.getpeercert()["subjectAltName"]]
with opened(alpn=["h2"]) as line:
    answer["h2"] = line.selected_alpn_protocol()
try:
    opened(verify=ssl.create_default_context(cafile="/workspace/ca.pem")).close()
    answer["real"] = "taken"
except ssl.SSLError as e:
    answer["real"] = e.verify_message
"""
    more = grants(["GET", "POST"], ["/user", "/repos/*"])
    ca = world.certificate.read_text()
    said, rows = run(world, RAW + code, more, files={"ca.pem": ca})
    found = {name: statuses(text) for (name, _, _, _), text in zip(PROBES, said["raw"], strict=True)}
    assert found == {name: gives for name, _, gives, _ in PROBES}
    # The one of another SNI passed unread to the other name, with what the agent wrote: nothing.
    with_secret = [one for one in host.seen if ("authorization", f"Bearer {SECRET}") in one["headers"]]
    assert len(with_secret) - _is_begun(with_secret) == sum(count for _, _, _, count in PROBES)
    assert {one["path"].partition("?")[0] for one in with_secret} == {"/user", "/repos/a/b"}
    assert {one["method"] for one in with_secret} == {"GET", "POST"}
    assert carried(host) == [f"Bearer {SECRET}"] * len(with_secret)
    names = {name for one in host.seen for name, _ in one["headers"]}
    assert not names & {"x-http-method-override", "x-original-url", "x-rewrite-url"}
    assert 200 not in statuses(said["chunk"])
    assert statuses(said["sni"]) == [200]
    assert said["clear"] in ("", "ConnectionResetError")
    assert said["alpn"] == ["http/1.1", [["DNS", NAME]]]
    assert said["h2"] is None
    assert "self" in said["real"] or "unable" in said["real"], said["real"]
    assert SECRET not in json.dumps(said)
    codes = {(row["code"], row["grant"]) for row in rows if row["type"] == "denied" and row["layer"] == "inject"}
    assert {
        ("request_not_granted", "permissions.network.inject"), ("path_refused", None), ("host_refused", None),
        ("frame_refused", None),
    } <= codes  # fmt: skip


def _is_begun(seen: Sequence[dict[str, Any]]) -> int:
    """The number of requests with a broken body that the host took for whole ones."""
    return sum(one["body"] == b"ZZ" for one in seen)


# --- what a host answers ------------------------------------------------------------------------------------------


def test_answers_come_without_secrets(world: InjectWorld, host: FakeHost) -> None:
    code = """
def headed(path, **more):
    found = raw("GET", path, **more)
    return [found.status, sorted(map(list, found.getheaders())), found.read().decode("latin-1")]
stream = raw("GET", "/stream")
times, begun = [], time.monotonic()
lines = []
while line := stream.readline():
    lines.append(line.decode())
    times.append(time.monotonic() - begun)
tokens = json.loads(ask("GET", "/token")[1])
form = ask("GET", "/formtoken")[1]
bearer = {"Authorization": "Bearer " + tokens["access_token"]}
kind = {"Content-Type": "application/x-www-form-urlencoded"}
refresh = "grant_type=refresh_token&refresh_token=" + tokens["refresh_token"]
upload = os.urandom(3 << 20)
kept = http.client.HTTPSConnection("api.example.com", 4443, timeout=30, context=context)
def again(path, method="GET", body=None, **more):
    kept.request(method, path, body, **more)
    found = kept.getresponse()
    return [found.status, len(found.read())]
answer = {
    "echo": headed("/echo"), "split": ask("GET", "/split"), "elsewhere": headed("/elsewhere"),
    "zipped": ask("GET", "/zipped"), "upgrade": ask("GET", "/upgrade"), "lines": lines, "times": times,
    "tokens": tokens, "form": form,
    "by token": ask("GET", "/user", headers=bearer), "refreshed": ask("POST", "/taken", refresh, kind),
    "elsewhere token": ask("GET", "/user", headers=bearer, host="other.example.com"),
    "kept": [
        again("/big"), again("/big", "HEAD"), again("/taken", "POST", upload), again("/close"),
        again("/taken", "POST", iter([b"a" * 100, b"b" * 50]), encode_chunked=True,
              headers={"Transfer-Encoding": "chunked"}),
        again("/taken", "POST", b"c" * 2000, headers={"Expect": "100-continue"}),
    ],
}
"""
    said, rows = run(world, code, grants())
    text = json.dumps(said)
    for hidden in (SECRET, SECRET[4:24], fake_host.TOKEN, fake_host.REFRESH):
        assert hidden not in text
    status, headers, body = said["echo"]
    names = {name.lower() for name, _ in headers}
    assert (status, "set-cookie" in names, "x-echo" in names) == (200, False, True)
    assert json.loads(body)["given"] == "Bearer " + "*" * len(SECRET)
    assert said["split"] == [200, f"<p>Bearer {'*' * len(SECRET)}</p>"]
    assert ["Location", "https://other.example.com:4443/landed"] in said["elsewhere"][1]
    assert [said["zipped"][0], said["upgrade"][0]] == [502, 502]
    events = [line for line in said["lines"] if line.strip()]
    assert events == [f"data: part{n} Bearer {'*' * len(SECRET)}\n" for n in range(3)]
    assert said["times"][0] < said["times"][-1] - 0.5  # the first came while the host still spoke
    assert said["tokens"]["access_token"].startswith("covenant-")
    assert len(said["tokens"]["refresh_token"]) == len(fake_host.REFRESH)
    assert "access_token=covenant-" in said["form"]
    by = {one["path"]: one for one in host.seen}
    landed = [value for one in host.seen for name, value in one["headers"] if name == "authorization"]
    # At its own host a placeholder is the token again, elsewhere it is nothing.
    assert f"Bearer {fake_host.TOKEN}" in landed
    assert f"Bearer {said['tokens']['access_token']}" in landed
    refreshes = [one["body"] for one in host.seen if b"grant_type" in one["body"]]
    assert refreshes == [f"grant_type=refresh_token&refresh_token={fake_host.REFRESH}".encode()]
    assert said["kept"] == [[200, 1 << 20], [200, 0], [200, 7], [200, 4], [200, 3], [200, 4]]
    assert by["/big"]["method"] == "HEAD"
    taken = [len(one["body"]) for one in host.seen if one["path"] == "/taken"]
    assert taken == [len(refreshes[0]), 3 << 20, 150, 2000]
    codes = [row["code"] for row in rows if row["type"] == "denied" and row["layer"] == "inject"]
    assert sorted(codes) == ["answer_refused", "host_failed"]


# --- where the secret is not --------------------------------------------------------------------------------------


def test_memory_of_sandbox_has_no_secret(world: InjectWorld, host: FakeHost) -> None:
    found: dict[str, Any] = {}

    def looked(number: int) -> None:
        if number == 1:
            needles = [SECRET.encode(), SECRET[4:24].encode(), base64.b64encode(SECRET.encode())[4:-4]]
            for pid in family(os.getpid())[1:]:
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                who = (
                    "gate" if b"sandbox.network.inject" in name else "gates" if b"sandbox.network" in name else "runsc"
                )
                hits = sum(needle in region for region in memory(pid) for needle in needles)
                found[who] = found.get(who, 0) + hits
                found[f"{who} processes"] = found.get(f"{who} processes", 0) + 1
            vault(world, "rotate", "probe", "github", secret="ghp_rotated/another-secret-0123")
        else:
            vault(world, "rm", "probe", "github")

    host.hook = looked
    code = """
tries = ["/echo", "/split", "/admin/../echo", "/echo?x=" + "y" * 500, "/zipped", "/elsewhere"]
hostile = 0
kept = None
for number in range(1000):
    try:
        kept = kept or http.client.HTTPSConnection("api.example.com", 4443, timeout=30, context=context)
        mine = {"Authorization": "Bearer %d" % number, "X-Odd": chr(33 + number % 90) * 40}
        kept.request(("GET", "POST", "TRACE", "PUT")[number % 4], tries[number % len(tries)], None, mine)
        found = kept.getresponse()
        hostile += 1
        found.read()
        if found.getheader("Connection") == "close":
            kept.close()
            kept = None
    except (OSError, http.client.HTTPException):
        kept = None
answer = [hostile, *(ask("GET", path)[0] for path in ("/hook?1", "/user?2", "/hook?3", "/user?4"))]
"""
    said, rows = run(world, code, grants(), cpu_ms=240000)
    assert said == [said[0], 200, 200, 200, 403]
    assert said[0] > 900
    assert found["runsc processes"] >= 1
    assert found["runsc"] == found["gates"] == 0
    assert found["gate"] > 0  # the control: where it is, by the same means
    by = {one["path"]: dict(one["headers"])["authorization"] for one in host.seen}
    assert by["/hook?1"] == f"Bearer {SECRET}"
    # The request after a rotation has the new one, the one after a removal none.
    assert by["/user?2"] == by["/hook?3"] == "Bearer ghp_rotated/another-secret-0123"
    assert "/user?4" not in by
    versions = [(row["version"], row["host"]) for row in rows if row["type"] == "credential_injected"]
    assert versions == [(1, NAME), (2, NAME)]
    assert "secret_absent" in {row["code"] for row in rows if row["type"] == "denied"}
    vault(world, "put", "probe", "github", secret=SECRET)


# --- what the page says -------------------------------------------------------------------------------------------


def test_entry_of_page_works(world: InjectWorld, host: FakeHost) -> None:
    page = (ROOT / "docs" / "credentials.md").read_text()
    (entry,) = [one for one in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "inject" in one]
    written = entry.replace("api.github.com", NAME).replace("[443]", f"[{PORT}]")
    code = 'answer = [ask("GET", "/user")[0], ask("GET", "/admin")[0], os.environ["GITHUB_TOKEN"]]'
    said, _ = run(world, code, written)
    assert said == [200, 403, "covenant-placeholder"]
    assert carried(host) == [f"Bearer {SECRET}"]
