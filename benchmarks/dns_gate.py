#!/usr/bin/env python3
"""A name asked of the DNS gate, beside the same resolver asked directly over the same links.

    .venv/bin/python benchmarks/dns_gate.py [questions]

    direct   agent -> gateway (the compiled rules, a udp grant to the resolver) -> resolver
    gate     agent -> the gate's process -> broker -> resolver -> broker (set element) -> agent
    again    a name whose answer the gate keeps

Question and answer, one after the other and in turn, from an ordinary process in the agent's namespace; the resolver is
a process that answers at once. Namespaces of our own, as root. Medians and the median of what the gate adds.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.network.dns import gate as dns_gate
from tests.kernel import gated_names, three_namespaces
from tests.kernel.three_namespaces import Namespaces
from tests.unit.policy.compile import sample

# Every label is another name, and with it another address: `again` asks for the same one.
_CLIENT = """
import json, socket, struct, sys, time
asked = int(sys.argv[1])
def wire(n):
    label = b"n%d" % n
    head = struct.pack("!6H", n & 0xffff, 0x0100, 1, 0, 0, 0)
    return head + bytes([len(label)]) + label + b"\\4wide\\7example\\0" + struct.pack("!HH", 1, 1)
def connected(host):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(10)
    made.connect((host, 53))
    return made
lines = {"direct": connected("9.9.9.9"), "gate": connected("192.0.0.1"), "again": connected("192.0.0.1")}
out = {name: [] for name in lines}
for n in range(asked + 20):
    for name, line in lines.items():
        data = wire(0 if name == "again" else n)
        begin = time.perf_counter()
        line.send(data)
        said = line.recv(4096)
        took = time.perf_counter() - begin
        assert said[:2] == data[:2] and said[3] & 15 == 0 and said[7] == 1, said
        if n >= 20:
            out[name].append(took * 1000)
print(json.dumps(out))
"""


@contextlib.contextmanager
def resolver(spaces: Namespaces) -> Iterator[None]:
    """A process that answers every question with an address of its number."""
    server = spaces.listen("world", gated_names.RESOLVER, 53, udp=True)
    pid = os.fork()
    if pid == 0:
        server.settimeout(None)
        while True:
            wire, peer = server.recvfrom(512)
            end = wire.index(b"\0", 12) + 5
            number = int(wire[14 : 13 + wire[12]])
            record = b"\xc0\x0c\0\1\0\1\0\0\1\x2c\0\4" + bytes(
                [93, number >> 16 & 255, number >> 8 & 255, number & 255]
            )
            server.sendto(wire[:2] + b"\x81\x80\0\1\0\1\0\0\0\0" + wire[12:end] + record, peer)
    server.close()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def main() -> None:
    """Print the medians."""
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 800
    assert asked <= 1000, "the set of a pattern holds 1,024"
    entries = sample.entries(("*.wide.example", "[80]", "tcp"), (gated_names.RESOLVER, "[53]", "udp"))
    artefacts = sample.compiled(sample.manifest(network="full", more=entries))
    plan = {**artefacts.json("gates.json")["dns"], "queries_per_second": 100_000, "burst": 100_000}
    with contextlib.ExitStack() as stack:
        spaces = stack.enter_context(three_namespaces.made())
        gated_names.links(spaces)
        stack.enter_context(resolver(spaces))
        stack.enter_context(gated_names.ruleset(spaces, artefacts))
        gate = stack.enter_context(
            dns_gate.open(
                plan,
                inside=lambda call: spaces.within("gateway", call),
                denied=print,
                resolvers=lambda: (gated_names.RESOLVER,),
            )
        )
        gate.process.ready()
        gated = gated_names.Gated(spaces, None, {}, gate)  # type: ignore[arg-type]
        stop, wake = os.pipe()
        exchange = threading.Thread(target=gated_names.exchange, args=(gated, spaces, stop))
        exchange.start()
        client = ["nsenter", "--net", "-t", str(spaces.pids["agent"]), sys.executable, "-I", "-c", _CLIENT, str(asked)]
        done = subprocess.run(client, stdout=subprocess.PIPE, check=False, text=True)
        os.close(wake)
        exchange.join()
        os.close(stop)
    assert done.returncode == 0, gated.error
    took: dict[str, list[float]] = json.loads(done.stdout)
    direct = statistics.median(took["direct"])
    for name, values in took.items():
        added = statistics.median(one - base for one, base in zip(values, took["direct"], strict=True))
        quantile = statistics.quantiles(values, n=20)[-1]
        print(f"{name:8} {statistics.median(values):7.3f} ms  95 % {quantile:7.3f}  adds {added:7.3f} ms")
    print(f"({os.uname().release}, {asked} questions; direct {direct:.3f} ms)")


if __name__ == "__main__":
    main()
