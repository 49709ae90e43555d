"""The first call of an agent that the filter refuses is told, with the tries of a run and without them."""

from __future__ import annotations

import threading

import pytest

from sandbox.attest import live_runs as attest_live_runs
from sandbox.attest import reference
from sandbox.supervisor import Answer
from tests.kernel import live_runs
from tests.kernel.test_denied_calls import told
from tests.kernel.world import HEAD, TAIL, World

ONCE = {("syscall", "getcpu", "not_granted"): 1}
FIRST = HEAD + "import ctypes\nctypes.CDLL(None).syscall(309, 0, 0, 0)\nanswer = 1" + TAIL


@pytest.mark.parametrize("self_test", [True, False])
def test_first_refused_call_is_told(world: World, *, self_test: bool) -> None:
    world.configure(self_test=self_test)
    answer = world.run_code(FIRST)
    assert answer.error is None, (answer.error, answer.stderr)
    assert told(world, answer.run_id) == ONCE


def test_attested_from_first_moment_is_no_drift(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attest as soon as the run's record is there, before its sandbox is complete."""
    monkeypatch.setattr(attest_live_runs, "_PATIENCE_SECONDS", live_runs.WAIT_SECONDS)
    world.configure(self_test=True)
    package = world.sign(world.package({"main.py": FIRST}))
    answers: list[Answer] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package)))
    thread.start()
    try:
        runs = world.state / "runs"
        (run_id,) = live_runs.until(lambda: attest_live_runs.live(runs))
        made = reference.Made.read(runs / run_id)
        assert made is not None
        found = attest_live_runs.answer(world.state, run_id, {run_id: made.policy_digest})
        assert found is not None
        assert found.holds, found.layers
    finally:
        thread.join(live_runs.WAIT_SECONDS)
    assert answers[0].error is None
    assert told(world, run_id) == ONCE


AGAIN = "import os, sys\nif len(sys.argv) == 1: os.execv(sys.orig_argv[0], [*sys.orig_argv, 'again'])\n"


def test_program_that_executes_itself_goes_on(world: World) -> None:
    world.configure(self_test=True)
    more = '[permissions.executables]\nallow = ["/usr/bin/python3.11"]\n'
    answer = world.run_code(AGAIN + HEAD + "answer = sys.argv[1:]" + TAIL, more=more)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == '["again"]'


def test_sandbox_attested_starts_at_debug(world: World) -> None:
    for self_test in (True, False):
        world.configure(self_test=self_test)
        with live_runs.live(world) as one:
            report = one.report()
            assert report.holds, report
            assert "--debug=true" in one.family().sandbox.arguments
