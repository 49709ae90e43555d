"""The network findings of doctor are true: the rules that it names stop agents, and its fix lets them pass."""

from __future__ import annotations

import functools
import shlex
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox import config, doctor_network
from sandbox.config import Config
from sandbox.host import facts as host_facts
from sandbox.host import runsc_network
from sandbox.kernel.net import dump
from sandbox.kernel.net import netns as spaces
from sandbox.network import resolvers
from tests.kernel import internet
from tests.kernel.internet import Internet
from tests.kernel.open_gateway import Opened
from tests.unit.policy.compile import sample

DOCKER = """
table ip filter {
    chain DOCKER-USER {
    }
    chain FORWARD {
        type filter hook forward priority 0; policy drop;
        jump DOCKER-USER
    }
}
"""
PLAIN = """
table inet mine {
    chain passing {
        type filter hook forward priority 5; policy drop;
    }
}
"""


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    with internet.made() as made:
        yield made
        assert made.leftovers() == []


def _look(net: Internet, look: object, **settings: str) -> doctor_network.Look:
    assert callable(look)
    found: doctor_network.Look = net.within("host", lambda: look(Config(**settings), None, 30))  # type: ignore[arg-type]
    return found


def _connects(opened: Opened, *, seconds: float = 20) -> bool:
    """Whether a connection is made in ``seconds``: a packet that is lost is sent again after one, and more."""

    def probe() -> bool:
        with socket.socket() as made:
            made.settimeout(seconds)
            return made.connect_ex(("93.184.216.34", 80)) == 0

    return spaces.within(opened.gateway.spaces.agent, probe)


def test_uplink_is_named_looked_for_and_switched_back(net: Internet) -> None:
    assert _look(net, doctor_network.interface)[0] == "missing"
    assert _look(net, doctor_network.interface, uplink="eth9")[0] == "missing"
    status, found, _ = _look(net, doctor_network.interface, uplink="eth0")
    assert (status, "while such a run is live" in found) == ("ok", True)
    assert net.within("host", lambda: host_facts.network_facts(Config(uplink="eth0"))).lacks == ""


def test_two_readers_of_netlink_agree(net: Internet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _look(net, doctor_network.readers) == (
        "ok",
        "our reader of netlink and pyroute2 read the same here",
        "",
    )
    # Control: a reader that leaves a line out is named with the line.
    lines = dump.lines
    monkeypatch.setattr(dump, "lines", lambda: frozenset(one for one in lines() if not one.startswith("address")))
    status, found, mend = _look(net, doctor_network.readers)
    assert status == "degraded"
    assert found.startswith("our reader of netlink and pyroute2 differ: only by pyroute2: address")
    assert "pyroute2" in mend


@pytest.mark.parametrize(("rules", "owner"), [(DOCKER, "docker"), (PLAIN, "")])
def test_rules_of_others_are_named_and_mend_works(net: Internet, rules: str, owner: str) -> None:
    artefacts = sample.compiled(sample.manifest(network="full", more=sample.entries(("93.184.216.34", "[80]", "tcp"))))
    assert _look(net, doctor_network.others, uplink="eth0")[0] == "ok"
    with Opened(net, artefacts) as opened:
        assert _connects(opened)
        net.run("host", "nft", "-f", "-", given=rules)
        try:
            status, found, mend = _look(net, doctor_network.others, uplink="eth0")
            assert status == "degraded"
            assert owner in found
            assert not _connects(opened, seconds=0.5)
            for line in mend.split("; "):
                net.run("host", *shlex.split(line))
            assert _connects(opened)
        finally:
            net.run("host", "nft", "delete", "table", *rules.split()[1:3])
        assert _connects(opened)


def test_way_of_this_runsc_is_found_and_remembered(tmp_path: Path) -> None:
    config = Config(state=tmp_path)
    facts = host_facts.runsc_facts(config)
    status, found, mend = doctor_network.way(config, facts, 60)
    assert (status, mend) == ("ok", ""), found
    known = runsc_network.known(config, sha256=facts.sha256, kernel=host_facts.probe(config).kernel)
    assert known is not None
    assert known.name in runsc_network.WAYS
    # Another binary, or another kernel, is another question.
    assert runsc_network.known(config, sha256="0" * 64, kernel=host_facts.probe(config).kernel) is None


def test_runsc_that_takes_no_network_is_said_to(tmp_path: Path) -> None:
    fake = tmp_path / "runsc"
    fake.write_text("#!/bin/sh\necho 'cannot run with network enabled in root network namespace' >&2\nexit 128\n")
    fake.chmod(0o755)
    config = Config(state=tmp_path)
    find = functools.partial(runsc_network.find, config, sha256="1" * 64, kernel="6.8.0", deadline_seconds=30)
    way = find(fake)
    assert (way.name, "root network namespace" in way.fault) == ("", True)
    assert runsc_network.known(config, sha256="1" * 64, kernel="6.8.0") is None


def test_dead_resolver_is_named_and_fix_works(net: Internet) -> None:
    answers, dead = internet.RESOLVER, "198.51.100.99"

    def look(*known: str) -> doctor_network.Look:
        settings = Config(resolvers=known)
        return net.within("host", lambda: doctor_network.names(settings, None, 30))

    status, found, fix = look(answers, dead)
    assert (status, f"{dead} " in found, answers in found) == ("degraded", True, False)
    assert f'resolvers = ["{answers}"]' in fix
    # The control: with the line of the fix nothing is left to say.
    assert look(answers) == ("ok", f"{answers} answers ({config.file_of(Config().state)})", "")
    status, found, fix = look(dead)
    assert (status, found.startswith("no name is resolved")) == ("missing", True)
    assert "ADDRESS" in fix


def test_resolver_that_refuses_this_host_is_named(net: Internet) -> None:
    with net.within("world", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as server:
        server.bind((internet.RESOLVER, 5353))

        def refuse() -> None:
            wire, peer = server.recvfrom(512)
            server.sendto(wire[:2] + b"\x81\x85" + wire[4:], peer)

        thread = threading.Thread(target=refuse)
        thread.start()
        found = net.within("host", lambda: resolvers.fault_of(internet.RESOLVER, port=5353))
        thread.join(10)
    assert found == "refuses to answer this host"
