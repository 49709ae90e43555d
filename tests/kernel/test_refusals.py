"""A package that is unsigned, forbidden or not enforceable does not start: each has its own code, and is in the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.kernel.world import HEAD, TAIL, World

ROOT = Path(__file__).resolve().parents[2]
GOOD = {"main.py": HEAD + "answer = 1" + TAIL}


def _changed(world: World) -> Path:
    path = world.sign(world.package(GOOD))
    with open(path / "main.py", "a") as file:
        file.write("#")
    return path


def _changed_manifest(world: World) -> Path:
    path = world.sign(world.package(GOOD))
    (path / "agent.toml").write_text((path / "agent.toml").read_text().replace("memory_mb = 128", "memory_mb = 129"))
    return path


def _extra_file(world: World) -> Path:
    path = world.sign(world.package(GOOD))
    (path / "json.py").write_text("import os")
    return path


def _symlink(world: World) -> Path:
    path = world.sign(world.package(GOOD))
    (path / "data").symlink_to("/etc/shadow")
    return path


def _unknown_key(world: World) -> Path:
    return world.sign(world.package(GOOD), key=Ed25519PrivateKey.generate())


def _older_serial(world: World) -> Path:
    world.run(world.sign(world.package(GOOD), serial=world.now_ms + 5000))
    return world.sign(world.package(GOOD), serial=world.now_ms + 4000)


def _same_serial_other_bytes(world: World) -> Path:
    world.run(world.sign(world.package(GOOD), serial=world.now_ms + 5000))
    return world.sign(world.package({"main.py": HEAD + "answer = 2" + TAIL}), serial=world.now_ms + 5000)


def _other_audience(world: World) -> Path:
    return world.sign(world.package(GOOD), audience="elsewhere.example")


def _reads(world: World, path: Path) -> Path:
    return world.sign(world.package(GOOD, more=f'[permissions.filesystem]\nread = ["{path}"]'))


def _reads_link(world: World) -> Path:
    link = world.base / "link"
    link.symlink_to("/usr/share")
    os.lchown(link, 65_534, -1)  # its owner can change it
    return _reads(world, world.base / "link" / "doc")


def _signed(**fields: str) -> Callable[[World], Path]:
    return lambda world: world.sign(world.package(GOOD, **fields))


CASES: dict[str, tuple[str, Callable[[World], Path]]] = {
    "one byte more": ("digest_mismatch", _changed),
    "manifest changed": ("digest_mismatch", _changed_manifest),
    "file that was not signed": ("digest_mismatch", _extra_file),
    "symlink": ("package_invalid", _symlink),
    "unsigned": ("unsigned", lambda world: world.package(GOOD)),
    "unknown key": ("unknown_key", _unknown_key),
    "older serial": ("serial_rollback", _older_serial),
    "serial reused": ("serial_rollback", _same_serial_other_bytes),
    "other audience": ("wrong_audience", _other_audience),
    "denied call": ("rule_7_deny_list", _signed(more='[permissions.syscalls]\nallow = ["ptrace"]')),
    "role exceeded": ("rule_3_role", _signed(id='x"\nrole = "observer', memory_mb="5000")),
    "more memory than there is": ("rule_6_resources", _signed(memory_mb="9999999")),
    "network": ("not_enforceable", _signed(network="full")),
    "skill without a server": (
        "not_enforceable",
        _signed(more='[permissions.skills]\nallow = ["matrix://tool/mcp/fs/read@1.0"]'),
    ),
    "credentials without a vault": ("vault_unusable", _signed(more='[permissions.credentials]\ngrants = ["token"]')),
    "reads the state": ("never_grantable", lambda world: _reads(world, world.state)),
    "reads what holds the state": ("never_grantable", lambda world: _reads(world, world.base)),
    "reads the keys": ("never_grantable", lambda world: _reads(world, world.home / "keys")),
    "reads through a user's symlink": ("path_refused", _reads_link),
    "reads /proc": ("never_grantable", _signed(more='[permissions.filesystem]\nread = ["/proc"]')),
}


@pytest.mark.parametrize("case", CASES)
def test_refused_before_anything_starts(world: World, case: str) -> None:
    code, make = CASES[case]
    path = make(world)
    before = len([r for r in world.rows() if r["kind"]["type"] == "run_started"])
    status, document = _run(world, path)
    assert (status, document["kind"]) == (1, "error")
    assert document["code"] == code, document
    rows = world.rows()
    assert len([r for r in rows if r["kind"]["type"] == "run_started"]) == before
    assert rows[-1]["kind"]["type"] == "manifest_rejected"
    assert rows[-1]["kind"]["code"] == code


def _run(world: World, path: Path) -> tuple[int, dict[str, str]]:
    """``covenant run`` as a command; a JSON document and nothing else on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "covenant", "run", str(path), "hi", "--json"],
        env={**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)


def test_expired_envelope_is_refused(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from policy import errors

    path = world.sign(world.package(GOOD), lifetime_ms=1000)
    import time

    time.sleep(1.2)
    with pytest.raises(errors.ExpiredError):
        world.run(path)


def test_package_that_ran_is_one_that_was_read(world: World) -> None:
    """Between reading and running, the source may change as it likes: the copy of the verified bytes runs."""
    from sandbox.storage import package_reader
    from sandbox.supervisor import Request, Supervisor

    path = world.sign(world.package({"main.py": HEAD + "answer = 'signed'" + TAIL}))
    read = package_reader.read(path)
    (path / "main.py").write_text('print(\'{"text": "swapped"}\')')
    with Supervisor(world.state) as supervisor:
        answer = supervisor.run(Request(read, "hi", world.issuer))
    assert answer.result is not None
    assert answer.result.text == '"signed"'
