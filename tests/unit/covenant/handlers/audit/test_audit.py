"""Check the audit handlers: a caller's own rows, the operator's verbs, and the rows that every purge leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.handlers import paging
from covenant.handlers.audit import audit, provenance
from covenant.handlers.caller import Caller
from covenant.handlers.server import Server
from covenant.keys.identity import Identity
from covenant.stores.audit.interface import AuditEntry
from covenant.stores.capabilities.in_memory import InMemoryCapabilities
from covenant.stores.capabilities.interface import to_wire
from covenant.wire import parts, requests
from covenant.wire.types import AgentId
from policy import base58, errors
from policy.audit_log import merkle, note
from policy.capabilities.token import Token
from tests import server_kit
from tests.doubles.audit import InMemoryAudit

pytestmark = pytest.mark.anyio

PEER = AgentId(display="peer@local", pubkey=base58.encode(b"p" * 32))
OTHER = AgentId(display="other@local", pubkey=base58.encode(b"o" * 32))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    identity = Identity(b"i" * 32)
    clock = server_kit.Clock()
    return server_kit.make(
        home=tmp_path,
        now_ms=clock,
        identity=identity,
        audit=InMemoryAudit(issuer=identity.agent, now_ms=clock),
        capabilities=InMemoryCapabilities(identity.agent.pubkey),
    )


def operator(server: Server) -> Caller:
    return server_kit.caller(server.identity.agent, operator=True)


def peer(agent: AgentId = PEER) -> Caller:
    return server_kit.caller(agent)


async def allow(server: Server, to: AgentId, action: str, scope: Any = None) -> None:
    token = Token(
        subject=to.pubkey, action=action, scope=scope or {}, granted_by=server.identity.agent.pubkey, expires_at=None
    )
    signed = to_wire(token, server.identity.grant(token), to.display, server.identity.agent.display)
    await server.capabilities.grant(signed, server.now_ms())


async def rows(server: Server, count: int, issuer: AgentId | None = None, *, step_ms: int = 0) -> list[str]:
    ids = []
    for n in range(count):
        server.now_ms.at_ms += step_ms  # type: ignore[attr-defined]
        fields = {"transport": "ipc", "reason": f"row {n}"}
        ids.append(await server.audit.append("authentication_failed", fields, issuer))
    return ids


async def kinds(server: Server) -> list[str]:
    return [row.kind["type"] for row in await server.audit.recent(100)]


# recent_audit ----------------------------------------------------------------------------------------------------


async def test_everybody_sees_their_own_rows_and_only_those(server: Server) -> None:
    mine = await rows(server, 3, PEER)
    await rows(server, 30, OTHER)
    daemons = await rows(server, 2)
    found = await audit.recent_audit(server, peer(), requests.RecentAudit(limit=3, extended=True))
    assert [row.id for row in found.events] == mine[::-1]
    found = await audit.recent_audit(server, operator(server), requests.RecentAudit(extended=True))
    assert [row.id for row in found.events] == daemons[::-1]
    nobody = peer(AgentId(display="peer@local", pubkey=base58.encode(b"n" * 32)))
    assert (await audit.recent_audit(server, nobody, requests.RecentAudit(extended=True))).events == ()


async def test_since_is_inclusive(server: Server) -> None:
    await rows(server, 3, PEER, step_ms=10)
    asked = requests.RecentAudit(since_ms=server.now_ms() - 10)
    assert len((await audit.recent_audit(server, peer(), asked)).events) == 2


async def test_rows_of_some_kinds_are_found_behind_any_number_of_others_and_only_ones_own(server: Server) -> None:
    ignored = {"intent_id": "i", "intent_text": "x", "matched_pattern": "p"}
    mine = await server.audit.append("intent_ignored", ignored, PEER)
    await server.audit.append("intent_ignored", ignored, OTHER)
    await rows(server, 1500, PEER)
    asked = requests.RecentAudit(limit=1024, types=("intent_ignored", "no_such_kind"))
    assert [row.id for row in (await audit.recent_audit(server, peer(), asked)).events] == [mine]
    later = requests.RecentAudit(types=("intent_ignored",), since_ms=server.now_ms() + 1)
    assert (await audit.recent_audit(server, peer(), later)).events == ()


async def test_rows_about_one_run_or_intent(server: Server) -> None:
    kept: dict[str, Any] = {"agent_id": "a", "operator": None, "denial": "D1", "layer": "path", "target": "/x"}
    kept |= {"code": "not_granted", "grant": "permissions", "count": 1}
    denied = [await server.audit.append("denied", {"run_id": name, **kept}, PEER) for name in ("r", "other")]
    await server.audit.append("denied", {"run_id": "r", **kept}, OTHER)
    ignored = await server.audit.append(
        "intent_ignored", {"intent_id": "i", "intent_text": "x", "matched_pattern": "p"}, PEER
    )
    await rows(server, 100, PEER)

    async def found(**asked: Any) -> list[str]:
        answer = await audit.recent_audit(server, peer(), requests.RecentAudit(**{"extended": True, **asked}))
        return [row.id for row in answer.events]

    assert await found(run_id="r") == [denied[0]]
    assert await found(intent_id="i") == [ignored]
    assert await found(run_id="r", intent_id="i") == [ignored, denied[0]]
    assert await found(run_id="i") == await found(run_id="") == []
    # Version 1's clients get the kinds that they know alone.
    assert await found(run_id="r", intent_id="i", extended=False) == [ignored]
    assert await found(run_id="r", types=("intent_ignored",)) == []


async def test_answer_holds_no_more_than_frame(server: Server) -> None:
    big = {"intent_id": "i", "intent_text": "x" * 1_500_000, "matched_pattern": "p"}
    await server.audit.append_all([AuditEntry("intent_ignored", big, PEER)] * 9)
    found = await audit.recent_audit(server, peer(), requests.RecentAudit(limit=10, extended=True))
    assert len(found.events) == paging.ROOM // 1_500_000
    await server.audit.append("intent_ignored", {**big, "intent_text": "x" * 6_000_000}, PEER)
    assert len((await audit.recent_audit(server, peer(), requests.RecentAudit(limit=10, extended=True))).events) == 1


# verify, purge, prove --------------------------------------------------------------------------------------------


async def test_verifying_is_operators(server: Server) -> None:
    await rows(server, 3)
    report = (await audit.verify_audit_integrity(server, operator(server), requests.VerifyAuditIntegrity())).report
    assert (report.valid, report.events, report.anchors, report.failures) == (True, 3, 3, ())
    with pytest.raises(errors.OperatorOnlyError):
        await audit.verify_audit_integrity(server, peer(), requests.VerifyAuditIntegrity())


async def test_failures_are_texts_that_name_row(server: Server) -> None:
    ids = await rows(server, 3)
    assert isinstance(server.audit, InMemoryAudit)
    server.audit._lines[1] = server.audit._lines[1].replace(b"row 1", b"row 9")
    report = (await audit.verify_audit_integrity(server, operator(server), requests.VerifyAuditIntegrity())).report
    assert not report.valid
    [failure] = report.failures
    assert failure.startswith("entry_mismatch: ")
    assert ids[1] in failure


async def test_purge_needs_grant_and_leaves_its_rows(server: Server) -> None:
    await rows(server, 4, step_ms=10)
    asked = requests.PurgeAudit(before_ms=server.now_ms())
    with pytest.raises(errors.CapabilityMissingError):
        await audit.purge_audit(server, operator(server), asked)
    assert (await kinds(server))[0] == "capability_check"
    await allow(server, server.identity.agent, "audit.purge")
    answer = await audit.purge_audit(server, operator(server), asked)
    assert answer.purged == 3
    # The rows about the refusal and the permission are newer than the cut rows.
    assert await kinds(server) == [
        "audit_purged",
        "capability_check",
        "capability_check",
        "authentication_failed",
        "audit_rebased",
    ]
    [row] = await server.audit.recent(1)
    assert (row.kind["purged"], row.issuer) == (3, server.identity.agent)
    assert (await server.audit.verify()).valid


async def test_scope_bounds_how_far_purge_reaches(server: Server) -> None:
    await rows(server, 4, step_ms=10)
    allowed = server.now_ms() - 10
    await allow(server, PEER, "audit.purge", {"version": 1, "before_ms": allowed})
    with pytest.raises(errors.CapabilityScopeError):
        await audit.purge_audit(server, peer(), requests.PurgeAudit(before_ms=allowed + 1))
    assert "audit_rebased" not in await kinds(server)
    assert (await audit.purge_audit(server, peer(), requests.PurgeAudit(before_ms=allowed))).purged == 2


async def test_proof_can_be_checked_with_nothing_but_answer(server: Server) -> None:
    ids = await rows(server, 7, PEER)
    for event_id in ids:
        asked = requests.ProveAuditInclusion(event_id=event_id, extended=True)
        for caller in (operator(server), peer()):
            proof = (await audit.prove_audit_inclusion(server, caller, asked)).proof
            assert isinstance(proof, parts.InclusionProof)
            assert proof.checkpoint is not None
            signed = note.Note.parse(proof.checkpoint.encode())
            signed.verified([server.audit.verifier])
            checkpoint = note.Checkpoint.parse(signed.text)
            assert checkpoint.root.hex() == proof.root_hash_hex
            leaf, path = bytes.fromhex(proof.leaf_hash_hex), tuple(map(bytes.fromhex, proof.path_hex))
            claimed = merkle.Inclusion(proof.leaf_index, proof.tree_size, leaf, path)
            assert merkle.includes(claimed, checkpoint.root)


async def test_anothers_row_is_as_one_not_there(server: Server) -> None:
    [theirs] = await rows(server, 1, OTHER)
    asked = requests.ProveAuditInclusion(event_id=theirs)
    assert (await audit.prove_audit_inclusion(server, peer(), asked)).proof is None
    assert (await audit.prove_audit_inclusion(server, operator(server), asked)).proof is not None
    unknown = requests.ProveAuditInclusion(event_id="0" * 36)
    assert (await audit.prove_audit_inclusion(server, operator(server), unknown)).proof is None


async def _cosigned(server: Server, witness: Ed25519PrivateKey) -> tuple[str, str]:
    """Return a checkpoint with a witness's cosignature, and the witness's vkey."""
    await rows(server, 3)
    signed = await server.audit.checkpoint()
    line = note.cosign(signed.text, "w", witness, 1_700_000_000)
    vkey = note.Verifier("w", note.COSIGNATURE, witness.public_key()).text
    return signed.with_signature(line).raw.decode(), vkey


async def test_operator_has_cosignatures_kept(server: Server) -> None:
    checkpoint, vkey = await _cosigned(server, Ed25519PrivateKey.generate())
    asked = requests.CosignAuditCheckpoint(checkpoint=checkpoint, witnesses=(vkey,))
    with pytest.raises(errors.CovenantError):
        await audit.cosign_audit_checkpoint(server, peer(), asked)
    assert "audit_checkpoint_cosigned" not in await kinds(server)
    assert (await audit.cosign_audit_checkpoint(server, operator(server), asked)).checkpoint == checkpoint
    assert "audit_checkpoint_cosigned" in await kinds(server)


async def test_no_other_cosignature_and_no_other_checkpoint_is_kept(server: Server) -> None:
    witness, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    checkpoint, vkey = await _cosigned(server, witness)
    other = note.Verifier("w", note.COSIGNATURE, stranger.public_key()).text
    head, dash, line = checkpoint.rpartition("\u2014")
    for text, keys in (
        (checkpoint, (other,)),
        (checkpoint, ()),
        (checkpoint.replace("\n3\n", "\n2\n"), (vkey,)),
        (head + dash + line.replace("A", "B").replace("a", "b"), (vkey,)),
        (head, (vkey,)),
        ("", (vkey,)),
        ("\ud800", (vkey,)),
        (checkpoint, ("w+00000000+AAAA",)),
        ("x" * (note.MAX_BYTES + 1), (vkey,)),
    ):
        with pytest.raises(errors.NoteError):
            await audit.cosign_audit_checkpoint(
                server, operator(server), requests.CosignAuditCheckpoint(checkpoint=text, witnesses=keys)
            )
    with pytest.raises(errors.UsageError):
        await audit.cosign_audit_checkpoint(
            server, operator(server), requests.CosignAuditCheckpoint(checkpoint=checkpoint, witnesses=(vkey,) * 65)
        )
    assert "audit_checkpoint_cosigned" not in await kinds(server)


# query_provenance ------------------------------------------------------------------------------------------------


def check(*, passed: bool, action: str = "memory.write") -> dict[str, Any]:
    by = [{"action": action, "granted_by_display": "operator@local", "signature_b58": "sig"}]
    return {
        "agent_id": "memory:write",
        "required_actions": [action],
        "missing_actions": [] if passed else [action],
        "passed": passed,
        "authorized_by": by if passed else [],
    }


async def fill(server: Server) -> None:
    await server.audit.append("capability_check", check(passed=True), PEER)
    await server.audit.append("capability_check", check(passed=False), PEER)
    ignored = {"intent_id": "i", "intent_text": "t", "matched_pattern": "**/.env"}
    await server.audit.append("intent_ignored", ignored, OTHER)
    called = {"tool": "echo", "arguments_hash_hex": "0" * 64, "duration_ms": 1, "outcome": "ok"}
    await server.audit.append("tool_call_completed", called, OTHER)


async def test_rows_are_read_as_acts(server: Server) -> None:
    await fill(server)
    answer = await provenance.query_provenance(server, operator(server), requests.QueryProvenance())
    told = [(one.actor, one.action, one.approver, one.rule, one.outcome) for one in answer.actions]
    assert told == [
        ("other@local", "echo", None, None, "ok"),
        ("other@local", "intent_ignored", None, "**/.env", "denied"),
        ("peer@local", "memory.write", None, "memory.write", "denied"),
        ("peer@local", "memory.write", "operator@local", "memory.write", "allowed"),
    ]
    assert (answer.scanned, answer.integrity.valid, answer.integrity.events) == (4, True, 4)


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        ({"actor": "peer@local"}, 2),
        ({"actor": OTHER.pubkey}, 2),
        ({"approver": "operator@local"}, 1),
        ({"rule": "**/.env"}, 1),
        ({"outcome": "denied"}, 2),
        ({"outcome": "denied", "actor": "peer@local"}, 1),
        ({"actor": "peer"}, 0),
        ({"limit": 1}, 1),
        ({"until_ms": 5}, 0),
        ({"since_ms": server_kit.NOW_MS + 1}, 0),
    ],
)
async def test_questions_narrow_it(server: Server, asked: dict[str, Any], count: int) -> None:
    await fill(server)
    answer = await provenance.query_provenance(server, operator(server), requests.QueryProvenance(**asked))
    assert len(answer.actions) == count


async def test_others_are_told_of_their_own_acts_alone(server: Server) -> None:
    await fill(server)
    answer = await provenance.query_provenance(server, peer(), requests.QueryProvenance())
    assert {one.actor for one in answer.actions} == {"peer@local"}
    assert (answer.scanned, answer.integrity.events, answer.integrity.valid) == (2, 2, True)
    elsewhere = requests.QueryProvenance(actor="other@local")
    assert (await provenance.query_provenance(server, peer(), elsewhere)).actions == ()


async def test_only_operator_has_log_verified_each_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(server)
    looked = []
    real = server.audit.verify

    async def verify() -> Any:
        looked.append(1)
        return await real()

    monkeypatch.setattr(server.audit, "verify", verify)
    for caller, after_ms, expected in (
        (peer(), 0, 1),
        (peer(), 59_000, 1),
        (operator(server), 0, 2),
        (operator(server), 0, 3),
        (peer(OTHER), 59_000, 3),
        (peer(), 1_000, 4),
    ):
        server.now_ms.at_ms += after_ms  # type: ignore[attr-defined]
        await provenance.query_provenance(server, caller, requests.QueryProvenance())
        assert len(looked) == expected


async def test_one_look_at_log_at_time_is_shared_by_who_asked_before_it_began(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(server)
    looking, most, begun, go = 0, 0, 0, anyio.Event()
    real = server.audit.verify

    async def verify() -> Any:
        nonlocal looking, most, begun
        begun, looking = begun + 1, looking + 1
        most = max(most, looking)
        await go.wait()
        found = await real()
        looking -= 1
        return found

    monkeypatch.setattr(server.audit, "verify", verify)
    answers: list[int] = []

    async def ask(caller: Caller) -> None:
        answer = await provenance.query_provenance(server, caller, requests.QueryProvenance())
        answers.append(answer.integrity.events)

    async def ask_whether_it_holds() -> None:
        found = await audit.verify_audit_integrity(server, operator(server), requests.VerifyAuditIntegrity())
        answers.append(found.report.events)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, operator(server))
            await anyio.wait_all_tasks_blocked()
            # The verification in progress does not cover this row: later requests must report it.
            await server.audit.append("capability_check", check(passed=True), PEER)
            for _ in range(5):
                group.start_soon(ask, operator(server))
                group.start_soon(ask_whether_it_holds)
                group.start_soon(ask, peer())
            await anyio.wait_all_tasks_blocked()
            assert begun == 1
            go.set()
    assert (begun, most, len(answers)) == (2, 1, 16)
    assert sorted(answers)[-10:] == [5] * 10


async def test_look_that_was_cancelled_keeps_no_other_from_one(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    await fill(server)
    real, begun = server.audit.verify, []

    async def verify() -> Any:
        begun.append(1)
        if len(begun) == 1:
            await anyio.sleep_forever()
        return await real()

    monkeypatch.setattr(server.audit, "verify", verify)
    answers = []

    async def ask() -> None:
        answers.append(await audit.verify_audit_integrity(server, operator(server), requests.VerifyAuditIntegrity()))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as others, anyio.create_task_group() as first:
            first.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            others.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            first.cancel_scope.cancel()
    assert ([one.report.valid for one in answers], len(begun)) == ([True], 2)


def test_every_kind_of_row_can_be_read() -> None:
    from policy.audit_log import events
    from tests.unit.policy.audit_log.test_events import SAMPLES

    for kind, table in events.KINDS.items():
        fields = {name: SAMPLES[wanted] for name, wanted in table.items()}
        row = parts.AuditEvent(id="e", timestamp_ms=1, issuer=PEER, kind={"type": kind, **fields})
        found = provenance.read(row)
        assert found.kind == kind
        assert found.action
        assert found.outcome


def test_tables_name_their_kinds() -> None:
    names = {*audit.HANDLERS, *provenance.HANDLERS}
    assert names == {
        "recent_audit",
        "verify_audit_integrity",
        "purge_audit",
        "prove_audit_inclusion",
        "cosign_audit_checkpoint",
        "query_provenance",
    }
