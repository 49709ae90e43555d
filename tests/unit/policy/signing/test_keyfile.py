"""Key files: sealed and plain, every field bound, parameters bounded before they are used."""

from __future__ import annotations

import base64
import json
from typing import Any

import pydantic
import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from policy import errors
from policy.signing import keyfile, strict_json
from tests import signing_kit as kit

# The least that a file may ask for: the tests are about the format, not about the cost.
CHEAP = keyfile.Argon2Parameters(memory_kib=8 * 1024, iterations=1, lanes=1)
SALT, NONCE = bytes(range(16)), bytes(range(12))


def _sealed(passphrase: bytes = b"open sesame") -> bytes:
    return keyfile.seal(kit.key(1), passphrase, salt=SALT, nonce=NONCE, parameters=CHEAP)


def _refused(raw: bytes, passphrase: bytes | None = b"open sesame") -> errors.KeyFileError:
    with pytest.raises(errors.KeyFileError) as caught:
        keyfile.unlock(keyfile.read(raw), passphrase)
    return caught.value


def test_sealed_key_opens_with_its_passphrase_only() -> None:
    file = keyfile.read(_sealed())
    assert file.key == kit.public(1)
    assert keyfile.unlock(file, b"open sesame").private_bytes_raw() == kit.key(1).private_bytes_raw()
    for wrong in (b"open sesamE", b"open sesame ", b"x"):
        assert "passphrase is wrong" in _refused(_sealed(), wrong).message
    assert "needs its passphrase" in _refused(_sealed(), None).message
    assert "between 1 and 1024" in _refused(_sealed(), b"").message


def test_plain_key_opens_without() -> None:
    assert keyfile.unlock(keyfile.read(keyfile.plain(kit.key(1)))).private_bytes_raw() == b"\x01" * 32


def test_secret_is_not_in_sealed_file_nor_in_repr() -> None:
    secret = kit.key(1).private_bytes_raw()
    raw = _sealed()
    assert secret.hex().encode() not in raw
    assert base64.b64encode(secret) not in raw
    assert secret.hex() in keyfile.plain(kit.key(1)).decode()
    assert secret.hex() not in repr(keyfile.read(keyfile.plain(kit.key(1))))


def test_default_cost_is_that_of_rfc_9106() -> None:
    raw = keyfile.seal(kit.key(1), b"p", salt=SALT, nonce=NONCE)
    assert json.loads(raw)["sealed"]["parameters"] == {"memory_kib": 65536, "iterations": 3, "lanes": 4}
    assert keyfile.unlock(keyfile.read(raw), b"p").private_bytes_raw() == b"\x01" * 32


def _changed(change: Any) -> bytes:
    document = json.loads(_sealed())
    change(document)
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("salt", base64.b64encode(bytes(16)).decode()),
        ("nonce", base64.b64encode(bytes(12)).decode()),
        ("parameters", {"memory_kib": 8192, "iterations": 2, "lanes": 1}),
        ("ciphertext", base64.b64encode(bytes(48)).decode()),
    ],
)
def test_every_field_of_seal_is_bound(field: str, value: Any) -> None:
    raw = _changed(lambda d: d["sealed"].update({field: value}))
    assert "wrong, or the key file was changed" in _refused(raw).message


def test_public_half_is_bound() -> None:
    other = kit.public(2).raw.hex()
    assert "was changed" in _refused(_changed(lambda d: d.update(public=other))).message
    plain = json.loads(keyfile.plain(kit.key(1))) | {"public": other}
    assert "not that of" in _refused(json.dumps(plain).encode(), None).message


