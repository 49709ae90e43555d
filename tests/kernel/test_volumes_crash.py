"""`kill -9` of each verb at each of its steps: afterwards the volumes are as before it or as after it, never between.

A step is an open, a rename, a removal, a lock, a request to a device or the start of a program. Each attempt forks a
process that is killed at one step; the next verb, or a recovery, removes what it left.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox.volumes.store import VolumeStore
from tests.kernel import volume_kit as kit

STEPS = frozenset(
    {"open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate", "fcntl.flock", "fcntl.ioctl"}
    | {"subprocess.Popen", "shutil.rmtree"}
)
MB = 8
Verb = Callable[[VolumeStore, Callable[[], None]], Any]
VERBS: dict[str, Verb] = {
    "create": lambda store, log: store.create("new", MB, 0, log, now_ms=2),
    "remove": lambda store, log: store.remove("data", log),
    "grow": lambda store, log: store.resize("data", MB + 4, log),
    "snapshot": lambda store, log: store.snapshot("data", "two", log),
    "restore": lambda store, log: store.restore("data", "one", log),
    "remove snapshot": lambda store, log: store.remove_snapshot("data", "one", log),
}


def seen(state: Path) -> dict[str, Any]:
    """The volumes with their sizes, contents and snapshots."""
    found = VolumeStore(state).listed()
    return {one.name: (one.mb, kit.content(one), [(s.name, s.mb) for s in one.snapshots()]) for one in found}


def attempt(state: Path, verb: Verb, step: int) -> bool:
    """Carry out a verb in a process of its own that is killed at a step. Returns whether it came to its end."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            if event in STEPS:
                count += 1
                if count > step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        try:
            verb(VolumeStore(state), (state / "row").touch)
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    return status == 0


@pytest.mark.parametrize("name", VERBS)
def test_killed_verb_did_all_or_nothing(tmp_path: Path, name: str) -> None:
    first = tmp_path / "first"
    first.mkdir()
    volume = kit.created(first, mb=MB)
    with kit.opened(volume) as top:
        Path(f"{top}/x").write_text("x")
    VolumeStore(first).snapshot("data", "one", lambda: None)
    with kit.opened(volume) as top:
        Path(f"{top}/y").write_text("y")
    before, after, step = seen(first), None, 0
    outcomes = set()
    while after is None:
        state = tmp_path / "state"
        shutil.copytree(first, state)
        ended = attempt(state, VERBS[name], step)
        VolumeStore(state).recover()
        now = seen(state)
        left = [one for one in (state / "volumes").rglob(".*") if one.name != ".lock"]
        assert left == [], (step, left)
        changed = now != before
        assert not changed or (state / "row").exists(), "the row is first"
        outcomes.add(changed)
        if changed:
            assert now == outcomes_of(first, tmp_path, VERBS[name]), step
        after = now if ended else None
        shutil.rmtree(state)
        step += 1
    assert after != before
    assert outcomes == {False, True}
    assert step > 4
    assert kit.attached_below(tmp_path) == []


def outcomes_of(first: Path, tmp_path: Path, verb: Verb) -> dict[str, Any]:
    """The volumes after the verb, when it is not killed."""
    whole = tmp_path / "whole"
    if not whole.exists():
        shutil.copytree(first, whole)
        verb(VolumeStore(whole), lambda: None)
    return seen(whole)
