"""kill -9 of a supervisor whose run has a network: nothing of it stays on the host after the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import internet
from tests.kernel.conftest import leftovers
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.open_gateway import Opened
from tests.kernel.world import HEAD, TAIL
from tests.unit.policy.compile import sample

ROOT = Path(__file__).resolve().parents[2]
GRANTS = internet.entries(("api.example.com", "[80]", "tcp"), ("www.example.com", "[443]", "tls"))


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> NetworkedWorld:
    return internet.configured(NetworkedWorld(tmp_path, warm=warm), net)


def test_a_killed_supervisor_leaves_no_device_table_or_setting(networked: NetworkedWorld) -> None:
    net = networked.internet
    sleeper = networked.sign(
        networked.package(
            {"main.py": HEAD + "import time; time.sleep(60)\nanswer = 1" + TAIL}, network="full", more=GRANTS
        )
    )
    quick = networked.sign(networked.package({"main.py": HEAD + "answer = 'next'" + TAIL}, name="next", id="next"))
    # What it takes to know how the way is; not what is looked at here.
    assert networked.run(networked.sign(networked.package(
        {"main.py": HEAD + "answer = 1" + TAIL}, name="first", id="first", network="full", more=GRANTS
    ))).error is None  # fmt: skip
    assert net.leftovers() == []
    environment = {**os.environ, "COVENANT_HOME": str(networked.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(sleeper), "hi"]
    entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}", *command]
    seen: set[str] = set()
    for after_ms in (0, 60, 1200):
        process = subprocess.Popen(entered, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until and not any((networked.state / "runs").glob("*-*/network.json")):
            time.sleep(0.001)
        time.sleep(after_ms / 1000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.update(one.split(":")[0] for one in net.leftovers())
        assert networked.run(quick).error is None
        assert net.leftovers() == [], after_ms
        assert leftovers(networked) == []
    # The control: there was something to take away.
    assert "table inet covenant_uplink" in seen


def test_an_uplink_that_was_renamed_meanwhile_forwards_no_more_and_its_namesake_is_left_alone(net: Internet) -> None:
    def forwarding(device: str) -> str:
        return net.run("host", "sysctl", "-n", f"net.ipv4.conf.{device}.forwarding").strip()

    def rename(old: str, new: str) -> None:
        for words in (("down",), ("name", new)):
            net.run("host", "ip", "link", "set", old, *words)
        net.run("host", "ip", "link", "set", new, "up")

    artefacts = sample.compiled(sample.manifest(network="full"))
    try:
        with Opened(net, artefacts):
            assert forwarding("eth0") == "1"
            rename("eth0", "wan0")
            net.run("host", "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "far0")
            net.run("host", "sysctl", "-q", "-w", "net.ipv4.conf.eth0.forwarding=1")
            assert forwarding("wan0") == "1"
        assert forwarding("wan0") == "0"
        assert forwarding("eth0") == "1"
    finally:
        net.run("host", "ip", "link", "del", "eth0", check=False)
        rename("wan0", "eth0")
        net.run("host", "ip", "route", "add", "default", "via", internet.WORLD, check=False)
        net.run("host", "ip", "address", "add", f"{internet.HOST6}/64", "dev", "eth0", "nodad", check=False)
        net.run("host", "ip", "-6", "route", "add", "default", "via", internet.WORLD6, check=False)
    assert net.leftovers() == []
