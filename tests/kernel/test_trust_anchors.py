"""An agent with a network finds the host's trust anchors where its runtime looks; without one it has none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel import internet
from tests.kernel.internet import NetworkedWorld
from tests.kernel.world import World

LOOK = """
import ssl
answer = len(ssl.create_default_context().get_ca_certs())
"""
NODE = (
    "process.stdin.once('data', () => { const fs = require('fs'); console.log(JSON.stringify({text: "
    "String(fs.readFileSync('/usr/lib/ssl/cert.pem', 'utf8').split('BEGIN CERTIFICATE').length - 1)})) });"
)


@pytest.fixture
def networked(tmp_path: Path, warm: Path) -> Iterator[NetworkedWorld]:
    with internet.made() as net:
        yield internet.configured(NetworkedWorld(tmp_path, warm=warm), net)
        assert net.leftovers() == []


def test_networked_agent_has_anchors(networked: NetworkedWorld) -> None:
    granted = internet.entries(("api.example.com", "[443]", "tls"))
    anchors = networked.ask(LOOK, network="outbound-https-only", more=granted)
    assert anchors > 50
    package = networked.package(
        {"main.js": NODE}, runtime="node", entry="main.js", memory_mb=512, network="outbound-https-only", more=granted
    )
    answer = networked.run(networked.sign(package))
    assert answer.result is not None, (answer.error, answer.stderr)
    assert int(answer.result.text) >= anchors
    # A granted path takes the place of ours: the case's own bundle is the granted directory's.
    read = '[permissions.filesystem]\nread = ["/etc/ssl/certs"]\n'
    assert networked.ask(LOOK, network="outbound-https-only", more=read + granted) == anchors


def test_agent_without_network_has_none(world: World) -> None:
    assert world.ask("import os\nanswer = [os.path.exists(p) for p in ('/etc/ssl', '/usr/lib/ssl')]") == [False, False]
