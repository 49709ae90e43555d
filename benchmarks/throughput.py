#!/usr/bin/env python3
"""TCP throughput of a program under runsc: through the gateway and through the TLS gate, beside the same path bare.

    .venv/bin/python benchmarks/throughput.py [rounds] [megabytes]

Three ways over the same links and machines (agent, gateway, host, world), in turn, as root, in namespaces of their own:
    bare     no rule and no gate: the gateway and the host only route
    gateway  the compiled rules with a tcp grant, the walls around them, masquerading twice
    gate     the same with a tls grant: the TLS gate reads the hello, compares the name and carries the rest
each with gVisor's network stack and, beside it, with `--network=host` inside the agent's namespace. Megabytes a second
down (to the agent) and up, medians; ratios are medians of the ratios of one round.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from policy import denials
from policy.compile.artefacts import Artefacts
from sandbox.config import Config
from sandbox.kernel.net import netns as spaces
from sandbox.network import addresses, gateway
from tests import hello_kit
from tests.kernel import internet, plain_runsc, tls_servers
from tests.unit.policy.compile import sample

ADDRESS, NAME = "93.184.216.34", "secure.example.com"
TCP_PORT, TLS_PORT = 5433, 5434
WAYS = {"bare": TCP_PORT, "gateway": TCP_PORT, "gate": TLS_PORT}
STACKS = ("sandbox", "host")

CLIENT = """
import json, socket, sys, time
port, size, hello, answer = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3]), int(sys.argv[4])
def connected():
    made = socket.create_connection((%r, port), timeout=120)
    made.sendall(hello)
    left = answer
    while left:
        left -= len(made.recv(left))
    return made
out = {}
with connected() as made:
    room = bytearray(1 << 20)
    begin = time.perf_counter()
    made.sendall(b"give %%d\\n" %% size)
    got = 0
    while got < size:
        got += made.recv_into(room)
    out["down"] = size / (time.perf_counter() - begin) / 1e6
with connected() as made:
    data = bytes(1 << 20)
    begin = time.perf_counter()
    made.sendall(b"take %%d\\n" %% size)
    for _ in range(size >> 20):
        made.sendall(data)
    assert int(made.recv(100)) == size
    out["up"] = size / (time.perf_counter() - begin) / 1e6
print(json.dumps(out))
"""


@contextlib.contextmanager
def opened(net: internet.Internet, artefacts: Artefacts, way: str) -> Iterator[gateway.Gateway]:
    """The gateway of a run; for ``bare`` with all its rules taken away and routes in their place."""
    run_id = secrets.token_hex(8)
    config = Config(uplink="eth0", resolvers=(internet.RESOLVER,))
    with gateway.opened(artefacts, run_id, config=config, note=lambda note: None, denied=unheard) as made:
        made.make()
        if way == "bare":
            for space in (made.spaces.agent, made.spaces.gateway, net.spaces["host"]):
                command(space, "nft", "flush", "ruleset")
            device = addresses.host_device(run_id)
            back = f"{addresses.AGENT4}/32"
            command(net.spaces["host"], "ip", "route", "add", back, "via", made.place.ipv4, "dev", device, "onlink")
            command(net.spaces["world"], "ip", "route", "replace", back, "via", internet.HOST)
        yield made


def unheard(denial: denials.Denial, *, count: int = 1) -> None:
    """Nothing is refused here; what is after all would show as a failed transfer."""


def command(space: int, *words: str) -> None:
    """Run a command in a namespace."""
    entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{space}", *words]
    done = subprocess.run(entered, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (words, done.stderr)


def measured(agent: int, port: int, stack: str, size: int) -> dict[str, float]:
    """Megabytes a second of one sandbox in the agent's namespace."""
    hello = hello_kit.hello(NAME)
    with tempfile.TemporaryDirectory(prefix="covenant-benchmark-") as name:
        base = Path(name)
        for part in ("proc", "sys", "dev", "usr", "tmp"):
            (base / "rootfs" / part).mkdir(parents=True)
        for link in ("bin", "lib", "lib64"):
            (base / "rootfs" / link).symlink_to(f"usr/{link}")
        (base / "rootfs" / "client.py").write_text(CLIENT % ADDRESS)
        arguments = [str(port), str(size), hello.hex(), str(len(hello_kit.server_hello()))]
        space = f"/proc/{os.getpid()}/fd/{agent}"
        document = plain_runsc.config(
            ["/usr/bin/python3", "/client.py", *arguments], rootfs=str(base / "rootfs"), netns="/proc/self/ns/net"
        )
        (base / "config.json").write_text(json.dumps(document))
        flags = [f"--root={base / 'state'}", "--platform=systrap", "--overlay2=none", "--ignore-cgroups"]
        cover = 'mount -t tmpfs none /proc/sys/net/core && exec "$@"'
        inside = ["nsenter", f"--net={space}", "unshare", "-m", "sh", "-c", cover, "sh"]
        run = [plain_runsc.find_runsc(), *flags, f"--network={stack}", "run", f"--bundle={base}", secrets.token_hex(8)]
        done = subprocess.run([*inside, *run], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, (done.stdout, done.stderr)
        found: dict[str, float] = json.loads(done.stdout)
        return found


def report(seen: dict[tuple[str, str, str], list[float]]) -> None:
    """The table."""
    for stack in STACKS:
        for side in ("down", "up"):
            bare = seen[stack, "bare", side]
            words = []
            for way in WAYS:
                values = seen[stack, way, side]
                ratio = statistics.median(a / b for a, b in zip(values, bare, strict=True))
                words.append(f"{way} {statistics.median(values):7.0f} ({ratio:.2f})")
            print(f"network={stack:8} {side:5} MB/s: " + "   ".join(words))
    print(json.dumps({" ".join(key): statistics.median(values) for key, values in seen.items()}))


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    size = (int(sys.argv[2]) if len(sys.argv) > 2 else 256) << 20
    entries = sample.entries((ADDRESS, f"[{TCP_PORT}]", "tcp"), (ADDRESS, f"[{TLS_PORT}]", "tls"))
    artefacts = sample.compiled(sample.manifest(network="full", more=entries))
    seen: dict[tuple[str, str, str], list[float]] = {}
    with internet.made() as net, contextlib.ExitStack() as stack:
        for port in (TCP_PORT, TLS_PORT):
            listener = net.within("world", lambda port=port: _listener(port))  # type: ignore[misc]
            stack.enter_context(tls_servers.serving(None, listener))

        def one(way: str, kind: str) -> dict[str, float]:
            with opened(net, artefacts, way) as made:
                return measured(made.spaces.agent, WAYS[way], kind, size)

        for _ in range(rounds):
            for kind in STACKS:
                for way in WAYS:
                    for side, value in spaces.within(net.spaces["host"], lambda w=way, k=kind: one(w, k)).items():  # type: ignore[misc]
                        seen.setdefault((kind, way, side), []).append(value)
    report(seen)


def _listener(port: int) -> socket.socket:
    made = socket.create_server((ADDRESS, port), backlog=64)
    made.settimeout(None)
    return made


if __name__ == "__main__":
    main()
