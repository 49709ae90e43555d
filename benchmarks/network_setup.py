#!/usr/bin/env python3
"""The network of one run beside the same made by `ip` and `nft`, in turn, with 0 to 200 other runs live; as root.

    .venv/bin/python benchmarks/network_setup.py [pairs]

Namespaces, both links, addresses, routes, rules in the gateway and the walls; without gates, which are processes.
Everything is made in a network namespace of this script's own.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy.compile.artefacts import Artefacts
from sandbox.config import Config
from sandbox.kernel import libc
from sandbox.network import (
    base_rules,
    gateway,
    uplink,
)
from tests.unit.policy.compile import sample

LIVE = (0, 20, 200)
# What the tools need, each as one batch in its namespace.
GATE_LINES = """
address add 192.0.0.1/29 dev agent0
address add fd00:c0:0:1::1/64 dev agent0 nodad
address add {at4}/32 dev uplink0
address add {at6}/128 dev uplink0 nodad
link set lo up
link set agent0 up
link set uplink0 up
route add default via 198.19.0.1 dev uplink0 onlink
route add default via fe80::1 dev uplink0 onlink
"""
AGENT_LINES = """
address add 192.0.0.2/29 dev eth0
address add fd00:c0:0:1::2/64 dev eth0 nodad
link set lo up
link set eth0 up
route add default via 192.0.0.1
route add default via fd00:c0:0:1::1
"""
HOST_LINES = """
address add 198.19.0.1/32 dev {device}
address add fe80::1/64 dev {device} nodad
link set {device} up
route add {at4}/32 dev {device}
route add {at6}/128 dev {device}
"""


def _command(*command: str, given: bytes = b"") -> None:
    subprocess.run(command, input=given, check=True, capture_output=True)


@contextlib.contextmanager
def raw(artefacts: Artefacts, number: int) -> Iterator[float]:
    """The same by the tools; milliseconds."""
    agent, gate, device = f"bench-{number}-a", f"bench-{number}-g", f"raw{number}"
    places = {"at4": f"198.18.7.{number + 1}", "at6": f"fd00:c0:0:7::{number + 1}", "device": device}
    begin = time.perf_counter()
    try:
        for name in (agent, gate):
            _command("ip", "netns", "add", name)
        _command("ip", "-n", gate, "link", "add", "agent0", "type", "veth", "peer", "name", "eth0", "netns", agent)
        _command("ip", "link", "add", device, "type", "veth", "peer", "name", "uplink0", "netns", gate)
        settings = [f"net.{n}=1" for n in ("ipv4.ip_forward", "ipv6.conf.all.forwarding")]
        _command("ip", "netns", "exec", gate, "sysctl", "-q", "-w", *settings)
        rules = artefacts.files["firewall.nft"] + base_rules.GATEWAY
        _command("ip", "netns", "exec", gate, "nft", "-f", "-", given=rules)
        _command("ip", "netns", "exec", agent, "nft", "-f", "-", given=base_rules.AGENT)
        _command("ip", "-n", gate, "-batch", "-", given=GATE_LINES.format(**places).encode())
        _command("ip", "-n", agent, "-batch", "-", given=AGENT_LINES.encode())
        _command("ip", "-batch", "-", given=HOST_LINES.format(**places).encode())
        yield (time.perf_counter() - begin) * 1000
    finally:
        for name in (agent, gate):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def ours(artefacts: Artefacts, config: Config) -> Iterator[float]:
    """As a run has it made; milliseconds."""
    begin = time.perf_counter()
    with gateway.opened(
        artefacts, str(uuid.uuid4()), config=config, note=lambda about: None, denied=lambda denial, count=1: None
    ) as made:
        made.make()
        yield (time.perf_counter() - begin) * 1000


def main() -> None:
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    libc.unshare(libc.CLONE_NEWNET)
    # `ip netns` mounts names: in a mount namespace of our own they stay here.
    libc.private_mounts()
    libc.mount("none", "/run", "tmpfs")
    Path("/run/netns").mkdir()
    _command("ip", "link", "add", "eth0", "type", "veth", "peer", "name", "world")
    _command("ip", "link", "set", "eth0", "up")
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(("93.184.216.34", "[443]", "tcp"))))
    state = Path(tempfile.mkdtemp(prefix="bench-state-"))
    (state / "closures").mkdir()
    config = Config(uplink="eth0", state=state)
    figures: dict[str, float] = {}
    with contextlib.ExitStack() as live:
        held = 0
        for count in LIVE:
            while held < count:
                live.enter_context(ours(artefacts, config))
                held += 1
            times: dict[str, list[float]] = {"ours": [], "raw": []}
            for number in range(pairs + 1):
                with ours(artefacts, config) as mine:
                    pass
                with raw(artefacts, number) as tools:
                    pass
                if number:
                    times["ours"].append(mine)
                    times["raw"].append(tools)
            ratio = statistics.median(m / t for m, t in zip(times["ours"], times["raw"], strict=True))
            mine, tools = (statistics.median(times[name]) for name in ("ours", "raw"))
            print(f"{count:3} live: {mine:6.1f} ms, by ip and nft {tools:6.1f} ms   {ratio:.2f}")
            figures |= {f"ours_{count}": mine, f"raw_{count}": tools}
    assert uplink.held_table() is None
    shutil.rmtree(state)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
