#!/usr/bin/env python3
"""Grant a held request, until the agent has the first byte of the host; beside the same connection to a granted host.

    .venv/bin/python benchmarks/approvals.py [hosts]

    granted   an agent under gVisor looks a granted name up, connects by TLS and reads the first byte
    grant     from the moment at which an operator begins to sign a lease to the same first byte of an asked name

One run asks for each host once. Namespaces of our own, as root. Medians and the slowest.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from covenant.keys import leasing
from covenant.keys.signers import Signer
from policy.signing import envelope
from sandbox.control import approvals
from sandbox.control.manager import Requester
from tests.kernel import internet
from tests.kernel.internet import NetworkedWorld
from tests.kernel.world import HEAD, TAIL

ADDRESS = "93.184.216.34"
GRANTS = (
    internet.entries(("*.example.net", "[443]", "tls"), ("*.example.com", "[443]", "tls")).rstrip()
    + '\non_deny = "ask"\nask_seconds = 100\n'
)
CODE = """
import time
def first(name):
    began = time.time()
    assert tls(name, wait=100) == name
    return [began, time.time()]
answer = [[first(f"h{n}.example.net"), first(f"h{n}.example.com")] for n in range(COUNT)]
"""


def operate(world: NetworkedWorld, over: threading.Event, began: list[float]) -> None:
    """Grant each request as soon as it is seen."""
    root, key, done = Requester("operator@local", root=True), world.key, set[str]()
    door = Signer("tester", envelope.PublicKey(key.public_key().public_bytes_raw()), key.sign)
    while not over.wait(0.005):
        for held in approvals.listed(world.state, root)["requests"]:
            if held["id"] not in done:
                done.add(held["id"])
                began.append(time.time())
                now_ms = int(time.time() * 1000)
                raw, _ = leasing.lease_of(held, door, duration="run", expires_ms=now_ms + 600_000, now_ms=now_ms)
                approvals.grant(world.state, root, held["id"], raw.decode())


def main() -> None:
    """Print the medians."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    with internet.made() as net, tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            for domain in ("net", "com"):
                net.resolver.zone[f"h{number}.example.{domain}", "A"] = [ADDRESS]
        world = internet.configured(NetworkedWorld(Path(folder)), net, ask_operators=True)
        over, began = threading.Event(), list[float]()
        operator = threading.Thread(target=operate, args=(world, over, began))
        operator.start()
        try:
            found = world.run_code(
                HEAD + internet.PROBES + internet.TLS_PROBE + CODE.replace("COUNT", str(count)) + TAIL,
                files={"ca.pem": net.certificate},
                more=GRANTS,
                network="outbound-https-only",
                cpu_ms=600000,
            )
        finally:
            over.set()
            operator.join()
        assert found.result is not None, found.error
        times = json.loads(found.result.text)
    plain = [(end - begin) * 1000 for (begin, end), _ in times]
    leased = [(end - grant) * 1000 for (_, (_, end)), grant in zip(times, began, strict=True)]
    for name, values in (("granted", plain), ("grant", leased)):
        print(f"{name:8} {statistics.median(values):7.1f} ms, slowest {max(values):7.1f} ms, {count} hosts")


if __name__ == "__main__":
    main()
