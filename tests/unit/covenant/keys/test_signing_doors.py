"""Compare every signing door of this project with every other: no two doors ever sign the same bytes.

The doors: capability tokens, tasks for other hosts, attestations and revocations (the daemon's identity), the audit
log's head and checkpoints (the log's keys), manifests and trust roots (operators' keys, DSSE). The tests give all of
them the same key, so that only the bytes keep them apart; in production the keys differ as well.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from covenant.handlers.identity import attested
from covenant.keys import identity
from covenant.keys.identity import Domain, Identity
from policy import base58, errors
from policy.audit_log import chain, merkle, note, truncation
from policy.capabilities import actions, token
from policy.capabilities.token import Token
from policy.signing import envelope

SEED = b"s" * 32
KEY = Ed25519PrivateKey.from_private_bytes(SEED)
OURS = Identity(SEED)
OTHER = Identity(b"o" * 32).agent.pubkey

_TOKENS = st.builds(
    Token,
    subject=st.binary(min_size=32, max_size=32).map(base58.encode),
    action=st.sampled_from(["memory.write", "tool.call.echo", "a." + "x" * 510]),
    scope=st.dictionaries(st.text(max_size=9), st.text(max_size=9) | st.integers(0, 9), max_size=3),
    granted_by=st.just(OURS.agent.pubkey),
    expires_at=st.none() | st.integers(0, 2**64 - 1),
)


class Recorder:
    """A key that records the messages it is asked to sign."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def sign(self, message: bytes) -> bytes:
        self.asked.append(message)
        return KEY.sign(message)

    def public_key(self) -> Ed25519PublicKey:
        return KEY.public_key()

    def private_bytes_raw(self) -> bytes:
        raise AssertionError("a door took the key itself")


CHECKPOINT = note.Checkpoint("covenant/log", 7, b"r" * 32).text
ROW = chain.ChainRow(b"{}", str(uuid.UUID(int=1)), 5)
CUT = truncation.Cut(1, ROW, ROW, "0" * 64, merkle.Frontier(), merkle.Frontier(), None)


def messages() -> dict[str, bytes]:
    """Return the message that each door signs, recorded from the door itself."""
    made: dict[str, bytes] = {}
    doors: dict[str, Callable[[Any], object]] = {
        "head": lambda key: chain.sign_head(chain.Head(), key),
        "rebase": lambda key: truncation.fields(CUT, key),
        "checkpoint": lambda key: note.sign(CHECKPOINT, "covenant/log", key),
        "cosignature": lambda key: note.cosign(CHECKPOINT, "witness", key, 9),
        "manifest": envelope.Envelope(b"{}", envelope.IN_TOTO_PAYLOAD_TYPE, ()).sign,
        "token": lambda key: _with(key).grant(Token(OTHER, "memory.write", {}, OURS.agent.pubkey, None)),
        "task": lambda key: _with(key).seal(1_790_000_000_000, b'{"id":"x"}'),
        **{
            domain.value: lambda key, domain=domain: _with(key).sign(domain, b"m")  # type: ignore[misc]
            for domain in Domain
        },
    }
    for name, door in doors.items():
        recorder = Recorder()
        door(recorder)
        (made[name],) = recorder.asked
    return made


def _with(key: Any) -> Identity:
    """Return our identity with a recording key."""
    made = Identity(SEED)
    made._key = key
    return made


def _is_checkpoint(message: bytes) -> bool:
    try:
        note.Checkpoint.parse(message.decode())
    except (errors.NoteError, UnicodeDecodeError):
        return False
    return True


READERS: dict[str, Callable[[bytes], bool]] = {
    "head": lambda message: message.startswith(b"covenant.audit.head.v1\n"),
    "rebase": lambda message: message.startswith(b"covenant.audit.rebase.v1\n"),
    "checkpoint": _is_checkpoint,
    "cosignature": lambda message: message.startswith(b"cosignature/v1\ntime "),
    "manifest": lambda message: message.startswith(b"DSSEv1 "),
    "token": lambda message: token.parse(message) is not None,
    "task": lambda message: message.startswith(b"covenant.a2a.cross-host.v1"),
    **{
        domain.value: lambda message, domain=domain: message.startswith(domain.tag)  # type: ignore[misc]
        for domain in Domain
    },
}


