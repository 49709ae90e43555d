#!/usr/bin/env python3
"""1,000 granted addresses into the kernel, beside `nft -f` of the same alone.

    .venv/bin/python benchmarks/set_elements.py [runs]

Of names, 1,000 addresses into the set of a pattern:
    nft -f     the program with `add element` for all of them
    together   one netlink transaction, acknowledged (sandbox.kernel.net.nft_sets)
    brokered   as the DNS gate has it done: 32 an answer, each acknowledged (sandbox.network.dns.broker)
    one        one address alone, beside the program for one
Of addresses, a ruleset with as many entries as a manifest may have:
    nft -f     the program with the compiled ruleset
    applied    the same by sandbox.kernel.net.nft
    checked    the same with `nft -c` before it, as a run does: the kernel takes a checked transaction back, and waits
               for a grace period

As root, in a network namespace of its own. Medians, in turn.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from sandbox.kernel import libc
from sandbox.kernel.net import nft, nft_sets
from sandbox.kernel.net.nft_sets import Element
from sandbox.network import ruleset_cache
from sandbox.network.dns import broker, broker_wire
from tests.unit.policy.compile import sample

NFT = Path("/usr/sbin/nft")
COUNT = 1000
# No two are neighbours: none joins another in a set.
STATIC = tuple((f"93.{n // 100}.{2 * (n % 100)}.1", "[443]", "tcp") for n in range(200))
NAMED = [Element(bytes([94, n >> 8, n & 255, 1]), 300) for n in range(COUNT)]
DELETE = b"delete table inet covenant\n"


def took_ms(action: Callable[[], object]) -> float:
    """The wall time of one call in milliseconds."""
    begin = time.perf_counter()
    action()
    return (time.perf_counter() - begin) * 1000


def main() -> None:
    """Print the medians and their ratios."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    libc.unshare(libc.CLONE_NEWNET)
    entries = sample.entries(*STATIC, ("api.example.com", "[443]", "tcp"))
    artefacts = sample.compiled(sample.manifest(network="full", more=entries))
    rules = artefacts.files["firewall.nft"]
    name = next(row["sets"][0] for row in artefacts.json("network.json")["grants"] if row["kind"] == "name")

    plan = artefacts.json("gates.json")["dns"]

    def program(text: bytes) -> None:
        subprocess.run([str(NFT), "-f", "-"], input=text, check=True, capture_output=True)

    def brokered(made: broker.SetBroker, line: socket.socket) -> None:
        for at in range(0, COUNT, 32):
            line.send(broker_wire.add_request(at, 300, [0], [one.address for one in NAMED[at : at + 32]]))
            assert made.serve() is None
            assert broker_wire.REPLY.unpack(line.recv(64))[1] == broker_wire.DONE

    listed = ", ".join(f"{ipaddress.ip_address(one.address)} timeout 300s" for one in NAMED)
    add = f"add element inet covenant {name} {{ {listed} }}\n".encode()
    add_one = f"add element inet covenant {name} {{ 95.0.0.1 timeout 300s }}\n".encode()
    flush = f"flush set inet covenant {name}\n".encode()
    times: dict[str, list[float]] = {}

    def timed(key: str, action: Callable[[], object]) -> None:
        times.setdefault(key, []).append(took_ms(action))

    with tempfile.TemporaryDirectory() as scratch, nft_sets.open_socket() as netlink:
        (state := Path(scratch)).joinpath("closures").mkdir(mode=0o700)
        elements = nft_sets.Elements("covenant", netlink)
        for _ in range(runs):
            timed("ruleset: nft -f", lambda: program(rules))
            program(DELETE)
            timed("ruleset: applied", lambda: nft.apply(NFT, rules, checked=False))
            program(DELETE)
            timed("ruleset: checked", lambda: nft.apply(NFT, rules))
            program(DELETE)
            # As a run has it: checked once for this text, in the first of these.
            timed("ruleset: of a run", lambda: ruleset_cache.apply(NFT, rules, state=state))
            timed("1,000: nft -f", lambda: program(add))
            program(flush)
            timed("1,000: together", lambda: elements.add({name: NAMED}))
            program(flush)
            made = broker.SetBroker(plan, netlink, lambda: ("127.0.0.1",))
            with contextlib.closing(made), socket.socket(fileno=os.dup(made.gate_end)) as line:
                timed("1,000: brokered", lambda made=made, line=line: brokered(made, line))  # type: ignore[misc]
            program(flush)
            timed("one: nft -f", lambda: program(add_one))
            program(flush)
            for one in NAMED[:50]:
                timed("one: together", lambda one=one: elements.add({name: [one]}))  # type: ignore[misc]
            program(DELETE)
    for key, values in times.items():
        median = statistics.median(values)
        ratio = median / statistics.median(times[f"{key.split(':')[0]}: nft -f"])
        print(f"{key:18} {median:8.3f} ms  {ratio:6.3f} of nft -f")
    print(f"({os.uname().release}, {runs} runs)")


if __name__ == "__main__":
    main()
