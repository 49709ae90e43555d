"""Attacks on the end of a tree.

A client resumes it at that very moment; a disk takes no mark; a shim takes no words; two end it at once; shims hang or
die meanwhile. A hook holds each gap open; the kernel's part is real.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.signing import change
from sandbox.audit import run_archive
from sandbox.control import manager, revocation_watch, tree_kill
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import spawn as proc_spawn
from sandbox.rundir import marks, registry
from sandbox.runner import trusted_local
from sandbox.shim import control_socket
from sandbox.storage.trust_state import State
from tests.kernel import revoking
from tests.kernel.conftest import leftovers
from tests.kernel.families import SMALL, member, spawn
from tests.kernel.live_runs import SLEEPS, live, until
from tests.kernel.test_command_line import call
from tests.kernel.world import HEAD, ROOT, TAIL, World, refused

pytestmark = pytest.mark.kernel

ASKER = manager.Requester("operator@local", root=True)
OTHER = manager.Requester("other@local", root=True)
SLOW = "import time\ntime.sleep(600)\nanswer = 1"
ELDER: dict[str, Any] = {"memory_mb": 512, "resources": "pids_max = 128\ncpu_millis = 500\n"}


def _kill(world: World, run_id: str, reason: str = "enough", *, asker: manager.Requester = ASKER) -> list[str]:
    return manager.operate(world.state, asker, "kill", run_id, reason=reason, tree=True)


def _live(world: World) -> list[registry.Entry]:
    return registry.live(world.state / "runs")


def _leaf(entry: registry.Entry) -> cgroup.Leaf:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), entry.run_id)
    leaf.adopt(entry.cgroups)
    return leaf


def _ends(world: World) -> dict[str, str]:
    """The code that each run ended with."""
    return {row["kind"]["run_id"]: row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "run_ended"}


def _elder(world: World, number: int = 1) -> Path:
    """An agent that starts so many that would outlive it."""
    member(world, "outlives", SLOW, more=spawn(1, 1, "adopt"), **SMALL)
    code = f"[ask('spawn', agent='outlives', text='') for _ in range({number})]\n" + SLOW
    return member(world, "elder", code, more=spawn(2, number, "adopt"), **ELDER)


@contextlib.contextmanager
def _family(world: World, elder: Path, number: int = 1) -> Iterator[tuple[revoking.Running, list[registry.Entry]]]:
    """It and those below it, in processes of their own; parents first."""
    with revoking.running(world, elder) as run:

        def all_of_it() -> list[registry.Entry] | None:
            found = registry.subtree(_live(world), run.entry.run_id)
            return found if [one.state for one in found] == ["Running"] * (number + 1) else None

        yield run, until(all_of_it)


def test_nobody_lets_go_on_what_is_just_being_marked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume between the stop and the mark finds no mark: the gate holds it back."""
    monkeypatch.setattr(tree_kill, "GATE_SECONDS", 0.0)
    mark, said = tree_kill.mark_stopped, list[Any]()

    def resume(entry: registry.Entry) -> str:
        return str(control_socket.ask(entry.path, "resume", by=ASKER.display, reason="")["state"])

    def resume_then_mark(entries: Sequence[registry.Entry], *words: str) -> None:
        for entry in entries:
            with pytest.raises(errors.KeeperError, match="the gate of the runs is not free"):
                said.append(resume(entry))
            said.append(_leaf(entry).frozen())
        mark(entries, *words)

    with live(world, SLEEPS) as one:
        (entry,) = until(lambda: [run for run in _live(world) if run.state == "Running"])
        manager.operate(world.state, ASKER, "suspend", entry.run_id)
        assert resume(entry) == "Running"  # the control: at any other moment they may
        manager.operate(world.state, ASKER, "suspend", entry.run_id)
        monkeypatch.setattr(tree_kill, "mark_stopped", resume_then_mark)
        assert _kill(world, entry.run_id) == [entry.run_id]
        refused(errors.KilledError, one.wait().error)
    assert said == [True]


