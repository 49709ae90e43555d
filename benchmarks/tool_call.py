#!/usr/bin/env python3
"""A call of a tool through the service gate, the tool gate and the log, beside the same server asked over its pipes.

    .venv/bin/python benchmarks/tool_call.py [calls]

    raw     pipe -> server -> pipe
    gate    HTTP/1.1, kept -> agent's link -> service gate -> tool gate -> (durable row) -> pipe -> server, and back

One after the other; then `gate` by 8 connections at once for the rate. Namespaces of our own, as root; the server is a
bare process of Python. Each call through the gate waits for one durable row of a log of its own.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy import base58, data
from policy.manifest import parse
from policy.rules import nine
from sandbox.audit.run_events import RunEvents
from sandbox.kernel.net import netns
from sandbox.network import addresses, namespaces
from sandbox.network.service import gate
from sandbox.network.tools.ledger import StartedServer, ToolTerms
from sandbox.supervisor import open_ledger
from tests import tool_call_kit as kit

MANIFEST = kit.MANIFEST.replace("calls_per_minute = 5\n", "calls_per_minute = 1000000\n")
PLAN = {
    "listen": 80, "names": ["tools.covenant"], "models": [], "requests_per_minute": 0, "tokens_per_hour": 0,
    "max_output_tokens": 0,
}  # fmt: skip
SERVER = f"""
import json, sys
TOOLS = json.loads({json.dumps(json.dumps(kit.TOOLS))})
listed = [dict(name=t["name"], description=t["description"], inputSchema=t["input_schema"]) for t in TOOLS]
for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    result = dict(content=[dict(type="text", text="x")])
    if request["method"] == "initialize":
        result = dict(protocolVersion="2025-06-18", capabilities=dict(), serverInfo=dict())
    if request["method"] == "tools/list":
        result = dict(tools=listed)
    print(json.dumps(dict(jsonrpc="2.0", id=request["id"], result=result)), flush=True)
"""
CALL = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "open", "arguments": {"path": "a"}}}


def _server(**pipes: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SERVER], **pipes)


def raw(calls: int) -> list[float]:
    """Milliseconds of each call over the pipes."""
    taken = []
    with _server(stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(calls):
            begin = time.perf_counter()
            process.stdin.write(json.dumps(CALL).encode() + b"\n")
            process.stdin.flush()
            json.loads(process.stdout.readline())
            taken.append((time.perf_counter() - begin) * 1000)
        process.stdin.close()
    return taken


def _asks(agent: int, calls: int, results: Any) -> None:
    made = netns.within(agent, lambda: socket.create_connection((addresses.GATEWAY4, 80), 30))
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line = http.client.HTTPConnection("tools.covenant")
    line.sock = made
    taken = []
    for _ in range(calls):
        begin = time.perf_counter()
        line.request("POST", "/mcp/fs", json.dumps(CALL), {"Content-Type": "application/json"})
        reply = json.loads(line.getresponse().read())
        taken.append((time.perf_counter() - begin) * 1000)
        assert not reply["result"].get("isError"), reply
    results.put(taken)


def _run(opened: gate.ServiceGate, agent: int, clients: int, calls: int) -> tuple[list[float], float]:
    results: Any = multiprocessing.get_context("fork").Queue()
    context = multiprocessing.get_context("fork")
    began = time.perf_counter()
    asking = [context.Process(target=_asks, args=(agent, calls, results)) for _ in range(clients)]
    for one in asking:
        one.start()
    poll = select.epoll()
    for fd in opened.watches:
        poll.register(fd, select.EPOLLIN)
    while any(one.is_alive() for one in asking):
        for fd, _ in poll.poll(0.05):
            assert (wrong := opened.watches[fd]()) is None, wrong
        if not results.empty():
            break
    taken: list[float] = []
    while len(taken) < clients * calls:
        for fd, _ in poll.poll(0):
            assert opened.watches[fd]() is None
        while not results.empty():
            taken += results.get()
    return taken, time.perf_counter() - began


def main() -> None:
    """Measure, and print one line each."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    servers: list[subprocess.Popen[bytes]] = []

    def start(alias: str) -> StartedServer:
        (stdin, to_server), (from_server, stdout), (read, write) = (os.pipe() for _ in range(3))
        servers.append(_server(stdin=stdin, stdout=stdout, stderr=write))
        for fd in (stdin, stdout, write):
            os.close(fd)
        return StartedServer(to_server, from_server, read)

    with tempfile.TemporaryDirectory() as folder, namespaces.made() as made:
        namespaces.connect(made)
        namespaces.open_link(made)
        with open_ledger(Path(folder)) as ledger:
            issuer = {"display": "bench@local", "pubkey": base58.encode(ledger.public_key.public_bytes_raw())}
            rows = RunEvents(ledger, "bench", issuer)
            grants = nine.requested(parse.parse(MANIFEST.encode()), roles=data.roles()).canonical()
            tools = ToolTerms(
                grants, json.dumps(kit.DOCUMENT), "hello", rows.tool, start, rows.sync, settle=rows.settle
            )
            terms = gate.Terms({}, {}, print, tools=tools)
            with gate.open(PLAN, terms, inside=made.inside, denied=print) as opened:
                for process in opened.processes:
                    process.ready(120)
                _run(opened, made.agent, 1, 20)
                plain, through = [], []
                for _ in range(2):
                    plain += raw(calls)[20:]
                    through += _run(opened, made.agent, 1, calls)[0]
                many, seconds = _run(opened, made.agent, 8, calls)
                opened.end()
        for one in servers:
            one.kill()
            one.wait()
    print(f"raw    median {statistics.median(plain):.3f} ms")
    print(f"gate   median {statistics.median(through):.3f} ms")
    print(f"added  {statistics.median(through) - statistics.median(plain):.3f} ms")
    print(f"rate   {len(many) / seconds:.0f} calls a second by 8 connections")


if __name__ == "__main__":
    main()
