"""Keys on disk: never overwritten, never readable by others, never reached through a link."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from covenant.keys import keystore
from policy import errors


def _none() -> bytes:
    raise AssertionError("asked for a passphrase")


def test_new_key_is_private_whatever_umask(home: Path) -> None:
    before = os.umask(0)
    try:
        key = keystore.new(home, "ann", None)
    finally:
        os.umask(before)
    file = home / "keys" / "ann.key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [f.name for f in file.parent.iterdir()] == ["ann.key"]
    assert keystore.load(home, "ann", _none).public_key().public_bytes_raw() == key.raw


def test_passphrase_is_asked_only_where_one_is_needed(home: Path) -> None:
    keystore.new(home, "plain", None)
    sealed = keystore.new(home, "sealed", b"open sesame")
    assert [(e.name, e.protected) for e in keystore.entries(home)] == [("plain", False), ("sealed", True)]
    keystore.load(home, "plain", _none)
    private = keystore.load(home, "sealed", lambda: b"open sesame")
    assert private.public_key().public_bytes_raw() == sealed.raw
    with pytest.raises(errors.KeyFileError, match="passphrase is wrong"):
        keystore.load(home, "sealed", lambda: b"open")


def test_salts_and_nonces_are_fresh(home: Path) -> None:
    for name in ("one", "two"):
        keystore.new(home, name, b"same")
    seals = [e.file.sealed for e in keystore.entries(home)]
    assert len({s.salt for s in seals if s}) == 2
    assert len({s.nonce for s in seals if s}) == 2


def test_key_is_never_overwritten(home: Path) -> None:
    keystore.new(home, "ann", None)
    before = (home / "keys" / "ann.key").read_bytes()
    with pytest.raises(errors.KeyFileError, match="there is a key `ann` already"):
        keystore.new(home, "ann", None)
    assert (home / "keys" / "ann.key").read_bytes() == before
    (home / "keys" / "eve.key").symlink_to(home / "elsewhere")
    with pytest.raises(errors.KeyFileError, match="already"):
        keystore.new(home, "eve", None)
    assert not (home / "elsewhere").exists()
    assert sorted(f.name for f in (home / "keys").iterdir()) == ["ann.key", "eve.key"]


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc/x", "a b", "-x", ".x", "a\n", "a\0", "é", "n" * 65]
)
def test_name_that_could_leave_directory_is_refused(name: str, home: Path) -> None:
    for act in (keystore.entry, lambda h, n: keystore.new(h, n, None)):
        with pytest.raises(errors.UsageError, match="cannot be a key's name"):
            act(home, name)
    keystore.new(home, "a.b_c-1", None)


def test_unsafe_key_file_is_refused(home: Path, tmp_path: Path) -> None:
    keystore.new(home, "ann", None)
    file = home / "keys" / "ann.key"
    for mode in (0o640, 0o604, 0o660, 0o620):
        file.chmod(mode)
        with pytest.raises(errors.KeyFileError, match=f"has mode 0{mode:o}") as caught:
            keystore.load(home, "ann", _none)
        assert "chmod 0600" in caught.value.hint
    file.chmod(0o600)
    keystore.load(home, "ann", _none)
    file.rename(tmp_path / "moved.key")
    file.symlink_to(tmp_path / "moved.key")
    with pytest.raises(errors.KeyFileError, match="it is a symlink"):
        keystore.load(home, "ann", _none)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(errors.KeyFileError, match="no plain file"):
        keystore.load(home, "ann", _none)
    file.unlink()
    file.write_bytes(b" " * 100_000)
    file.chmod(0o600)
    with pytest.raises(errors.KeyFileError, match="larger than"):
        keystore.load(home, "ann", _none)


def test_another_owner_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keystore.new(home, "ann", None)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(errors.HomeError, match="not to uid 4242"):
        keystore.load(home, "ann", _none)


def test_unsafe_directory_is_refused(home: Path) -> None:
    keystore.new(home, "ann", None)
    (home / "keys").chmod(0o755)
    for act in (lambda: keystore.load(home, "ann", _none), lambda: keystore.entries(home)):
        with pytest.raises(errors.KeyFileError, match="has mode 0755"):
            act()
    (home / "keys").chmod(0o700)
    (home / "keys").rename(home / "elsewhere")
    (home / "keys").symlink_to(home / "elsewhere")
    with pytest.raises(errors.KeyFileError, match="cannot be used"):
        keystore.load(home, "ann", _none)


def test_missing_key_is_named(home: Path) -> None:
    assert keystore.entries(home) == ()
    with pytest.raises(errors.KeyFileError, match="there is no key `ann`") as caught:
        keystore.load(home, "ann", _none)
    assert caught.value.hint == "covenant keys new ann"
    assert not (home / "keys").exists()
    keystore.new(home, "operator", None)
    for name, hint in {"operater": "did you mean `operator`? If not: ", "someone-else": ""}.items():
        with pytest.raises(errors.KeyFileError) as caught:
            keystore.entry(home, name)
        assert caught.value.hint == f"{hint}covenant keys new {name}"


def test_dev_key_is_made_once(home: Path) -> None:
    one = keystore.dev_key(home)
    assert keystore.dev_key(home).private_bytes_raw() == one.private_bytes_raw()
    assert stat.S_IMODE((home / "dev.key").stat().st_mode) == 0o600
    (home / "dev.key").chmod(0o644)
    with pytest.raises(errors.KeyFileError, match="has mode 0644"):
        keystore.dev_key(home)
