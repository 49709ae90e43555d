"""``covenant vault`` in a home of its own: a secret comes by stdin or a descriptor, and is never said again."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from covenant.cli.operator import vault as command
from policy import errors
from sandbox import doctor
from sandbox.audit.log import Ledger
from sandbox.vault import embedded
from tests import cli_kit
from tests.unit.sandbox.control.test_revocation import live
from tests.unit.sandbox.control.test_withdrawn_secrets import served
from tests.unit.sandbox.vault.test_embedded import CHEAP

ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}


@pytest.fixture
def home(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a configuration that names a key file, and a cheap Argon2id."""
    state = covenant_home / "supervisor"
    for path in (covenant_home, state):
        path.mkdir(mode=0o700, exist_ok=True)
    (state / "config.toml").write_text(f'[vault]\nkey = "{covenant_home}/vault.key"\n')
    monkeypatch.setattr(embedded.FileVault.create, "__kwdefaults__", {"parameters": CHEAP})
    monkeypatch.setattr(embedded.FileVault.rekey, "__kwdefaults__", {"parameters": CHEAP})
    return covenant_home


@contextlib.contextmanager
def piped(secret: str) -> Iterator[str]:
    """The number of a descriptor that gives it; stdin itself is another's in this process (tests/kernel has it)."""
    reader, writer = os.pipe()
    os.write(writer, secret.encode())
    os.close(writer)
    try:
        yield str(reader)
    finally:
        os.close(reader)


def put(agent: str, name: str, secret: str, *more: str | Path, verb: str = "put") -> dict[str, Any]:
    with piped(secret) as fd:
        return cli_kit.document("vault", verb, agent, name, "--fd", fd, *more)


def rows(home: Path) -> list[dict[str, Any]]:
    log = home / "supervisor" / "audit" / "events.jsonl"
    return [json.loads(line)["kind"] for line in log.read_text().splitlines()]


