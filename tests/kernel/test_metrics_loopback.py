"""Numbers for Prometheus at an address of the loopback, asked as Prometheus asks: there, and nowhere else."""

from __future__ import annotations

import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests import loopback_server, prometheus_text
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import until
from tests.kernel.serving import Served
from tests.kernel.world import World


def _listens(port: int) -> set[str]:
    """Return the addresses with a listener at this port, as the kernel writes them (proc_net_tcp(5))."""
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    return {one[1].rpartition(":")[0] for one in lines if int(one[1].rpartition(":")[2], 16) == port and one[3] == "0A"}


@pytest.mark.parametrize(
    ("named", "kernels"), [("127.0.0.1", "0100007F"), ("[::1]", "00000000000000000000000001000000")]
)
def test_numbers_are_served_at_loopbacks_address_and_at_no_other(world: World, named: str, kernels: str) -> None:
    port = loopback_server.free_port()
    assert _listens(port) == set(), "the control"
    with Served(world, journal=True, metrics=f"{named}:{port}"):
        until(lambda: _listens(port))
        assert _listens(port) == {kernels}
        with urllib.request.urlopen(f"http://{named}:{port}/metrics", timeout=30) as answer:
            assert answer.status == 200
            numbers = prometheus_text.parse(answer.read().decode())
        assert sum(numbers["covenant_runs"].values()) == 0
        assert "covenant_run_starts_total" in numbers
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{named}:{port}/", timeout=30)
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", port), timeout=5):
            pass
    until(lambda: not _listens(port))
    assert leftovers(world) == []