MALFORMED: dict[str, Any] = {
    "more memory than a machine should give": lambda d: d["sealed"]["parameters"].update(memory_kib=2**30),
    "a little more than the bound": lambda d: d["sealed"]["parameters"].update(memory_kib=256 * 1024 + 1),
    "hardly any memory": lambda d: d["sealed"]["parameters"].update(memory_kib=8),
    "endless passes": lambda d: d["sealed"]["parameters"].update(iterations=10**9),
    "no passes": lambda d: d["sealed"]["parameters"].update(iterations=0),
    "many lanes": lambda d: d["sealed"]["parameters"].update(lanes=1000),
    "a parameter left out": lambda d: d["sealed"]["parameters"].pop("lanes"),
    "another kdf": lambda d: d["sealed"].update(kdf="pbkdf2"),
    "another aead": lambda d: d["sealed"].update(aead="none"),
    "another version": lambda d: d.update(version=2),
    "another kind": lambda d: d.update(kind="key"),
    "another algorithm": lambda d: d.update(algorithm="rsa"),
    "an unknown key": lambda d: d.update(extra=1),
    "an unknown key of the seal": lambda d: d["sealed"].update(extra=1),
    "sealed and plain at once": lambda d: d.update(plain="00" * 32),
    "neither": lambda d: d.pop("sealed"),
    "a short salt": lambda d: d["sealed"].update(salt="AAAA"),
    "a salt with a character that base64 has not": lambda d: d["sealed"].update(salt=d["sealed"]["salt"] + "!"),
    "a public half of 63 digits": lambda d: d.update(public=kit.public(1).raw.hex()[:-1]),
    "a public half of 66 digits": lambda d: d.update(public=kit.public(1).raw.hex() + "00"),
    "an upper-case public half": lambda d: d.update(public=kit.public(1).raw.hex().upper()),
    "a number as text": lambda d: d.update(version="1"),
    "a salt that is no base64": lambda d: d["sealed"].update(salt="!"),
    "a key of small order": lambda d: d.update(public="00" * 32),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_key_file_is_refused_before_anything_is_derived(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = _changed(MALFORMED[name])

    def never(*args: object, **kwargs: object) -> bytes:
        raise AssertionError("derived")

    monkeypatch.setattr(keyfile, "derive_key", never)
    with pytest.raises(AssertionError, match="derived"):
        keyfile.unlock(keyfile.read(_sealed()), b"open sesame")
    assert "malformed" in _refused(raw).message


@pytest.mark.parametrize("raw", [b"", b"{}", b"null", b"-----BEGIN PRIVATE KEY-----", b" " * 20_000])
def test_file_no_key_file_is_refused(raw: bytes) -> None:
    assert "malformed" in _refused(raw).message


def test_key_file_has_at_most_sixteen_kibibytes_and_does_not_change() -> None:
    raw = _sealed()
    full = raw + b" " * (16 * 1024 - len(raw))
    file = keyfile.read(full)
    assert "malformed" in _refused(full + b" ").message
    values: tuple[Any, ...] = (file, file.sealed, keyfile.RECOMMENDED)
    for value in values:
        with pytest.raises(pydantic.ValidationError, match="frozen"):
            value.version = 1


def test_what_is_sealed_must_be_key() -> None:
    document = json.loads(_sealed())
    sealed = document["sealed"]
    del sealed["ciphertext"]
    aead = ChaCha20Poly1305(keyfile.derive_key(b"open sesame", SALT, CHEAP))
    for secret in (bytes(31), bytes(33), b""):
        made = aead.encrypt(NONCE, secret, strict_json.dumps(document))
        raw = strict_json.dumps(document | {"sealed": sealed | {"ciphertext": base64.b64encode(made).decode()}})
        assert "does not hold an Ed25519 key" in _refused(raw).message


def test_where_error_was_is_said_only_when_it_is_known() -> None:
    assert _refused(_sealed(), b"wrong").where == ""
    with pytest.raises(errors.KeyFileError) as caught:
        keyfile.unlock(keyfile.read(_sealed(), where="a"), b"wrong", where="b")
    assert caught.value.where == "b"


@pytest.mark.parametrize(("size", "fits"), [(0, False), (1, True), (1024, True), (1025, False)])
def test_passphrase_has_length(size: int, fits: bool) -> None:
    passphrase = b"p" * size
    if not fits:
        with pytest.raises(errors.KeyFileError, match="between 1 and 1024 bytes"):
            _sealed(passphrase)
        return
    assert keyfile.unlock(keyfile.read(_sealed(passphrase)), passphrase).private_bytes_raw() == b"\x01" * 32


def test_salt_and_nonce_have_their_lengths() -> None:
    for salt, nonce in ((SALT[:-1], NONCE), (SALT, NONCE[:-1])):
        with pytest.raises(ValueError, match="salt has 16"):
            keyfile.seal(kit.key(1), b"p", salt=salt, nonce=nonce)