def readings(message: bytes) -> set[str]:
    return {name for name, reads in READERS.items() if reads(message)}


def test_what_one_door_signs_no_other_reader_takes() -> None:
    made = messages()
    assert made.keys() == READERS.keys()
    for name, message in made.items():
        assert readings(message) == {name}


@given(st.binary(max_size=300), st.sampled_from(list(Domain)))
def test_tagged_message_is_no_token_checkpoint_or_envelope(body: bytes, domain: Domain) -> None:
    assert readings(domain.tag + body) == {domain.value}


@given(st.binary(max_size=300), st.integers(0, (1 << 48) - 1))
def test_task_for_other_host_is_nothing_else(rest: bytes, issued_at_ms: int) -> None:
    recorder = Recorder()
    _with(recorder).seal(issued_at_ms, b'{"' + rest)
    assert readings(recorder.asked[0]) == {"task"}
    for task_json, at_ms in ((b"[]", 1), (b"", 1), (b'{"', 1 << 48), (b'{"', -1)):
        with pytest.raises(errors.AttestationError):
            OURS.seal(at_ms, task_json)


@given(_TOKENS, st.sampled_from(list(Domain)))
def test_attestation_over_tokens_bytes_is_no_token(made: Token, domain: Domain) -> None:
    try:
        wanted = made.message()
    except token.MalformedTokenError:
        return
    for body in (wanted, wanted[32:], wanted[36:], wanted[44:]):
        signature = base58.encode(OURS.sign(domain, body))
        assert not made.verifies(signature)
    assert readings(wanted) == {"token"}


@pytest.mark.parametrize("start", [domain.tag for domain in Domain] + [b"DSSEv1 28 application/vnd.in-toto+json 9 "])
def test_token_whose_subject_is_beginning_of_another_message(start: bytes) -> None:
    """A subject may be any 32 bytes; the length of the action behind them may not be any number."""
    made = Token(base58.encode(start[:32]), "memory.write", {}, OURS.agent.pubkey, None)
    message = made.message()
    assert message[:32] == start[:32]
    assert not message.startswith(start[:36])
    assert int.from_bytes(start[32:36]) > actions.MAX_LENGTH
    assert int.from_bytes(start[32:36]) > identity.MAX_MESSAGE_BYTES


def test_tags_are_as_they_must_be() -> None:
    tags = [domain.tag for domain in Domain]
    for one in tags:
        assert len(one) > 36
        assert b"\0" not in one
        assert not any(one is not other and other.startswith(one) for other in tags)


@pytest.mark.parametrize("domain", Domain)
@pytest.mark.parametrize("wanted", sorted(READERS.keys() - {"token"}))
def test_attestation_over_bytes_of_another_door_is_not_that_doors(wanted: str, domain: Domain) -> None:
    message = messages()[wanted]
    for body in (message, b"\n" + message, attested(message, 9)):
        signature = OURS.sign(domain, body)
        assert not envelope.PublicKey.of(KEY).verifies(signature, message)
    assert envelope.PublicKey.of(KEY).verifies(KEY.sign(message), message), "the control"


def test_identity_signs_no_token_of_another_grantor() -> None:
    with pytest.raises(errors.GrantRefusedError):
        OURS.grant(Token(OTHER, "memory.write", {}, OTHER, None))


def test_nothing_else_of_identity_signs() -> None:
    public = {name for name in dir(OURS) if not name.startswith("_")}
    assert public == {"agent", "grant", "load", "seal", "sign"}
    assert OURS.agent.pubkey in repr(OURS)
    assert base58.encode(SEED) not in repr(OURS)
    with pytest.raises(errors.AttestationError):
        OURS.sign(Domain.ATTESTATION, bytes(identity.MAX_MESSAGE_BYTES + 1))


def test_attestation_of_one_time_is_none_of_another() -> None:
    assert attested(b"", 1) != attested(b"\0" * 7 + b"\1", 0)
    assert len({attested(b"x", ts) for ts in (0, 1, 2**64 - 1)}) == 3
