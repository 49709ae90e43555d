"""Refusals of ``covenant trust``: when they come, and that each printed fix works."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest

from policy import errors
from tests import signing_kit as kit
from tests.cli_kit import call, document, done, refused


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset the caller's ssh-agent and pretend to be root: the trust state is in a temporary home."""
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    monkeypatch.setattr("covenant.cli.operator.trust_update_steps.running_as_root", lambda: True)


def test_refused_version_asks_about_no_package(covenant_home: Path) -> None:
    for name in ("ann", "bob", "bob-new"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("trust", "add", "bob", "--sign-with", "ann")
    package = covenant_home / "agents" / "hello"
    for name, data in kit.FILES.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_bytes(data)
    done("manifest", "sign", package, "--key", "bob")
    rotate = ("trust", "rotate", "bob", "--to", "bob-new", "--sign-with")
    unlisted, unknown = call(*rotate, "bob"), call(*rotate, "nobody")
    assert "the key `bob` does not sign trust roots" in str(unlisted.exception)
    assert isinstance(unknown.exception, errors.KeyFileError)
    # A version that waits for a second signature.
    done("trust", "add", "bob-new", "--root", "--root-threshold", "2", "--sign-with", "ann")
    done("trust", "renew", "--sign-with", "ann")
    remove = ("trust", "remove", "bob", "--sign-with", "ann", "--sign-with", "bob-new")
    waiting = call(*remove)
    assert "is waiting for signatures" in str(waiting.exception)
    assert [said.stderr for said in (unlisted, unknown, waiting)] == ["", "", ""]
    # The fixes: keys that sign roots, and the waiting version dropped.
    assert document(*remove, "--discard-pending", "--yes")["version"] == 4


def test_each_fix_of_a_listed_key_works(covenant_home: Path) -> None:
    public = {name: document("keys", "new", name, "--no-passphrase")["public"] for name in ("ann", "bob", "eve")}
    done("trust", "init", "--key", "ann")
    by_ann = ("--sign-with", "ann")
    done("trust", "add", "bob", *by_ann)
    for words in (("add", "bob"), ("add", "x", "--public", public["bob"]), ("rotate", "ann", "--to", "bob")):
        error = refused("trust_root", "trust", *words, *by_ann)
        assert error.hint.startswith("covenant trust set bob changes")
    done("trust", "set", "bob", "--agents", "team-*", *by_ann)
    for wrong in ("BOB", public["bob"][:-1]):
        error = refused("usage", "trust", "add", "y", "--public", wrong, *by_ann)
        assert "is no public key: it is not 64 hexadecimal digits" in error.message
    error = refused("trust_root", "trust", "add", "bob", "--public", public["eve"], *by_ann)
    assert error.hint == f"give another name: covenant trust add NAME --public {public['eve']}"
    done("trust", "add", "eve", "--public", public["eve"], *by_ann)
    assert refused("usage", "trust", "add", *by_ann).hint.startswith("covenant trust add NAME, ")
    assert "manifest verify" in refused("usage", "trust", "revoke", "--agent", "x", "--reason", "y", *by_ann).hint


def test_each_fix_of_a_revocation_works(covenant_home: Path, tmp_path: Path) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    done("manifest", "new", tmp_path / "mine")
    revoke = ("trust", "revoke", "--reason", "leaks", "--sign-with", "ann")
    error = refused("package_invalid", *revoke, "--package", tmp_path / "mina")
    assert error.hint.startswith(f"did you mean `{tmp_path}/mine`?; --manifest DIGEST")
    error = refused("package_invalid", *revoke, "--package", tmp_path / "mine")
    assert error.hint.startswith("--manifest DIGEST revokes")
    error = refused("trust_root", *revoke, "--manifest", "zz")
    assert "`payload_digest` of covenant manifest verify PACKAGE --json" in error.hint
    done("manifest", "sign", tmp_path / "mine", "--key", "ann")
    digest = document("manifest", "verify", tmp_path / "mine")["payload_digest"]
    done(*revoke, "--manifest", digest)
    error = refused("trust_root", *revoke, "--manifest", digest)
    assert error.hint == "nothing is left to do; covenant trust enforce ends live runs that depend on it"


def test_each_fix_of_an_export_works(covenant_home: Path, tmp_path: Path) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    for words in (("export", tmp_path / "no" / "x"), ("export", "--version", "9", tmp_path / "x"), ("import", "none")):
        assert refused("trust_root", "trust", *words).hint
    done("trust", "export", "--version", "1", tmp_path / "x")
    done("trust", "import", tmp_path / "x")


def test_each_fix_of_a_passphrase_file_works(covenant_home: Path, tmp_path: Path) -> None:
    file = tmp_path / "passphrase"
    new = ("keys", "new", "ann", "--passphrase-file", file)
    assert "--passphrase-file - for stdin" in refused("key_file", *new).hint
    file.write_text("")
    assert refused("key_file", *new).hint == f"chmod 0600 {file}"
    file.chmod(0o600)
    assert refused("key_file", *new).hint == "write it into the first line"
    file.write_text("open\n")
    done(*new)


def test_fix_of_an_archive_without_directory_works(covenant_home: Path, tmp_path: Path) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    archive = ("audit", "archive", tmp_path / "a b" / "old", "--older-than", "1d")
    hint = refused("usage", *archive).hint
    subprocess.run(shlex.split(hint.rpartition(": ")[2]), check=True)
    done(*archive)


def test_packages_that_are_not_there_are_refused(covenant_home: Path, tmp_path: Path) -> None:
    """A misspelt --packages would leave packages unsigned without a question."""
    for name in ("ann", "new"):
        done("keys", "new", name, "--no-passphrase")
    done("trust", "init", "--key", "ann")
    package = tmp_path / "agents" / "hello"
    package.parent.mkdir()
    done("manifest", "new", package)
    done("manifest", "sign", package, "--key", "ann")
    (tmp_path / "empty").mkdir()
    rotate = ("trust", "rotate", "ann", "--to", "new", "--sign-with", "ann", "--packages")
    for place in ("agentz", "empty"):
        error = refused("package_invalid", *rotate, tmp_path / place)
        assert str(tmp_path / place) in error.message
    assert document("trust", "show")["version"] == 1
    said = call(*rotate, tmp_path / "agents", stdin="n\n")
    assert (said.exit_code, "left unsigned: hello" in said.stderr) == (1, True)


def test_each_fix_of_an_import_works(covenant_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    first = document("trust", "show")["payload_digest"]
    (tmp_path / "other.json").write_text("{}")
    for more in ((), ("--first", first)):
        error = refused("trust_root", "trust", "import", tmp_path / "other.json", *more)
        assert (error.where, error.hint) == (
            str(tmp_path / "other.json"),
            "give the file that covenant trust export wrote",
        )
    done("trust", "export", tmp_path / "1")
    for version in ("2", "3"):
        done("trust", "renew", "--sign-with", "ann")
        done("trust", "export", tmp_path / version)
    error = refused("trust_root", "trust", "import", tmp_path / "2")
    assert error.hint == "a newer one is here: make the change again, on version 3"
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "behind"))
    error = refused("trust_root", "trust", "import", tmp_path / "1")
    command = error.hint.rpartition(": ")[2].replace("FILE", str(tmp_path / "1"))
    done(*command.replace("DIGEST", first).split()[1:])
    error = refused("trust_root", "trust", "import", tmp_path / "3")
    monkeypatch.setenv("COVENANT_HOME", str(covenant_home))
    command = error.hint.rpartition(": ")[2].replace("FILE", str(tmp_path / "again"))
    done(*shlex.split(command)[1:])
    monkeypatch.setenv("COVENANT_HOME", str(tmp_path / "behind"))
    done("trust", "import", tmp_path / "again")
    done("trust", "import", tmp_path / "3")


