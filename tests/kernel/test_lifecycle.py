"""A live run is suspended, resumed, ended, waited for and read from another process, by root alone."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from policy import errors, lifecycle
from policy.lifecycle import State
from sandbox.audit import run_archive
from sandbox.audit.log import Ledger
from sandbox.control import manager, tree_kill, withdrawn_secrets
from sandbox.kernel.cgroup import cgroup
from sandbox.rundir import directory, marks, registry
from sandbox.shim import control_socket
from sandbox.shim.agent_loop import AgentLoop
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import Live, live, until
from tests.kernel.world import HEAD, TAIL, World, refused

ROOT = Path(__file__).resolve().parents[2]
ASKER = manager.Requester("operator@local", root=True)
# Counts on stderr, one number a line, so that a reader sees progress.
COUNTS = """\
import sys, time
sys.stdin.readline()
n = 0
while True:
    n += 1
    print(n, file=sys.stderr, flush=True)
    time.sleep(0.02)
"""


def covenant(world: World, *arguments: str, check: bool = True) -> dict[str, Any]:
    """Run a command in its own process, and return the document that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "covenant", *arguments, "--json"],
        env={**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, (done.stdout, done.stderr)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def states(one: Live) -> list[str]:
    return [row["state"] for row in one.rows("run_state")]


def counted(one: Live) -> int:
    """How far the agent has counted, as its keeper tells it."""
    # The keeper answers a second question after it has read all that was in the pipe at the first one. What the agent
    # says while it is asked is not waited for: it may be faster.
    ends = [control_socket.ask(one.directory, "logs", offset=0)["ends"] for _ in range(2)][-1]
    offset, text = 0, ""
    while offset < ends:
        piece = control_socket.ask(one.directory, "logs", offset=offset)
        offset, text = piece["next"], text + piece["text"]
    return int((text.split() or ["0"])[-1])


def leaf(one: Live) -> cgroup.Leaf:
    found = cgroup.Leaf(cgroup.Hierarchies.read(), one.made.run_id)
    found.adopt({name: Path(path) for name, path in one.made.cgroup_files.items()})
    return found


def goes_on(one: Live) -> None:
    before = counted(one)
    until(lambda: counted(one) > before)


def stands(one: Live) -> None:
    """Two looks with a processor's time between them, in which it was not given any."""
    held = leaf(one)
    assert held.frozen()
    before, used, own = counted(one), held.cpu_time_us(), time.thread_time()
    # On a busy machine a sleep shows little: use processor time here, so that the agent could have had some as well.
    while time.thread_time() - own < 0.1:
        pass
    assert counted(one) == before
    assert held.cpu_time_us() == used


def entry(one: Live) -> registry.Entry:
    (found,) = [e for e in registry.live(one.directory.parent) if e.run_id == one.made.run_id]
    return found


def test_run_is_suspended_with_its_sentry_goes_on_after_and_is_ended(world: World) -> None:
    """The whole life of one run, asked by commands of other processes."""
    with live(world, COUNTS) as one:
        run_id = one.made.run_id
        goes_on(one)
        assert [(run["run_id"], run["state"]) for run in covenant(world, "ps")["runs"]] == [(run_id, "Running")]
        assert covenant(world, "suspend", run_id[:8], "--reason", "to look") == {"kind": "suspend", "runs": [run_id]}
        assert covenant(world, "ps")["runs"][0]["state"] == "Suspended"
        stands(one)
        # What confines it still stands, and its keeper sees nothing amiss: attestation goes on.
        assert one.report().holds
        until(lambda: one.rows("run_state")[-1]["state"] == "Suspended")
        assert one.drift() == []
        # A second is refused and changes nothing.
        error = covenant(world, "suspend", run_id, check=False)
        assert (error["code"], error["message"]) == (
            "wrong_state",
            "a run that is suspended cannot be asked to suspend",
        )
        stands(one)
        covenant(world, "resume", run_id)
        goes_on(one)
        with pytest.raises(errors.WrongStateError):
            manager.operate(world.state, ASKER, "resume", run_id)
        # stderr is read while it lives, from wherever it was left off.
        first = covenant(world, "logs", run_id)
        assert first["live"]
        assert [int(line) for line in first["text"].split()] == list(range(1, len(first["text"].split()) + 1))
        # A waiting client gets its own outcome. The run is ended while suspended: it is thawed with its death pending.
        manager.operate(world.state, ASKER, "suspend", run_id)
        last = counted(one)
        waiting = subprocess.Popen(
            [sys.executable, "-m", "covenant", "wait", run_id],
            env={**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)},
            stderr=subprocess.PIPE,
            text=True,
        )
        assert covenant(world, "kill", run_id, "--reason", "enough\x1b[2J") == {"kind": "kill", "runs": [run_id]}
        answer = one.wait()
        assert "enough" in refused(errors.KilledError, answer.error)
        assert waiting.wait(60) == 1
        assert waiting.stderr is not None
        said = waiting.stderr.read()
        waiting.stderr.close()
        assert "[stopped]" in said
        assert "\x1b" not in said
        assert states(one) == [
            *("Provisioned", "Validated", "Isolated", "Running", "Suspended", "Running", "Suspended"),
            *("Terminated", "Archived"),
        ]
        reasons = [row["reason"] for row in one.rows("run_state")]
        assert reasons[4] == "asked by operator@local: to look"
        assert reasons[7] == "stopped by operator@local: enough\x1b[2J"
        assert one.rows("run_ended")[0]["code"] == "stopped"
    # What is left of it.
    assert covenant(world, "ps")["runs"] == []
    record = run_archive.read(world.state, run_id)
    assert record is not None
    assert (record.status, record.code, record.agent_id) == ("failed", "stopped", "probe")
    after = covenant(world, "logs", run_id)
    assert not after["live"]
    assert int(after["text"].split()[-1]) == last
    for verb in ("suspend", "resume", "kill"):
        assert covenant(world, verb, run_id, check=False)["code"] == "no_such_run"
    assert covenant(world, "wait", run_id, check=False)["code"] == "stopped"


