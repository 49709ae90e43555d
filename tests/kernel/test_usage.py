"""The use of a run is measured by its own cgroup, and returned with its answer."""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import contract, errors
from sandbox import unix_wire
from sandbox.kernel.cgroup.cgroup import Hierarchies, Leaf
from sandbox.run_result import RunResult
from sandbox.serve.api import client
from tests.kernel import families, serving
from tests.kernel.serving import Served, opened
from tests.kernel.test_serve import eventually
from tests.kernel.world import World

_MIB = 1024 * 1024
_HEAD = "import json, sys, time\nintent = json.loads(sys.stdin.readline())\n"
_ANSWER = "print(json.dumps({'text': intent['id'] + ' ' + intent['priority'], 'files': [{'path': 'x'}]}))\n"
_CLOCK = "until = time.process_time() + 0.5\nwhile time.process_time() < until: pass\n"
# And so much work beside it: on a machine that has much else to do, gVisor's clock goes on meanwhile. How long the work
# takes is the processor's speed, so that less is asked for than it takes on any.
_BURN = _CLOCK.replace("while", "for _ in range(40_000_000): pass\nwhile", 1)
_BURNT_MS = 150
_SLEEP = "time.sleep(0.5)\n"
_HOLD = "held = bytearray(96 * 1024 * 1024)\nfor at in range(0, len(held), 4096): held[at] = 1\n"


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as made:
        yield made


def _answer(served: Served, code: str, *, name: str, **fields: object) -> RunResult:
    package = served.world.package({"main.py": _HEAD + code + _ANSWER}, name=name, id=name, **fields)
    answer = served.run(served.world.sign(package))
    assert answer.error is None, (answer.error, answer.stderr)
    return answer


def test_processor_time_is_of_task_and_not_of_clock(served: Served) -> None:
    """One agent computes, the other waits."""
    busy = _answer(served, _BURN, name="busy").usage
    idle = _answer(served, _SLEEP, name="idle").usage
    assert busy.cpu_ms is not None
    assert idle.cpu_ms is not None
    assert busy.wall_ms is not None
    assert idle.wall_ms is not None
    assert busy.cpu_ms >= _BURNT_MS
    assert busy.cpu_ms > idle.cpu_ms
    assert idle.wall_ms >= 500
    # Processor time is at most what all processors have in that time; another's counter would be more.
    assert busy.cpu_ms <= busy.wall_ms * (os.cpu_count() or 1) + 100


def test_most_memory_at_one_time(served: Served) -> None:
    large = _answer(served, _HOLD, name="large", memory_mb=256).usage
    small = _answer(served, "", name="small", memory_mb=256).usage
    if large.memory_peak_bytes is None:  # version 2 before Linux 5.19 keeps none, and then none is told
        assert small.memory_peak_bytes is None
        assert not list(Path("/sys/fs/cgroup").glob("*/memory.peak"))
        return
    assert small.memory_peak_bytes is not None
    assert large.memory_peak_bytes - small.memory_peak_bytes > 80 * _MIB


def test_run_that_fails_has_used_what_it_used(served: Served) -> None:
    code = _BURN + "sys.exit(3)\n"
    package = served.world.sign(served.world.package({"main.py": _HEAD + code}, name="fails", id="fails"))
    answer = served.run(package)
    assert isinstance(answer.error, errors.AgentFailedError)
    assert answer.usage.cpu_ms is not None
    assert answer.usage.cpu_ms >= _BURNT_MS


# A child and its parent with a line between them: each says that it is so far, or that it has ended.
_FORKS = "import os, socket\nhere, there = socket.socketpair()\nif not os.fork():\n    here.close()\n"
_GOES = "    there.send(b'.')\n    there.recv(1)\n    os._exit(0)\nthere.close()\nhere.recv(1)\n"


def _below(code: str) -> str:
    return "".join(f"    {line}\n" for line in code.splitlines())


def _local(world: World, code: str) -> contract.Usage:
    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false"}
    package = world.sign(world.package({"main.py": _HEAD + code + _ANSWER}, **fields))
    answer = world.run(package, user="covenant-agent")
    assert answer.error is None, (answer.error, answer.stderr)
    return answer.usage


def test_trusted_local_counts_what_was_waited_for_and_what_was_not_and_not_its_start(world: World) -> None:
    """A child that the agent waits for, one that it never does, and memory of two at the same time."""
    burns, holds = _FORKS + _below(_CLOCK) + _GOES, _FORKS + _below(_HOLD) + _GOES + _HOLD
    waits, orphans, rests = _local(world, burns + "here.close()\nos.wait()\n"), _local(world, burns), _local(world, "")
    assert rests.cpu_ms is not None
    for used in (waits, orphans):
        assert used.cpu_ms is not None
        assert used.cpu_ms >= rests.cpu_ms + 300
    two = _local(world, holds).memory_peak_bytes
    if two is None:  # version 2 before Linux 5.19 keeps none
        assert not list(Path("/sys/fs/cgroup").glob("*/memory.peak"))
    else:
        assert two > 150 * _MIB
    left = Leaf(Hierarchies.read(), world.rows()[-1]["kind"]["run_id"])
    assert not [path for path in left.plan().values() if path.exists()]


def test_where_no_cgroup_can_be_made_trusted_local_counts_nothing_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hierarchies, "read", lambda: Hierarchies(0, {}))
    used = _local(world, _CLOCK)
    assert (used.cpu_ms, used.memory_peak_bytes) == (None, None)
    assert used.wall_ms is not None
    assert used.wall_ms >= 400


