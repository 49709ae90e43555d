"""10,000 leases that are not for the request that waits: replays, other runs, wider targets, ended and revoked keys."""

from __future__ import annotations

import random
from typing import Any

import pytest

from policy import errors
from policy.leases import targets
from policy.leases.book import LeaseBook, RunOfLeases
from policy.signing import lease, strict_json
from tests import signing_kit as kit

NOW, DAY = kit.NOW, kit.DAY
RUN = RunOfLeases("0b5c3a52-0f5e-4a55-9a07-2f4f3f1f9b52", "hello", "1" * 64)
REQUEST, TARGET = "3f" * 8, "api.example.com"
ROOT = kit.root(kit.operator(1), revoked=kit.revoked(keys=[kit.revoked_key(3)]))
GOOD: dict[str, Any] = {
    "agent_id": RUN.agent_id,
    "run_id": RUN.run_id,
    "policy_digest": RUN.policy_digest,
    "request_id": REQUEST,
    "kind": "network",
    "target": TARGET,
    "duration": "run",
    "nonce": "0" * 32,
    "not_before": NOW - 1000,
    "expires_at": NOW + DAY,
}
HEX = "0123456789abcdef"


def _hex(chance: random.Random, size: int, but: str) -> str:
    made = "".join(chance.choice(HEX) for _ in range(size))
    return made if made != but else _hex(chance, size, but)


def _wider(chance: random.Random) -> str:
    return chance.choice([
        "example.com", "*.example.com", "*", f"{TARGET}.", f"{TARGET} ", TARGET.upper(), f"{TARGET}\0", f"www.{TARGET}",
        f"{TARGET}:443", "other.example.com", f"{chance.randrange(10**9)}.example.com",
    ])  # fmt: skip