def private(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def test_verbs_and_what_they_leave_in_log(home: Path) -> None:
    cli_kit.done("vault", "init")
    assert ((home / "vault.key").stat().st_mode & 0o777, (home / "vault.key").stat().st_size) == (0o400, 32)
    said = [
        put("probe", "db", "planted-one\n"),
        put("probe", "db", "planted-two", verb="rotate"),
        put("other", "db", "planted-three"),
        cli_kit.document("vault", "rm", "other", "db"),
        cli_kit.document("vault", "list"),
        cli_kit.document("vault", "grant-log"),
    ]
    assert [(one["kind"], one.get("version")) for one in said[:4]] == [
        ("secret_put", 1), ("secret_rotated", 2), ("secret_put", 1), ("secret_removed", 1),
    ]  # fmt: skip
    (listed,) = said[4]["secrets"]
    assert (listed["agent_id"], listed["name"], listed["version"], said[4]["notes"]) == ("probe", "db", 2, [])
    changes = [(row["action"], row["agent_id"], row["name"], row["version"]) for row in rows(home)]
    assert changes == [
        ("created", None, None, None), ("put", "probe", "db", 1), ("rotated", "probe", "db", 2),
        ("put", "other", "db", 1), ("removed", "other", "db", 1),
    ]  # fmt: skip
    assert [row["what"] for row in said[5]["rows"]] == ["created", "put", "rotated", "put", "removed"]
    # INVARIANT: nothing that a verb prints or writes has the value.
    everything = json.dumps(said) + cli_kit.done("vault", "list") + cli_kit.done("vault", "grant-log", "probe")
    assert "planted" not in everything
    for path in home.rglob("*"):
        assert not path.is_file() or b"planted" not in path.read_bytes(), path


def test_rm_names_run_that_does_not_confirm(home: Path) -> None:
    cli_kit.done("vault", "init")
    put("probe", "db", "planted")
    runs = home / "supervisor" / "runs"
    runs.mkdir(mode=0o700)
    with live(runs, "older", ()) as path, served(path, {}):
        error = cli_kit.refused("keeper_silent", "vault", "rm", "probe", "db")
    assert "the secret is removed, but" in error.message
    assert "older" in error.message
    assert (error.hint or "").startswith("covenant kill older")
    assert cli_kit.document("vault", "list")["secrets"] == []
    put("probe", "db", "planted")
    assert cli_kit.document("vault", "rm", "probe", "db")["kind"] == "secret_removed"  # once the run is gone


def test_secret_by_descriptor(home: Path) -> None:
    cli_kit.done("vault", "init")
    put("probe", "db", "planted\n\n")
    with command.opened_vault(command.vault_config(), None).opened("probe", "db") as found:
        assert found is not None
        assert bytes(found.value.view) == b"planted\n"  # one newline is taken away


def test_secret_is_no_argument(home: Path) -> None:
    cli_kit.done("vault", "init")
    result = cli_kit.call("vault", "put", "probe", "db", "planted")
    assert result.exit_code == 2
    with piped("") as fd:
        cli_kit.refused("secret_refused", "vault", "put", "probe", "db", "--fd", fd)
    assert cli_kit.document("vault", "list")["secrets"] == []


def test_passphrase_opens_it_and_rekey_replaces_it(home: Path, tmp_path: Path) -> None:
    first, second = private(tmp_path / "first", "correct horse\n"), private(tmp_path / "second", "battery staple\n")
    cli_kit.done("vault", "init", "--new-passphrase-file", first)
    put("probe", "db", "planted", "--passphrase-file", first)
    cli_kit.refused("vault_locked", "vault", "list", "--passphrase-file", second)
    cli_kit.done("vault", "rekey", "--passphrase-file", first, "--new-passphrase-file", second)
    cli_kit.refused("vault_locked", "vault", "list", "--passphrase-file", first)
    cli_kit.refused("vault_locked", "vault", "list")  # by the key file, which is none of its keys any more
    assert len(cli_kit.document("vault", "list", "--passphrase-file", second)["secrets"]) == 1


def test_rekey_says_what_opens_it_and_that_runs_cannot(home: Path, tmp_path: Path) -> None:
    words, config = private(tmp_path / "words", "correct horse\n"), home / "supervisor" / "config.toml"
    cli_kit.done("vault", "init")
    put("probe", "db", "planted")
    said = cli_kit.call("vault", "rekey", "--new-passphrase-file", words)
    assert said.stdout == "only this opens the vault now: a passphrase\n"
    warned, fix = said.stderr.splitlines()
    assert warned == "warning: no run can open it: no key file opens the vault"
    # The fix: the key file opens it again, with the passphrase.
    cli_kit.done(*fix.replace("FILE", str(words)).partition("covenant ")[2].split())
    assert len(cli_kit.document("vault", "list")["secrets"]) == 1
    # Another file than the configured one.
    said = cli_kit.call("vault", "rekey", "--key-file", home / "new.key")
    assert said.stdout == f"only this opens the vault now: {home}/new.key\n"
    assert said.stderr.splitlines()[1] == f'  fix: write [vault] key = "{home}/new.key" in {config}'
    hint = cli_kit.refused("vault_locked", "vault", "list").hint or ""
    assert hint.startswith("write [vault] key in config.toml with the --key-file of the last")
    config.write_text(f'[vault]\nkey = "{home}/new.key"\n')
    assert len(cli_kit.document("vault", "list")["secrets"]) == 1
    said = cli_kit.call("vault", "rekey", "--key-file", home / "new.key", "--new-passphrase-file", words)
    assert (said.stdout, said.stderr) == (f"only this opens the vault now: {home}/new.key, a passphrase\n", "")


def test_failed_rekey_leaves_no_key_file(home: Path, tmp_path: Path) -> None:
    words, key = private(tmp_path / "words", "correct horse\n"), home / "new.key"
    cli_kit.done("vault", "init")
    words.chmod(0o644)
    cli_kit.refused("key_file", "vault", "rekey", "--key-file", key, "--new-passphrase-file", words)
    (home / "vault.key").rename(home / "kept.key")
    cli_kit.refused("vault_locked", "vault", "rekey", "--key-file", key)
    cli_kit.refused("vault_unusable", "vault", "init", "--key-file", key)
    assert not key.exists()
    (home / "kept.key").rename(home / "vault.key")
    cli_kit.done("vault", "rekey", "--key-file", key)
    assert key.exists()


def test_secret_that_is_not_there_is_looked_up(home: Path) -> None:
    cli_kit.done("vault", "init")
    put("probe", "db", "planted")
    hint = cli_kit.refused("secret_refused", "vault", "rm", "probe", "bd").hint or ""
    assert hint.startswith("covenant vault list shows which there are")


def test_stdin_gives_one_thing(home: Path) -> None:
    cli_kit.refused("usage", "vault", "put", "probe", "db", "--passphrase-file", "-", stdin="x\ny")


def test_what_opens_it_has_to_be_said(home: Path) -> None:
    (home / "supervisor" / "config.toml").write_text("")
    cli_kit.refused("usage", "vault", "init")
    cli_kit.done("vault", "init", "--key-file", home / "elsewhere.key")
    cli_kit.refused("usage", "vault", "rekey", "--passphrase-file", "x")


def test_key_file_of_init_opens_it_once_configured(home: Path) -> None:
    config = home / "supervisor" / "config.toml"
    config.write_text("")
    said = cli_kit.call("vault", "init", "--key-file", home / "other.key")
    line = f'write [vault] key = "{home}/other.key" in {config}'
    assert (said.stdout, said.stderr) == (f"vault {home}/supervisor/vault\n", f"so that runs can open it: {line}\n")
    error = cli_kit.refused("vault_locked", "vault", "list")
    assert error.hint == f'write [vault] key = "FILE" in {config}'
    error = cli_kit.refused("vault_locked", "vault", "list", "--passphrase-file", private(home / "words", "x\n"))
    assert error.message == "no passphrase opens the vault"
    assert error.hint.startswith("leave --passphrase-file out: its key file opens it")
    # The fix of all these messages.
    config.write_text(f'[vault]\nkey = "{home}/other.key"\n')
    assert put("probe", "db", "planted")["version"] == 1


def test_passphrase_is_the_fix_of_its_vault(home: Path, tmp_path: Path) -> None:
    config, words = home / "supervisor" / "config.toml", private(tmp_path / "words", "correct horse\n")
    configured = config.read_text()
    config.write_text("")
    cli_kit.done("vault", "init", "--new-passphrase-file", words)
    assert cli_kit.refused("key_file", "vault", "list").hint == "give --passphrase-file FILE"
    assert cli_kit.document("vault", "list", "--passphrase-file", words)["secrets"] == []
    # With a key file as well, each is a fix.
    cli_kit.done(
        "vault", "rekey", "--passphrase-file", words, "--new-passphrase-file", words, "--key-file", home / "other.key"
    )
    error = cli_kit.refused("key_file", "vault", "list")
    assert error.hint == f'write [vault] key = "FILE" in {config}, or give --passphrase-file FILE'
    # A configured file that is none of its keys.
    cli_kit.done("vault", "rekey", "--passphrase-file", words, "--new-passphrase-file", words)
    config.write_text(f'[vault]\nkey = "{home}/other.key"\n')
    error = cli_kit.refused("vault_locked", "vault", "list")
    assert error.message == "no key file opens the vault"
    # The fix.
    new = re.findall(r"covenant (vault rekey .*) --key-file NEW", error.hint)[0].replace("FILE", str(words)).split()
    cli_kit.done(*new, "--key-file", home / "new.key")
    config.write_text(f'[vault]\nkey = "{home}/new.key"\n')
    assert cli_kit.document("vault", "list")["secrets"] == []
    config.write_text(configured)


def test_lost_key_file_is_put_back(home: Path) -> None:
    config, key = home / "supervisor" / "config.toml", home / "only.key"
    config.write_text(f'[vault]\nkey = "{key}"\n')
    cli_kit.done("vault", "init")
    key.rename(home / "kept.key")
    assert cli_kit.refused("vault_locked", "vault", "list").hint == "put it back: no passphrase opens the vault"
    # The fix.
    (home / "kept.key").rename(key)
    assert cli_kit.document("vault", "list")["secrets"] == []


def test_openbao_is_made_by_its_own_tools(home: Path) -> None:
    (home / "supervisor" / "config.toml").write_text('[vault]\nbackend = "openbao"\n')
    cli_kit.refused("usage", "vault", "init", "--key-file", home / "key")
    cli_kit.refused("vault_locked", "vault", "list")  # no token is configured


NO_TABLES = [
    *('key = "relative"', 'key = "credential:../x"', 'key = "/a/../b"', 'backend = "other"', "unknown = 1"),
    *('address = "http://10.0.0.1"', 'address = "https://user@host"', 'mount = "a/b"', 'prefix = ".."', 'ca = "x"'),
    "timeout_seconds = 0",
]


@pytest.mark.parametrize("text", NO_TABLES)
def test_table_none_is_refused(home: Path, text: str) -> None:
    (home / "supervisor" / "config.toml").write_text(f"[vault]\n{text}\n")
    cli_kit.refused("config_invalid", "vault", "list")


def test_credential_of_systemd_opens_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "supervisor" / "config.toml").write_text('[vault]\nkey = "credential:covenant-vault"\n')
    error = cli_kit.refused("vault_locked", "vault", "init")
    assert "LoadCredentialEncrypted" in error.hint
    given = tmp_path / "given"
    given.mkdir(mode=0o500)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(given))
    # A key that is made there would be gone with the unit.
    assert "LoadCredentialEncrypted" in cli_kit.refused("vault_locked", "vault", "init").hint
    assert list(given.iterdir()) == []
    (given / "covenant-vault").write_bytes(os.urandom(32))
    (given / "covenant-vault").chmod(0o400)
    cli_kit.done("vault", "init")
    put("probe", "db", "planted")
    (given / "covenant-vault").unlink()
    cli_kit.refused("vault_locked", "vault", "list")


