"""The firewall's log as this kernel writes it: which packets are reported, with what target, and the cost of a flood.

A granted packet is the control: it passes by the same rules and is not reported.
"""

from __future__ import annotations

import contextlib
import re
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from policy import errors
from policy.compile.network.firewall import LOG_BURST, LOG_PACKETS_PER_SECOND, REFUSED
from policy.denials import REST_CODE, Denial
from sandbox.kernel.net.nflog import RefusedPackets
from tests.kernel import three_namespaces
from tests.kernel.three_namespaces import GATEWAY, WORLD6, Namespaces
from tests.unit.policy.compile import sample

ENTRIES = (("203.0.113.5", "[80, 443]", "tcp"), ("api.example.com", "[80]", "tcp"))
FLOOD = 100_000


@pytest.fixture(scope="module")
def spaces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Namespaces]:
    ruleset = tmp_path_factory.mktemp("rules") / "firewall.nft"
    compiled = sample.compiled(sample.manifest(network="full", more=sample.entries(*ENTRIES)))
    ruleset.write_bytes(compiled.files["firewall.nft"])
    with three_namespaces.made() as made:
        made.run("gateway", "nft", "-f", str(ruleset))
        with made.listen("world", "203.0.113.5", 80):
            yield made


class Told:
    """A reader in the gateway, and what it told."""

    def __init__(self, spaces: Namespaces) -> None:
        self.denials: list[Denial] = []
        self.untold = 0
        self.reader = spaces.within("gateway", lambda: RefusedPackets(self.told))

    def told(self, denial: Denial, *, count: int = 1) -> None:
        """As the collector of a run takes it."""
        if denial.code == REST_CODE:
            assert (denial.layer, denial.target) == ("packet", "")
            self.untold += count
        else:
            self.denials.append(denial)

    def within(self, count: int, seconds: float = 10) -> list[Denial]:
        """Return the denials reported, once there are `count`; fewer when the time is over."""
        until = time.monotonic() + seconds
        while len(self.denials) < count and time.monotonic() < until:
            if select.select([self.reader], [], [], until - time.monotonic())[0]:
                self.reader.ready()
        return self.denials


@pytest.fixture
def told(spaces: Namespaces) -> Iterator[Told]:
    made = Told(spaces)
    with contextlib.closing(made.reader):
        yield made


def connect(host: str, port: int) -> Callable[[], int]:
    def probe() -> int:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as made:
            made.settimeout(20)
            return made.connect_ex((host, port))

    return probe


def test_refused_packets_are_told_and_granted_ones_are_not(spaces: Namespaces, told: Told) -> None:
    def datagram() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            made.sendto(b"x", ("9.9.9.9", 53))

    def ping() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as made:
            made.sendto(b"\x08\0\xf7\xff" + bytes(4), ("9.9.9.9", 0))

    assert spaces.within("agent", connect("203.0.113.5", 80)) == 0
    assert spaces.within("agent", connect("203.0.113.5", 81)) != 0
    assert spaces.within("agent", connect(WORLD6[0], 443)) != 0
    assert spaces.within("agent", connect(GATEWAY, 22)) != 0
    spaces.within("agent", datagram)
    spaces.within("agent", ping)
    assert told.within(5) == [
        Denial("packet", "203.0.113.5:81/tcp", "not_granted"),
        Denial("packet", f"[{WORLD6[0]}]:443/tcp", "not_granted"),
        Denial("packet", f"{GATEWAY}:22/tcp", "gateway"),
        Denial("packet", "9.9.9.9:53/udp", "not_granted"),
        Denial("packet", "9.9.9.9/icmp", "protocol"),
    ]


def test_flood_is_told_within_rate_and_counted_whole(spaces: Namespaces, told: Told) -> None:
    def counted() -> int:
        text = spaces.run("gateway", "nft", "list", "counters", "table", "inet", "covenant")
        found = dict(re.findall(r"counter (\w+) \{\s+packets (\d+)", text))
        return sum(int(found[name]) for name in REFUSED)

    def flood() -> float:
        began = time.monotonic()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
            for number in range(FLOOD):
                # An unreachable port is an error of the next call, which has then not sent.
                with contextlib.suppress(ConnectionRefusedError):
                    made.sendto(b"x", ("9.9.9.9", 1 + number % 60_000))
        return time.monotonic() - began

    seconds = spaces.within("agent", flood)
    told.within(FLOOD, seconds=1)
    assert counted() >= FLOOD // 2
    assert LOG_BURST / 2 <= len(told.denials) <= LOG_BURST + LOG_PACKETS_PER_SECOND * (seconds + 2)
    # What the rate left out, and what another reader was told before, is a number: none is lost. The stack of the
    # agent's namespace says something of its own at any time (which groups it hears): that is heard, and not told.
    least = counted()
    told.reader.close()
    assert least <= told.reader._heard + told.untold <= counted()
    assert 0 <= told.reader._heard - len(told.denials) < 20


def test_group_has_one_reader(spaces: Namespaces, told: Told) -> None:
    with pytest.raises(errors.KernelError, match="refused packets cannot be read"):
        spaces.within("gateway", lambda: RefusedPackets(told.told))
    # Another namespace has groups of its own.
    spaces.within("world", lambda: RefusedPackets(told.told)).close()
