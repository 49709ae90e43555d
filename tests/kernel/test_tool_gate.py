"""The tool gate in its real process, sealed: calls that must be refused, and servers that die and lie."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from policy import data
from policy.manifest import parse
from policy.rules import nine
from sandbox.network.tools import gate, wire
from sandbox.network.tools.ledger import StartedServer, ToolTerms
from tests import tool_call_kit as kit
from tests.kernel.live_runs import until

# More calls than the table has.
MANIFEST = kit.MANIFEST.replace("calls_per_minute = 5\n", "")


class Played:
    """A tool gate, and the test as its service gate, its supervisor and its server."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Mapping[str, Any]]] = []
        self.starts: list[str] = []
        self.server: tuple[int, int] | None = None
        grants = nine.requested(parse.parse(MANIFEST.encode()), roles=data.roles())
        log = lambda kind, row: self.rows.append((kind, row))  # noqa: E731 - one line
        self.terms = ToolTerms(grants.canonical(), json.dumps(kit.DOCUMENT), "hello", log, self.start)
        self.number = 0

    def start(self, alias: str) -> StartedServer:
        self.starts.append(alias)
        self.close()
        (stdin, to_server), (from_server, stdout), (read, write) = (os.pipe() for _ in range(3))
        os.close(write)
        self.server = stdin, stdout
        return StartedServer(to_server, from_server, read)

    def close(self) -> None:
        for fd in self.server or ():
            os.close(fd)
        self.server = None


class Line:
    """The service gate's end."""

    def __init__(self, played: Played, opened: gate.ToolGate) -> None:
        self.played, self.opened, self.socket = played, opened, opened.line
        self.socket.settimeout(0.05)

    def put(self, raw: bytes, alias: str = "") -> int:
        self.played.number += 1
        name = alias.encode()
        head = wire.REQUEST.pack(self.played.number, wire.MESSAGE, len(name), 0, len(raw))
        left = memoryview(head + name + raw)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except TimeoutError:
                assert self.opened.serve() is None
        return self.played.number

    def get(self) -> tuple[int, bytes]:
        head = self._exactly(wire.REPLY.size)
        number, said, size = wire.REPLY.unpack(head)
        assert number <= self.played.number
        return said, self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        data = b""
        for _ in range(600):
            assert self.opened.serve() is None
            try:
                while len(data) < size:
                    more = self.socket.recv(size - len(data))
                    assert more, "the gate is there"
                    data += more
                return data
            except TimeoutError:
                continue
        raise AssertionError("the gate does not answer")

    def call(self, name: str, arguments: Any) -> dict[str, Any]:
        self.ask("tools/call", name=name, arguments=arguments)
        said, reply = self.get()
        assert said == wire.ANSWER, (name, arguments)
        found: dict[str, Any] = json.loads(reply)
        return found

    def ask(self, method: str, **params: Any) -> int:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return self.put(json.dumps(message).encode(), "fs")

    def look(self, seconds: float = 5) -> bytes:
        """Serve the gate until the server has something to read."""
        for _ in range(int(seconds / 0.05)):
            assert self.opened.serve() is None
            if self.played.server is not None:
                os.set_blocking(self.played.server[0], False)
                try:
                    return os.read(self.played.server[0], 1 << 20)
                except BlockingIOError:
                    pass
            try:
                assert self.socket.recv(1, socket.MSG_PEEK), "the gate is there"
                return b""
            except TimeoutError:
                continue
        return b""


@pytest.fixture(scope="module")
def line() -> Iterator[Line]:
    played = Played()
    with gate.open(played.terms) as opened:
        opened.process.ready(120)
        yield Line(played, opened)
    played.close()


def test_every_call_of_table_is_refused_by_sealed_gate(line: Line) -> None:
    cases = list(kit.refused())
    assert len(cases) > 200
    for case in cases:
        if case.name == "size of all":
            continue  # the service gate takes no such message
        found = line.call(case.tool, case.arguments)
        assert found.get("error") or found["result"]["isError"], case.name
    assert line.played.starts == [], "nothing was started"
    assert {kind for kind, _ in line.played.rows} == {"tool_refused"}


@pytest.mark.parametrize(
    "raw", [b"", b"\xff" * 9, b"[" * 70_000, b'{"a":' * 5000, b"[" + b"0," * 40_000 + b"0]", b"nul"]
)
def test_no_message_is_answered_and_survived(line: Line, raw: bytes) -> None:
    line.put(raw)
    assert line.get()[0] == wire.MALFORMED
    line.ask("ping")
    assert line.get()[0] == wire.ANSWER


def test_server_that_dies_and_floods_ends_calls_and_no_more(line: Line) -> None:
    for output in (b"", b"x" * 100, b"no json\n", b'{"jsonrpc":"2.0","id":true,"result":{}}\n' * 3):
        line.ask("tools/call", name="open", arguments={})
        assert b"initialize" in line.look()
        assert line.played.server is not None
        os.write(line.played.server[1], output)
        line.played.close()
        said, reply = line.get()
        assert (said, json.loads(reply)["result"]["isError"]) == (wire.ANSWER, True)
        ends = [row["code"] for kind, row in line.played.rows if kind == "tool_answered"]
        assert ends[-1] == "server_ended"
    assert line.call("open", {})["result"]["isError"], "it is not started at once again and again"
    assert line.played.starts == ["fs"] * 4


class PlayedDaemon(Played):
    """Its server is at a socket, whose other end the supervisor keeps, as it keeps the daemon's line."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[socket.socket] = []

    def start(self, alias: str) -> StartedServer:
        self.starts.append(alias)
        self.close()
        ours, theirs = socket.socketpair()
        self.kept.append(theirs)
        with ours:
            self.server = os.dup(ours.fileno()), os.dup(ours.fileno())
        return StartedServer(os.dup(theirs.fileno()), os.dup(theirs.fileno()), -1)


def test_line_of_daemon_that_ends_is_forgotten() -> None:
    played = PlayedDaemon()
    with gate.open(played.terms) as opened:
        opened.process.ready(120)
        line = Line(played, opened)
        for _ in range(2):
            line.ask("tools/call", name="open", arguments={})
            assert line.look()
            # With a call that was not read: the gate's next read is refused, and no end of file.
            line.ask("tools/call", name="open", arguments={})
            played.close()
            for _ in range(2):
                assert json.loads(line.get()[1])["result"]["isError"]
        before = _spent(opened.process.pid)
        line.look(2)
        # A registration that is left over in epoll wakes the gate for ever.
        assert _spent(opened.process.pid) - before < 0.5
        assert played.starts == ["fs"] * 2
    for one in played.kept:
        one.close()


def _spent(pid: int) -> float:
    """Return the processor time of a process in seconds (proc_pid_stat(5))."""
    with open(f"/proc/{pid}/stat") as stream:
        fields = stream.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_last_rows_are_written_when_run_ends(line: Line) -> None:
    """Last: the gate ends by it. Equal refusals are counted, and their number is written at the end."""
    before = len(line.played.rows)
    for _ in range(30):
        line.call("ruled", {"path": "/etc/never"})

    def ended() -> bool:
        line.opened.ledger.wind_up()  # it waits briefly alone, and a loaded machine takes longer
        return line.opened.ledger.hung_up

    until(ended)
    assert sum(row["count"] for _, row in line.played.rows[before:]) == 30
