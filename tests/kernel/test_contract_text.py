"""Run agents with the contract `text` under real runsc: programs that know nothing of Covenant."""

from __future__ import annotations

import pytest

from policy import errors
from sandbox.audit import run_archive
from sandbox.control import manager
from sandbox.run_result import RunResult
from tests.kernel.world import World

ROOT = manager.Requester("operator@local", root=True)
TEXT = '[process]\ncontract = "text"\n'
ARGUMENT = TEXT + 'args = ["--ask", "{intent}"]\n'


def _text(answer: RunResult) -> str:
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    return answer.result.text


def test_text_agent_answers_with_all_of_stdout(world: World) -> None:
    echo = "import sys\nprint('Welcome!')\nprint(sys.stdin.read(), end='')"
    assert _text(world.run_code(echo, "gr\u00fc\u00df\ndich", more=TEXT)) == "Welcome!\ngr\u00fc\u00df\ndich"
    row = next(row["kind"] for row in world.rows() if row["kind"]["type"] == "intent_dispatched")
    assert row["intent_text"] == "gr\u00fc\u00df\ndich"


def test_text_agent_with_argument_has_empty_stdin(world: World) -> None:
    assert (
        _text(world.run_code("import sys\nprint(sys.argv[1:], [sys.stdin.read()])", "a b", more=ARGUMENT))
        == "['--ask', 'a b'] ['']\n"
    )


def test_text_agent_that_exits_at_once_answers(world: World) -> None:
    for _ in range(5):
        assert _text(world.run_code("import os\nos.write(1, b'done')\nos._exit(0)", more=ARGUMENT)) == "done"


def test_failed_text_agent_leaves_its_output(world: World) -> None:
    answer = world.run_code(
        "import sys\nprint('usage: tool FILE')\nprint('why', file=sys.stderr)\nsys.exit(3)", more=TEXT
    )
    assert isinstance(answer.error, errors.AgentFailedError)
    assert answer.error.details["exit_status"] == 3
    record = run_archive.read(world.state, answer.run_id)
    assert record is not None
    assert (record.exit_status, record.stdout, record.stdout_bytes) == (3, "usage: tool FILE\n", 17)
    shown = manager.logs(world.state, ROOT, answer.run_id, stream="stdout")
    assert shown["text"] == "usage: tool FILE\n"
    assert "why" in manager.logs(world.state, ROOT, answer.run_id)["text"]


def test_answered_run_leaves_no_stdout(world: World) -> None:
    answer = world.run_code("print('a secret of the caller')", more=TEXT)
    record = run_archive.read(world.state, answer.run_id)
    assert record is not None
    assert (record.stdout, record.stdout_bytes) == ("", len(_text(answer)))


def test_binary_stdout_names_contract_stdio(world: World) -> None:
    answer = world.run_code("import os\nos.write(1, b'\\xff\\xfe')", more=TEXT)
    assert isinstance(answer.error, errors.MalformedOutputError)
    assert "stdio" in answer.error.hint


@pytest.mark.parametrize("text", ["x" * 131_072, "a\0b"])
def test_text_that_no_argument_carries_is_refused(world: World, text: str) -> None:
    with pytest.raises(errors.UsageError) as refused:
        world.run_code("print('started')", text, more=ARGUMENT)
    assert "[process] args" in refused.value.hint
    assert not [row for row in world.rows() if row["kind"]["type"] == "run_started"]
    # The fix: the same text on stdin.
    assert _text(world.run_code("import sys\nprint(len(sys.stdin.read()))", text, more=TEXT)) == f"{len(text)}\n"
