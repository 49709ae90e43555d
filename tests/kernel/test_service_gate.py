"""The service gate as an agent under gVisor meets it, with `network = "off"`: models by HTTP, and nothing else.

What does not answer has its control beside it: the same call of the granted service does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from tests.kernel.conftest import leftovers
from tests.kernel.fake_provider import KEY, Provider
from tests.kernel.test_credentials import vault
from tests.kernel.world import HEAD, TAIL, World

MODELS = """[services.models]
allow = [{ provider = "local", models = ["test-*", "exact"] }, { provider = "fake", models = ["big-*"] }]
"""
PROVIDERS = """
[providers.local]
kind = "mock"

[providers.fake]
kind = "openai-compatible"
endpoint = "{url}"
secret = "fake"
input_price = 1_000_000

[providers.other]
kind = "mock"
"""
ASK = """
import errno, http.client, socket, time
def raw(method, path, body=None, headers=None, host="models.covenant"):
    line = http.client.HTTPConnection(host, timeout=20)
    data = None if body is None else json.dumps(body)
    line.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    return line.getresponse()
def ask(*args, **more):
    found = raw(*args, **more)
    text = found.read().decode()
    return [found.status, json.loads(text) if text.startswith("{") else text]
def chat(model, text="hello there", headers=None, **more):
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    return ask("POST", "/v1/chat/completions", body, headers)
def fault(call):
    try:
        call()
    except OSError as e:
        return type(e).__name__ if isinstance(e, socket.gaierror) else errno.errorcode.get(e.errno, str(e))
    return "none"
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, warm: Path, provider: Provider) -> Iterator[World]:
    """A world with three providers, of which the agents are granted two."""
    base = tmp_path_factory.mktemp("services")
    world = World(base, warm=warm)
    with (world.state / "config.toml").open("a") as stream:
        stream.write(f'[vault]\nkey = "{base}/vault.key"\n')
    vault(world, "init")
    vault(world, "put", "covenant-providers", "fake", secret=KEY + "\n")
    (world.state / "providers.toml").write_text(PROVIDERS.format(url=provider.url))
    yield world
    assert leftovers(world) == []


@pytest.fixture(autouse=True)
def _fresh(provider: Provider) -> None:
    provider.seen.clear()
    provider.status, provider.gap_seconds, provider.parts, provider.more = 200, 0.0, 3, {}
    provider.cut.clear()


def run(world: World, code: str, *, more: str = MODELS, **fields: Any) -> tuple[Any, Sequence[dict[str, Any]]]:
    """Return the agent's answer and the rows of its run."""
    before = len(world.rows())
    answer = world.run_code(HEAD + ASK + code + TAIL, more=more, **fields)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    return json.loads(answer.result.text), [row["kind"] for row in world.rows()[before:]]


def asked(rows: Sequence[dict[str, Any]], *fields: str) -> list[tuple[Any, ...]]:
    """The fields of each request that was passed on."""
    return [tuple(row[name] for name in fields) for row in rows if row["type"] == "model_asked"]


def test_model_answers_and_nothing_else_does(served: World) -> None:
    code = """
def named(name):
    return fault(lambda: socket.getaddrinfo(name, 80))
def reached(host, port, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_INET, kind) as s:
        s.settimeout(5)
        def go():
            s.connect((host, port))
            if kind == socket.SOCK_DGRAM:
                s.send(b"x" * 12)
                s.recv(100)
        return fault(go)
names = ["models.covenant", "x.covenant", "covenant", "example.com", "localhost.example", "MODELS.covenant"]
places = [("192.0.0.1", 80), ("192.0.0.1", 53), ("192.0.0.1", 443), ("192.0.0.1", 8443), ("192.0.0.3", 80),
          ("198.19.0.1", 80), ("198.19.0.16", 80), ("1.1.1.1", 80), ("1.1.1.1", 443), ("10.0.0.1", 80),
          ("169.254.169.254", 80)]
answer = {
    "chat": chat("test-1"), "refused": chat("gpt-5"), "other": chat("other/test-1"),
    "names": {name: named(name) for name in names},
    "places": {f"{host}:{port}": reached(host, port) for host, port in places},
    "datagram": reached("192.0.0.1", 53, socket.SOCK_DGRAM),
    "hosts": open("/etc/hosts").read(),
}
"""
    said, rows = run(served, code)
    status, document = said["chat"]
    assert (status, document["choices"][0]["message"]["content"]) == (200, "mock: hello there")
    usage = document["usage"]
    counts = (usage["prompt_tokens"], usage["completion_tokens"])
    assert asked(rows, "provider", "model", "status", "whole", "counted", "input_tokens", "output_tokens") == [
        ("local", "test-1", 200, True, True, *counts)
    ]
    assert [said["refused"][0], said["other"][0]] == [403, 403]
    assert said["names"].pop("models.covenant") == said["names"].pop("MODELS.covenant") == "none"
    assert set(said["names"].values()) == {"gaierror"}
    assert said["places"].pop("192.0.0.1:80") == "none"
    assert said["places"].pop("192.0.0.3:80") == "EHOSTUNREACH"  # of the link, on which there is none but the gateway
    assert set(said["places"].values()) == {"ECONNREFUSED"}
    assert said["datagram"] == "ECONNREFUSED"
    denied = {(row["layer"], row["code"], row["grant"]) for row in rows if row["type"] == "denied"}
    assert {
        ("model", "model_not_granted", "services.models"),
        ("packet", "not_granted", "permissions.network"),
    } <= denied


