"""Check the runtime contract: the valid results, and the name of each breach."""

from __future__ import annotations

import contextlib
import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy import contract, errors

ISSUER = {"display": "operator@local", "pubkey": "x"}


def test_intent_is_one_line_with_seeds_fields() -> None:
    line = contract.Intent("id", "a\nb", ISSUER, 5).line()
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert json.loads(line) == {
        "id": "id",
        "text": "a\nb",
        "issuer": ISSUER,
        "issued_at": 5,
        "priority": "normal",
        "parent": None,
    }


def test_intent_of_just_mebibyte_is_written_and_no_more() -> None:
    room = (1 << 20) - len(contract.Intent("id", "", ISSUER, 5).line())
    assert len(contract.Intent("id", "x" * room, ISSUER, 5).line()) == 1 << 20
    with pytest.raises(errors.UsageError, match="the intent is 1048577 bytes, at most 1048576 are taken"):
        contract.Intent("id", "x" * (room + 1), ISSUER, 5).line()


def test_what_may_be_written_is_what_page_says() -> None:
    assert (contract.RESULT_BYTES, contract.STDOUT_BYTES, contract.STDERR_BYTES) == (4 << 20, 16 << 20, 64 << 10)


@pytest.mark.parametrize("by", ["uid990@local", "uid990"])
def test_whoever_asks_for_another_process_stands_behind_last_via(by: str) -> None:
    assert contract.on_behalf("ada@laptop.via.uid1", "key", by=by) == {
        "display": "ada@laptop.via.uid1.via.uid990",
        "pubkey": "key",
    }


@pytest.mark.parametrize("text", ["\ud800", "x" * (1 << 20)])
def test_intent_that_cannot_be_written_is_refused(text: str) -> None:
    with pytest.raises(errors.UsageError):
        contract.Intent("id", text, ISSUER, 5).line()


def test_result_keeps_version_1s_fields_and_drops_others() -> None:
    raw = b'\n{"text": "t", "sources": ["a"], "files": [1], "runtime_events": [{}], "other": 1}\n\n'
    assert contract.parse_result(raw) == contract.AgentResult("t", ("a",), (1,), ({},))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\n\n",
        b"text",
        b"[]",
        b"1",
        b"{}",
        b'{"text": null}',
        b'{"text": "a", "sources": "b"}',
        b'{"text": "a", "sources": [1]}',
        b'{"text": "a", "files": {}}',
        b'{"text": "a"}\n{"text": "b"}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": "a", "x": NaN}',
        b'{"text": "a", "runtime_events": [1e999]}',
        b'{"text": "a", "files": [{"size": -1e400}]}',
        b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"text": "a", "x": ' + b"9" * 10_000 + b"}",
    ],
)
def test_everything_else_is_malformed(raw: bytes) -> None:
    with pytest.raises(errors.MalformedOutputError):
        contract.parse_result(raw)


def test_line_over_4_mib_and_output_over_16_mib_are_too_large() -> None:
    room = contract.RESULT_BYTES - len(b'{"text": ""}')
    assert len(contract.parse_result(b'{"text": "' + b"x" * room + b'"}').text) == room
    for raw in (b'{"text": "' + b"x" * (room + 1) + b'"}', b"\n" * (contract.STDOUT_BYTES + 1)):
        with pytest.raises(errors.OutputTooLargeError):
            contract.parse_result(raw)


@pytest.mark.parametrize(("opens", "closes"), [(b"[", b"]"), (b'{"a":', b"}")])
def test_result_is_nested_so_deep_that_everybody_can_hand_it_on(opens: bytes, closes: bytes) -> None:
    """A parser accepts nesting up to its own stack's depth, where a program that writes it again could fail."""

    def nested(depth: int) -> bytes:
        return b'{"text": "t", "files": [' + opens * (depth - 2) + b"1" + closes * (depth - 2) + b"]}"

    assert contract.parse_result(nested(contract.RESULT_DEPTH)).files
    for depth in (contract.RESULT_DEPTH + 1, 490, 900):
        with pytest.raises(errors.MalformedOutputError, match="nested more than 64 deep"):
            contract.parse_result(nested(depth))
    # Brackets in a text are not nesting.
    assert contract.parse_result(json.dumps({"text": "[{" * 100_000}).encode()).text


def test_result_has_so_many_lists_and_objects_and_no_more() -> None:
    """Three bytes of an agent take sixty in its supervisor, which the agent's cgroup does not limit."""

    def many(count: int) -> bytes:
        return b'{"text": "t", "files": [' + b",".join([b"{}"] * (count - 2)) + b"]}"

    assert len(contract.parse_result(many(contract.RESULT_CONTAINERS)).files) == contract.RESULT_CONTAINERS - 2
    with pytest.raises(errors.OutputTooLargeError, match="more than 65536 lists and objects"):
        contract.parse_result(many(contract.RESULT_CONTAINERS + 1))


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(raw: bytes) -> None:
    with contextlib.suppress(errors.RunError):
        contract.parse_result(raw)


