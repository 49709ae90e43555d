"""A call to another agent is read at the gate as the daemon reads it, and a card that comes in parts is whole."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from sandbox.network.gate import prefork
from sandbox.network.service.a2a import messages
from sandbox.network.service.a2a.server import AgentEndpoint
from sandbox.network.service.shapes import RefusedError

CALL = {"jsonrpc": "2.0", "id": 7, "method": "message/send", "params": {"message": {"role": "user"}}}
CARD = json.dumps({"name": "w" * 9_000, "capabilities": {"pushNotifications": True}, "security": [{}]}).encode()


def test_call_is_written_anew() -> None:
    found = messages.read(json.dumps({**CALL, "more": 1}).encode())
    assert (found.number, found.method, json.loads(found.message)) == (7, "message/send", CALL)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32-le", "utf-8-sig"])
def test_call_is_utf_8_alone(encoding: str) -> None:
    # The sealed gate cannot load another codec.
    with pytest.raises(RefusedError) as refused:
        messages.read(json.dumps(CALL).encode(encoding))
    assert refused.value.code == "malformed"


@pytest.mark.parametrize(
    "params",
    [
        '{"configuration": {}, "configuration": {"pushNotificationConfig": {}}}',
        '{"a": NaN}',
        '{"a": 1e999}',
        '{"a": ' + "[" * 70 + "]" * 70 + "}",
        '{"a": [' + "0," * 40_000 + "0]}",
    ],
)
def test_call_that_the_daemon_refuses_stays(params: str) -> None:
    with pytest.raises(RefusedError) as refused:
        messages.read(b'{"jsonrpc": "2.0", "id": 1, "method": "message/send", "params": %b}' % params.encode())
    assert refused.value.code == "malformed"


LATE = """
import sys
sys.path += sys.argv[1:]
from sandbox.network.service.a2a import messages
from sandbox.network.service.shapes import RefusedError
known = set(sys.modules)
bad = [b"[", b"\\xff", b'{"\\xc3\\xa9": 1, "\\xc3\\xa9": 2}', b"NaN"]
bad += [b"[" * 99 + b"]" * 99, b"1" * 5000, b"[" + b"0," * 40000]
for body in bad:
    try:
        messages.read(body)
        raise SystemExit(f"{body[:20]} was taken")
    except RefusedError as e:
        messages.refusal(e)
print(*sorted(set(sys.modules) - known))
"""


def test_refusal_loads_no_module_late() -> None:
    # A sealed gate cannot: the agent would get 500.
    command = [sys.executable, "-I", "-B", "-c", LATE, *prefork.roots()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd="/")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


class Daemon:
    """A daemon whose answers come in parts; it is the response too."""

    status = 200

    def __init__(self, parts: list[bytes]) -> None:
        self.parts, self.peer, self.content = parts, self, self
        self.kind = "a2a"
        self.ended: list[int] = []

    async def ask_agent(self, path: str, headers: dict[str, str], body: bytes) -> Any:
        return self

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def iter_any(self) -> Any:
        for one in self.parts:
            yield one

    def begin_agent(self, agent: str, method: str, digest: str) -> int:
        return 0

    def end_agent(self, entry: int, status: int, size: int) -> None:
        self.ended.append(size)


class Asked:
    """A request for a card."""

    method, raw_path, path = "GET", "/one/.well-known/agent-card.json", "/one/.well-known/agent-card.json"
    headers: Mapping[str, str] = types.MappingProxyType({})


@pytest.mark.parametrize(
    ("parts", "status"),
    [([CARD[:10], CARD[10:5_000], CARD[5_000:]], 200), ([CARD[:10]], 502), ([b" " * (1 << 20), CARD], 502)],
)
def test_card_in_parts_is_read_whole(parts: list[bytes], status: int) -> None:
    daemon: Any = Daemon(parts)
    endpoint = AgentEndpoint(["one"], [daemon], daemon, daemon)
    asked: Any = Asked()
    answer: Any = asyncio.run(endpoint.handle(asked))
    assert answer.status == status
    assert daemon.ended == [sum(map(len, parts))]
    if status == 200:
        said = json.loads(answer.body)
        assert said["url"] == "http://agents.covenant/one"
        assert not said["capabilities"]["pushNotifications"]
        assert "security" not in said