def test_deadline_ends_run_suspended(world: World) -> None:
    with live(world, COUNTS, cpu_ms=4000) as one:
        goes_on(one)
        manager.operate(world.state, ASKER, "suspend", one.made.run_id)
        assert "cpu_ms_per_task" in refused(errors.DeadlineError, one.wait().error)
        assert states(one)[-3:] == ["Suspended", "Terminated", "Archived"]
        assert one.rows("run_state")[-2]["reason"].startswith("deadline: still running after 4 s")


EXPIRES = '[lifetime]\nttl_seconds = 2\non_expiry = "suspend"'


def test_ttl_suspends_and_one_more_ends(world: World) -> None:
    with live(world, COUNTS, more=EXPIRES.replace("2", "3")) as one:
        # The shim logs the state before it freezes the run, so a reader may see it early.
        until(lambda: entry(one).state == State.SUSPENDED and leaf(one).frozen())
        stands(one)
        assert "ttl_seconds" in refused(errors.DeadlineError, one.wait().error)
        assert states(one)[-4:] == ["Running", "Suspended", "Terminated", "Archived"]


def test_run_whose_ttl_is_over_goes_on_when_it_is_resumed_and_ends_at_twice_its_ttl(world: World) -> None:
    with live(world, COUNTS, more=EXPIRES.replace("2", "3")) as one:
        until(lambda: entry(one).state == State.SUSPENDED)
        manager.operate(world.state, ASKER, "resume", one.made.run_id)
        goes_on(one)
        assert "6 s (clock: ttl_seconds)" in refused(errors.DeadlineError, one.wait().error)
        assert states(one)[-5:] == ["Running", "Suspended", "Running", "Terminated", "Archived"]


def test_answered_run_is_waited_for_and_its_record_holds_neither_intent_nor_result(world: World) -> None:
    answer = world.run_code(
        HEAD + "print('a secret of its own', file=sys.stderr)\nanswer = 'the result 4711'" + TAIL, "the intent 0815"
    )
    assert answer.error is None
    assert covenant(world, "wait", answer.run_id)["status"] == "ok"
    (raw,) = [path.read_text() for path in (world.state / "archive").glob("*.json")]
    assert "a secret of its own" in raw
    assert "4711" not in raw
    assert "0815" not in raw


REACHES = """\
import json, os, socket, sys
intent = json.loads(sys.stdin.readline())
found, tried = [], 0
for place, folders, files in os.walk("/"):
    if place.startswith(("/proc", "/sys")):
        folders[:] = []
    for name in files:
        path = os.path.join(place, name)
        if name in ("control", "state", "label.json"):
            found.append(path)
for path in ("/control", "control", "../control", "\\0control", intent["text"], "/proc/1/root" + intent["text"]):
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM):
        one = socket.socket(socket.AF_UNIX, kind)
        tried += 1
        try:
            one.connect(path)
            found.append(f"connected to {path}")
        except OSError:
            pass
# The control: a socket of its own it does reach.
a = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
a.bind("/tmp/own")
a.listen()
b = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
b.connect("/tmp/own")
print(json.dumps({"text": json.dumps([found, tried])}))
"""


