"""gVisor's log is on before an agent's first instruction, however long whoever turns it on takes for that."""

from __future__ import annotations

import dataclasses
import time

import pytest

from policy import errors
from policy.compile.artefacts import Artefacts
from sandbox.kernel.runsc.log_level import Raising
from sandbox.probes import preload, preload_object
from sandbox.probes.preload_object import Step
from tests.kernel import live_runs
from tests.kernel.test_denied_calls import told
from tests.kernel.world import HEAD, SLOWNESS, TAIL, World

# Long enough that an agent which nobody holds has begun, made its tries and is over by then.
_LATE_SECONDS = 1.0
FIRST = HEAD + "import ctypes\nctypes.CDLL(None).syscall(309, 0, 0, 0)\nanswer = 1" + TAIL


@pytest.fixture
def late(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    ask = Raising.ask

    def slow(self: Raising) -> None:
        time.sleep(_LATE_SECONDS)
        ask(self)

    monkeypatch.setattr(Raising, "ask", slow)
    world.configure(self_test=True, start_deadline_seconds=5 * SLOWNESS)
    return world


def test_an_agent_is_held_until_its_sandbox_says_what_is_refused(late: World) -> None:
    answer = late.run_code(FIRST)
    assert answer.error is None, (answer.error, answer.stderr)
    assert told(late, answer.run_id) == {("syscall", "getcpu", "not_granted"): 1}


def test_one_that_does_not_wait_is_not_heard_of_and_is_refused(late: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same tries without the wait are over before the log is on."""
    real, build = preload.tries, preload_object.build

    def hasty(artefacts: Artefacts) -> preload.Tries:
        def without(program: str, steps: list[Step]) -> bytes:
            # Its place is kept, since later steps take results of earlier ones by theirs.
            wait, *others = steps
            assert wait.call.arguments[2] == preload._MOST_WAIT_MS
            return build(program, [Step(dataclasses.replace(wait.call, arguments=(0, 0, 0)), 0, 0), *others])

        with monkeypatch.context() as patch:
            patch.setattr(preload_object, "build", without)
            return real(artefacts)

    monkeypatch.setattr(preload, "tries", hasty)
    with pytest.raises(errors.SelfTestError, match="nobody has told of the filter of call"):
        late.run_code(FIRST)


def test_a_runtime_that_tries_nothing_is_told_from_the_start(world: World) -> None:
    world.configure(self_test=False)
    answer = world.run_code(FIRST)
    assert told(world, answer.run_id) == {("syscall", "getcpu", "not_granted"): 1}


AGAIN = "import os, sys\nif len(sys.argv) == 1: os.execv(sys.orig_argv[0], [*sys.orig_argv, 'again'])\n"


def test_a_program_that_executes_itself_is_held_by_nothing(world: World) -> None:
    world.configure(self_test=True)
    more = '[permissions.executables]\nallow = ["/usr/bin/python3.11"]\n'
    answer = world.run_code(AGAIN + HEAD + "answer = sys.argv[1:]" + TAIL, more=more)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert answer.result.text == '["again"]'


def test_both_kinds_are_attested_by_how_they_were_started(world: World) -> None:
    for self_test in (True, False):
        world.configure(self_test=self_test)
        with live_runs.live(world) as one:
            report = one.report()
            assert report.holds, report
            arguments = one.family().sandbox.arguments
            assert ("--debug=true" in arguments) is not self_test
            # One that says otherwise than its record is no run of that record.
            made = dataclasses.replace(one.made, raises_log=not self_test)
            assert not dataclasses.replace(one, made=made).report().holds
