"""A real OpenBao server on loopback, in memory, with TLS and a certificate authority of its own."""

from __future__ import annotations

import contextlib
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox.config import VaultSettings
from sandbox.kernel import libc
from tests import loopback_server

_ROOT_TOKEN = "root-of-the-test"
_SECONDS = 60.0
# What a supervisor needs that hands secrets out and changes none.
READ_ONLY = 'path "secret/data/covenant/*" { capabilities = ["read"] }'


@dataclass
class Server:
    """``settings`` say how it is reached with a token that may do everything."""

    process: subprocess.Popen[bytes]
    settings: VaultSettings
    base: Path

    def client(self) -> Any:
        """hvac's own client, for what an administrator does."""
        import hvac

        assert self.settings.token is not None
        token = self.settings.token.read_text()
        return hvac.Client(url=self.settings.address, token=token, verify=str(self.settings.ca))

    def token(self, name: str, policy: str) -> Path:
        """A file with a token that may do what ``policy`` says."""
        client = self.client()
        client.sys.create_or_update_policy(name, policy)
        made = client.auth.token.create(policies=[name], no_default_policy=True)["auth"]["client_token"]
        return private(self.base / f"{name}.token", made)

    def stop(self) -> None:
        """Stop the server without ending it, so that no request is answered; ``go_on`` undoes it."""
        self.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + _SECONDS
        while any(_state(path) != "T" for path in Path(f"/proc/{self.process.pid}/task").iterdir()):
            assert time.monotonic() < until, "it does not stop"
            time.sleep(0.005)

    def go_on(self) -> None:
        """Have it answer again."""
        self.process.send_signal(signal.SIGCONT)


def _state(task: Path) -> str:
    """How a thread is, as proc(5) has it; one that is gone does nothing."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split(maxsplit=1)[0]
    except FileNotFoundError:
        return "T"


def private(path: Path, text: str) -> Path:
    """A file that only its owner can read."""
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@contextlib.contextmanager
def running(base: Path) -> Iterator[Server]:
    """Start one below ``base``; it ends with the context, and with this process."""
    port = loopback_server.free_port()
    command = [
        *("-dev", "-dev-tls", f"-dev-tls-cert-dir={base}", "-dev-no-store-token"),
        *(f"-dev-root-token-id={_ROOT_TOKEN}", f"-dev-listen-address=127.0.0.1:{port}"),
    ]
    process = started(base, *command)
    try:
        address, ca = f"https://127.0.0.1:{port}", base / "vault-ca.pem"
        _wait(process, address, ca, base / "server.log")
        token = private(base / "root.token", _ROOT_TOKEN)
        yield Server(
            process, VaultSettings(backend="openbao", address=address, token=token, ca=ca, timeout_seconds=30), base
        )
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def started(base: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """`bao server` with these arguments, its log in ``base``; it ends with this process."""
    with (base / "server.log").open("ab") as log:
        return subprocess.Popen(
            [str(Path(sys.executable).with_name("bao")), "server", *arguments],
            env={"HOME": str(base), "PATH": "/usr/bin:/bin"},
            cwd=base,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            preexec_fn=lambda: libc.set_parent_death_signal(signal.SIGKILL),  # noqa: PLW1509 - no thread is here
        )


def _wait(process: subprocess.Popen[bytes], address: str, ca: Path, log: Path) -> None:
    until = time.monotonic() + _SECONDS
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError, ssl.SSLError):
            context = ssl.create_default_context(cafile=str(ca))
            with urllib.request.urlopen(f"{address}/v1/sys/health", context=context, timeout=2) as answer:
                if answer.status == 200 and "Root Token" in log.read_text():
                    return
        time.sleep(0.05)
    raise AssertionError(log.read_text())
