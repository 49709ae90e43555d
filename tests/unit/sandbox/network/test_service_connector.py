"""Connections of the service gate's connector, where the operator has a proxy."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from sandbox.network.gate.proxy import Proxy
from sandbox.network.service import connector, gate


@pytest.mark.parametrize(
    ("url", "first"),
    [
        ("http://127.0.0.1:4318", ("127.0.0.1", 4318)),
        ("http://localhost:4318", ("localhost", 4318)),
        ("https://collector.example:4318", ("proxy.example", 3128)),
    ],
)
def test_collector_that_is_not_encrypted_is_reached_directly(
    url: str, first: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def refuse(address: Any, *args: Any, **more: Any) -> None:
        seen.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
    by = Proxy("proxy.example", 3128)
    terms = gate.Terms({}, {}, lambda row: None, proxy=by, collector=gate.Collector(url, {}))
    targets = connector.Targets(gate.targets({}, terms))
    assert targets.known(0, b"")
    with pytest.raises(OSError):  # noqa: PT011 - of the proxy or of the collector
        targets.connected(0, "")
    assert seen == [first]
