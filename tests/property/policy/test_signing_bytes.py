"""Check that each change to an envelope, file, key file or record is refused or has no effect."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from policy import errors, package
from policy.signing import envelope, keyfile, root, statement, strict_json
from tests import signing_kit as kit

SIGNED = kit.signed(1, 2)
RAW = SIGNED.envelope or b""
ROOT = kit.root(kit.operator(1, threshold=2), kit.operator(2, threshold=2))
ROOT_RAW = kit.root_bytes(kit.root_document(kit.operator(1), kit.operator(2), threshold=2), 1, 2)
PAYLOAD = envelope.decode(RAW).payload

paths = st.text(
    st.characters(
        codec="utf-8",
        exclude_categories=["Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"],
        exclude_characters="".join(sorted(package.INVISIBLE)),
    ),
    min_size=1,
    max_size=20,
)
trees = st.dictionaries(paths, st.binary(max_size=64), max_size=8)


def test_controls_hold() -> None:
    kit.verify(SIGNED, ROOT)
    root.TrustRoot.load(ROOT_RAW, kit.NOW)


def test_every_bit_of_envelope_matters() -> None:
    for position in range(len(RAW.rstrip()) * 8):
        changed = bytearray(RAW)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(errors.SignatureError):
            kit.verify(SIGNED.with_envelope(bytes(changed)), ROOT)


def test_every_bit_of_trust_root_matters() -> None:
    for position in range(len(ROOT_RAW.rstrip()) * 8):
        changed = bytearray(ROOT_RAW)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(errors.TrustError):
            root.TrustRoot.load(bytes(changed), kit.NOW)


@given(st.integers(0, len(RAW) - 1), st.binary(max_size=4), st.integers(0, 4))
def test_spliced_envelope_is_refused_or_says_exactly_same(at: int, put: bytes, cut: int) -> None:
    changed = RAW[:at] + put + RAW[at + cut :]
    try:
        trusted = kit.verify(SIGNED.with_envelope(changed), ROOT)
    except errors.SignatureError:
        return
    # Accepted changes: white space between tokens, an escaped character, the other base64 alphabet.
    assert envelope.decode(changed).payload == PAYLOAD
    assert trusted.statement == kit.verify(SIGNED, ROOT).statement


@given(st.sampled_from(sorted(kit.FILES)), st.data())
def test_every_byte_of_every_file_matters(name: str, data: st.DataObject) -> None:
    content = kit.FILES[name]
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    changed = content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]
    with pytest.raises(errors.DigestMismatchError):
        kit.verify(package.Package({**kit.FILES, name: changed}, RAW), ROOT)


@given(trees, trees)
def test_statement_fits_one_tree_only(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    try:
        signed = kit.signed(files={**one, "agent.toml": b""})
        offered = package.Package({**other, "agent.toml": b""}, signed.envelope)
    except errors.PackageError:
        return
    if dict(signed.files) == dict(offered.files):
        kit.verify(offered)
        assert signed.digest == offered.digest
        return
    assert signed.digest != offered.digest
    with pytest.raises(errors.DigestMismatchError):
        kit.verify(offered)


@given(st.lists(paths, max_size=6, unique=True), st.randoms(use_true_random=False))
def test_what_is_accepted_does_not_depend_on_order(names: list[str], random: Any) -> None:
    def accepted(order: list[str]) -> bool:
        try:
            package.check_paths(order)
        except errors.PackageError:
            return False
        return True

    shuffled = list(names)
    random.shuffle(shuffled)
    assert accepted(names) is accepted(shuffled)


@given(paths)
@example("a/../b")
def test_accepted_path_stays_below_its_package(path: str) -> None:
    try:
        package.check_path(path)
    except errors.PackageError:
        return
    parts = path.split("/")
    assert not set(parts) & {"", ".", ".."}
    assert "\0" not in path


@given(st.binary(max_size=200), st.text(max_size=40))
def test_pae_is_injective(payload: bytes, kind: str) -> None:
    made = envelope.pae(kind, payload)
    prefix, _, rest = made.partition(b" ")
    size, _, rest = rest.partition(b" ")
    kind_bytes, rest = rest[: int(size)], rest[int(size) + 1 :]
    length, _, body = rest.partition(b" ")
    assert (prefix, kind_bytes.decode(), body) == (b"DSSEv1", kind, payload)
    assert int(length) == len(payload)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
DECODERS: list[Callable[[bytes], object]] = [envelope.decode, statement.parse]


@settings(max_examples=300)
@given(st.one_of(st.binary(max_size=300), json_values.map(lambda v: json.dumps(v).encode())))
def test_no_input_crashes_decoder(raw: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(strict_json.MalformedJsonError):
            decode(raw)
    with pytest.raises(errors.TrustError):
        root.TrustRoot.parse(raw)
    with pytest.raises(errors.KeyFileError):
        keyfile.read(raw)
    with pytest.raises(errors.SignatureError):
        kit.verify(SIGNED.with_envelope(raw), ROOT)


@given(st.sampled_from(sorted(json.loads(PAYLOAD)["predicate"])), json_values)
def test_listed_signer_cannot_put_anything_into_field(field: str, value: object) -> None:
    document = json.loads(PAYLOAD)
    document["predicate"][field] = value
    payload = json.dumps(document).encode()
    try:
        kit.verify(SIGNED.with_envelope(kit.envelope(payload, 1, 2)), ROOT)
    except errors.SignatureError:
        return
    # The parser accepts only the bytes that the writer makes of these values.
    assert json.loads(statement.parse(payload).encode()) == document


@given(st.binary(max_size=100))
def test_base64_has_one_spelling(data: bytes) -> None:
    text = base64.b64encode(data).decode()
    document = {"payload": text, "payloadType": "t", "signatures": [{"sig": base64.b64encode(bytes(64)).decode()}]}
    assert envelope.decode(json.dumps(document).encode()).payload == data
    for other in (text + "=", text + "\n", " " + text, text.rstrip("=") + "\n"):
        document["payload"] = other
        with pytest.raises(strict_json.MalformedJsonError):
            envelope.decode(json.dumps(document).encode())


SEALED = keyfile.seal(
    kit.key(1),
    b"passphrase",
    salt=bytes(16),
    nonce=bytes(12),
    parameters=keyfile.Argon2Parameters(memory_kib=8192, iterations=1, lanes=1),
)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, len(SEALED.rstrip()) * 8 - 1))
def test_every_bit_of_sealed_key_file_matters(position: int) -> None:
    changed = bytearray(SEALED)
    changed[position // 8] ^= 1 << position % 8
    with pytest.raises(errors.KeyFileError):
        keyfile.unlock(keyfile.read(bytes(changed)), b"passphrase")
