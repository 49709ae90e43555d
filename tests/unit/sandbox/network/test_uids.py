"""No two gates run as one user, and none is a user that agents run as."""

from __future__ import annotations

from pathlib import Path

from policy.compile.network import firewall
from sandbox import config
from sandbox.network.gate import uids

ALL = {name: value for name, value in vars(uids).items() if name.isupper()}


def test_no_two_gates_share_uid() -> None:
    assert len(set(ALL.values())) == len(ALL) >= 13
    assert {uids.TLS, uids.PUBLISH_CONNECTOR} == {firewall.GATE_UID, firewall.PUBLISH_UID}


def test_no_agent_has_uid_of_gate() -> None:
    settings = config.Config(state=Path("/var/lib/covenant"))
    assert all(0 < uid < 65_534 and uid < settings.uid_first for uid in ALL.values())