def test_key_is_added_outside_and_never_seen(served: World, provider: Provider) -> None:
    code = """
mine = {"Authorization": "Bearer mine", "x-api-key": "mine", "Cookie": "a=b", "X-Other": "1", "Proxy-Connection": "x"}
first = raw("POST", "/v1/chat/completions", {"model": "big-1", "messages": []}, mine)
body = first.read().decode()
found = [body, str(first.getheaders())]
for folder, _, files in os.walk("/"):
    if not folder.startswith(("/proc", "/sys", "/usr", "/lib", "/dev")):
        for name in files:
            try:
                found.append(open(os.path.join(folder, name), errors="replace").read())
            except OSError:
                pass
found.append(str(dict(os.environ)))
answer = {"status": first.status, "body": body, "cookie": first.getheader("Set-Cookie"), "all": "".join(found)}
"""
    said, rows = run(served, code)
    (seen,) = provider.seen
    assert said["status"] == 200
    assert seen["headers"]["authorization"] == f"Bearer {KEY}"
    assert not {"x-api-key", "cookie", "x-other", "proxy-connection"} & set(seen["headers"])
    assert seen["path"] == "/v1/chat/completions"
    assert KEY not in said["all"]
    assert said["cookie"] is None
    assert asked(rows, "provider", "input_tokens", "output_tokens", "counted", "credits") == [("fake", 11, 7, True, 11)]
    assert KEY not in json.dumps(served.rows())


def test_key_is_not_told_by_a_refusal(served: World, provider: Provider) -> None:
    provider.status = 401
    said, rows = run(served, 'answer = chat("big-1")')
    assert (said[0], KEY in json.dumps(said)) == (502, False)
    assert [row["code"] for row in rows if row["type"] == "denied"] == ["key_refused"]


def test_stream_comes_part_by_part(served: World, provider: Provider) -> None:
    provider.gap_seconds = 0.4
    code = """
found = raw("POST", "/v1/chat/completions", {"model": "big-1", "stream": True, "messages": []})
times, lines = [], []
begun = time.monotonic()
while line := found.readline():
    if line.strip():
        times.append(time.monotonic() - begun)
        lines.append(line.decode().strip())
answer = {"lines": lines, "times": times, "type": found.getheader("Content-Type")}
"""
    said, rows = run(served, code)
    assert said["type"] == "text/event-stream"
    assert [json.loads(one[6:])["choices"][0]["delta"]["content"] for one in said["lines"][:-1]] == [
        "part0 ", "part1 ", "part2 "
    ]  # fmt: skip
    assert said["lines"][-1] == "data: [DONE]"
    assert said["times"][0] < said["times"][-1] - 0.5  # the first came while the provider still spoke
    # The gate asked for the counts, and the agent did not get them.
    assert provider.seen[0]["body"]["stream_options"] == {"include_usage": True}
    assert asked(rows, "stream", "input_tokens", "output_tokens", "counted", "whole") == [(True, 5, 3, True, True)]


def test_run_without_its_provider_is_refused(served: World) -> None:
    more = '[services.models]\nallow = [{ provider = "absent", models = ["x"] }]\n'
    answer = served.package({"main.py": HEAD + ASK + 'answer = ask("GET", "/v1/models")' + TAIL}, more=more)
    with pytest.raises(errors.NotEnforceableError) as refused:
        served.run(served.sign(answer))
    assert "providers.toml" in refused.value.hint
    with (served.state / "providers.toml").open("a") as stream:
        stream.write('\n[providers.absent]\nkind = "mock"\n')
    said, _ = run(served, 'answer = ask("GET", "/v1/models")', more=more)
    assert [one["id"] for one in said[1]["data"]] == ["x"]
