"""Check attestations and secrets over the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from covenant.handlers.identity import MAX_MESSAGE_BYTES, attested
from covenant.keys import identity
from covenant.wire import requests
from policy import base58, errors
from tests.authority_kit import World
from tests.capability_kit import ADA, BOB, DAEMON

pytestmark = pytest.mark.anyio


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    world.clock.at_ms = 1_000_000
    return world


def attest(message: bytes = b"hello", ts: int = 1_000_000) -> requests.SignAttestation:
    return requests.SignAttestation(message_b58=base58.encode(message), ts=ts)


@pytest.mark.parametrize("message", [b"hello", b"\0\0", b"x" * MAX_MESSAGE_BYTES])
async def test_attestation_verifies_under_its_tag_alone(world: World, message: bytes) -> None:
    answer = await world.ask(world.operator, attest(message))
    assert (answer.pubkey_b58, answer.ts) == (DAEMON.agent.pubkey, 1_000_000)
    signature = base58.decode(answer.signature_b58, length=64)
    body = attested(message, 1_000_000)
    assert identity.verifies(answer.pubkey_b58, identity.Domain.ATTESTATION, body, signature)
    assert not identity.verifies(answer.pubkey_b58, identity.Domain.ATTESTATION, attested(message, 1), signature)
    assert not identity.verifies(answer.pubkey_b58, identity.Domain.CAPABILITY_REVOCATION, body, signature)
    assert not identity.verifies(answer.pubkey_b58, identity.Domain.ATTESTATION, message, signature)
    assert world.kinds() == ["identity_signed"]


@pytest.mark.parametrize(
    "asked",
    [
        attest(ts=1_000_000 + 300_001),
        attest(ts=1_000_000 - 300_001),
        attest(ts=2**64 - 1),
        attest(b"x" * (MAX_MESSAGE_BYTES + 1)),
        attest(b"\0" * (MAX_MESSAGE_BYTES + 1)),
        requests.SignAttestation(message_b58="0OIl", ts=1_000_000),
        requests.SignAttestation(message_b58="é", ts=1_000_000),
    ],
)
async def test_what_is_not_attested(world: World, asked: requests.SignAttestation) -> None:
    assert isinstance(await world.refused(world.operator, asked), errors.AttestationError)
    assert world.kinds() == []


async def test_who_may_have_something_attested(world: World) -> None:
    ada, bob = await world.enroll(ADA, "identity.sign"), await world.enroll(BOB)
    await world.ask(ada, attest())
    assert isinstance(await world.refused(bob, attest()), errors.CapabilityMissingError)


async def test_secret_named(world: World) -> None:
    ada = await world.enroll(ADA)
    bob = await world.enroll(BOB, "secret.access.mail")
    scope = {"version": 1, "names": ["mail", "absent", "raw"]}
    await world.ask(world.operator, requests.GrantCapability(action="secret.access", scope=scope, subject=ADA.pubkey))
    world.kinds()
    for caller in (ada, bob):
        assert (await world.ask(caller, requests.GetSecret(name="mail"))).value == "hunter2"
        assert world.kinds() == ["capability_check", "secret_access_granted"]


async def test_absent_and_not_granted_are_one_answer(world: World) -> None:
    ada, bob = await world.enroll(ADA), await world.enroll(BOB, "memory.read")
    scope = {"version": 1, "names": ["absent", "raw"]}
    await world.ask(world.operator, requests.GrantCapability(action="secret.access", scope=scope, subject=ADA.pubkey))
    world.kinds()
    told = set()
    for caller, name in (
        (ada, "absent"),
        (ada, "raw"),
        (ada, "mail"),
        (bob, "mail"),
        (bob, "absent"),
        (world.operator, "mail"),
        (ada, "no\nname"),
        (ada, "x" * 9999),
        (ada, ""),
    ):
        refused = await world.refused(caller, requests.GetSecret(name=name))
        told.add((type(refused), refused.message, refused.hint, refused.where))
        assert world.rows[-1][0] == "secret_access_denied"
        assert world.rows[-1][1] == "operator@local"
        assert not any("hunter2" in str(row) for row in world.rows)
    assert len(told) == 1
    assert {issuer for _, issuer, _ in world.rows} == {"operator@local"}
    assert world.kinds().count("capability_check") == 9


def revoking_when(world: World, monkeypatch: pytest.MonkeyPatch, whose: str, kind: str) -> list[bool]:
    """Have the operator revoke the grant of ``whose`` while a row of this kind is written; return the revocations."""
    (grant,) = world.capabilities.recent(10, whose)
    asked, done = requests.RevokeCapability(signature_b58=grant.signature), list[bool]()

    def meanwhile(name: str) -> None:
        write = getattr(world.audit, name)

        async def wrote(given: Any, *more: Any, **named: Any) -> Any:
            found = await write(given, *more, **named)
            if kind in ([given] if isinstance(given, str) else [one.kind for one in given]):
                done.append((await world.ask(world.operator, asked)).removed)
            return found

        monkeypatch.setattr(world.audit, name, wrote)

    for name in ("append", "append_all"):
        meanwhile(name)
    return done


@pytest.mark.parametrize("kind", ["capability_check", "secret_access_granted"])
async def test_secret_is_given_to_nobody_whose_grant_was_taken_back_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Writing the row takes as long as the disk does; a revocation that is acknowledged in that time must hold."""
    bob = await world.enroll(BOB, "secret.access.mail")
    done = revoking_when(world, monkeypatch, BOB.pubkey, kind)
    assert isinstance(await world.refused(bob, requests.GetSecret(name="mail")), errors.SecretDeniedError)
    assert any(done)
    assert world.rows[-1][:2] == ("secret_access_denied", "operator@local")


@pytest.mark.parametrize("kind", ["capability_check", "identity_signed"])
async def test_nothing_is_signed_for_whom_grant_was_taken_back_meanwhile(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    ada = await world.enroll(ADA, "identity.sign")
    done = revoking_when(world, monkeypatch, ADA.pubkey, kind)
    assert isinstance(await world.refused(ada, attest()), errors.CapabilityMissingError)
    assert any(done)
