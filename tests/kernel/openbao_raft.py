"""A real OpenBao server as it is run for good: raft storage on a disk, sealed at each start, TLS; of one node."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hvac
import requests
from hvac.exceptions import VaultError

from sandbox.config import VaultSettings
from tests import loopback_server
from tests.kernel.openbao_server import Server, private, started
from tests.kernel.tls_servers import Certificates
from tests.kernel.world import SLOWNESS

_SECONDS = 120 * SLOWNESS
_CONFIG = """\
storage "raft" {{
  path = "{base}/raft"
  node_id = "one"
}}
listener "tcp" {{
  address = "127.0.0.1:{port}"
  cluster_address = "127.0.0.1:{cluster}"
  tls_cert_file = "{pem}"
  tls_key_file = "{pem}"
}}
api_addr = "https://localhost:{port}"
cluster_addr = "https://127.0.0.1:{cluster}"
"""


@dataclass
class RaftServer(Server):
    """``key`` unseals it."""

    key: str = ""

    def restart(self) -> None:
        """kill -9, and start it on what its disk has; it is sealed then."""
        self.process.kill()
        self.process.wait()
        self.process = _start(self.base)
        client = self.client()
        _until(self, client.sys.is_sealed)

    def unseal(self) -> None:
        """Until it is the leader of its one node."""
        self.client().sys.submit_unseal_key(self.key)
        self._leads()

    def go_on(self) -> None:
        """As ``Server.go_on``: who was stopped for long may have to become the leader again."""
        super().go_on()
        self._leads()

    def _leads(self) -> None:
        # Anything that has to be written through the leader.
        client = self.client()
        _until(self, lambda: client.sys.create_or_update_policy("leads", 'path "x" {}') is not None)


@contextlib.contextmanager
def running(base: Path) -> Iterator[RaftServer]:
    """Start one below ``base``, with an empty KV version 2 store at ``secret``; it ends with the context."""
    certificates, port = Certificates(base, "localhost"), loopback_server.free_port()
    (base / "raft").mkdir()
    config = _CONFIG.format(base=base, port=port, cluster=loopback_server.free_port(), pem=certificates.path)
    (base / "server.hcl").write_text(config)
    token = private(base / "root.token", "none yet")
    settings = VaultSettings(
        backend="openbao",
        address=f"https://localhost:{port}",
        token=token,
        ca=certificates.path,
        timeout_seconds=2 * SLOWNESS,
    )
    server = RaftServer(_start(base), settings, base)
    try:
        client = server.client()
        _until(server, lambda: client.sys.is_initialized() is False)
        made = client.sys.initialize(1, 1)
        server.key = made["keys"][0]
        token.write_text(made["root_token"])
        server.unseal()
        _until(server, lambda: _stores(server.client()))
        yield server
    finally:
        server.process.send_signal(signal.SIGCONT)
        server.process.kill()
        server.process.wait()


def _stores(client: hvac.Client) -> bool:
    """Whether the store takes secrets: it is made, and then upgraded in its own time."""
    if "secret/" not in client.sys.list_mounted_secrets_engines()["data"]:
        client.sys.enable_secrets_engine("kv", path="secret", options={"version": "2"})
    kv = client.secrets.kv.v2
    kv.create_or_update_secret(path="is-there", secret={"a": "b"}, mount_point="secret")
    kv.delete_metadata_and_all_versions(path="is-there", mount_point="secret")
    return True


def _start(base: Path) -> subprocess.Popen[bytes]:
    return started(base, f"-config={base / 'server.hcl'}")


def _until(server: Server, true: Callable[[], Any]) -> None:
    until = time.monotonic() + _SECONDS
    while True:
        with contextlib.suppress(VaultError, requests.RequestException):
            if true():
                return
        log = (server.base / "server.log").read_text()
        assert time.monotonic() < until, log
        assert server.process.poll() is None, log
        time.sleep(0.1)
