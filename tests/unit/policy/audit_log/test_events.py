"""The table of audit events: what is refused, and what a line looks like."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from policy import errors
from policy.audit_log import event_kinds, events, supervisor_kinds

ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
STATE = {"run_id": "r1", "agent_id": "a", "operator": None, "state": "started", "reason": ""}
SAMPLES = {
    "text": "x",
    "text?": None,
    "int": 1,
    "int?": None,
    "bool": True,
    "digest": "a" * 64,
    "digest?": None,
    "texts": ["a"],
    "counts": {"attempts": 2},
    "objects": [{"action": "intent.subscribe", "granted_by_display": "operator@local", "signature_b58": "1"}],
}


def line(kind: str = "run_state", fields: Mapping[str, object] | None = None, **changes: object) -> bytes:
    arguments = {"event_id": "e1", "issuer": ISSUER, "now_ms": 5, **changes}
    return events.event_line(kind, STATE if fields is None else fields, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", events.KINDS)
def test_every_kind_takes_exactly_its_fields(kind: str) -> None:
    fields = {name: SAMPLES[wanted] for name, wanted in events.KINDS[kind].items()}
    assert list(json.loads(line(kind, fields))["kind"]) == ["type", *events.KINDS[kind]]
    for name in fields:
        with pytest.raises(errors.EventError, match=f"`{name}` is missing"):
            line(kind, {k: v for k, v in fields.items() if k != name})
    with pytest.raises(errors.EventError, match="`surplus` is not a field"):
        line(kind, {**fields, "surplus": "x"})


OF_MANY = {"clock_set", "trust_changed", "vault_changed", "volume_changed", "runs_revoked", "runs_stopped"}


@pytest.mark.parametrize("kind", sorted(set(supervisor_kinds.SUPERVISOR) - OF_MANY))
def test_every_row_that_can_belong_to_run_names_run_and_operator(kind: str) -> None:
    assert {"run_id", "operator"} <= set(events.KINDS[kind])


@pytest.mark.parametrize("kind", ["run_started", "run_ended", "run_state", "denied", "drift"])
def test_row_of_run_cannot_leave_run_out(kind: str) -> None:
    assert events.KINDS[kind]["run_id"] == "text"


def test_version_1s_kinds_are_all_there_and_none_twice() -> None:
    version_1 = {*event_kinds.V1, "capability_check", "intent_dispatched"}
    assert len(version_1) == 41
    assert version_1 <= set(events.KINDS)
    assert len(events.KINDS) == len(supervisor_kinds.SUPERVISOR) + len(event_kinds.V1) + len(event_kinds.OURS)


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(errors.EventError, match="`nothing` is not in the table"):
        line("nothing", {})


@pytest.mark.parametrize(
    ("wanted", "wrong"),
    [
        ("text", 1),
        ("text", None),
        ("int", True),
        ("int", -1),
        ("int", 2**64),
        ("int", 1.5),
        ("bool", 1),
        ("digest", "A" * 64),
        ("digest", "a" * 64 + "\n"),
        ("texts", "abc"),
        ("texts", [1]),
        ("objects", [{"a": [1]}]),
        ("objects", [{1: "a"}]),
        ("digest?", ""),
        ("counts", {"a": -1}),
        ("counts", {"a": "1"}),
        ("counts", [1]),
    ],
)
def test_wrong_type_is_refused(wanted: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(events.KINDS, "probe", {"field": wanted})
    line("probe", {"field": SAMPLES[wanted]})
    with pytest.raises(errors.EventError, match="`field` is not"):
        line("probe", {"field": wrong})


def test_line_is_one_line_of_ascii_whatever_strings_hold() -> None:
    hostile = 'x\n{"id":"forged"}\r\x1b[31m\u2028\u202e\udcff"'
    made = line(fields={**STATE, "reason": hostile})
    assert b"\n" not in made
    assert made.isascii()
    assert all(byte >= 0x20 for byte in made)
    assert json.loads(made)["kind"]["reason"] == hostile.replace("\udcff", "\\udcff")


def test_line_is_version_1s_event() -> None:
    assert json.loads(line()) == {
        "id": "e1",
        "timestamp_ms": 5,
        "issuer": ISSUER,
        "kind": {"type": "run_state", **STATE},
    }
    assert line().startswith(b'{"id":"e1","timestamp_ms":5,"issuer":{"display":"operator@local","pubkey":"')


@pytest.mark.parametrize(
    "issuer",
    [
        {},
        {"display": "operator@local"},
        {"display": "operator", "pubkey": ISSUER["pubkey"]},
        {"display": "a@b\n", "pubkey": ISSUER["pubkey"]},
        {"display": "a@b", "pubkey": "0" * 43},
        {**ISSUER, "more": "x"},
    ],
)
def test_malformed_issuer_is_refused(issuer: dict[str, str]) -> None:
    with pytest.raises(errors.EventError, match="issuer"):
        line(issuer=issuer)


@pytest.mark.parametrize("length", [1, 256])
@pytest.mark.parametrize("key", [32, 64])
def test_longest_and_shortest_issuer_are_taken_and_none_beyond(length: int, key: int) -> None:
    issuer = {"display": f"{'a' * length}@{'b' * length}", "pubkey": "z" * key}
    assert json.loads(line(issuer=issuer))["issuer"] == issuer
    beyond = 0 if length == 1 else 257
    for odd in (
        {**issuer, "display": f"{'a' * beyond}@{'b' * length}"},
        {**issuer, "display": f"{'a' * length}@{'b' * beyond}"},
        {**issuer, "pubkey": "z" * (31 if key == 32 else 65)},
    ):
        with pytest.raises(errors.EventError, match="issuer"):
            line(issuer=odd)


@pytest.mark.parametrize("now_ms", [-1, True, 5.0, "5", None, 2**64])
def test_time_is_number_of_milliseconds(now_ms: object) -> None:
    with pytest.raises(errors.EventError, match="is not a number of milliseconds"):
        line(now_ms=now_ms)


def test_line_has_limit() -> None:
    with pytest.raises(errors.EventError, match="more than"):
        line(fields={**STATE, "reason": "x" * events.MAX_LINE_BYTES})


@pytest.mark.parametrize(
    ("error", "rule", "grant"),
    [
        (errors.RoleViolation("no", grant="filesystem.write", where="agent.toml:31"), 3, "filesystem.write"),
        (errors.ExpiredError("old"), 2, None),
        (errors.NotEnforceableError("no", grant="sandbox.standby"), None, "sandbox.standby"),
        (errors.KernelError("no", grant="resources.network"), None, "resources.network"),
        (errors.ManifestSyntaxError("bad"), 1, None),
        (errors.PackageError("symlink"), None, None),
    ],
)
def test_rejection_carries_rule_grant_and_place(
    error: errors.CovenantError, rule: int | None, grant: str | None
) -> None:
    fields = events.rejection(error, agent_id="a", package_digest="b" * 64)
    row = json.loads(line("manifest_rejected", fields))["kind"]
    assert (row["rule"], row["grant"], row["code"], row["message"]) == (rule, grant, error.code, error.message)
    assert (row["where"], row["agent_id"], row["package_digest"]) == (error.where or None, "a", "b" * 64)


@pytest.mark.parametrize("character", ["x", "é", "\ud800", "😀"])
def test_how_long_rejection_is_is_not_for_whoever_is_quoted_in_it(character: str) -> None:
    words = character * 500_000
    error = errors.RoleViolation(f"path `{words}` is not granted", grant=words, where=words)
    row = line("manifest_rejected", events.rejection(error, agent_id="a"))
    kind = json.loads(row)["kind"]
    assert kind["message"].startswith("path `")
    assert len(row) < 3 * 12 * events.MESSAGE_CHARACTERS + 1_000
    # The control: what has that length stands there whole.
    error = errors.RoleViolation("y" * events.MESSAGE_CHARACTERS, grant="g", where="w")
    assert events.rejection(error)["message"] == error.message
