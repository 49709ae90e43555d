"""A run that is suspended or being ended starts no child, also none that it asked for just before."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.control import manager
from sandbox.rundir import registry
from tests.kernel import revoking
from tests.kernel.families import BIG, KIT, SMALL, member, spawn
from tests.kernel.live_runs import until
from tests.kernel.world import HEAD, TAIL, World

ASKER = manager.Requester("operator@local", root=True)
STAYS = "import time\ntime.sleep(600)\nanswer = 1"
ASKS_AS_IT_ENDS = """
import signal, time
def told(*_):
    said = ask("spawn", agent="clings", text="")
    print("SAID", said, file=sys.stderr, flush=True)
    os._exit(1)
signal.signal(signal.SIGTERM, told)
print("READY", file=sys.stderr, flush=True)
while True:
    time.sleep(0.05)
"""
# So large that its reader is seen while it reads.
LARGE = 100 << 20


def _states(world: World) -> dict[str, str]:
    return {one.agent_id: one.state for one in registry.live(world.state / "runs")}


def test_who_is_asked_to_end_starts_no_child_that_outlives_it(world: World) -> None:
    member(world, "clings", STAYS, more=spawn(1, 1, "adopt"), **SMALL)
    elder = member(world, "elder", ASKS_AS_IT_ENDS, more=spawn(2, 4, "adopt"), **BIG)
    with revoking.running(world, elder) as run:
        top = run.entry.run_id

        def said() -> str:
            return str(manager.logs(world.state, ASKER, top)["text"])

        until(lambda: "READY" in said())
        manager.operate(world.state, ASKER, "kill", top, grace_ms=20_000)
        until(lambda: "SAID" in said())
    assert "no_task" in said()
    assert "clings" not in _states(world)


@pytest.mark.parametrize("when", ["while it is read", "once it runs"])
def test_suspended_tree_stays_suspended(world: World, when: str) -> None:
    """Suspend the tree while its child is being read; the control suspends it when the child already runs."""
    text = HEAD + KIT + STAYS + TAIL
    about = {"name": "slow", "id": "slow", "cpu_ms": 250_000, **SMALL}
    world.sign(world.package({"main.py": text, "data": "x" * LARGE}, **about))
    asks = 'import time\nsend("spawn", agent="slow", text="")\ntime.sleep(600)'
    elder = member(world, "elder", asks, more=spawn(2, 4), **BIG)
    with revoking.running(world, elder) as run:
        kept = run.entry.keeper
        until(lambda: _states(world).get("elder") == "Running")
        if when == "while it is read":
            with _read(world, kept):
                manager.operate(world.state, ASKER, "suspend", run.entry.run_id, tree=True)
            until(lambda: not _readers(kept))
        else:
            until(lambda: _states(world).get("slow") == "Running")
            manager.operate(world.state, ASKER, "suspend", run.entry.run_id, tree=True)
        seen = set(_states(world).values())
        manager.operate(world.state, ASKER, "kill", run.entry.run_id, tree=True)
    assert seen == {"Suspended"}


def test_parent_that_was_suspended_for_moment_is_told_so_and_may_ask_again(world: World) -> None:
    about = {"name": "slow", "id": "slow", "cpu_ms": 250_000, **SMALL}
    world.sign(world.package({"main.py": HEAD + KIT + "answer = 1" + TAIL, "data": "x" * LARGE}, **about))
    asks = 'answer = [child("slow"), child("slow")]\nprint("SAID", answer, file=sys.stderr, flush=True)'
    elder = member(world, "elder", asks, more=spawn(2, 4), **BIG)
    with revoking.running(world, elder) as run:
        top, kept = run.entry.run_id, run.entry.keeper
        until(lambda: _states(world).get("elder") == "Running")
        with _read(world, kept):
            manager.operate(world.state, ASKER, "suspend", top)
        until(lambda: not _readers(kept))
        manager.operate(world.state, ASKER, "resume", top)
        until(lambda: "SAID" in manager.logs(world.state, ASKER, top)["text"])
        said = str(manager.logs(world.state, ASKER, top)["text"])
    assert "wrong_state" in said
    assert "parent_ended" not in said
    ends = [row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "run_ended"]
    assert None in ends, "the second child answered"


@contextlib.contextmanager
def _read(world: World, kept: int) -> Iterator[None]:
    """The block runs while a child of this keeper reads its package: the reader stands still for so long."""
    (reader,) = until(lambda: _readers(kept))
    os.kill(reader, signal.SIGSTOP)
    try:
        assert "slow" not in _states(world), "it reads no more"
        yield
    finally:
        os.kill(reader, signal.SIGCONT)


def _readers(kept: int) -> list[int]:
    """The children of a keeper that are one still, and read their packages."""
    children = Path(f"/proc/{kept}/task/{kept}/children").read_text().split()
    return [int(one) for one in children if _command(one) == _command(kept)]


def _command(pid: int | str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b"?"