@pytest.mark.parametrize("backend", ["linux-gvisor", "trusted-local"])
def test_disk_that_takes_no_mark_keeps_nobody_alive_whom_no_cgroup_shows(
    world: World, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """One has no cgroup yet when all that can be seen is killed, and one never has: its keeper is asked."""
    fields: dict[str, Any] = {"cpu_ms": 60_000, "memory_mb": 256}
    if backend == "trusted-local":
        uid = 2_000_000_000 + os.getpid()  # no account of any machine
        somebody = trusted_local.Identity("nobody-in-particular", uid, uid)
        monkeypatch.setattr(trusted_local, "identify", lambda name, config: somebody)
        monkeypatch.setattr(trusted_local, "_leaf", lambda *arguments: None)
        fields |= {"backend": backend, "required": "false"}
    monkeypatch.setattr(manager, "_GONE_SECONDS", 20.0)
    package, full = world.sign(world.package({"main.py": SLEEPS}, **fields)), list[Path]()
    killed, ended = threading.Event(), list[list[str]]()
    start, together = proc_spawn.spawn, tree_kill.end_together

    def no_room(path: Path, *words: str, **more: Any) -> None:
        full.append(path)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def kill_what_is_seen(*arguments: Any) -> None:
        together(*arguments)
        killed.set()

    def while_it_is_killed(*arguments: Any) -> Any:
        (entry,) = _live(world)
        threading.Thread(target=lambda: ended.append(_kill(world, entry.run_id))).start()
        assert killed.wait(30)
        return start(*arguments)

    monkeypatch.setattr(marks, "mark_stopped", no_room)
    monkeypatch.setattr(tree_kill, "end_together", kill_what_is_seen)
    monkeypatch.setattr(tree_kill, "_all_leaves", lambda hierarchies, entries, failed: {e.run_id: [] for e in entries})
    monkeypatch.setattr(proc_spawn, "spawn", while_it_is_killed)
    try:
        error = world.run(package).error
    except errors.KilledError as e:  # it was asked while it was being started, and not just after
        error = e
    assert refused(errors.KilledError, error) == "ended by operator@local: enough"
    (run_id,) = {path.name for path in full}
    assert until(lambda: ended) == [[run_id]]
    assert _ends(world) == {run_id: "stopped"}


# A reason that is longer than a keeper's request may be, one that is no text, and one that would be a row of its own.
WORDS = {
    "long": "x" * 40_000,
    "no text": "caf\udce9",
    "a row": '\x1b[2J\n{"kind":{"type":"run_ended","status":"ok","code":null}}',
}


def _marks_one_and_dies(world: World, run_id: str, reason: str) -> None:
    """End the tree in another process, which dies after the first mark."""
    mark, left = marks.mark_stopped, iter([1])

    def mark_or_die(*arguments: Any, **more: Any) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        mark(*arguments, **more)

    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            marks.mark_stopped = mark_or_die
            _kill(world, run_id, reason)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL


def test_no_words_keep_what_is_below_from_ending_with_tree_half_ended(world: World) -> None:
    """The keeper of the one that is marked asks those below it in these words; they end some seconds later."""
    elder = _elder(world)
    with contextlib.ExitStack() as stack:
        families = {name: stack.enter_context(_family(world, elder)) for name in WORDS}
        for name, (run, _) in families.items():
            _marks_one_and_dies(world, run.entry.run_id, WORDS[name])
        assert {run.document()["code"] for run, _ in families.values()} == {"stopped"}
        until(lambda: not _live(world))
    ids = {one.run_id for _, tree in families.values() for one in tree}
    # A run is seen no more a moment before its end is in the log.
    until(lambda: len(_ends(world)) == len(ids))
    assert _ends(world) == dict.fromkeys(ids, "stopped")
    for run_id in ids:
        # It is written after the row of its end.
        record = until(functools.partial(run_archive.read, world.state, run_id))
        assert record.message is not None
        assert record.message.startswith("ended by operator@local: ")
        assert len(record.message) < 300
    shown = call(world.home, "wait", families["a row"][0].entry.run_id)
    assert shown.returncode == 1
    assert b"\x1b" not in shown.stderr
    assert not [line for line in shown.stderr.splitlines() if line.startswith(b"{")]


def test_locale_in_which_reason_cannot_be_written_keeps_nobody_alive(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that enforces a root has another locale than the one that wrote the reason in it."""
    monkeypatch.setattr(revocation_watch, "VERSION_EVERY", 10**9)  # the shim does not find it by itself
    with live(world, SLEEPS) as one:
        (entry,) = _live(world)
        raw = revoking.next_root(
            world,
            lambda document: change.revoke_manifest(
                document, entry.payload_digest, now_ms=world.now_ms, reason="der Schlüssel ist fort – 鍵"
            ),
        )
        with State(world.state) as state:
            state.replace_root(raw, int(time.time() * 1000))
        environment = {"PATH": os.environ["PATH"], "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-X", "utf8=0", "-m", "covenant", "trust", "enforce", "--json"],
            env={**environment, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done
        said = json.loads(done.stdout)
        assert [ended["run_id"] for ended in said["ended"]] == [entry.run_id]
        assert said["not_done"] == []
        error = refused(errors.RunRevokedError, one.wait().error)
        assert error == "the signed manifest was revoked: der Schlüssel ist fort – 鍵"


def test_keeper_that_dies_as_its_tree_is_ended_leaves_nobody(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its children would see that it is gone, and go on without it."""
    together = tree_kill.end_together

    def after_its_keeper(*arguments: Any) -> None:
        os.kill(run.entry.keeper, signal.SIGKILL)
        run.process.wait(60)
        together(*arguments)

    monkeypatch.setattr(tree_kill, "end_together", after_its_keeper)
    with _family(world, _elder(world, 2), 2) as (run, tree):
        assert set(_kill(world, run.entry.run_id)) == {one.run_id for one in tree}
        assert _live(world) == []
        assert [_leaf(one).pids() for one in tree] == [[]] * 3
    until(lambda: len(_ends(world)) == 2)
    assert world.run_code(HEAD + "answer = 1" + TAIL, name="next").error is None  # which clears up
    ends = _ends(world)
    assert [ends[one.run_id] for one in tree] == ["cut_off", "stopped", "stopped"]
    assert leftovers(world) == []


def test_keeper_that_hangs_keeps_none_of_its_tree_alive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told that the shim is still there; none of its agents is."""
    with _family(world, _elder(world)) as (run, tree):
        os.kill(run.entry.keeper, signal.SIGSTOP)
        try:
            monkeypatch.setattr(manager, "_GONE_SECONDS", 2.0)
            with pytest.raises(errors.KeeperError, match=f"run `{run.entry.run_id}` was to end and is still there"):
                _kill(world, run.entry.run_id)
            assert [_leaf(one).pids() for one in tree] == [[], []]
        finally:
            os.kill(run.entry.keeper, signal.SIGCONT)
        assert run.document()["code"] == "stopped"
    until(lambda: not _live(world))
    assert _ends(world) == dict.fromkeys((one.run_id for one in tree), "stopped")


def test_of_two_who_end_tree_at_once_while_others_resume_it_each_is_right(world: World) -> None:
    with _family(world, _elder(world, 2), 2) as (run, tree):
        begin, done = threading.Barrier(4), threading.Event()
        ended: dict[str, list[str]] = {}

        def end(asker: manager.Requester) -> None:
            begin.wait(30)
            with contextlib.suppress(errors.NoRunError):  # the other was so much earlier
                ended[asker.display] = _kill(world, run.entry.run_id, asker=asker)

        def disturb(operation: manager.Operation) -> None:
            begin.wait(30)
            while not done.is_set():
                with contextlib.suppress(errors.CovenantError):
                    manager.operate(world.state, ASKER, operation, run.entry.run_id, tree=True)

        acts: list[Callable[[], None]] = [lambda: end(ASKER), lambda: end(OTHER)]
        acts += [lambda: disturb("resume"), lambda: disturb("resume")]
        threads = [threading.Thread(target=act) for act in acts]
        for thread in threads:
            thread.start()
        for thread in threads[:2]:
            thread.join(60)
        assert _live(world) == []
        done.set()
        for thread in threads[2:]:
            thread.join(60)
        assert run.document()["code"] == "stopped"  # its last row is written: the block ends it otherwise
    ids = {one.run_id for one in tree}
    assert set().union(*ended.values()) == ids
    assert _ends(world) == dict.fromkeys(ids, "stopped")
    rows = [row["kind"] for row in world.rows() if row["kind"]["type"] == "runs_stopped"]
    assert {one["run_id"] for row in rows for one in row["runs"]} == ids
