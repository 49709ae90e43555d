"""The control of the network probes: the same links and addresses, and no rule anywhere.

    agent (plain runsc, uid 0, every capability) ── gateway that forwards all ── a world that answers at every address

The gateway answers like the world at its own addresses: it stands for the host.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.kernel import three_namespaces
from tests.kernel.three_namespaces import Namespaces

# INVARIANT: sandbox/network/addresses.py has the same; agents/hostile/network/wire.py knows them.
AGENT, GATEWAY, AGENT6, GATEWAY6 = "192.0.0.2", "192.0.0.1", "fd00:c0:0:1::2", "fd00:c0:0:1::1"

LINKS = """
link add agent0 type veth peer name eth0 netns {agent}
link add uplink0 type veth peer name eth0 netns {world}
link set agent0 address 02:c0:00:00:00:01
address add 192.0.0.1/29 dev agent0
address add 192.0.0.3/29 dev agent0
address add fd00:c0:0:1::1/64 dev agent0 nodad
address add 10.201.0.1/30 dev uplink0
address add fd00:201::1/64 dev uplink0 nodad
link set lo up
link set agent0 up
link set uplink0 up
route add default via 10.201.0.2
route add default via fd00:201::2
"""
AGENT_SIDE = """
link set eth0 address 02:c0:00:00:00:02
address add 192.0.0.2/29 dev eth0
address add fd00:c0:0:1::2/64 dev eth0 nodad
link set lo up
link set eth0 up
route add default via 192.0.0.1
route add default via fd00:c0:0:1::1
"""
WORLD_SIDE = """
address add 10.201.0.2/30 dev eth0
address add fd00:201::2/64 dev eth0 nodad
link set lo up
link set eth0 up
route add 192.0.0.0/29 via 10.201.0.1
route add fd00:c0:0:1::/64 via fd00:201::1
"""


@contextlib.contextmanager
def made() -> Iterator[Namespaces]:
    """Agent, gateway and world, with the world's servers in the two that are not the agent's."""
    spaces = Namespaces()
    with contextlib.ExitStack() as stack:
        for role in ("agent", "gateway", "world"):
            spaces.pids[role] = stack.enter_context(three_namespaces.anchor())
            spaces.run(role, "sysctl", "-q", "-w", *(f"net.ipv6.conf.{n}.accept_dad=0" for n in ("all", "default")))
        spaces.batch("gateway", LINKS.format(**spaces.pids))
        spaces.batch("agent", AGENT_SIDE)
        spaces.batch("world", WORLD_SIDE)
        settings = ["net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1", "net.ipv4.icmp_ratelimit=0"]
        settings += [f"net.ipv4.conf.{name}.accept_source_route=1" for name in ("all", "agent0")]
        spaces.run("gateway", "sysctl", "-q", "-w", *settings)
        stack.enter_context(serving(spaces, "world", anywhere=True))
        stack.enter_context(serving(spaces, "gateway"))
        yield spaces


@contextlib.contextmanager
def serving(spaces: Namespaces, role: str, *, anywhere: bool = False) -> Iterator[None]:
    """The servers of hostile_world in that namespace; ``anywhere``: at every address there is."""
    program = Path(__file__).with_name("hostile_world.py")
    inside = ["nsenter", "--net", "-t", str(spaces.pids[role])]
    command = [*inside, sys.executable, "-B", str(program), *(["--anywhere"] if anywhere else [])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield
        finally:
            server.stdin.close()
            server.wait(20)


def inside(namespace: str) -> list[str]:
    """A command's beginning: in the network namespace of this path, and with nothing at /proc/sys/net/core.

    runsc up to 20240729 takes any namespace of a kernel since 6.7 for the root one when it finds rmem_default there.
    """
    cover = 'mount -t tmpfs none /proc/sys/net/core && exec "$@"'
    return ["nsenter", f"--net={namespace}", "unshare", "-m", "sh", "-c", cover, "sh"]