def _changed(chance: random.Random) -> tuple[dict[str, Any], int]:
    """One field that is not the request's, or a time at which the lease is none; and the signer."""
    how = chance.randrange(8)
    choices: list[dict[str, Any]] = [
        {"run_id": _hex(chance, 32, RUN.run_id)},
        {"policy_digest": _hex(chance, 64, RUN.policy_digest)},
        {"request_id": _hex(chance, 16, REQUEST)},
        {"target": _wider(chance)},
        {"agent_id": chance.choice(["hello2", "hell", "other", "hello-x"])},
        {"expires_at": NOW - chance.randrange(999)},
        {"not_before": NOW + 1 + chance.randrange(DAY // 2)},
        {},
    ]
    changes = choices[how]
    # A revoked key, or one that no trust root has.
    return {**GOOD, "nonce": _hex(chance, 32, ""), **changes}, chance.choice([2, 3]) if how == 7 else 1


def _given(book: LeaseBook, fields: dict[str, Any], signer: int = 1, now_ms: int = NOW) -> None:
    # A signature costs a millisecond, and half of the fields are nothing to it: those come to the book as if verified.
    alone = all(fields[name] == GOOD[name] for name in ("run_id", "policy_digest", "request_id", "target"))
    if alone:
        raw = kit.envelope(strict_json.dumps(fields), signer, payload_type=lease.PAYLOAD_TYPE)
        signed = lease.verify(raw, ROOT, role=None, now_ms=now_ms)
    else:
        signed = lease.SignedLease(strict_json.validate(lease.LeaseStatement, fields), ("op1",), "0" * 64)
    book.grant(signed, now_ms=now_ms)


def _refused(book: LeaseBook, fields: dict[str, Any], signer: int = 1, now_ms: int = NOW) -> bool:
    try:
        _given(book, fields, signer, now_ms)
    except (errors.CovenantError, strict_json.MalformedJsonError):
        return True
    return False


def _book() -> LeaseBook:
    book = LeaseBook(RUN, lambda kind, target: target == TARGET)
    book.ask("network", TARGET, REQUEST, now_ms=NOW, ends_ms=NOW + 60_000)
    return book


def test_leases_for_something_else_never_count() -> None:
    chance, book = random.Random(27), _book()
    accepted = [fields for fields, signer in (_changed(chance) for _ in range(8_000))
                if not _refused(book, fields, signer)]  # fmt: skip
    assert accepted == []
    # The positive control, in the same book; its replays, also for a later request of the same target.
    _given(book, GOOD)
    assert book.live("network", TARGET, NOW) is not None
    replays = 0
    for number in range(2_000):
        now_ms = NOW + 2 * DAY + number * 100_000 if number % 2 else NOW + 1 + number
        book.overdue(now_ms)
        again = {**GOOD, "request_id": f"{number:016x}", "expires_at": now_ms + DAY}
        book.ask("network", TARGET, again["request_id"], now_ms=now_ms, ends_ms=now_ms + 60_000)
        # The same lease, and one with its nonce for the new request.
        replays += not _refused(book, GOOD, 1, now_ms) or not _refused(book, again, 1, now_ms)
    assert replays == 0


URI = "matrix://tool/mcp/mail/send@1.2.0"


REQUEST_HEAD = "POST https://api.example.com/send/once"


def _of_call(chance: random.Random, kind: str, head: str) -> dict[str, Any]:
    """A lease for another call, for all of its kind but once, or for another kind of thing."""
    call, other_kind = targets.call(head, "a" * 64), "inject" if kind == "tool" else "tool"
    other = chance.choice([
        targets.call(head, _hex(chance, 64, "a" * 64)), targets.call(head + "1", "a" * 64),
        targets.call(head[:-1], "a" * 64), head.replace("send", "*"), head.replace("/send", ""),
        f"{call} ", call.swapcase(), f"{head} ", f"{head} sha256:", f"{head} sha256:*", "*", head[:-1],
        f"{head}*", f"{head} sha256:{'a' * 63}", f"{call},{'b' * 64}", head.replace("POST", "*"),
    ])  # fmt: skip
    other = f"{other}?" if other == head else other
    fields: dict[str, Any] = {**GOOD, "kind": kind, "target": call, "nonce": _hex(chance, 32, "")}
    return {**fields, **chance.choice([
        {"target": other}, {"target": head, "duration": "once"}, {"kind": "network"}, {"kind": other_kind},
        {"kind": "network", "target": head}, {"run_id": _hex(chance, 32, RUN.run_id), "target": head},
        {"kind": other_kind, "target": head}, {"request_id": _hex(chance, 16, REQUEST), "target": head},
        {"policy_digest": _hex(chance, 64, ""), "target": head}, {"expires_at": NOW - 1, "target": head},
    ])}  # fmt: skip


@pytest.mark.parametrize(("kind", "head"), [("tool", URI), ("inject", REQUEST_HEAD)])
@pytest.mark.parametrize("whole", [False, True])
def test_leases_for_another_call_never_count(kind: Any, head: str, *, whole: bool) -> None:
    chance, call = random.Random(130), targets.call(head, "a" * 64)
    book = LeaseBook(RUN, lambda _, target: targets.tool(target) == head)
    book.ask(kind, call, REQUEST, now_ms=NOW, ends_ms=NOW + 60_000)
    assert [one for one in (_of_call(chance, kind, head) for _ in range(2_000)) if not _given_unsigned(book, one)] == []
    # The positive control, and exactly the calls that it covers.
    good = {**GOOD, "kind": kind, "target": head if whole else call, "duration": "run"}
    assert not _given_unsigned(book, good)
    for _ in range(500):
        other = targets.call(head, _hex(chance, 64, "a" * 64))
        assert (book.live(kind, other, NOW) is not None) == whole
        assert book.live(kind, targets.call(head + "2", "a" * 64), NOW) is None
        assert book.live("network", call, NOW) is None
    assert book.live(kind, call, NOW) is not None
    assert book.live(kind, call, GOOD["expires_at"]) is None


def _given_unsigned(book: LeaseBook, fields: dict[str, Any]) -> bool:
    """Give a lease as if its signature was verified. Returns whether it is refused."""
    try:
        statement = strict_json.validate(lease.LeaseStatement, fields)
        book.grant(lease.SignedLease(statement, ("op1",), "0" * 64), now_ms=NOW)
    except (errors.CovenantError, strict_json.MalformedJsonError):
        return True
    return False


def test_lease_lives_no_longer_than_it_says() -> None:
    chance = random.Random(28)
    for _ in range(300):
        book, ends = _book(), NOW + 1 + chance.randrange(10**6)
        duration = chance.choice(["once", "run", "until"])
        _given(book, {**GOOD, "expires_at": ends, "duration": duration})
        look = NOW + chance.randrange(2 * 10**6)
        assert (book.live("network", TARGET, look) is not None) == (look < ends)
        spent = book.use("network", TARGET)
        assert (spent is not None) == (duration == "once")
        assert (book.live("network", TARGET, NOW) is None) == (duration == "once")
        assert len(book.overdue(ends)[1]) == 1
        assert book.leases == ()
