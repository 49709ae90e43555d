"""The publish gate's server, in this process: what it carries, what it counts, and how a crowd waits."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from policy import errors
from sandbox.network.publish import connector, places, server
from sandbox.network.publish.counts import Count, Counts
from tests import loopback_server


class Served:
    """A server with one listener on an abstract socket, and an agent on this machine's loopback."""

    def __init__(self) -> None:
        self.agent = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self.listener.bind(f"\0publish-{os.getpid()}-{id(self)}")
        self.listener.listen(512)
        fd, self.counts = Counts.create(1)
        os.close(fd)
        port = self.agent.getsockname()[1]
        begin = functools.partial(connector.begin, "127.0.0.1")
        self.server = server.PublishServer(begin, {0: (self.listener, port)}, self.counts)
        self._ends = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends:
            self.server.turn(0.01)

    def connect(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(30)
        made.connect(self.listener.getsockname())
        return made

    def taken(self) -> socket.socket:
        self.agent.settimeout(30)
        made, _ = self.agent.accept()
        made.settimeout(30)
        return made

    def count(self, **wanted: int) -> Count:
        """Wait until the counts are so."""
        until = time.monotonic() + 30
        while self.counts.read(0) != Count(**wanted) and time.monotonic() < until:
            time.sleep(0.01)
        return self.counts.read(0)

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        self.server.close()
        self.listener.close()
        self.agent.close()
        self.counts.close()


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def say(one: socket.socket, words: bytes) -> None:
    one.sendall(words)
    one.shutdown(socket.SHUT_WR)


def to_end(one: socket.socket) -> bytes:
    return b"".join(iter(lambda: one.recv(1 << 16), b""))


def test_bytes_pass_both_ways_with_their_ends(served: Served) -> None:
    question, answer = os.urandom(3 << 20), os.urandom(5 << 20)
    with served.connect() as client, served.taken() as agent:
        asking = threading.Thread(target=say, args=(client, question))
        asking.start()
        assert to_end(agent) == question
        telling = threading.Thread(target=say, args=(agent, answer))
        telling.start()
        assert to_end(client) == answer
        asking.join()
        telling.join()
    wanted = {"connections": 1, "in_bytes": len(question), "out_bytes": len(answer)}
    assert served.count(**wanted) == Count(**wanted)


def test_agent_that_does_not_listen_is_counted(served: Served) -> None:
    served.agent.close()
    with served.connect() as client:
        assert client.recv(1) == b""
    assert served.count(refused=1) == Count(refused=1)


@pytest.mark.parametrize("side", ["client", "agent"])
def test_side_that_is_gone_ends_the_other(served: Served, side: str) -> None:
    client, agent = served.connect(), served.taken()
    gone, left = (client, agent) if side == "client" else (agent, client)
    gone.sendall(b"x")
    assert left.recv(1) == b"x"
    gone.close()
    assert left.recv(1) == b""
    with pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012 - the first may still be taken
        for _ in range(100):
            left.sendall(b"y" * 4096)
            time.sleep(0.01)
    left.close()


def test_crowd_waits_for_a_place(served: Served) -> None:
    clients = [served.connect() for _ in range(server.CONNECTIONS + 20)]
    agents = [served.taken() for _ in range(server.CONNECTIONS)]
    served.agent.settimeout(0.3)
    with pytest.raises(TimeoutError):
        served.agent.accept()
    for one in (*clients[: server.CONNECTIONS], *agents):
        one.close()
    late = [served.taken() for _ in range(20)]
    for agent in late:
        agent.sendall(b"z")
    assert [client.recv(1) for client in clients[server.CONNECTIONS :]] == [b"z"] * 20
    for one in (*late, *clients[server.CONNECTIONS :]):
        one.close()
    assert served.counts.read(0).refused == 0


def test_rate_beyond_the_walls_waits(served: Served) -> None:
    """A client more than the burst is served later, and none is refused."""
    for _ in range(server.BURST + 5):
        with served.connect() as client, served.taken() as agent:
            agent.close()
            assert client.recv(1) == b""
    wanted = server.BURST + 5
    assert served.count(connections=wanted) == Count(connections=wanted)


def test_loopback_port_is_taken_once() -> None:
    port = loopback_server.free_port()
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(errors.PublishError, match="in use") as refused, places.opened(f"127.0.0.1:{port}"):
            pass
        assert "name another port" in refused.value.hint
    with places.opened(f"127.0.0.1:{port}") as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
