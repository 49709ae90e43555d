"""No two gates run as one user, and none is a user that agents run as."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policy.compile.network import firewall
from sandbox import config
from sandbox.network.gate import process, uids

ALL = {name: value for name, value in vars(uids).items() if name.isupper() and isinstance(value, int)}


def test_no_two_gates_share_uid() -> None:
    assert len(set(ALL.values())) == len(ALL) >= 13
    assert {uids.TLS, uids.PUBLISH_CONNECTOR} == {firewall.GATE_UID, firewall.PUBLISH_UID}


def test_no_agent_has_uid_of_gate() -> None:
    settings = config.Config(state=Path("/var/lib/covenant"))
    assert all(0 < uid < 65_534 and uid < settings.uid_first for uid in ALL.values())


@pytest.mark.parametrize("call", ["connect", "socket"])
def test_gate_that_is_handed_its_sockets_makes_none(call: str) -> None:
    """Some of these sockets are of the host's namespace: with such a call their holder could reach the host."""
    assert not process.CALLS & {"connect", "socket"}
    for uid in ALL.values():
        gate: dict[str, Any] = {"module": "m", "layer": "l", "codes": (), "uid": uid, "plan": {}, "fds": {}}
        assert process.Gate(**gate).calls == ()
        if uid in uids.CONNECT:
            assert process.Gate(**gate, calls={call}).calls == {call}
        else:
            with pytest.raises(ValueError, match="makes no connections"):
                process.Gate(**gate, calls={call})