# Without a network the filter has no sockets at all; here it has.
SOCKETS = '[permissions.syscalls]\nallow = ["socket", "connect", "bind", "listen"]'


def test_agent_does_not_reach_its_own_control_socket(world: World) -> None:
    """Neither by a name of its own root nor by the host's, which it is told here."""
    answer = world.run_code(REACHES, f"{world.state}/runs", more=SOCKETS)
    assert answer.error is None, (answer.error, answer.stderr)
    assert answer.result is not None
    assert json.loads(answer.result.text) == [[], 18]


def test_nobody_but_root_is_listened_to(world: World) -> None:
    """The directory keeps others out; who came past it all the same would be hung up on."""
    program = (
        "import os, socket, sys\n"
        "fd = os.open(sys.argv[1], os.O_PATH | os.O_DIRECTORY)\n"
        "if sys.argv[2] == 'past': os.setgid(65534); os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20)\n"
        "s.connect(f'/proc/self/fd/{fd}/control')\n"
        's.send(b\'{"op": "state"}\'); print(s.recv(1000))\n'
    )
    with live(world, COUNTS) as one:
        os.chmod(one.directory / control_socket.NAME, 0o666)

        def run(how: str, **more: Any) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-c", program, str(one.directory), how], capture_output=True, text=True, **more
            )

        goes_on(one)
        assert "Running" in run("root").stdout
        past = run("past")
        assert "Running" not in past.stdout, past
        outside = run("outside", user=65534, group=65534)
        assert "PermissionError" in outside.stderr
        assert entry(one).state == State.RUNNING


def test_self_tests_are_not_listed_and_leave_no_record(world: World) -> None:
    world.configure(self_test=True)
    seen: list[str] = []
    with live(world, COUNTS) as one:
        seen += [run["run_id"] for run in manager.listed(world.state, ASKER)]
        assert seen == [one.made.run_id]
        # Ended before, it would be ended for what was not told of its tries.
        until(lambda: entry(one).state == State.RUNNING)
        assert one.rows("self_test") == [] or one.rows("self_test")[0]["passed"]
        one.end()
    assert run_archive.ids(world.state) == seen
    assert leftovers(world) == []


def test_run_without_cgroup_is_ended_and_not_suspended(world: World) -> None:
    answers: list[Any] = []
    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false", "cpu_ms": 250_000}
    thread = threading.Thread(target=lambda: answers.append(world.run_code(COUNTS, **fields)))
    thread.start()
    runs = until(lambda: [run for run in manager.listed(world.state, ASKER) if run["state"] == "Running"])
    with pytest.raises(errors.NotEnforceableError, match="cannot be suspended"):
        manager.operate(world.state, ASKER, "suspend", runs[0]["run_id"])
    assert withdrawn_secrets.announce(world.state) == []  # it has none of the vault
    until(lambda: manager.logs(world.state, ASKER, runs[0]["run_id"])["text"].startswith("1\n2\n"))
    assert manager.operate(world.state, ASKER, "kill", runs[0]["run_id"], tree=True) == [runs[0]["run_id"]]
    thread.join(60)
    refused(errors.KilledError, answers[0].error)


