"""The main job under real runsc: the contract of the seed, and no remains after any act of the agent."""

from __future__ import annotations

import json

import pytest

from policy import errors
from tests.kernel.world import HEAD, TAIL, World, refused


@pytest.mark.parametrize("agent", ["hello", "wordcount"])
def test_sample_agents_answer(world: World, agent: str) -> None:
    answer = world.run(world.sign(world.copy(agent)), "one two two")
    assert answer.error is None
    assert answer.result is not None
    assert "two" in answer.result.text


def test_intent_line_holds_what_version_1_says(world: World) -> None:
    intent = world.ask("answer = intent")
    assert set(intent) == {"id", "text", "issuer", "issued_at", "priority", "parent"}
    assert intent["issuer"]["display"] == "operator@local"
    assert intent["text"] == "hi"


def test_agent_sees_its_own_root_and_nothing_else(world: World) -> None:
    seen = world.ask(
        "answer = {'root': sorted(os.listdir('/')), 'cwd': os.getcwd(), 'env': sorted(os.environ),"
        " 'uid': os.getuid(), 'groups': os.getgroups(), 'host': os.uname().nodename,"
        " 'sys': os.listdir('/sys'), 'shm': os.listdir('/dev/shm'), 'run': os.listdir('/run'),"
        " 'pids': [p for p in os.listdir('/proc') if p.isdigit()],"
        " 'fds': [fd for fd in range(3, 64) if os.path.exists(f'/proc/self/fd/{fd}')],"
        " 'status': open('/proc/self/status').read()}"
    )
    assert seen["cwd"] == "/workspace"
    assert set(seen["env"]) - {"LC_CTYPE"} == {"COVENANT_RUN_ID", "HOME", "LANG", "PATH", "TMPDIR"}
    assert seen["uid"] >= 65536
    assert seen["groups"] in ([], [seen["uid"]])
    assert seen["host"] == "agent"
    assert seen["sys"] == []
    assert seen["shm"] == []
    assert seen["pids"] == ["1"]
    assert seen["fds"] == []
    assert "Seccomp:\t2" in seen["status"]
    for line in ("CapInh", "CapPrm", "CapEff", "CapBnd"):
        assert f"{line}:\t0000000000000000" in seen["status"]
    of_system = {"bin", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr"}
    assert set(seen["root"]) <= {*of_system, "workspace"}
    assert seen["run"] == ["covenant"]


def test_each_live_run_has_uid_of_its_own(world: World) -> None:
    first, second = (world.ask("answer = os.getuid()") for _ in range(2))
    assert first == second, "a uid is free again when its run is gone"


def test_fork_and_leave_ends_with_first_process(world: World) -> None:
    answer = world.run_code(HEAD + "answer = 1\nif os.fork() == 0:\n    import time; time.sleep(100)\n" + TAIL)
    assert answer.error is None
    assert answer.timings["sandbox"] < 20


def test_agent_that_never_reads_stdin_gets_its_deadline(world: World) -> None:
    answer = world.run_code("import time; time.sleep(100)", text="x" * 500_000, cpu_ms=1000)
    assert "cpu_ms_per_task" in refused(errors.DeadlineError, answer.error)


def test_closed_stdout_does_not_end_wait_early_or_late(world: World) -> None:
    answer = world.run_code(HEAD + "import time\nprint('{}', flush=True)\nos.close(1)\ntime.sleep(100)", cpu_ms=1000)
    refused(errors.DeadlineError, answer.error)
    assert answer.timings["sandbox"] < 20


def test_sigterm_comes_first_and_is_not_enough_for_one_that_ignores_it(world: World) -> None:
    # So long that either agent has said how it takes SIGTERM before it comes, on a slow machine too.
    polite = (
        "import signal, sys, time\n"
        "signal.signal(15, lambda *a: (print('bye', file=sys.stderr, flush=True), sys.exit(0)))\n"
    )
    answer = world.run_code(polite + "time.sleep(100)", cpu_ms=4000)
    refused(errors.DeadlineError, answer.error)
    assert "bye" in answer.stderr
    world.configure(grace_seconds=1)
    rude = "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(100)"
    answer = world.run_code(rude, cpu_ms=4000)
    refused(errors.DeadlineError, answer.error)
    assert world.rows()[-1]["kind"]["exit_signal"] == 9


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("print('not json')", errors.MalformedOutputError),
        ("print('{\"text\": 1}')", errors.MalformedOutputError),
        ('print(\'{"text": "a"}\\n{"text": "b"}\')', errors.MalformedOutputError),
        ("pass", errors.MalformedOutputError),
        ("import sys; sys.stdout.buffer.write(b'\\xff\\xfe')", errors.MalformedOutputError),
        ("import sys; sys.exit(1)", errors.AgentFailedError),
        ("import os; os.kill(os.getpid(), 11)", errors.AgentFailedError),
        ("print('{\"text\": \"' + 'x' * (5 << 20) + '\"}')", errors.OutputTooLargeError),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", errors.OutputTooLargeError),
    ],
)
def test_each_broken_contract_has_its_own_error(world: World, code: str, kind: type[errors.RunError]) -> None:
    # Output before the intent is another error, and its time is not specified.
    answer = world.run_code(HEAD + code)
    assert answer.error is not None
    refused(kind, answer.error)
    assert answer.result is None
    ended = world.rows()[-1]["kind"]
    assert (ended["type"], ended["status"], ended["code"]) == ("run_ended", "failed", kind.code)


def test_stderr_is_bounded_and_names_no_host_path(world: World) -> None:
    answer = world.run_code(HEAD + "answer = 1\nsys.stderr.write('e' * 1_000_000)\n" + TAIL)
    assert answer.error is None
    assert 60_000 < len(answer.stderr) < 70_000
    assert str(world.base) not in answer.stderr


def test_timeout_of_caller_is_clock_named(world: World) -> None:
    answer = world.run_code("import time; time.sleep(100)", request={"timeout_ms": 700})
    assert "timeout" in refused(errors.DeadlineError, answer.error)


def test_log_tells_run(world: World) -> None:
    answer = world.run_code(HEAD + "answer = 1" + TAIL)
    kinds = [row["kind"].get("state", row["kind"]["type"]) for row in world.rows()]
    assert kinds == [
        *("Provisioned", "Validated", "capability_check", "Isolated", "run_started"),
        *("Running", "intent_dispatched", "Terminated", "Archived", "run_ended"),
    ]
    started = world.rows()[4]["kind"]
    assert started["policy_digest"] == answer.policy_digest
    assert started["signers"] == ["tester"]
    # Also in what waited to be written until it was known.
    assert [row["kind"]["operator"] for row in world.rows()] == ["tester"] * 10
    assert json.dumps(started).count(answer.run_id) == 1
