"""Places in JSON, and what an ssh-agent answers."""

from __future__ import annotations

import json
import struct
from typing import Any

from covenant.keys import ssh_agent
from policy.manifest.tools import json_places
from tests import signing_kit as kit
from tests.fuzz.drive import Target


def places(raw: bytes) -> str:
    """The scanner that places findings in JSON: what it cuts out is the value that JSON's reader finds there."""
    text = raw.decode("utf-8", "replace")
    found = json_places.scan(text)
    for start, end in found.values.values():
        assert 0 <= start <= end <= len(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return "of broken text"
    if found.duplicates:
        return "of doubled keys"
    for path, (start, end) in list(found.values.items())[:40]:
        value = document
        for part in path:
            value = value[part]
        assert json.dumps(json.loads(text[start:end])) == json.dumps(value), path
    return f"of {min(len(found.values), 40)} values"


class _Wire:
    """The agent's end of the socket: one answer."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def settimeout(self, seconds: float) -> None:
        """There is nothing to wait for."""

    def sendall(self, data: bytes) -> None:
        """The request is of no interest."""

    def recv(self, size: int) -> bytes:
        part, self.answer = self.answer[:size], self.answer[size:]
        return part


def identities(raw: bytes) -> str:
    """The keys that an ssh-agent says it has."""
    agent = ssh_agent.Agent.__new__(ssh_agent.Agent)
    wire: Any = _Wire(raw)
    agent.path, agent._socket = "/agent", wire
    found = agent.identities()
    for identity in found:
        assert len(identity.key.raw) == 32
        assert identity.fingerprint.startswith("SHA256:")
    return f"{min(len(found), 3)} keys"


def _answer() -> bytes:
    def string(data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + data

    keys = [(string(b"ssh-ed25519") + string(kit.public(n).raw), b"me%d" % n) for n in (1, 2)]
    keys.append((string(b"ssh-rsa") + string(b"\x01\x00\x01"), b"old"))
    body = b"\x0c" + struct.pack(">I", len(keys)) + b"".join(string(blob) + string(comment) for blob, comment in keys)
    return struct.pack(">I", len(body)) + body


TARGETS = (
    Target(
        "json places",
        places,
        lambda: (b'{"a": [1, {"b": "c"}], "d": null}', b"[[], {}]"),
        (b'"a":', b"\\u0041"),
        share=8,
    ),
    Target("ssh-agent", identities, lambda: (_answer(),), (b"\0\0\0\x0b", b"ssh-ed25519", b"\xff" * 4), share=6),
)