def _holds_a_keeper(pid: int) -> bool:
    """Whether a process that waits for a run has reached its keeper, whose end it then hears by a pidfd."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if "pidfd" in os.readlink(f"/proc/{pid}/fd/{fd}"):
                return True
    return False


def test_who_waits_for_run_whose_keeper_is_killed_is_told_and_later_what_became_of_it(world: World) -> None:
    package = world.sign(world.package({"main.py": COUNTS}, cpu_ms=250_000))
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant"]
    keeper = subprocess.Popen([*command, "run", str(package), "hi"], env=environment, stderr=subprocess.DEVNULL)
    runs = until(lambda: [run for run in manager.listed(world.state, ASKER) if run["state"] == "Running"])
    assert runs[0]["keeper"] == keeper.pid
    waiting = subprocess.Popen(
        [*command, "wait", runs[0]["run_id"]], env=environment, stderr=subprocess.PIPE, text=True
    )
    until(lambda: _holds_a_keeper(waiting.pid))
    keeper.kill()
    keeper.wait()
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 1
    assert "[cut_off]" in said
    assert world.run_code(HEAD + "answer = 1" + TAIL, name="next").error is None  # the next start writes it down
    record = manager.ended(world.state, ASKER, runs[0]["run_id"])
    assert record is not None
    assert (record.status, record.code, record.agent_id) == ("failed", "cut_off", "probe")
    kinds = [row["kind"] for row in world.rows() if row["kind"].get("run_id") == runs[0]["run_id"]]
    assert [kind.get("state", kind["type"]) for kind in kinds][-4:] == [
        "Running",
        "Terminated",
        "Archived",
        "run_ended",
    ]


@pytest.fixture
def broken_freezer(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(self: cgroup.Leaf, **more: object) -> None:
        raise errors.KernelError("a thread still runs")

    monkeypatch.setattr(cgroup.Leaf, "freeze", freeze)


def test_what_cannot_be_stopped_is_said_and_at_its_ttl_ended(world: World, broken_freezer: None) -> None:
    with live(world, COUNTS, more=EXPIRES.replace("2", "8")) as one:
        goes_on(one)
        with pytest.raises(errors.KernelError, match="still runs"):
            manager.operate(world.state, ASKER, "suspend", one.made.run_id)
        goes_on(one)
        assert "cannot be suspended" in refused(errors.DeadlineError, one.wait().error)
        assert states(one)[-6:] == ["Suspended", "Running", "Suspended", "Running", "Terminated", "Archived"]
    assert set(itertools.pairwise(states(one))) <= {(move.source, move.target) for move in lifecycle.TRANSITIONS}


def test_tree_is_stopped_marked_and_named_before_any_of_it_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[Any] = []
    mark, kill = marks.mark_stopped, tree_kill.end_together

    def marked(path: Path, *said: str, **more: Any) -> None:
        leaf = cgroup.Leaf(cgroup.Hierarchies.read(), path.name)
        leaf.adopt(directory.cgroups_of(path))
        steps.append(("marked", until(leaf.frozen), *said))
        mark(path, *said, **more)

    def killed(*arguments: Any) -> None:
        rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "runs_stopped"]
        steps.append(("killed", [(row["reason"], row["runs"]) for row in rows]))
        kill(*arguments)

    monkeypatch.setattr(marks, "mark_stopped", marked)
    monkeypatch.setattr(tree_kill, "end_together", killed)
    with live(world, COUNTS) as one:
        goes_on(one)
        run_id = one.made.run_id
        assert manager.operate(world.state, ASKER, "kill", run_id, reason="it leaks", tree=True) == [run_id]
        assert refused(errors.KilledError, one.wait().error) == "ended by operator@local: it leaks"
    assert steps == [
        ("marked", True, "operator@local", "it leaks"),
        ("killed", [("it leaks", [{"run_id": run_id, "agent_id": "probe"}])]),
    ]
    assert states(one)[-2:] == ["Terminated", "Archived"]
    assert leftovers(world) == []


@pytest.mark.parametrize("seen", [State.RUNNING, State.ISOLATED])
def test_sandbox_just_starting_ends_with_its_tree(world: World, monkeypatch: pytest.MonkeyPatch, seen: State) -> None:
    """The agent may run already and take the processor from its shim, so it is killed with the others in any state."""
    monkeypatch.setattr(AgentLoop, "_give", lambda self: None)
    names: list[str] = []
    kill = tree_kill.end_together

    def killed(entries: Sequence[registry.Entry], leaves: Sequence[cgroup.Leaf], failed: list[str]) -> None:
        names.extend(leaf.name for leaf in leaves)
        kill(entries, leaves, failed)

    monkeypatch.setattr(tree_kill, "end_together", killed)
    with live(world, COUNTS) as one:
        assert [entry.state for entry in registry.live(world.state / "runs")] == [State.ISOLATED]
        (one.directory / registry.STATE).write_text(f"{seen}\n")
        assert manager.operate(world.state, ASKER, "kill", one.made.run_id, tree=True) == [one.made.run_id]
        refused(errors.KilledError, one.wait().error)
    assert one.made.run_id in names
    assert states(one) == ["Provisioned", "Validated", "Isolated", "Terminated", "Archived"]
    assert leftovers(world) == []


def test_log_that_takes_no_row_keeps_no_tree_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told of it when all of the tree is gone."""
    append = Ledger.append

    def full(self: Ledger, kind: str, *arguments: Any, **more: Any) -> str:
        if kind == "runs_stopped":
            raise errors.LedgerError("no space left")
        return append(self, kind, *arguments, **more)

    monkeypatch.setattr(Ledger, "append", full)
    with live(world, COUNTS) as one:
        goes_on(one)
        with pytest.raises(errors.LedgerError, match="no space left"):
            manager.operate(world.state, ASKER, "kill", one.made.run_id, tree=True)
        assert refused(errors.KilledError, one.wait().error) == "ended by operator@local"
    assert leftovers(world) == []
