"""Check the contract of both audit logs: the one on disk and the one in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from covenant.stores.audit.durable import DurableAudit
from covenant.stores.audit.interface import AuditEntry, AuditLog
from covenant.wire import parts
from covenant.wire.types import AgentId
from policy import base58, errors
from policy.audit_log import events, merkle, note, truncation
from tests.doubles.audit import InMemoryAudit

pytestmark = pytest.mark.anyio

DAEMON = AgentId(display="user@local", pubkey=base58.encode(b"d" * 32))
PEER = AgentId(display="peer@local", pubkey=base58.encode(b"p" * 32))
WITNESS = Ed25519PrivateKey.from_private_bytes(b"w" * 32)


class Clock:
    """A clock in milliseconds that the test moves."""

    def __init__(self) -> None:
        self.ms = 1_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["durable", "in_memory"])
async def log(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[AuditLog]:
    if request.param == "in_memory":
        yield InMemoryAudit(issuer=DAEMON, now_ms=clock)
        return
    tmp_path.chmod(0o700)
    async with await DurableAudit.open(tmp_path, issuer=DAEMON, now_ms=clock) as opened:
        yield opened


async def write(log: AuditLog, count: int, *, issuer: AgentId | None = None, start: int = 0) -> list[str]:
    return [await log.append("authentication_failed", failed(n), issuer) for n in range(start, start + count)]


def failed(n: int) -> dict[str, Any]:
    return {"transport": "ipc", "reason": f"row {n}"}


def reasons(rows: Sequence[parts.AuditEvent]) -> list[str]:
    return [row.kind.get("reason", row.kind["type"]) for row in rows]


async def test_row_is_there_with_what_it_says(log: AuditLog, clock: Clock) -> None:
    clock.ms = 77
    event_id = await log.append("authentication_failed", failed(1), PEER)
    [row] = await log.recent(10)
    assert (row.id, row.timestamp_ms, row.issuer) == (event_id, 77, PEER)
    assert row.kind == {"type": "authentication_failed", **failed(1)}
    await log.append("authentication_failed", failed(2))
    assert (await log.recent(1))[0].issuer == DAEMON


async def test_rows_of_run_may_leave_run_and_operator_out(log: AuditLog) -> None:
    fields = {"agent_id": "a", "required_actions": [], "missing_actions": [], "passed": True, "authorized_by": []}
    await log.append("capability_check", fields)
    [row] = await log.recent(1)
    assert (row.kind["run_id"], row.kind["operator"]) == (None, None)


async def test_what_is_not_in_table_is_refused_and_hurts_nothing(log: AuditLog) -> None:
    with pytest.raises(errors.EventError, match="not in the table"):
        await log.append("nothing", {})
    with pytest.raises(errors.EventError, match="`reason` is missing"):
        await log.append("authentication_failed", {"transport": "ipc"})
    with pytest.raises(errors.EventError):
        await log.append_all([AuditEntry("authentication_failed", failed(1)), AuditEntry("nothing", {})])
    await write(log, 1)
    assert len(await log.recent(10)) == 1


async def test_row_too_long_is_refused_and_log_goes_on(log: AuditLog) -> None:
    """A line may need six bytes for one letter, so a row from an 8 MiB frame may be too long for a line."""
    long = {"transport": "ipc", "reason": "\u00e9" * (events.MAX_LINE_BYTES // 6)}
    with pytest.raises(errors.EventError, match="more than 8388608"):
        await log.append("authentication_failed", long)
    with pytest.raises(errors.EventError, match="more than 8388608"):
        await log.append_all(
            [AuditEntry("authentication_failed", failed(1)), AuditEntry("authentication_failed", long)]
        )
    event_id = await log.append("authentication_failed", failed(2))
    assert [row.id for row in await log.recent(10)] == [event_id]


async def test_recent_is_newest_first_with_limit_after_filter(log: AuditLog, clock: Clock) -> None:
    for n in range(30):
        clock.ms = 1_000 + n
        await log.append("authentication_failed", failed(n), PEER if n % 10 == 0 else None)
    assert reasons(await log.recent(3)) == ["row 29", "row 28", "row 27"]
    assert reasons(await log.recent(2, issuer_pubkey=PEER.pubkey)) == ["row 20", "row 10"]
    assert reasons(await log.recent(9, issuer_pubkey=PEER.pubkey, since_ms=1_010)) == ["row 20", "row 10"]
    assert reasons(await log.recent(9, since_ms=1_028)) == ["row 29", "row 28"]
    assert await log.recent(9, issuer_pubkey=base58.encode(b"x" * 32)) == []
    assert await log.recent(0) == []


async def test_times_never_go_backwards(log: AuditLog, clock: Clock) -> None:
    await write(log, 1)
    clock.ms = 3
    await write(log, 1, start=1)
    assert [row.timestamp_ms for row in await log.recent(2)] == [1_000, 1_000]


async def test_rows_together_stand_together(log: AuditLog) -> None:
    entries = [AuditEntry("authentication_failed", failed(n), PEER) for n in range(5)]
    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(log.append_all, entries)
    rows = reasons(await log.recent(100))
    assert rows == [f"row {n}" for n in (4, 3, 2, 1, 0)] * 8
    assert await log.append_all([]) == []


async def test_many_at_once_are_all_there_once(log: AuditLog) -> None:
    async with anyio.create_task_group() as group:
        for _ in range(64):
            group.start_soon(write, log, 10)
    rows = await log.recent(10_000)
    assert len({row.id for row in rows}) == len(rows) == 640
    report = await log.verify()
    assert (report.valid, report.events, report.anchors, report.failures) == (True, 640, 640, ())


async def test_scan_says_how_many_it_looked_at(log: AuditLog) -> None:
    await write(log, 20)
    found = await log.scan(lambda row: row.kind["reason"] in ("row 15", "row 3"), 10)
    assert (reasons(found.events), found.scanned) == (["row 15", "row 3"], 20)
    found = await log.scan(lambda row: True, 4)
    assert (len(found.events), found.scanned) == (4, 4)


async def test_listeners_hear_of_each_row_once_it_is_durable(log: AuditLog) -> None:
    heard: list[parts.AuditEvent] = []
    log.listen(heard.append)
    await write(log, 3)
    assert reasons(heard) == ["row 0", "row 1", "row 2"]
    assert heard == (await log.recent(3))[::-1]


async def test_empty_log_holds(log: AuditLog) -> None:
    report = await log.verify()
    assert (report.valid, report.events, report.root_hash_hex) == (True, 0, "0" * 64)
    assert await log.recent(5) == []
    assert note.Checkpoint.parse((await log.checkpoint()).text).root == merkle.EMPTY_ROOT


# Proofs and checkpoints ------------------------------------------------------------------------------------------


async def test_every_row_is_proved_under_signed_checkpoint(log: AuditLog) -> None:
    ids = await write(log, 13)
    for event_id in ids:
        proof = await log.prove(event_id)
        assert proof is not None
        [by] = proof.checkpoint.verified([log.verifier])
        checkpoint = note.Checkpoint.parse(proof.checkpoint.text)
        assert (by.verifier.name, checkpoint.origin) == (log.origin, log.origin)
        assert (checkpoint.size, checkpoint.root) == (proof.inclusion.size, proof.root)
        assert merkle.includes(proof.inclusion, checkpoint.root)
        assert proof.inclusion.index == ids.index(event_id)
    assert await log.prove("0" * 36) is None
    assert await log.prove('"') is None


async def test_checkpoint_is_same_while_nothing_comes(log: AuditLog) -> None:
    await write(log, 3)
    first = await log.checkpoint()
    # The row about the refusal comes behind it.
    second = await log.checkpoint()
    sizes = [note.Checkpoint.parse(one.text).size for one in (first, second)]
    assert sizes == [3, 4]
    assert reasons(await log.recent(1)) == ["audit_checkpoint"]


async def test_later_checkpoints_extend_earlier_ones(log: AuditLog) -> None:
    seen = []
    for n in range(5):
        await write(log, 3, start=3 * n)
        seen.append(note.Checkpoint.parse((await log.checkpoint()).text))
    for old in seen:
        for new in seen:
            if old.size <= new.size:
                proof = await log.consistency(old.size, new.size)
                assert merkle.extends(old.size, new.size, old.root, new.root, proof)
    with pytest.raises(errors.NoteError):
        await log.consistency(3, 10_000)


async def test_witnesses_cosign_and_log_keeps_it(log: AuditLog) -> None:
    await write(log, 2)
    signed = await log.checkpoint()
    witness = note.Verifier("witness.example/w", note.COSIGNATURE, WITNESS.public_key())
    cosigned = signed.with_signature(note.cosign(signed.text, witness.name, WITNESS, 1_700_000_000))
    kept = await log.cosigned(note.Note.parse(cosigned.raw), [witness])
    assert [one.time_s for one in kept.verified([log.verifier, witness])] == [None, 1_700_000_000]
    assert (await log.recent(1))[0].kind["witness"] == witness.text
    proof = await log.prove((await log.recent(10))[-1].id)
    assert proof is not None
    assert proof.checkpoint == kept


async def test_cosignature_none_is_refused(log: AuditLog) -> None:
    await write(log, 2)
    signed = await log.checkpoint()
    witness = note.Verifier("witness.example/w", note.COSIGNATURE, WITNESS.public_key())
    other = note.Note.parse(signed.raw.replace(log.origin.encode(), b"other"))
    for refused in (
        signed,
        signed.with_signature(note.sign(signed.text, witness.name, WITNESS)),
        signed.with_signature(note.cosign(other.text, witness.name, WITNESS, 5)),
        other.with_signature(note.cosign(other.text, witness.name, WITNESS, 5)),
    ):
        with pytest.raises(errors.NoteError):
            await log.cosigned(refused, [witness])
    log_key = note.Verifier(log.origin, note.SIGNATURE, log.verifier.key)
    with pytest.raises(errors.NoteError):
        await log.cosigned(signed, [log_key])


# Cuts ------------------------------------------------------------------------------------------------------------


async def timed(log: AuditLog, clock: Clock, count: int, *, start: int = 0) -> list[str]:
    ids = []
    for n in range(start, start + count):
        clock.ms = 1_000 + n
        ids.append(await log.append("authentication_failed", failed(n), PEER if n % 2 else None))
    return ids


async def test_purge_cuts_what_is_older_and_rest_still_holds(log: AuditLog, clock: Clock) -> None:
    await timed(log, clock, 10)
    before = await log.verify()
    done = await log.purge(1_004)
    assert (done.purged, done.root_before_hex) == (4, before.root_hash_hex)
    report = await log.verify()
    assert (report.valid, report.events, report.root_hash_hex) == (True, 7, done.root_after_hex)
    rows = await log.recent(100)
    assert reasons(rows) == [f"row {n}" for n in range(9, 3, -1)] + ["audit_rebased"]
    record = rows[-1]
    assert (record.id, record.issuer) == (done.rebase_id, DAEMON)
    assert (record.kind["cut"], record.kind["cut_now"]) == (4, 4)
    assert record.kind["root_before_hex"] == before.root_hash_hex
    assert reasons(await log.recent(9, issuer_pubkey=PEER.pubkey)) == ["row 9", "row 7", "row 5"]


async def test_checkpoints_from_before_cut_hold_against_what_is_left(log: AuditLog, clock: Clock) -> None:
    ids = await timed(log, clock, 11)
    old = note.Checkpoint.parse((await log.checkpoint()).text)
    await log.purge(1_007)
    proof = await log.prove(ids[8])
    assert proof is not None
    # The checkpoint that was signed before the cut still covers it.
    assert (proof.inclusion.index, proof.inclusion.size, proof.root) == (8, old.size, old.root)
    assert merkle.includes(proof.inclusion, old.root)
    await timed(log, clock, 3, start=11)
    new = note.Checkpoint.parse((await log.checkpoint()).text)
    assert merkle.extends(old.size, new.size, old.root, new.root, await log.consistency(old.size, new.size))
    assert await log.prove(ids[2]) is None
    record = (await log.recent(100))[-1]
    assert await log.prove(record.id) is None


async def test_cuts_follow_each_other(log: AuditLog, clock: Clock) -> None:
    ids = await timed(log, clock, 30)
    whole = note.Checkpoint.parse((await log.checkpoint()).text)
    for at in (3, 4, 11, 27):
        done = await log.purge(1_000 + at)
        assert done.purged > 0
        record = (await log.recent(100))[-1]
        assert record.kind["cut"] == at
        assert (await log.verify()).valid
        proof = await log.prove(ids[29])
        assert proof is not None
        assert merkle.includes(proof.inclusion, whole.root)
        assert (record.kind["previous_rebase_hex"] is None) == (at == 3)


async def test_purge_of_nothing_changes_nothing(log: AuditLog, clock: Clock) -> None:
    await timed(log, clock, 3)
    before = await log.verify()
    assert (await log.purge(1_000)).purged == 0
    assert (await log.purge(0)).rebase_id is None
    assert await log.verify() == before
    await log.purge(1_001)
    again = await log.verify()
    assert (await log.purge(1_001)).purged == 0
    assert await log.verify() == again


async def test_purge_of_everything_leaves_record(log: AuditLog, clock: Clock) -> None:
    await timed(log, clock, 5)
    assert (await log.purge(9_999)).purged == 5
    assert reasons(await log.recent(9)) == ["audit_rebased"]
    assert (await log.verify()).valid
    await timed(log, clock, 2, start=5)
    assert (await log.verify()).events == 3
    assert note.Checkpoint.parse((await log.checkpoint()).text).size == 7


async def test_purges_among_writers_lose_nothing_newer(log: AuditLog, clock: Clock) -> None:
    async def writer(name: int) -> None:
        for n in range(20):
            clock.ms += 1
            await log.append("authentication_failed", {"transport": "ipc", "reason": f"{name} {n}"})

    cuts = []
    async with anyio.create_task_group() as group:
        for name in range(8):
            group.start_soon(writer, name)
        for _ in range(4):
            cuts.append((await log.purge(clock.ms - 5)).purged)
            await log.recent(5)
    rows = [row for row in await log.recent(10_000) if row.kind["type"] != "audit_rebased"]
    assert len(rows) + sum(cuts) == 160
    assert (await log.verify()).valid


def _other(value: Any) -> Any:
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [*value[:-1], "0" * 64] if value else ["0" * 64]
    return "0" * len(value) if value else "0" * 64


async def test_record_of_cut_is_signed_in_every_field(log: AuditLog, clock: Clock) -> None:
    await timed(log, clock, 6)
    await log.purge(1_003)
    record = (await log.recent(10))[-1]
    assert isinstance(log, DurableAudit | InMemoryAudit)
    key = (log._files.key if isinstance(log, DurableAudit) else log._key).public_key()
    line = record.model_dump_json().encode()
    found = truncation.frontier(line, key)
    assert found is not None
    assert found.size == 3
    for name in set(record.kind) - {"type"}:
        body = {**record.kind, name: _other(record.kind[name])}
        changed = record.model_copy(update={"kind": body}).model_dump_json().encode()
        assert truncation.frontier(changed, key) is None
    assert truncation.frontier(line, WITNESS.public_key()) is None
    assert truncation.frontier(b'{"kind":{"type":"audit_rebased",', key) is None
