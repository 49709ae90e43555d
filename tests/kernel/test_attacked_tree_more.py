"""The end of a tree, attacked: as a run of it answers or is suspended, and by a child that is shown late."""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable
from typing import Any

import pytest

from policy import errors
from sandbox.audit.log import Ledger
from sandbox.control import manager
from sandbox.kernel.cgroup import cgroup, kill
from sandbox.rundir import marks, registry
from sandbox.runner import gvisor
from tests.kernel.live_runs import live, until
from tests.kernel.world import HEAD, TAIL, World, refused

pytestmark = pytest.mark.kernel

ASKER = manager.Requester("operator@local", root=True)


def test_run_that_has_answered_as_it_was_marked_is_ended_and_not_answered(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keeper has looked for the mark for the last time, and its label can still be seen: who ends the tree says
    that it was ended, and so does the log. It is not answered as well."""
    finish, ended, threads = gvisor._finish, list[list[str]](), list[threading.Thread]()

    def mark_then_finish(*arguments: Any) -> Any:
        (entry,) = registry.live(world.state / "runs")

        def end() -> None:
            ended.append(manager.operate(world.state, ASKER, "kill", entry.run_id, reason="enough", tree=True))

        threads.append(threading.Thread(target=end))
        threads[0].start()
        until(lambda: marks.stopped_of(entry.path))
        return finish(*arguments)

    package = world.sign(world.package({"main.py": HEAD + "answer = 1" + TAIL}))
    assert world.run(package).error is None  # the control
    monkeypatch.setattr(gvisor, "_finish", mark_then_finish)
    answer = world.run(package)
    threads[0].join(60)
    assert ended == [[answer.run_id]]
    assert answer.result is None
    assert refused(errors.KilledError, answer.error) == "ended by operator@local: enough"
    rows = [row["kind"] for row in world.rows() if row["kind"].get("run_id") == answer.run_id]
    assert [row["code"] for row in rows if row["type"] == "run_ended"] == ["stopped"]


def test_child_shown_late_is_ended_where_log_takes_no_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent's shim was just starting the child, which is there when the parent is gone.

    The failure to log the parent's end is reported afterwards, and the manager still looks once more.
    """
    append, subtree, gone, shown = Ledger.append, registry.subtree, manager._until_gone, set[str]()

    def full(self: Ledger, kind: str, *arguments: Any, **more: Any) -> str:
        if kind == "runs_stopped":
            raise errors.LedgerError("no space left")
        return append(self, kind, *arguments, **more)

    with live(world) as parent, live(world, id="late") as child:

        def below(entries: Iterable[registry.Entry], run_id: str) -> list[registry.Entry]:
            entries = list(entries)
            return subtree(entries, run_id) + [one for one in entries if one.run_id in shown]

        def wait_and_show(*arguments: Any) -> None:
            gone(*arguments)
            shown.add(child.made.run_id)

        monkeypatch.setattr(Ledger, "append", full)
        monkeypatch.setattr(registry, "subtree", below)
        monkeypatch.setattr(manager, "_until_gone", wait_and_show)
        with pytest.raises(errors.LedgerError, match="no space left"):
            manager.operate(world.state, ASKER, "kill", parent.made.run_id, reason="enough", tree=True)
        for one in (parent, child):
            assert refused(errors.KilledError, one.wait().error) == "ended by operator@local: enough"


def test_who_is_suspended_as_it_dies_is_let_go_to_die(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keeper was just asked to suspend it, and freezes it a moment after the thaw that it was to die of. On one
    processor none of it has run in between: it stood with its death pending, until the deadline."""
    leaf, ask, again = (
        cgroup.Leaf(cgroup.Hierarchies.read(), f"suspended-{uuid.uuid4()}"),
        kill._ask,
        list[bool](),
    )
    processors, scheduling = os.sched_getaffinity(0), (os.sched_getscheduler(0), os.sched_getparam(0))

    def ask_and_suspend(one: cgroup.Leaf, *, frozen: bool) -> None:
        ask(one, frozen=frozen)
        if not frozen and not again:
            ask(one, frozen=True)
            again.append(True)

    with leaf:
        os.sched_setaffinity(0, {min(processors)})
        try:
            sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
            for one in sleepers:
                for path in set(leaf.paths.values()):
                    (path / "cgroup.procs").write_text(str(one.pid))
            monkeypatch.setattr(kill, "_ask", ask_and_suspend)
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
            begun = time.monotonic()
            kill.kill([leaf], deadline_seconds=5.0)
            assert time.monotonic() - begun < 3.0
        finally:
            os.sched_setscheduler(0, *scheduling)
            os.sched_setaffinity(0, processors)
            leaf.kill()
            assert [one.wait(10) for one in sleepers] == [-9] * 3
    assert again == [True]
