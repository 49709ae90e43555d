"""Check for any exchange in any pieces: the gate forwards in order, and forwards no hello before it is judged."""

from __future__ import annotations

import contextlib
import select
import socket

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.network.tls.connection import Connection, Stage
from sandbox.network.tls.plan import TlsPlan
from sandbox.network.tls.splice import Pipes
from tests import hello_kit as kit

NAME, OTHER = "api.example.com", "other.example.com"
PLAN = TlsPlan({"names": [{"pattern": NAME, "ports": [[443, 443]]}], "addresses": []})
_AGENT = (
    kit.hello(NAME), kit.hello(NAME), kit.hello(NAME), kit.hello(OTHER), kit.hello(None),
    kit.hello(NAME, kit.extension(kit.ECH, b"")), kit.record(b"\x01", kind=20), kit.record(b"early data", kind=23),
    kit.record(b"\x01\x70", kind=21), b"garbage", b"",
)  # fmt: skip
_SERVER = (
    kit.server_hello(), kit.server_hello(retry=True), kit.server_hello(retry=True), kit.record(b"\x01\x70", kind=21),
    kit.record(b"\x01", kind=20), kit.record(b"secret", kind=23), b"HTTP/1.1 400\r\n", b"",
)  # fmt: skip
# The next speaker, the data, and the number of pieces.
_SAYINGS = st.lists(
    st.one_of(
        st.tuples(st.just("agent"), st.sampled_from(_AGENT), st.integers(1, 4)),
        st.tuples(st.just("server"), st.sampled_from(_SERVER), st.integers(1, 4)),
    ),
    max_size=8,
)


def _serve(connection: Connection) -> None:
    """Run the connection until a wait ends without an event."""
    for _ in range(1000):
        wanted = connection.interest()
        poll = select.poll()
        for fd, mask in wanted.items():
            poll.register(fd, mask)
        if not poll.poll(0):
            return
        connection.turn(0)
    raise AssertionError("it turns in vain")


def _heard(far: socket.socket) -> bytes:
    out = b""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while more := far.recv(1 << 16):
            out += more
    return out


@given(st.just([("agent", kit.hello(NAME), 1)]) | st.just([]), _SAYINGS)
@settings(max_examples=300, deadline=None)
def test_gate_carries_in_order_and_nothing_before_its_time(
    first: list[tuple[str, bytes, int]], sayings: list[tuple[str, bytes, int]]
) -> None:
    pipes, refused = Pipes(2), []
    near, agent = socket.socketpair()
    upstream, server = socket.socketpair()
    with agent, server, upstream:
        for one in (near, agent, upstream, server):
            one.setblocking(False)
        connection = Connection(
            near,
            "192.0.2.1",
            443,
            plan=PLAN,
            pipes=pipes,
            refused=lambda name, code: refused.append(code),
            now=0,
            connect=lambda host, port: upstream,
        )
        sent = {"agent": b"", "server": b""}
        heard = {"agent": b"", "server": b""}
        for who, data, pieces in (*first, *sayings):
            size = -(-len(data) // pieces) or 1
            for at in range(0, len(data), size):
                with contextlib.suppress(OSError):
                    {"agent": agent, "server": server}[who].sendall(data[at : at + size])
                    sent[who] += data[at : at + size]
                _serve(connection)
                heard["server"] += _heard(server)
                heard["agent"] += _heard(agent)
                assert sent["agent"].startswith(heard["server"])
                assert sent["server"].startswith(heard["agent"])
                if kit.server_hello() not in sent["server"]:
                    # No server has accepted a hello yet, so only judged hellos may have reached it.
                    assert OTHER.encode() not in heard["server"]
                    assert b"garbage" not in heard["server"]
                    assert heard["server"].count(kit.hello(NAME)) <= 2
                if refused:
                    assert connection.stage is Stage.CLOSED
        assert len(refused) <= 1
        if connection.stage is not Stage.CLOSED:
            connection.close(reset=False)
    pipes.close()
