"""Check the contract `text` with real children: the text in, all of stdout out, output at any time."""

from __future__ import annotations

import pytest

from policy import contract, errors
from sandbox.run_io import Limits
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.stdio import StdioSession
from tests.unit.sandbox.shim.test_stdio import child

LIMITS = Limits(60.0, 60.0, "clock", 0.5)
CAT = "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())"


def _run(code: str, intent: bytes = b"hi", *, limits: Limits = LIMITS) -> AgentLoop:
    with child(code) as channel:
        loop = AgentLoop(channel, StdioSession(contract.TextContract()), intent, limits)
        loop.run()
    return loop


@pytest.mark.parametrize("intent", [b"", b"hi", b"two\nlines\n", "\u00fc".encode() * 300_000])
def test_text_goes_in_and_out_whole(intent: bytes) -> None:
    done = _run(CAT, intent)
    assert done.error is None
    assert done.stdout == intent
    assert contract.TextContract().parse(done.stdout).text == intent.decode()


def test_text_before_intent_is_part_of_answer() -> None:
    done = _run("print('banner', flush=True)\n" + CAT)
    assert done.error is None
    assert done.stdout == b"banner\nhi"


def test_text_agent_that_exits_at_once_has_answered() -> None:
    """The event of the start may come with that of the exit: the agent waits for nothing."""
    for _ in range(10):
        done = _run("import os; os.write(1, b'done'); os._exit(0)", b"x" * 500_000)
        assert done.error is None
        assert done.started_at is not None
        assert done.stdout == b"done"


def test_text_flood_is_cut_at_bound_of_answer() -> None:
    done = _run("import os\nwhile True: os.write(1, b'x' * 65536)")
    assert isinstance(done.error, errors.OutputTooLargeError)
    assert len(done.stdout) <= contract.RESULT_BYTES + 65536


def test_text_agent_that_floods_without_reading_ends() -> None:
    done = _run("import os\nfor _ in range(20): os.write(1, b'y' * 65536)", b"x" * 900_000)
    assert done.error is None
    assert done.stdout == b"y" * 20 * 65536


def test_line_agent_must_stay_silent_where_text_may_speak() -> None:
    with child("print('early', flush=True)\nimport time; time.sleep(60)", starts=False) as channel:
        loop = AgentLoop(channel, StdioSession(), b"hi\n", LIMITS)
        loop.run()
    assert isinstance(loop.error, errors.EarlyOutputError)
