"""Calls of a package's tools: a table of calls that are refused, each with its fix, and calls that are made."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from policy import errors
from policy.why import amend
from sandbox.network.tools.guard import ToolGuard
from tests import tool_call_kit as kit

CASES = tuple(kit.refused())
REFUSALS = (errors.ToolDeniedError, errors.ToolArgumentsError)


def test_table_has_at_least_200_cases() -> None:
    assert len(CASES) >= 200
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_call_is_denied_and_fix_ends_it(case: kit.Case) -> None:
    one = kit.Guarded()
    with pytest.raises(REFUSALS) as caught:
        one.guard.check(kit.uri(case.tool), case.arguments)
    ((kind, row),) = one.rows
    assert (kind, row["code"]) == ("tool_refused", case.code)
    # The row holds digests and no content.
    assert not any(isinstance(v, str) and len(v) > 3 and v in json.dumps(row) for v in case.arguments.values())
    add = caught.value.details.get("add", [])
    assert bool(add) or not case.fixed
    if not add:
        return
    again = kit.Guarded(amend.document(kit.MANIFEST, add))
    if case.fixed:
        again.guard.check(kit.uri(case.tool), case.arguments)
        assert again.rows[0][0] == "tool_called"
        return
    # The line ends this denial; the schema, or allowed_side_effects of tools.json, refuses the call as well.
    with pytest.raises(REFUSALS):
        again.guard.check(kit.uri(case.tool), case.arguments)
    assert again.rows[0][1]["code"] in ("schema", "class_not_allowed")


@pytest.mark.parametrize(("name", "arguments"), kit.ALLOWED)
def test_allowed_call_is_written_before_it_is_made(name: str, arguments: dict[str, Any]) -> None:
    one = kit.Guarded()
    call = one.guard.check(kit.uri(name), arguments)
    assert one.rows[0][0] == "tool_called"
    assert one.guard.answered(call, {"content": [], "_meta": {}, "resultType": "input_required"}, 40) == {"content": []}
    kind, row = one.rows[1]
    assert (kind, row["status"], row["call"], row["answer_bytes"]) == ("tool_answered", "ok", call.id, 40)


def test_log_that_fails_stops_call() -> None:
    def broken(kind: str, row: Any) -> None:
        raise errors.LedgerError("no space")

    guard = ToolGuard(kit.skills(), kit.tools(), broken)
    with pytest.raises(errors.LedgerError):
        guard.check(kit.uri("open"), {})


def test_rate_is_of_any_minute_and_fix_ends_it() -> None:
    one = kit.Guarded()
    for second in range(5):
        one.clock.now = 1000 + second
        one.guard.check(kit.uri("open"), {})
    one.clock.now = 1059.9
    with pytest.raises(errors.ToolDeniedError, match="5 calls") as caught:
        one.guard.check(kit.uri("stat"), {})
    again = kit.Guarded(amend.document(kit.MANIFEST, caught.value.details["add"]))
    for _ in range(10):
        again.guard.check(kit.uri("open"), {})
    one.clock.now = 1060
    one.guard.check(kit.uri("stat"), {})
    with pytest.raises(errors.ToolDeniedError):
        one.guard.check(kit.uri("stat"), {})


def test_budget_of_run_is_counted_and_fix_ends_it() -> None:
    manifest = kit.MANIFEST.replace("calls_per_minute = 5", "calls_per_minute = 4\ncalls = 5")
    one = kit.Guarded(manifest)
    for number in range(5):
        one.clock.now += 60 * (number == 4)  # a call that the rate refuses is not charged
        one.guard.check(kit.uri("open"), {})
        if number == 3:
            with pytest.raises(errors.ToolDeniedError, match="4 calls in the last 60"):
                one.guard.check(kit.uri("open"), {})
    one.clock.now += 3600
    with pytest.raises(errors.ToolDeniedError, match="this run has made 5 calls, and calls is 5") as caught:
        one.guard.check(kit.uri("stat"), {})
    assert one.rows[-1][1]["code"] == "calls"
    assert caught.value.details["add"] == ["[permissions.skills]", "calls = 10"]
    again = kit.Guarded(amend.document(manifest, caught.value.details["add"]))
    for _ in range(10):
        again.clock.now += 60
        again.guard.check(kit.uri("open"), {})
    again.clock.now += 60
    with pytest.raises(errors.ToolDeniedError, match="calls is 10"):
        again.guard.check(kit.uri("open"), {})


def test_call_beyond_budget_is_not_asked_about() -> None:
    one = kit.Guarded(kit.MANIFEST.replace("calls_per_minute = 5", "calls_per_minute = 5\ncalls = 1"))
    assert one.guard.question(kit.uri("open"), {})["uri"] == kit.uri("open")
    one.guard.check(kit.uri("open"), {})
    with pytest.raises(errors.ToolDeniedError, match="calls is 1"):
        one.guard.question(kit.uri("open"), {})


def test_large_answer_is_refused_and_fix_ends_it() -> None:
    one = kit.Guarded()
    result = {"content": [{"type": "text", "text": "x" * 2000}]}
    with pytest.raises(errors.ToolDeniedError, match="answer") as caught:
        one.guard.answered(one.guard.check(kit.uri("open"), {}), result, 2040)
    again = kit.Guarded(amend.document(kit.MANIFEST, caught.value.details["add"]))
    assert again.guard.answered(again.guard.check(kit.uri("open"), {}), result, 2040) == result


@pytest.mark.parametrize("result", [None, [], "x", {}, {"content": "x"}, {"content": ["x"]}, {"content": None}])
def test_answer_that_is_no_result(result: Any) -> None:
    one = kit.Guarded()
    with pytest.raises(errors.ToolServerError):
        one.guard.answered(one.guard.check(kit.uri("open"), {}), result, 10)
    assert one.rows[1][1]["code"] == "malformed"


def test_late_call_names_key_that_was_least() -> None:
    one = kit.Guarded()
    call = one.guard.check(kit.uri("stat"), {})
    assert call.seconds == 2.0
    error = one.guard.late(call)
    assert error.details["add"] == ["[permissions.skills]", "call_ms = 5000"]
    again = kit.Guarded(amend.document(kit.MANIFEST, error.details["add"]))
    call = again.guard.check(kit.uri("stat"), {})
    assert call.seconds == 5.0
    assert "timeout_ms" in again.guard.late(call).hint


def test_flood_of_refusals_has_few_rows_and_all_are_counted() -> None:
    one = kit.Guarded()
    for number in range(3000):
        one.clock.now += 0.01
        with pytest.raises(errors.ToolDeniedError):
            one.guard.check(kit.uri("hidden" if number % 2 else f"made_up_{number}"), {})
    one.guard.close()
    assert len(one.rows) <= 1000
    assert sum(row["count"] for _, row in one.rows) == 3000


@pytest.mark.parametrize(
    ("more", "refused"),
    [({}, True), ({"additionalProperties": True}, False), ({"allOf": [{}]}, False), ({"patternProperties": {}}, False)],
)
def test_argument_that_schema_does_not_name(more: dict[str, Any], refused: bool) -> None:
    whole = copy.deepcopy(kit.DOCUMENT)
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, **more}
    whole["servers"][0]["tools"][0]["input_schema"] = schema
    one = kit.Guarded(whole=whole)
    one.guard.check(kit.uri("open"), {"path": "a"})
    if refused:
        with pytest.raises(errors.ToolArgumentsError, match="`evil`"):
            one.guard.check(kit.uri("open"), {"path": "a", "evil": 1})
    else:
        one.guard.check(kit.uri("open"), {"path": "a", "evil": 1})


def test_tool_without_schema_is_not_called() -> None:
    whole = copy.deepcopy(kit.DOCUMENT)
    del whole["servers"][0]["tools"][0]["input_schema"]
    one = kit.Guarded(whole=whole)
    assert not one.guard.allows(kit.uri("open"))
    with pytest.raises(errors.UsageError, match="input_schema"):
        one.guard.check(kit.uri("open"), {})
    assert one.rows == []


def test_tool_that_run_does_not_have_is_refused_and_not_listed() -> None:
    one = kit.Guarded()
    uri, rows = kit.uri("open"), list[Any]()
    guard = ToolGuard(kit.skills(), one.tools, lambda kind, row: rows.append(row), closed={uri: "no daemon did"})
    assert one.guard.allows(uri)
    assert not guard.allows(uri)
    with pytest.raises(errors.ToolDeniedError, match="no daemon did") as caught:
        guard.check(uri, {})
    assert (rows[0]["code"], rows[0]["grant"], caught.value.details["add"]) == ("not_offered", None, [])
    assert "submit the intent to the daemon" in caught.value.hint
    assert guard.check(kit.uri("ruled"), {"path": "/data/a"}).uri == kit.uri("ruled")
