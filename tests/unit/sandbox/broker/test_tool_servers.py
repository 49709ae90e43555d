"""Tool servers of a run: pipes to a forked process, its end with the run, and a bound on starts."""

from __future__ import annotations

import os
import select

from sandbox.broker import tool_servers
from sandbox.broker.tool_servers import ServerRequest, ToolServers


def _echo(asked: ServerRequest) -> None:
    """Answer one message, then wait for the end of the run."""
    os.write(asked.stdout, os.read(asked.stdin, 64).upper())
    poll = select.poll()
    poll.register(asked.alive, select.POLLIN)
    poll.poll(30_000)


def test_server_has_pipes_and_ends_with_its_run() -> None:
    servers = ToolServers(["fs"], _echo)
    assert servers.start("other") is None
    made = servers.start("fs")
    assert made is not None
    os.write(made.stdin, b"hi")
    assert os.read(made.stdout, 64) == b"HI"
    servers.close()
    assert os.read(made.stdout, 64) == b""
    assert os.read(made.stderr, 64) == b""
    for fd in (*made.gates, made.stderr):
        os.close(fd)


def test_starts_of_one_server_are_bounded() -> None:
    servers = ToolServers(["fs"], lambda asked: None)
    made = [servers.start("fs") for _ in range(tool_servers.STARTS + 3)]
    assert [one is None for one in made] == [False] * tool_servers.STARTS + [True] * 3
    servers.close()
    for one in made:
        if one is not None:
            for fd in (*one.gates, one.stderr):
                os.close(fd)
