"""Packages that a version of the trust root leaves unsigned, and agents that this host does not know."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from covenant.cli import times
from sandbox.audit import run_archive
from tests import signing_kit as kit
from tests.cli_kit import call, document, done, refused

BY_ANN = ("--sign-with", "ann")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the caller's ssh-agent and pretend to be root: the trust state is in a temporary home."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)


def _version() -> int:
    return int(document("trust", "show")["version"])


def _agent(home: Path, agent_id: str, key: str) -> Path:
    place = home / "agents" / agent_id
    place.mkdir(parents=True, mode=0o700)
    for name, data in kit.FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(data.replace(b'id = "hello"', f'id = "{agent_id}"'.encode()))
    done("manifest", "sign", place, "--key", key)
    return place


def test_rotate_names_packages_left_unsigned_and_asks(covenant_home: Path) -> None:
    for name in ("ann", "bob", "bob-new"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    place = _agent(covenant_home, "of-bob", "bob")
    _agent(covenant_home, "of-ann", "ann")
    rotate = ("trust", "rotate", "bob", "--to", "bob-new", "--sign-with", "ann")
    said = call(*rotate, stdin="n\n")
    assert said.exit_code == 1
    assert "left unsigned: of-bob" in said.output
    assert "of-ann" not in said.output
    error = refused("trust_root", *rotate, "--json")
    assert "of-bob" in str(error)
    assert document("trust", "show")["version"] == 2
    # The fix: a signature by a key that stays.
    done("manifest", "sign", place, "--key", "ann", "--fresh")
    assert document(*rotate)["version"] == 3
    done("manifest", "verify", place)


def test_yes_leaves_packages_unsigned(covenant_home: Path, tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    elsewhere = _agent(tmp_path / "elsewhere", "of-bob", "bob").parent
    remove = ("trust", "remove", "bob", "--sign-with", "ann", "--packages", elsewhere)
    refused("trust_root", *remove, "--json")
    said = call(*remove, "--yes")
    assert (said.exit_code, "left unsigned: of-bob" in said.output) == (0, True)


def test_package_of_archived_run_is_asked_about(covenant_home: Path, tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    place = _agent(tmp_path / "elsewhere", "of-bob", "bob")
    remove = ("trust", "remove", "bob", "--sign-with", "ann")
    for package in (tmp_path / "gone", place, place):
        _archived(covenant_home, "of-bob", package)
    said = call(*remove, stdin="n\n")
    assert said.exit_code == 1
    assert said.output.count(f"left unsigned: of-bob in {place}, signed by bob") == 1
    assert call(*remove, stdin="y\n").exit_code == 0


def test_import_names_package_of_archived_run(covenant_home: Path, tmp_path: Path) -> None:
    """An operator who signs the version is asked; a host that installs a complete one only prints it."""
    for name in ("ann", "bob", "eve"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    done("trust", "add", "eve", "--root", "--root-threshold", "2", "--sign-with", "ann", "--sign-with", "eve")
    place = _agent(tmp_path / "elsewhere", "of-bob", "bob")
    _archived(covenant_home, "of-bob", place)
    done("trust", "remove", "bob", "--sign-with", "ann", "--yes")
    done("trust", "export", tmp_path / "asked")
    warning = f"left unsigned: of-bob in {place}, signed by bob"
    completing = ("trust", "import", tmp_path / "asked", "--key", "eve")
    said = call(*completing, stdin="n\n")
    assert (said.exit_code, said.output.count(warning), _version()) == (1, 1, 3)
    looked = call("trust", "import", tmp_path / "asked")
    assert (looked.exit_code, looked.output.count(warning), "Go on" in looked.output) == (0, 1, False)
    assert call(*completing, stdin="y\n").exit_code == 0
    assert _version() == 4


def test_packages_of_runs_are_read_only_as_far_as_needed(
    covenant_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version that takes no signature away reads none; otherwise the manifest and the signature are read."""
    for name in ("ann", "bob", "eve"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", *BY_ANN)
    place = _agent(tmp_path / "elsewhere", "of-bob", "bob")
    os.mkfifo(place / "fifo")
    _archived(covenant_home, "of-bob", place)
    read = list[str]()
    whole = run_archive.read

    def counted(state: Path, run_id: str) -> run_archive.ArchivedRun | None:
        read.append(run_id)
        return whole(state, run_id)

    monkeypatch.setattr(run_archive, "read", counted)
    done("trust", "add", "eve", *BY_ANN)
    done("trust", "renew", "--expires", "400d", *BY_ANN)
    assert read == []
    said = call("trust", "remove", "bob", *BY_ANN, stdin="n\n")
    assert (said.exit_code, f"left unsigned: of-bob in {place}, signed by bob" in said.output) == (1, True)
    assert len(read) == 1


def test_revoke_of_unknown_agent_is_asked_about(covenant_home: Path) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    _agent(covenant_home, "greeter", "ann")
    _archived(covenant_home, "archived", Path("/no/such"))
    revoke = ("trust", "revoke", "--reason", "leaks", *BY_ANN)
    typo = (*revoke, "--agent", "greter", "--serial-at-most", "7")
    unknown = "no package and no run of `greter` is known on this host; near: `greeter`"
    said = call(*typo, stdin="n\n")
    assert (said.exit_code, unknown in said.stderr) == (1, True)
    assert unknown in str(refused("trust_root", *typo, "--json"))
    early = call(*revoke, "--agent", "greeter", "--serial-at-most", "7", stdin="n\n")
    assert early.exit_code == 1
    unanswered = refused("usage", *typo, stdin="")
    assert (unanswered.message, unanswered.hint) == ("the question has no answer without a terminal", "give --yes")
    assert "no run of `greeter` with a serial of at most 7 is known on this host; the lowest known is " in early.stderr
    assert _version() == 1
    # An id that is unknown here can be revoked, and a known one without this question.
    said = call(*typo, "--yes")
    assert (said.exit_code, unknown in said.stderr, "ended: no run\n" in said.stdout) == (0, True, True)
    for agent_id in ("archived", "greeter"):
        said = call(*revoke, "--agent", agent_id, "--serial-at-most", str(times.now_ms()), "--yes")
        assert (said.exit_code, "is known on this host" in said.stderr) == (0, False)


def _archived(home: Path, agent_id: str, package: Path) -> None:
    fields = dict.fromkeys(("operator", "parent", "code", "message", "policy_digest", "exit_status"))
    record = run_archive.ArchivedRun(
        **fields,  # type: ignore[arg-type]
        run_id=str(uuid.uuid4()),
        agent_id=agent_id,
        package=str(package),
        issuer="root",
        status="ok",
        started_ms=1,
        ended_ms=2,
        result_hash_hex=None,
        denials=0,
        stderr="",
        stderr_bytes=0,
    )
    run_archive.store(home / "supervisor", record)
