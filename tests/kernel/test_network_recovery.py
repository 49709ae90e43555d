"""kill -9 of a supervisor whose run has a network: nothing of it stays on the host after the next start."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from policy import errors
from sandbox.attest import live_runs
from sandbox.config import Config
from sandbox.kernel.net import netns as spaces
from sandbox.kernel.net import nft
from sandbox.rundir import registry
from sandbox.storage import package_reader as packages
from sandbox.supervisor import Request, Supervisor
from tests.crash import traces
from tests.kernel import internet
from tests.kernel.conftest import leftovers
from tests.kernel.internet import Internet, NetworkedWorld
from tests.kernel.open_gateway import Opened
from tests.kernel.world import HEAD, TAIL
from tests.unit.policy.compile import sample

ROOT = Path(__file__).resolve().parents[2]
UPLINK_TABLE = "table inet covenant_uplink"
GRANTS = internet.entries(("api.example.com", "[80]", "tcp"), ("www.example.com", "[443]", "tls"))

# A keeper that is killed between the answer and the rest.
KILLED = """
import contextlib, json, os, signal, sys
from pathlib import Path
from sandbox.storage import package_reader as package
from sandbox.supervisor import Request, Supervisor
with Supervisor(Path(sys.argv[1])) as supervisor:
    request = Request(package.read(Path(sys.argv[2])), "hi", json.loads(sys.argv[3]))
    assert supervisor.run(request, after=contextlib.ExitStack()).error is None
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def networked(tmp_path: Path, warm: Path, net: Internet) -> NetworkedWorld:
    return internet.configured(NetworkedWorld(tmp_path, warm=warm), net)