def _older(home: Path) -> Callable[[], None]:
    state = home / "supervisor"
    kept = {path: path.read_bytes() for path in (state / "vault" / "vault.json", state / "vault-head.json")}

    def put_back() -> None:
        for path, raw in kept.items():
            path.write_bytes(raw)

    return put_back


def test_older_vault_put_back_whole_is_shown_by_log(home: Path) -> None:
    """With its head, as only root can: the files agree, and the log does not."""
    cli_kit.done("vault", "init")
    put("probe", "db", "one")
    put_back = _older(home)
    put("probe", "db", "two", verb="rotate")
    put("probe", "more", "x")
    cli_kit.document("vault", "rm", "probe", "more")
    assert cli_kit.document("vault", "list")["notes"] == []
    put_back()
    (note,) = cli_kit.document("vault", "list")["notes"]
    assert note == "the log has db of probe as version 2, the file vault as version 1"
    assert cli_kit.document("vault", "list", "other")["notes"] == []


def test_grant_log_tells_who_was_given_what(home: Path) -> None:
    cli_kit.done("vault", "init")
    base = home / "supervisor"
    own = {"run_id": "11111111-aaaa", "agent_id": "probe", "operator": "ann"}
    refused = {"denial": "d-1", "target": "x\x1b[2J", "code": "absent", "grant": None, "count": 7}
    with Ledger.open(base / "audit", head=base / "audit-head" / "head.json") as ledger:
        for kind, fields in (
            ("credential_granted", {"name": "db", "version": 3, "backend": "file"}),
            ("denied", {**refused, "layer": "credential"}),
            ("denied", {**refused, "layer": "dns"}),
        ):
            ledger.append(kind, {**own, **fields}, issuer=ISSUER, now_ms=1_700_000_000_000)
    shown = cli_kit.done("vault", "grant-log", "probe").splitlines()
    assert shown == [
        "2023-11-14T22:13:20Z  granted probe db  version 3  run 11111111-aaaa",
        "2023-11-14T22:13:20Z  refused probe x\\x1b[2J  absent  7 times  run 11111111-aaaa",
    ]
    assert [row["what"] for row in cli_kit.document("vault", "grant-log")["rows"]] == ["created", "granted", "refused"]