@pytest.mark.parametrize("line", [b"\n", b"x\n", b"xx\n", b" \n"])
def test_reading_flood_of_short_lines_costs_no_more_than_flood(line: bytes) -> None:
    """The agent's cgroup limits the agent, but not the memory that its output takes in the supervisor."""
    flood = (line * (contract.STDOUT_BYTES // len(line)))[: contract.STDOUT_BYTES]
    tracemalloc.start()
    try:
        with pytest.raises(errors.MalformedOutputError):
            contract.parse_result(flood)
        assert tracemalloc.get_traced_memory()[1] < 2 * contract.STDOUT_BYTES
    finally:
        tracemalloc.stop()


def test_page_of_limits_has_bounds_of_answer() -> None:
    page = (Path(__file__).parents[3] / "docs" / "limits.md").read_text()
    cells = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| ")]
    rows = {row[1]: row[2] for row in cells}
    assert rows["stdout"] == f"{contract.STDOUT_BYTES >> 20} MiB"
    assert rows["the line"] == f"{contract.RESULT_BYTES >> 20} MiB"
    assert rows["lists and objects in it"] == f"{contract.RESULT_CONTAINERS:,}"
    assert rows["depth of nesting"] == str(contract.RESULT_DEPTH)
    assert f"{contract.STDERR_BYTES >> 10} KiB" in rows["stderr"]


@given(st.text(max_size=200))
def test_text_answer_is_all_of_stdout(text: str) -> None:
    assert contract.parse_text(text.encode()) == contract.AgentResult(text)


@pytest.mark.parametrize("raw", [b"\xff", b"ok\n\xc3", "\ud800".encode("utf-8", "surrogatepass")])
def test_text_answer_that_is_no_text_names_stdio(raw: bytes) -> None:
    with pytest.raises(errors.MalformedOutputError) as refused:
        contract.parse_text(raw)
    assert 'contract = "stdio"' in refused.value.hint


def test_text_answer_has_bound() -> None:
    assert len(contract.parse_text(b"x" * contract.RESULT_BYTES).text) == contract.RESULT_BYTES
    with pytest.raises(errors.OutputTooLargeError):
        contract.parse_text(b"x" * (contract.RESULT_BYTES + 1))


@pytest.mark.parametrize(
    ("process", "name", "stdin"),
    [
        (None, "line", None),
        ({"contract": "line", "intent": "stdin"}, "line", None),
        ({"contract": "text", "intent": "stdin"}, "text", "gr\u00fc\u00df dich".encode()),
        ({"contract": "text", "intent": "argument"}, "text", b""),
        ({"contract": "stdio", "intent": "none"}, "stdio", b""),
        ({"contract": "terminal", "intent": "none"}, "terminal", b""),
    ],
)
def test_contract_of_policy_gives_intent(process: dict[str, str] | None, name: str, stdin: bytes | None) -> None:
    intent = contract.Intent("id", "gr\u00fc\u00df dich", ISSUER, 5)
    spoken = contract.of(process)
    assert spoken.name == name
    assert spoken.stdin(intent) == (intent.line() if stdin is None else stdin)


def test_argument_carries_text_that_program_takes() -> None:
    def intent(text: str) -> contract.Intent:
        return contract.Intent("id", text, ISSUER, 5)

    spoken = contract.TextContract("argument")
    assert spoken.argument(intent("x" * contract.ARGUMENT_BYTES)) == "x" * contract.ARGUMENT_BYTES
    for one in (contract.LINE, contract.TextContract(), contract.StreamContract(terminal=False)):
        assert one.argument(intent("a\0b")) is None
    for text, said in (("x" * 131_072, "131072 bytes"), ("a\0b", "NUL")):
        with pytest.raises(errors.UsageError, match=said):
            spoken.argument(intent(text))


@pytest.mark.parametrize(
    "process", [{}, {"contract": "text"}, {"contract": "x", "intent": "none"}, {"contract": "text", "intent": "env"}]
)
def test_contract_unknown_is_refused(process: dict[str, str]) -> None:
    with pytest.raises(errors.InternalError):
        contract.of(process)


def test_contract_reads_its_own_answers() -> None:
    assert contract.LINE.parse(b'{"text": "t"}') == contract.AgentResult("t")
    assert contract.TextContract().parse(b'{"text": "t"}') == contract.AgentResult('{"text": "t"}')
    assert contract.StreamContract(terminal=True).parse(b"seen by the caller") == contract.AgentResult("")


@pytest.mark.parametrize("connected", ["nothing", "streams", "terminal"])
@pytest.mark.parametrize(
    "spoken",
    [
        contract.LINE,
        contract.TextContract(),
        contract.StreamContract(terminal=False),
        contract.StreamContract(terminal=True),
    ],
)
def test_caller_fits_contract_or_is_refused(spoken: contract.Contract, connected: contract.Connected) -> None:
    fitting = {
        "line": {"nothing"},
        "text": {"nothing"},
        "stdio": {"streams", "terminal"},
        "terminal": {"terminal"},
    }
    if connected in fitting[spoken.name]:
        contract.check_caller(spoken, connected)
        return
    with pytest.raises(errors.ContractError) as refused:
        contract.check_caller(spoken, connected)
    assert "covenant run PACKAGE" in refused.value.hint
