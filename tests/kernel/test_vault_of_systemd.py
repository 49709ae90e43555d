"""The key of the vault as a credential of the supervisor's unit, encrypted by the host's key under a real systemd.

Nothing of this machine's is used: the host key is made in a /var/lib of the booted systemd's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from policy import errors
from sandbox.run_result import RunResult
from sandbox.serve.api import client
from tests.kernel import serving
from tests.kernel.booted_services import BootedServices
from tests.kernel.conftest import leftovers
from tests.kernel.serving import opened
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World

SECRET = "planted-by-an-operator"
SERVICE = "covenant-supervisor.service"
# Where systemd looks for it is said in the unit; a name of the root's own, which no boot of the machine knows.
PLACE = "/run/covenant-vault.cred"
READS = """
answer = open(os.environ["CREDENTIALS_DIRECTORY"] + "/db").read()
"""
FILES = '[permissions.credentials]\ngrants = ["db"]\nfiles = true\n'


class Sharing(BootedServices):
    """Its mounts are shared, as systemd has them on a machine: what it mounts for a unit it mounts beside itself."""

    script: ClassVar[str] = BootedServices.script.replace('exec "$SYSTEMD"', 'mount --make-rshared /\nexec "$SYSTEMD"')


@pytest.fixture
def booted(warm: Path) -> Iterator[BootedServices]:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        world.configure(journal=False, checkpoint_seconds=0)
        with (world.state / "config.toml").open("a") as stream:
            stream.write('[vault]\nkey = "credential:covenant-vault"\n')
        world.sign(world.package({"main.py": HEAD + READS + TAIL}, more=FILES))
        services = Sharing(world, base)
        credential = f"LoadCredentialEncrypted=covenant-vault:{PLACE}"
        services.drop_in(SERVICE, f"[Service]\n{credential}\n")
        services.unit("operates.service", f"[Service]\nType=oneshot\n{credential}\nExecStart=/bin/sh /run/operates\n")
        with services:
            yield services
        assert leftovers(world) == []


def _within(booted: BootedServices, *command: str) -> str:
    done = booted.run(*command)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def _encrypt(booted: BootedServices, name: str = "covenant-vault") -> None:
    """As an operator does: what is random is never in the clear on a disk."""
    encrypt = f"head -c 32 /dev/urandom | systemd-creds encrypt --with-key=host --name={name} - {PLACE}"
    _within(booted, "sh", "-ec", encrypt)


def _vault(booted: BootedServices, words: str, secret: str = "") -> dict[str, Any]:
    """``covenant vault`` in a unit of its own, which is given the same credential."""
    vault = f"HOME=/tmp COVENANT_STATE=/var/lib/covenant /opt/covenant/bin/covenant vault {words} --json"
    booted.inside("run/operates").write_text(f"printf %s '{secret}' | {vault} >/run/said 2>/run/why\n")
    done = booted.run("systemctl", "start", "operates.service")
    assert done.returncode == 0, (done.stderr, *(booted.inside("run", name).read_text() for name in ("said", "why")))
    said: dict[str, Any] = json.loads(booted.inside("run/said").read_text())
    return said


def _run(booted: BootedServices) -> RunResult:
    socket = str(booted.inside("run/covenant/supervisor.sock"))
    with client.connected(socket) as sock, opened(booted.world.base / "packages" / "probe") as directory:
        assert sock is not None
        sock.settimeout(120 * SLOWNESS)
        return client.run(sock, directory, "hi")


def test_key_that_host_encrypts_opens_vault_in_unit_and_nowhere_else(booted: BootedServices) -> None:
    _encrypt(booted)
    assert _vault(booted, "init")["kind"] == "vault_created"
    assert _vault(booted, "put probe db", SECRET)["kind"] == "secret_put"
    answer = _run(booted)
    assert answer.error is None, (answer.error, booted.journal(f"_SYSTEMD_UNIT={SERVICE}"))
    assert answer.result is not None
    assert json.loads(answer.result.text) == SECRET
    # Where it lies it is encrypted, and what systemd made of it is in the unit's own directory, root's alone.
    assert b"planted" not in booted.inside(PLACE.lstrip("/")).read_bytes()
    environment = Path(f"/proc/{booted.main(SERVICE)}/environ").read_bytes().split(b"\0")
    (directory,) = (one for one in environment if one.startswith(b"CREDENTIALS_DIRECTORY="))
    clear = booted.inside(os.fsdecode(directory.partition(b"=")[2]).lstrip("/"), "covenant-vault")
    assert (clear.stat().st_size, clear.stat().st_uid, clear.stat().st_mode & 0o077) == (32, 0, 0)
    # Outside the unit there is no key, and it is said where one comes from.
    done = booted.run("sh", "-c", "HOME=/tmp COVENANT_STATE=/var/lib/covenant /opt/covenant/bin/covenant vault list")
    assert done.returncode != 0
    assert "needs a service of systemd" in done.stderr


def test_another_key_of_that_name_opens_nothing(booted: BootedServices) -> None:
    _encrypt(booted)
    _vault(booted, "init")
    _vault(booted, "put probe db", SECRET)
    _encrypt(booted)
    with pytest.raises(errors.VaultKeyError, match="does not open the vault"):
        _run(booted)
