"""The socket on which gVisor says that the container started, with a peer that behaves and with peers that do not."""

from __future__ import annotations

import json
import select
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.kernel.runsc.start_trace import StartTrace

STARTED = struct.pack("<HHI", 8, 1, 0)


@pytest.fixture
def trace(tmp_path: Path) -> Iterator[StartTrace]:
    made = StartTrace(tmp_path)
    yield made
    made.close()


def peer(trace: StartTrace) -> socket.socket:
    config = json.loads(trace.config.read_text())
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.connect(config["trace_session"]["sinks"][0]["config"]["endpoint"])
    assert trace.poll() is False
    return other


def ready(trace: StartTrace) -> bool:
    return bool(select.select([trace.fileno()], [], [], 0)[0])


def test_handshake_then_start(trace: StartTrace) -> None:
    with peer(trace) as other:
        other.send(b"\x08\x01")
        assert trace.poll() is False
        assert other.recv(10) == b"\x08\x01"
        assert not ready(trace)
        other.send(STARTED)
        assert ready(trace)
        assert trace.poll() is True


@pytest.mark.parametrize("message", [b"x", struct.pack("<HHI", 8, 2, 0), STARTED[:7]])
def test_another_message_is_no_start(trace: StartTrace, message: bytes) -> None:
    with peer(trace) as other:
        other.send(b"\x08\x01")
        trace.poll()
        other.send(message)
        assert trace.poll() is False


def test_sandbox_that_dies_before_it_is_greeted_is_no_error_here(trace: StartTrace) -> None:
    """Its exit is reported elsewhere; a broken pipe from here would be taken for the machine's failure."""
    other = peer(trace)
    other.send(b"\x08\x01")
    other.close()
    assert trace.poll() is False
    assert not ready(trace), "a dead connection must not keep the exchange turning"