def test_fix_of_a_revoked_package_works(covenant_home: Path, tmp_path: Path) -> None:
    """A new signature, and for serials beyond the clock another id: until then no signature helps."""
    done("keys", "new", "ann", "--no-passphrase")
    done("trust", "init", "--key", "ann")
    mine = tmp_path / "mine"
    done("manifest", "new", mine)
    done("manifest", "sign", mine, "--key", "ann")
    revoke = ("trust", "revoke", "--reason", "leaks", "--sign-with", "ann", "--yes")
    done(*revoke, "--package", mine)
    command = refused("revoked", "manifest", "verify", mine).hint.partition(": ")[2].partition(", by")[0]
    done(*shlex.split(command.replace("PACKAGE", str(mine)).replace("NAME", "ann"))[1:])
    done("manifest", "verify", mine)
    said = call(*revoke, "--agent", "mine", "--serial-at-most", "9007199254740991")
    assert "note: no agent is `mine` again: serials of new signatures are below 9007199254740991 too" in said.stderr
    said = call("manifest", "sign", mine, "--key", "ann", "--fresh")
    assert " of agent `mine` is revoked on this host" in said.stderr
    error = refused("revoked", "manifest", "verify", mine)
    assert error.hint.endswith("give the agent another id in agent.toml, and sign it")
    (mine / "agent.toml").write_text((mine / "agent.toml").read_text().replace('id = "mine"', 'id = "mine-2"'))
    assert call("manifest", "sign", mine, "--key", "ann").stderr == ""
    done("manifest", "verify", mine)
