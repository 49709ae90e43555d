#!/usr/bin/env python3
"""A connection through the TLS gate, beside the same server by a tcp grant over the same links.

    .venv/bin/python benchmarks/tls_connect.py [connections]

    direct   connect, send a ClientHello, read the first bytes of the answer; forwarded by the compiled rules
    gate     the same by a tls grant: the gate reads the hello, connects, and passes the answer on

In turn, from an ordinary process in the agent's namespace. Namespaces of our own, as root. Medians, and what the gate
adds.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.network.tls import gate as tls_gate
from tests import hello_kit as kit
from tests.kernel import three_namespaces, tls_servers
from tests.unit.policy.compile import sample

HOST, TLS_PORT, TCP_PORT = "198.51.100.7", 443, 444


def timed(port: int, hello: bytes) -> float:
    """Milliseconds until the first bytes of the answer."""
    begin = time.perf_counter()
    with socket.create_connection((HOST, port), timeout=20) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.sendall(hello)
        assert made.recv(65536)
        return (time.perf_counter() - begin) * 1000


def main() -> None:
    """Print the medians."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    entries = sample.entries((HOST, f"[{TLS_PORT}]", "tls"), (HOST, f"[{TCP_PORT}]", "tcp"))
    artefacts = sample.compiled(sample.manifest(network="full", more=entries))
    with three_namespaces.made() as spaces, contextlib.ExitStack() as stack:
        for port in (TLS_PORT, TCP_PORT):
            stack.enter_context(tls_servers.serving(None, spaces.listen("world", "0.0.0.0", port)))
        with tempfile.NamedTemporaryFile(suffix=".nft") as file:
            file.write(artefacts.files["firewall.nft"])
            file.flush()
            spaces.run("gateway", "nft", "-f", file.name)
        inside: Callable[[Callable[[], object]], object] = functools.partial(spaces.within, "gateway")
        plan = artefacts.json("gates.json")["tls"]
        gate = stack.enter_context(tls_gate.open(plan, inside=inside, denied=print))
        gate.process.ready()
        hello = kit.hello("api.example.com")

        def probe() -> tuple[list[float], list[float]]:
            direct, carried = [], []
            for _ in range(count):
                direct.append(timed(TCP_PORT, hello))
                carried.append(timed(TLS_PORT, hello))
            return direct, carried

        direct, carried = spaces.within("agent", probe)
    added = statistics.median(one - base for one, base in zip(carried, direct, strict=True))
    for name, values in (("direct", direct), ("gate", carried)):
        print(f"{name:8} {statistics.median(values):7.3f} ms  95 % {statistics.quantiles(values, n=20)[-1]:7.3f}")
    print(f"adds     {added:7.3f} ms ({count} connections)")


if __name__ == "__main__":
    main()