def test_vault_not_there(home: Path) -> None:
    with piped("x") as fd:
        error = cli_kit.refused("vault_unusable", "vault", "put", "probe", "db", "--fd", fd)
    assert isinstance(error, errors.VaultError)
    assert (error.message, error.hint) == (
        "there is no vault",
        "covenant vault init; if [vault] key is not configured: covenant vault init --key-file FILE",
    )


def test_doctor_opens_it_as_run_does(home: Path) -> None:
    def look() -> doctor.Finding:
        return doctor._vault(command.vault_config(), 1)

    with pytest.raises(errors.VaultError, match="there is no vault"):
        look()
    cli_kit.done("vault", "init")
    assert (look().status, look().found.endswith(f"opened by {home}/vault.key")) == (doctor.Status.OK, True)
    (home / "vault.key").chmod(0o644)
    with pytest.raises(errors.VaultKeyError):
        look()


def test_passphrases_open_what_another_machine_restores(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the vault's key file, which was outside of the backup. The steps of docs/install.md."""
    words = private(tmp_path / "words", "correct horse\n")
    cli_kit.done("keys", "new", "ann", "--passphrase-file", words)
    cli_kit.done("trust", "init", "--key", "ann", "--passphrase-file", words)
    cli_kit.done("vault", "init", "--key-file", home / "vault.key", "--new-passphrase-file", words)
    put("probe", "db", "planted")
    (home / "vault.key").unlink()
    other = tmp_path / "other"
    home.rename(other)
    monkeypatch.setenv("COVENANT_HOME", str(other))
    key = other / "new.key"
    (other / "supervisor" / "config.toml").write_text(f'[vault]\nkey = "{key}"\n')
    error = cli_kit.refused("vault_locked", "vault", "list")
    assert len(cli_kit.document("vault", "list", "--passphrase-file", words)["secrets"]) == 1
    fix = (error.hint or "").partition("covenant ")[2].replace("FILE", str(words))
    cli_kit.done(*fix.split())
    # By the new key file, as a run opens it.
    assert len(cli_kit.document("vault", "list")["secrets"]) == 1
    cli_kit.done("trust", "renew", "--sign-with", "ann", "--passphrase-file", words)
