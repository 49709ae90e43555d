"""Run agents with the contract `stdio` under real runsc, in this process: streams, ends, and what the log keeps."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from policy import errors
from sandbox.run_result import RunResult
from tests.kernel.world import World
from tests.unit.sandbox.shim.test_stream import CAT, Caller

STDIO = '[process]\ncontract = "stdio"\n'


@pytest.fixture
def caller() -> Iterator[Caller]:
    made = Caller()
    yield made
    made.joined()
    for fd in (made.stdin, made.stdout, made.stderr):
        made.close(fd)


def _run(world: World, code: str, caller: Caller, **fields: Any) -> RunResult:
    package = world.sign(world.package({"main.py": code}, more=STDIO, **fields))
    return world.run(package, "", caller=caller.streams)


def _row(world: World, kind: str) -> dict[str, Any]:
    return next(row["kind"] for row in reversed(world.rows()) if row["kind"]["type"] == kind)


def test_session_relays_and_logs_digests(world: World, caller: Caller) -> None:
    data = os.urandom(3_000_000)
    caller.writes(data)
    caller.reads(caller.stdout)
    done = _run(world, CAT, caller)
    caller.joined()
    assert done.error is None, (done.error, done.stderr)
    assert done.exit_status == 0
    assert caller.read[caller.stdout] == data
    row, digest = _row(world, "session_ended"), hashlib.sha256(data).hexdigest()
    assert (row["contract"], row["in_bytes"], row["out_bytes"]) == ("stdio", len(data), len(data))
    assert (row["in_hash_hex"], row["out_hash_hex"], row["recording_hash_hex"]) == (digest, digest, None)
    assert _row(world, "run_ended")["stdout_bytes"] == len(data)
    assert not [row for row in world.rows() if row["kind"]["type"] == "intent_dispatched"]


def test_session_ends_with_status_of_agent(world: World, caller: Caller) -> None:
    caller.reads(caller.stderr)
    done = _run(world, "import sys\nprint('why', file=sys.stderr)\nsys.exit(7)", caller)
    caller.joined()
    assert isinstance(done.error, errors.AgentFailedError)
    assert done.exit_status == 7
    assert caller.read[caller.stderr] == b"why\n"


def test_session_is_conversation(world: World, caller: Caller) -> None:
    """Each answer comes before the next question: nothing waits in a buffer."""
    heard: list[bytes] = []

    def converse() -> None:
        for number in range(20):
            os.write(caller.stdin, b"%d\n" % number)
            heard.append(os.read(caller.stdout, 100))
        caller.close(caller.stdin)

    caller.starts(converse)
    done = _run(world, "import sys\nfor line in sys.stdin: print(int(line) * 2, flush=True)", caller)
    caller.joined()
    assert done.error is None, (done.error, done.stderr)
    assert heard == [b"%d\n" % (2 * number) for number in range(20)]


def test_session_is_bound_by_its_deadline(world: World, caller: Caller) -> None:
    done = _run(world, "import time\ntime.sleep(300)", caller, cpu_ms=1000)
    assert isinstance(done.error, errors.DeadlineError)
    assert done.error.details["clock"] == "cpu_ms_per_task"


def test_session_without_caller_is_refused(world: World) -> None:
    package = world.sign(world.package({"main.py": CAT}, more=STDIO))
    with pytest.raises(errors.ContractError, match="stream"):
        world.run(package, "hi")
    assert _row(world, "manifest_rejected")["code"] == "wrong_contract"
    assert not [row for row in world.rows() if row["kind"]["type"] == "run_started"]


def test_line_agent_is_given_no_stream(world: World, caller: Caller) -> None:
    package = world.sign(world.package({"main.py": CAT}))
    with pytest.raises(errors.ContractError, match="line"):
        world.run(package, "", caller=caller.streams)


def test_descriptors_of_caller_stay_outside(world: World, caller: Caller) -> None:
    """The agent's own descriptors are pipes of the shim: no inode of the caller's is among them."""
    caller.reads(caller.stdout)
    code = "import os\nfor fd in range(64):\n    try: print(fd, os.fstat(fd).st_ino)\n    except OSError: pass"
    caller.close(caller.stdin)
    done = _run(world, code, caller)
    ours = {os.fstat(fd).st_ino for fd in (caller.stdout, caller.stderr)}
    caller.joined()
    assert done.error is None, (done.error, done.stderr)
    lines = [line.split() for line in caller.read[caller.stdout].decode().splitlines()]
    assert [int(fd) for fd, _ in lines] == [0, 1, 2]
    assert not ours & {int(inode) for _, inode in lines}


def test_killed_session_ends(world: World, caller: Caller) -> None:
    from sandbox.control import manager

    root = manager.Requester("operator@local", root=True)

    def kill() -> None:
        assert os.read(caller.stdout, 10) == b"ready\n"
        runs = manager.listed(world.state, root)
        manager.operate(world.state, root, "kill", runs[0]["run_id"])

    thread = threading.Thread(target=kill)
    thread.start()
    begin = time.monotonic()
    done = _run(world, "import sys\nprint('ready', flush=True)\nsys.stdin.read()", caller, cpu_ms=300_000)
    thread.join()
    assert isinstance(done.error, errors.KilledError)
    assert time.monotonic() - begin < 200
