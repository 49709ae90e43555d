"""Check that no list is too long for a frame: each listing is filled with the longest possible rows and answered."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import pydantic
import pytest

from covenant.handlers import expiry, paging, routes
from covenant.handlers.access import authorization
from covenant.handlers.audit import consistency, drift
from covenant.handlers.memory import records
from covenant.handlers.server import Server
from covenant.runtime.packages import Listed
from covenant.runtime.runner import Runners
from covenant.stores.audit.interface import Scan
from covenant.stores.capabilities.interface import Grant
from covenant.stores.mailbox.interface import MAX_RESULT_BYTES, MAX_TASK_BYTES, State, TaskEntry
from covenant.stores.memory.interface import Hit, MemoryCompaction, Repaired
from covenant.stores.peers.interface import Listing
from covenant.stores.settlement.interface import Batch
from covenant.wire import frames, parts, requests, responses
from covenant.wire.types import (
    U64_END,
    A2ATask,
    A2ATaskResult,
    AgentId,
    BudgetDebit,
    Capability,
    MemoryRecord,
    PeerSummary,
    SettlementReceipt,
    SignedCapability,
    Tier,
    ToolSpec,
)
from policy import contract, errors
from policy.audit_log import verify as audit_log_verify
from policy.capabilities import actions, token
from policy.signing.expiry import Expiry
from tests import server_kit

pytestmark = pytest.mark.anyio

MOST = 2**32 - 1
END = U64_END - 1
WHO = AgentId(display=f"{'a' * 256}@{'b' * 256}", pubkey="1" * 128)
ID = "f" * 36
HEX = "f" * 64
# On the wire a control character takes six bytes.
WORST = "\x01"
MEGABYTE = 1024 * 1024

# Answers with a tuple that lists no stored rows, each with the reason for its length.
NO_LISTINGS = {
    "intent_result": "its sources are in the line of at most 4 MiB that an agent answers with",
    "tool_result": "the blocks of one call, from what one frame asked for",
    "peer_enrolled": "the actions that were asked for, at most 256",
    "chain_status": "the names of settings that are missing",
    "audit_inclusion": "one hash for each doubling of the log",
    "a2_a_result_opt": "one result",
    "memory_stored": "one record",
    "a2_a_repaired": "one result",
    "a2_a_auto_retried": "ids and reasons, each list cut to half of what fits",
    "memory_promoted": "one record",
}


def forever(row: Any, *, count: int = 0) -> Any:
    """Return a store's method that returns as many rows as ``count`` asks for, up to a store's limit."""

    async def found(*args: Any, **named: Any) -> Any:
        return [row] * min(args[count], 100_000)

    return found


def now(value: Any) -> Any:
    """Return an async method that returns this value."""

    async def found(*args: Any, **named: Any) -> Any:
        return value

    return found


def at_once(value: Any) -> Any:
    """Return a synchronous method that returns this value."""
    return lambda *args, **named: value


def record() -> MemoryRecord:
    empty = MemoryRecord(id=ID, tier=Tier.LONGTERM, owner=WHO, text="", embedding=(-1 / 3,) * 384, created_at=END)
    room = records.MAX_RECORD_BYTES - paging.size_of(empty)
    made = empty.model_copy(update={"text": WORST * (room // 6)})
    records.check_size(made)
    return made


def receipt() -> SettlementReceipt:
    names = ("id", "memory_record_id", "chain", "cluster", "batch_id", "merkle_root", "tx_sig", "onchain_sig")
    text: dict[str, Any] = dict.fromkeys(names, "s" * 128)
    numbers: dict[str, Any] = dict.fromkeys(("credits_consumed", "settled_at", "slot", "confirmed_at"), END)
    return SettlementReceipt(payer=WHO, resource="registration", **text, **numbers)


def grant() -> Grant:
    scope = {"max_uses": END, "note": "n" * (token.MAX_SCOPE_BYTES - 100)}
    long = f"tool.{'x' * (actions.MAX_LENGTH - 5)}"
    return Grant(token.Token(WHO.pubkey, long, scope, WHO.pubkey, END), "1" * 128, WHO.display, WHO.display, END)


def signed() -> SignedCapability:
    one = grant().token
    fields = {"action": one.action, "scope": one.scope, "expires_at": END}
    return SignedCapability(capability=Capability(subject=WHO, granted_by=WHO, **fields), signature="1" * 128)


def row(**kind: Any) -> parts.AuditEvent:
    return parts.AuditEvent(id=ID, timestamp_ms=END, issuer=WHO, kind=kind)


# The longest rule of .covenantignore, beside the longest intent.
IGNORED = row(type="intent_ignored", intent_id=ID, intent_text=WORST * contract.INTENT_BYTES, matched_pattern="x" * 999)


def task() -> A2ATask:
    made = A2ATask(id=ID, sender=WHO, recipient=WHO, intent_text="")
    return made.model_copy(update={"intent_text": WORST * ((MAX_TASK_BYTES - paging.size_of(made)) // 6)})


def result() -> A2ATaskResult:
    made = A2ATaskResult(task_id=ID, status="error", error_message="")
    return made.model_copy(update={"error_message": WORST * ((MAX_RESULT_BYTES - paging.size_of(made)) // 6)})


def entry(state: State) -> TaskEntry:
    return TaskEntry(task=task(), state=state, sent_at_ms=END, turn=1, result=result())


def _peer() -> Any:
    shown = PeerSummary(agent_id=WHO, token_prefix="1" * 6, registered_at=END, revoked_at=END, expires_at=END)
    return SimpleNamespace(summary=lambda: shown, revoked_at_ms=None)


def broken(count: int) -> audit_log_verify.Report:
    failures = tuple(
        audit_log_verify.Failure("entry_mismatch", "both", "m" * 200, "changed", n, ID) for n in range(count)
    )
    return audit_log_verify.Report(END, END, False, HEX, failures)


def approval() -> parts.Approval:
    names = dict.fromkeys(("id", "intent_id", "run_id", "agent_id", "description", "command"), WORST * 300)
    return parts.Approval(**names, choices=("deny", "once", "session"), requested_at=END)


def denial() -> parts.AuditEvent:
    named = dict.fromkeys(("layer", "target", "code"), WORST * 4096)
    return row(type="denied", run_id=ID, agent_id=ID, count=END, **named)


Asked = tuple[requests.Request, Mapping[str, Mapping[str, Any]]]


def _compaction() -> Asked:
    ids = tuple(str(uuid.UUID(int=number)) for number in range(150_000))
    policy = parts.CompactionPolicy(delete_working_before_ms=1)
    order = parts.MemoryCompactionOrder(mode="dry_run", policy=policy, reason="r")
    return requests.CompactMemory(request=order), {"memory": {"compact": now(MemoryCompaction(ids, ids, ids))}}


def _repair() -> Asked:
    command = parts.DetachParent(id=ID)
    one = record()
    changed = Repaired(one.model_copy(update={"parent": ID}), one, changed=True)
    order = parts.MemoryRepairOrder(mode="apply", command=command, reason="r")
    return requests.RepairMemory(request=order), {"memory": {"repair": now(changed), "get": now(one)}}


def _agents() -> Mapping[str, Mapping[str, Any]]:
    # The error of a manifest quotes its content.
    listed = Listed("d" * 255, None, errors.HomeError(WORST * 10_000))
    return {"agents": {"listing": at_once((listed,) * 4096), "reload": now(None)}}


# For every request that lists rows: the request, and the rows of its stores.
LISTINGS: Mapping[str, Callable[[], Asked]] = {
    "recent_memory": lambda: (requests.RecentMemory(limit=MOST), {"memory": {"recent": forever(record(), count=1)}}),
    "search_memory": lambda: (
        requests.SearchMemory(query="q", limit=MOST),
        {"memory": {"search": forever(Hit(record(), 1.0), count=3)}},
    ),
    "compact_memory": _compaction,
    "repair_memory": _repair,
    "verify": lambda: (requests.Verify(window=MOST), {}),
    "recent_receipts": lambda: (requests.RecentReceipts(limit=MOST), {"receipts": {"recent": forever(receipt())}}),
    "receipt_batches": lambda: (
        requests.ReceiptBatches(limit=MOST),
        {"receipts": {"batches": forever(Batch(HEX, HEX, END, "c" * 128, "c" * 128, "s" * 128, END, END))}},
    ),
    "recent_debits": lambda: (
        requests.RecentDebits(limit=MOST),
        {"budget": {"recent": forever(BudgetDebit(agent=WHO, credits=END, paired_receipt="r" * 128, at_ms=END))}},
    ),
    "recent_capabilities": lambda: (
        requests.RecentCapabilities(limit=MOST),
        {"capabilities": {"recent": lambda most, key: [SimpleNamespace(signed=signed())] * most}},
    ),
    "capability_usage": lambda: (
        requests.CapabilityUsage(limit=MOST),
        {"capabilities": {"usage": lambda most, key: [grant()] * most, "effective": at_once(False)}},
    ),
    "list_peers": lambda: (
        requests.ListPeers(limit=MOST),
        {"peers": {"listing": lambda most, *_: Listing([_peer()] * most, truncated=True)}},
    ),
    "revoke_peer": lambda: (
        requests.RevokePeer(token_prefix="1", match_limit=MOST),
        {"peers": {"matching": at_once([_peer()] * 10_000)}},
    ),
    "recent_audit": lambda: (requests.RecentAudit(limit=MOST, extended=True), {"audit": {"recent": forever(IGNORED)}}),
    "verify_audit_integrity": lambda: (requests.VerifyAuditIntegrity(), {"audit": {"verify": now(broken(100_000))}}),
    "query_provenance": lambda: (
        requests.QueryProvenance(limit=MOST),
        {
            "audit": {
                "verify": now(broken(100_000)),
                "scan": now(Scan((row(type="x", action="a" * MEGABYTE, rule="r" * MEGABYTE),) * 1000, END)),
            }
        },
    ),
    "recent_denials": lambda: (
        requests.RecentDenials(limit=MOST),
        {"audit": {"scan": now(Scan((denial(),) * 1000, END))}},
    ),
    "list_agents": lambda: (requests.ListAgents(), _agents()),
    "list_expiries": lambda: (requests.ListExpiries(), {}),
    "reload_agents": lambda: (requests.ReloadAgents(), _agents()),
    "list_approvals": lambda: (requests.ListApprovals(), {}),
    "list_tools": lambda: (
        requests.ListTools(),
        {"tools": {"specs": at_once((ToolSpec(name="t", description=WORST * 9999, input_schema={}),) * 1000)}},
    ),
    "recent_a2_a_tasks": lambda: (
        requests.RecentA2ATasks(limit=MOST),
        {"mailbox": {"recent": at_once([entry(State.QUEUED)] * 500)}},
    ),
    "recent_a2_a_results": lambda: (
        requests.RecentA2AResults(limit=MOST),
        {"mailbox": {"answered": at_once([entry(State.RESULT_PENDING)] * 500)}},
    ),
    "a2_a_queue": lambda: (
        requests.A2AQueue(limit=MOST),
        {
            "mailbox": {
                "open_entries": at_once([entry(State.QUEUED)] * 500),
                "unfetched": at_once([entry(State.RESULT_PENDING)] * 500),
            }
        },
    ),
}


def _tuples(kind: Any) -> bool:
    """Whether a type contains a tuple of any length, at any depth."""
    if get_origin(kind) is tuple:
        return True
    if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
        return any(_tuples(field.annotation) for field in kind.model_fields.values())
    return any(_tuples(one) for one in get_args(kind))


def _lists(value: Any) -> list[Sequence[Any]]:
    """Return the tuples that an answer contains, at any depth."""
    if isinstance(value, pydantic.BaseModel):
        return [one for name in type(value).model_fields for one in _lists(getattr(value, name))]
    return [value] if isinstance(value, tuple) else []


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    made = server_kit.make(home=tmp_path)
    monkeypatch.setattr(authorization, "require", now(SignedCapability(capability=_everything(), signature="1" * 88)))
    long = [parts.Drift(kind="memory_row_invalid", id=ID, message=WORST * 1000, repair="r" * 500)] * 5000
    monkeypatch.setattr(consistency, "gather", now(None))
    monkeypatch.setattr(drift, "found", at_once(long))
    monkeypatch.setattr(expiry, "found", now([Expiry("grant", WORST * 20_000, END)] * 1000))
    made.runners = Runners({})
    made.runners.approving = SimpleNamespace(approvals=at_once((approval(),) * 10_000))
    return made


def _everything() -> Capability:
    return Capability(subject=WHO, action="memory.read", scope={}, granted_by=WHO, expires_at=None)


@pytest.mark.parametrize("kind", LISTINGS)
async def test_longest_rows_are_listed_as_far_as_frame_goes(
    kind: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, stores = LISTINGS[kind]()
    for name, methods in stores.items():
        for method, answer in methods.items():
            monkeypatch.setattr(getattr(server, name), method, answer)
    monkeypatch.setattr(server.audit, "append", now(None))
    monkeypatch.setattr(server.audit, "append_all", now(None))
    answer = await server.respond(server_kit.caller(WHO, operator=True), asked)
    assert answer.kind != "error", answer
    frames.encode(answer.to_bytes())
    listed = _lists(answer)
    assert kind == "repair_memory" or all(listed), "rows there are, and none is shown"


@pytest.mark.parametrize(("packages", "truncated"), [(3, False), (4096, True)])
async def test_cut_list_of_packages_says_so(
    packages: int, truncated: bool, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = Listed("d" * 255, None, errors.HomeError(WORST * 10_000))
    monkeypatch.setattr(server.agents, "listing", at_once((listed,) * packages))
    answer = await server.respond(server_kit.caller(WHO, operator=True), requests.ListAgents())
    assert isinstance(answer, responses.AgentDirectory)
    assert (answer.truncated, len(answer.agents) < packages) == (truncated, truncated)


def test_every_request_that_lists_something_is_in_table() -> None:
    listing = {model.__name__ for kind, model in responses.KINDS.items() if _tuples(model) and kind not in NO_LISTINGS}
    answers = {kind: handler.__annotations__["return"].rpartition(".")[2] for kind, handler in routes.HANDLERS.items()}
    assert listing <= set(answers.values())
    listed = {kind for kind, answer in answers.items() if answer in listing}
    assert listed | {"repair_memory"} == LISTINGS.keys()