def test_warm_instance_is_not_charged_for_its_start_and_its_waiting(served: Served) -> None:
    """Its start costs far more than its task, and it is frozen while it waits."""
    first = _answer(served, "", name="warm", more="standby = 1")
    eventually(lambda: list((served.world.state / "runs").glob("*/standby-*")))
    with served.connected() as sock, opened(served.world.base / "packages" / "warm") as directory:
        answer = client.run(sock, directory, "again")
    assert answer.error is None
    assert answer.timings["sandbox start"] < first.timings["sandbox start"]
    assert first.usage.cpu_ms is not None
    assert answer.usage.cpu_ms is not None
    # Its interpreter's start alone is more than an answer, and is in neither.
    assert answer.usage.cpu_ms <= first.usage.cpu_ms + 100


def test_intent_has_id_that_whoever_asks_gave_it(served: Served) -> None:
    """By it the asker finds the run among those that live, and the agent its own intent."""
    package = served.world.sign(served.world.package({"main.py": _HEAD + _ANSWER}, name="named", id="named"))
    mine = str(uuid.uuid4())
    with served.connected() as sock, opened(package) as directory:
        document = client.ask(sock, "run", fds=[directory], text="hi", intent_id=mine, priority="low")
    answer = RunResult.from_json(document)
    assert answer.intent_id == mine
    assert answer.result is not None
    assert answer.result.text == f"{mine} low"
    assert answer.result.files == ({"path": "x"},)
    dispatched = [row["kind"] for row in served.world.rows() if row["kind"]["type"] == "intent_dispatched"]
    assert dispatched[-1]["intent_id"] == mine
    with served.connected() as sock, opened(package) as directory, pytest.raises(errors.RequestError):
        client.ask(sock, "run", fds=[directory], text="hi", intent_id="mine")


def test_run_ended_gently_may_end_by_itself(served: Served) -> None:
    """The control is the agent that does not: it is killed when its grace is over, and not before."""
    ends = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    stays = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    waits = "print('here', file=sys.stderr, flush=True)\nwhile True: time.sleep(0.05)\n"
    ended: dict[str, tuple[float, object]] = {}
    # The first has all the time that a busy machine needs to ask it.
    for name, code, grace_ms in (("ends", ends, 60_000), ("stays", stays, 1500)):
        package = served.world.sign(served.world.package({"main.py": _HEAD + code + waits}, name=name, id=name))
        mine = str(uuid.uuid4())
        with serving.asked(served.path, package, intent_id=mine):
            run_id = eventually(lambda mine=mine: _run_of(served, mine))  # type: ignore[misc]
            eventually(lambda run_id=run_id: "here" in _ask(served, "logs", run=run_id)["text"])  # type: ignore[misc]
            began = time.monotonic()
            _ask(served, "operate", operation="kill", run=run_id, grace_ms=grace_ms, reason="budget")
            ended[name] = time.monotonic() - began, _ask(served, "wait", run=run_id)["record"]["exit_status"]
    assert ended["ends"][1] == 7
    assert ended["stays"][1] != 7
    assert ended["stays"][0] >= 1.5


def _ask(served: Served, kind: str, **fields: object) -> dict[str, Any]:
    with served.connected() as sock:
        return client.ask(sock, kind, **fields)  # type: ignore[arg-type]


def _run_of(served: Served, intent_id: str) -> str | None:
    """The run that is named by the asker's own name for its intent."""
    return next((one["run_id"] for one in _ask(served, "ps")["runs"] if one["intent_id"] == intent_id), None)


def test_what_is_left_to_child_is_billed_all_same(served: Served) -> None:
    """An agent that lets others compute pays for them, and for theirs; the control is the same with nothing to do."""
    small = {**families.SMALL, "resources": "pids_max = 16\ncpu_millis = 500\n"}
    middle = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 1000\n"}
    families.member(served.world, "works", "import time\n" + _BURN + "answer = 1", **small)
    families.member(served.world, "rests", "answer = 1", **small)
    families.member(served.world, "hands", "answer = child(intent['text'])", more=families.spawn(2, 2), **middle)
    code = "answer = child('hands', intent['text'])"
    top = families.member(served.world, "leaves", code, more=families.spawn(), **families.BIG)
    used = {}
    for text in ("works", "rests"):
        answer = served.run(top, text)
        assert answer.error is None, (answer.error, answer.stderr)
        assert answer.result is not None
        assert "error" not in answer.result.text
        assert answer.usage.cpu_ms is not None
        used[text] = answer.usage.cpu_ms
    assert used["works"] - used["rests"] >= _BURNT_MS // 2


def test_long_grace_keeps_nobody_from_ending_run_at_once(served: Served) -> None:
    """A gentle end gives 60 s, and an agent that stays would take them from root's kill as well."""
    code = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('asked', file=sys.stderr, flush=True))\n"
    waits = "print('here', file=sys.stderr, flush=True)\nwhile True: time.sleep(0.05)\n"
    package = served.world.sign(served.world.package({"main.py": _HEAD + code + waits}, name="long", id="long"))
    mine = str(uuid.uuid4())
    with serving.asked(served.path, package, intent_id=mine):
        run_id = eventually(lambda: _run_of(served, mine))
        eventually(lambda: "here" in _ask(served, "logs", run=run_id)["text"])
        with served.connected() as sock:
            unix_wire.send(
                sock,
                unix_wire.encode({"kind": "operate", "operation": "kill", "run": run_id, "grace_ms": 60_000}),
                until=None,
            )
            eventually(lambda: "asked" in _ask(served, "logs", run=run_id)["text"])
            _ask(served, "operate", operation="kill", run=run_id)
    record = _ask(served, "wait", run=run_id)["record"]
    assert (record["code"], record["exit_status"]) == ("stopped", 128 + signal.SIGKILL)