def test_killed_supervisor_leaves_no_device_table_or_setting(networked: NetworkedWorld) -> None:
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
    for after_ms in (0, 60, None):  # None: once there is something to take away
        process = subprocess.Popen(entered, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 60
        while time.monotonic() < until and not any((networked.state / "runs").glob("*-*/network.json")):
            time.sleep(0.001)
        if after_ms is None:
            while time.monotonic() < until and not any(one.startswith(UPLINK_TABLE) for one in net.leftovers()):
                time.sleep(0.05)
        else:
            time.sleep(after_ms / 1000)
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen.update(one.split(":")[0] for one in net.leftovers())
        assert networked.run(quick).error is None
        assert net.leftovers() == [], after_ms
        assert leftovers(networked) == []
    # The control: there was something to take away.
    assert UPLINK_TABLE in seen


@pytest.mark.parametrize("killed", [False, True])
def test_what_is_left_of_network_when_answer_was_given(networked: NetworkedWorld, killed: bool) -> None:
    """It is no run any more, holds no place and can be killed over: the directory says what is to be taken away."""
    net, runs = networked.internet, networked.state / "runs"
    package = networked.sign(networked.package({"main.py": HEAD + "answer = 1" + TAIL}, network="full", more=GRANTS))
    after = contextlib.ExitStack()

    def run() -> None:
        with Supervisor(networked.state, never_granted=(str(networked.home),)) as supervisor:
            answer = supervisor.run(Request(packages.read(package), "hi", networked.issuer), after=after)
            assert answer.error is None

    if killed:
        entered = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{net.spaces['host']}", sys.executable, "-c", KILLED]
        given = [str(networked.state), str(package), json.dumps(networked.issuer)]
        done = subprocess.run([*entered, *given], env={"PYTHONPATH": str(ROOT)}, check=False, timeout=120)
        assert done.returncode == -signal.SIGKILL
    else:
        net.within("host", run)
    (left,) = [path for path in runs.iterdir() if path.is_dir()]
    assert {path.name for path in left.iterdir()} == {"lock", "meter", "network.json"}
    assert not registry.under_way(left)
    assert registry.live(runs) == []
    assert live_runs.live(runs) == []
    assert any(UPLINK_TABLE in one for one in net.leftovers())
    if killed:
        used = [row for row in networked.rows() if row["kind"]["type"] == "run_ended"]
        net.within("host", lambda: Supervisor(networked.state).__enter__().__exit__())
        # Its end was written before, and is written once.
        assert [row for row in networked.rows() if row["kind"]["type"] == "run_ended"] == used
        assert len(used) == 1
    else:
        net.within("host", after.close)
    assert net.leftovers() == []
    assert leftovers(networked) == []


SAYS_NO = 'echo "netlink: Error: cache initialization failed: Cannot allocate memory" >&2; exit 1'
# By its words and the text of a rule set that it is given.
REFUSALS = {
    "everything": SAYS_NO,
    "the table of all runs": f'case "$*/$given" in "-f -/table inet covenant_uplink"*) {SAYS_NO};; esac',
    "the table of the run": f'case "$given" in *"table inet covenant {{"*) {SAYS_NO};; esac',
    "the walls of the agent": f'case "$*/$given" in "-f -/"*covenant_walls*) {SAYS_NO};; esac',
    "no answer": 'case "$*" in "-f -") exec sleep 1000;; esac',
}


# Those that refuse as well to take away what all runs share.
NOT_UNDONE = ("everything", "the table of all runs", "no answer")


def _nft(script: Path, refusal: str) -> str:
    """The machine's own nft, but for what is refused."""
    given = 'given=; case "$*" in *"-f -") given=$(cat);; esac'
    script.write_text(f'#!/bin/sh\n{given}\n{refusal}\nprintf "%s\\n" "$given" | {Config().nft} "$@"\n')
    script.chmod(0o755)
    return str(script)


def _start(networked: NetworkedWorld) -> None:
    """Do the work of a start, with the machine's own nft."""
    internet.configured(networked, networked.internet)
    networked.internet.within("host", lambda: Supervisor(networked.state).__enter__().__exit__())


@pytest.mark.parametrize("when", ["at its end", "as it starts"])
def test_table_that_could_not_be_taken_away_is_next_start_s(
    networked: NetworkedWorld, tmp_path: Path, when: str
) -> None:
    """It drops what it does not know on the uplink, and only the run's directory says that it is there."""
    net, runs = networked.internet, networked.state / "runs"
    package = networked.sign(networked.package({"main.py": HEAD + "answer = 1" + TAIL}, network="full", more=GRANTS))
    # To end with it is to take it away alone.
    refusal = f'case "$given" in *"delete table inet covenant_uplink") {SAYS_NO};; esac'
    if when == "as it starts":
        refusal += f"\n{REFUSALS['the table of the run'].replace('Cannot allocate memory', 'No such file')}"
    internet.configured(networked, net, nft=_nft(tmp_path / "nft", refusal))
    # The first error stays the first.
    with pytest.raises(errors.KernelError, match="Cannot allocate" if when == "at its end" else "No such file"):
        networked.run(package)
    (left,) = [path for path in runs.iterdir() if path.is_dir()]
    assert json.loads((left / "network.json").read_bytes())["left"] is True
    assert registry.live(runs) == []
    assert UPLINK_TABLE in net.leftovers()
    _start(networked)
    assert net.leftovers() == []
    assert leftovers(networked) == []
    assert networked.run(package).error is None


def test_nft_that_refuses_is_error_that_says_so_and_leaves_nothing(
    networked: NetworkedWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does where the kernel has no memory for one more table."""
    net, home, script = networked.internet, networked.home, tmp_path / "nft"
    package = networked.sign(networked.package({"main.py": HEAD + "answer = 1" + TAIL}, network="full", more=GRANTS))
    assert networked.run(package).error is None
    held, before = traces.held(home), traces.tree(home)
    monkeypatch.setattr(nft, "_SECONDS", 1)
    for what, refusal in REFUSALS.items():
        internet.configured(networked, net, nft=_nft(script, refusal))
        with pytest.raises(errors.KernelError, match=r"nft.*(Cannot allocate memory|does not answer)"):
            networked.run(package)
        if what in NOT_UNDONE:
            _start(networked)
        left = [*net.leftovers(), *leftovers(networked), *traces.processes(home), *traces.unknown(home, before)]
        assert (what, left, traces.held(home)) == (what, [], held)
    # The control: with the machine's own it runs; and each has its end in the log.
    internet.configured(networked, net)
    monkeypatch.undo()
    assert networked.run(package).error is None
    ended = [row["kind"]["status"] for row in networked.rows() if row["kind"]["type"] == "run_ended"]
    assert ended == ["ok", *["failed"] * len(REFUSALS), "ok"]


def test_uplink_that_was_renamed_meanwhile_forwards_no_more_and_its_namesake_is_left_alone(net: Internet) -> None:
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


def test_uplink_made_anew_forwards_for_next_run_and_no_longer() -> None:
    """A VPN takes its interface away and makes another of that name while a run lives."""
    with internet.made() as other:
        artefacts = sample.compiled(sample.manifest(network="full"))

        def forwarding() -> str:
            return other.run("host", "sysctl", "-n", "net.ipv4.conf.tun0.forwarding").strip()

        def make() -> None:
            other.run("host", "ip", "link", "add", "tun0", "type", "veth", "peer", "name", "far0")

        make()
        first, second = (Opened(other, artefacts) for _ in range(2))
        first._config = second._config = Config(uplink="tun0", resolvers=(internet.RESOLVER,))
        with first:
            assert forwarding() == "1"
            other.run("host", "ip", "link", "del", "tun0")
            make()
            assert forwarding() == "0"
            with second:
                assert forwarding() == "1"
            assert forwarding() == "1"
        assert forwarding() == "0"
        other.run("host", "ip", "link", "del", "tun0")
        assert other.leftovers() == []


def _make_anew(net: Internet) -> None:
    """Do what a VPN does that connects again: another interface of the same name, with the same addresses."""
    net.run("host", "ip", "link", "del", "eth0")
    net.link()


def _reaches(one: Opened, seconds: float = 1) -> bool:
    def connect() -> bool:
        with socket.socket() as made:
            made.settimeout(seconds)
            return made.connect_ex(("93.184.216.34", 80)) == 0

    return spaces.within(one.gateway.spaces.agent, connect)


CHANGES: dict[str, Callable[[Internet], object]] = {
    "interface made anew": _make_anew,
    "ruleset flushed": lambda net: net.run("host", "nft", "flush", "ruleset"),
    "forwarding off": lambda net: net.run("host", "sysctl", "-q", "-w", "net.ipv4.conf.all.forwarding=1",
                                          "net.ipv4.conf.all.forwarding=0"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_live_run_gets_its_way_out_back(change: str) -> None:
    """The operator changes the host's network under two live runs. Their checks of each second make it whole again."""
    granted = internet.entries(("93.184.216.34", "[80]", "tcp"))
    artefacts = sample.compiled(sample.manifest(network="full", more=granted))
    with internet.made() as net:
        with Opened(net, artefacts) as first:
            with Opened(net, artefacts) as second:
                assert _reaches(first, 30)
                CHANGES[change](net)
                assert not _reaches(second)
                until = time.monotonic() + 60
                while not (_reaches(second) and _reaches(first)):
                    assert time.monotonic() < until
                    for one in (second, first):
                        net.within("host", one.gateway.collect)
            assert _reaches(first, 30)
            assert UPLINK_TABLE in net.leftovers()
        assert net.leftovers() == []
