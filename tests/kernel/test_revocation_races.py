"""A revocation in the middle of other work, with each gap held open by a hook in our own process.

It comes between verification and start, before the cgroup, before the sandbox, and to runs that are frozen or were
forgotten. The kernel's part is real.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from policy import errors
from policy.signing import change
from policy.signing import envelope as envelopes
from sandbox.attest import monitor, verifier
from sandbox.control import manager, revocation, revocation_watch
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.cgroup import kill as cgroup_kill
from sandbox.kernel.proc import launch as proc_launch
from sandbox.kernel.proc import spawn as proc_spawn
from sandbox.rundir import directory as rundir_directory
from sandbox.rundir import marks, registry
from sandbox.runner import trusted_local
from sandbox.runner.limits import METER
from sandbox.shim.operations import RunOperations
from sandbox.storage.trust_state import State
from sandbox.supervisor import RunResult
from tests.kernel import live_runs, revoking
from tests.kernel.live_runs import SLEEPS, until
from tests.kernel.world import World, refused

# The outcome of an agent that is ended, and the code of one that answers when it is not.
LEAKS = "the signed manifest was revoked: it leaks"
ANSWERS = 'import sys\nsys.stdin.readline()\nprint(\'{"text": "done"}\')\n'


class Revoking(threading.Thread):
    """An operator elsewhere, who revokes the only package of the world; ``begun`` waits until a run is marked."""

    def __init__(self, world: World, digest: str) -> None:
        super().__init__(name="operator")
        self.world, self.raw = world, revoking.next_root(world, revoking.manifest_of(world, digest))
        self.enforced = revocation.NOTHING

    def run(self) -> None:
        self.enforced = revoking.revoke(self.world, self.raw)

    def begun(self) -> None:
        self.start()
        runs = self.world.state / "runs"
        until(lambda: [one for one in registry.live(runs) if marks.revoked_of(one.path)])


def _signed(world: World, code: str = ANSWERS) -> tuple[Path, str]:
    """A package and the digest of what was signed in it."""
    package = world.sign(world.package({"main.py": code}, cpu_ms=60_000))
    signed = envelopes.decode((package / "agent.dsse.json").read_bytes())
    return package, hashlib.sha256(signed.payload).hexdigest()


def _ended(world: World) -> list[str | None]:
    return [row["kind"]["code"] for row in world.rows() if row["kind"]["type"] == "run_ended"]


def test_what_was_verified_under_old_root_does_not_start(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    package, digest = _signed(world)
    accept = State.accept

    def accept_then_revoke(self: State, *arguments: Any, **more: Any) -> None:
        accept(self, *arguments, **more)
        monkeypatch.setattr(State, "accept", accept)
        operator = Revoking(world, digest)
        operator.run()
        assert operator.enforced == revocation.NOTHING  # no label to be seen yet

    monkeypatch.setattr(State, "accept", accept_then_revoke)
    monkeypatch.setattr(proc_spawn, "spawn", lambda *launch: pytest.fail("it was started"))
    with pytest.raises(errors.TrustError, match="verified under trust root version 1, 2 holds now"):
        world.run(package)
    assert _ended(world) == ["trust_root"]


def test_run_whose_cgroup_is_not_made_yet_makes_none_of_it_run(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    package, digest = _signed(world)
    operator = Revoking(world, digest)
    note = rundir_directory.RunDirectory.note_cgroups

    def revoke_then_note(self: rundir_directory.RunDirectory, paths: Any) -> None:
        operator.begun()
        note(self, paths)

    monkeypatch.setattr(rundir_directory.RunDirectory, "note_cgroups", revoke_then_note)
    monkeypatch.setattr(proc_spawn, "spawn", lambda *launch: pytest.fail("it was started"))
    with pytest.raises(errors.RunRevokedError, match=LEAKS):
        world.run(package)
    operator.join()
    assert operator.enforced.failed == ()
    assert _ended(world) == ["revoked"]


def test_sandbox_just_being_started_stands_and_is_killed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    package, digest = _signed(world)
    operator = Revoking(world, digest)
    spawn, stopped = proc_spawn.spawn, threading.Event()
    stop = cgroup_kill.stop

    def stop_and_say(leaves: Any) -> None:
        stop(leaves)
        stopped.set()

    def revoke_then_spawn(launch: proc_launch.Launch, patience: proc_spawn.Patience) -> proc_spawn.Child:
        monkeypatch.setattr(proc_spawn, "spawn", spawn)
        operator.begun()
        assert stopped.wait(10)
        # Without the stop this sandbox would start: its keeper looked for the mark before it was there.
        return spawn(launch, proc_spawn.Patience(kill=patience.kill))

    monkeypatch.setattr(cgroup_kill, "stop", stop_and_say)
    monkeypatch.setattr(proc_spawn, "spawn", revoke_then_spawn)
    answer = world.run(package)
    operator.join()
    _revoked(answer)
    assert answer.timings["sandbox start"] == 0.0
    assert operator.enforced.failed == ()
    assert _ended(world) == ["revoked"]


@pytest.fixture
def sleeping(world: World) -> Iterator[live_runs.Live]:
    with live_runs.live(world, SLEEPS) as one:
        yield one


def _digest(one: live_runs.Live) -> str:
    return registry.live(one.world.state / "runs")[0].payload_digest


def _leaf(one: live_runs.Live) -> cgroup.Leaf:
    leaf = cgroup.Leaf(cgroup.Hierarchies.read(), one.directory.name)
    leaf.adopt(rundir_directory.cgroups_of(one.directory))
    return leaf


def _revoked(answer: RunResult, reason: str = LEAKS) -> None:
    assert refused(errors.RunRevokedError, answer.error) == reason


def test_what_is_revoked_while_its_start_is_looked_at_is_given_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look is left, so that it takes no processor from who dies, and no row says that the run got its intent."""
    package, digest = _signed(world)
    operator = Revoking(world, digest)
    examine, gone = verifier.examine, []

    def revoke_then_look(*what: Any, over: Callable[[], bool], **more: Any) -> verifier.Examination:
        monkeypatch.setattr(monitor, "examine", examine)
        assert not over()
        operator.begun()
        report = examine(*what, over=over, **more)
        gone.append((report.gone, report.layers))
        return report

    monkeypatch.setattr(monitor, "examine", revoke_then_look)
    answer = world.run(package)
    operator.join()
    _revoked(answer)
    assert operator.enforced.failed == ()
    assert gone == [(True, ())]
    states = [row["kind"]["state"] for row in world.rows() if row["kind"]["type"] == "run_state"]
    assert states[-2:] == ["Terminated", "Archived"]
    assert "Running" not in states


def test_frozen_run_dies_without_instruction_of_its_own(world: World, sleeping: live_runs.Live) -> None:
    leaf = _leaf(sleeping)
    leaf.freeze()
    operator = Revoking(world, _digest(sleeping))
    operator.run()
    assert [one.run_id for one in operator.enforced.ended] == [sleeping.directory.name]
    _revoked(sleeping.wait())


def test_nobody_lets_go_on_what_is_being_revoked(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the freezer and the kill a client resumes the run, whose shim has not found the mark by itself yet."""
    operator = manager.Requester("operator@local", root=True)
    kill, look, said = cgroup_kill.kill, revocation_watch.RevocationWatch.look, list[bool]()
    monkeypatch.setattr(revocation_watch.RevocationWatch, "look", lambda watch: look(watch) if said else None)

    def resume_then_kill(leaves: Any, **more: Any) -> None:
        monkeypatch.setattr(cgroup_kill, "kill", kill)
        with pytest.raises(errors.RevokedError, match="it leaks"):
            manager.operate(world.state, operator, "resume", run)
        said.append(leaf.frozen())
        kill(leaves, **more)

    with live_runs.live(world, SLEEPS) as sleeping:
        run, leaf = sleeping.directory.name, _leaf(sleeping)
        until(lambda: (sleeping.directory / registry.STATE).read_text().strip() == "Running")
        manager.operate(world.state, operator, "suspend", run)
        monkeypatch.setattr(cgroup_kill, "kill", resume_then_kill)
        one = Revoking(world, _digest(sleeping))
        one.run()
        assert one.enforced.failed == ()
        assert said == [True]
        _revoked(sleeping.wait())
    assert [row["kind"]["state"] for row in world.rows() if row["kind"]["type"] == "run_state"][-4:] == [
        "Running", "Suspended", "Terminated", "Archived",
    ]  # fmt: skip


def test_keeper_finds_root_by_itself_when_nobody_enforced_it(world: World, sleeping: live_runs.Live) -> None:
    """As after a command that was killed between the two."""
    raw = revoking.next_root(world, revoking.manifest_of(world, _digest(sleeping)))
    with State(world.state) as state:
        state.replace_root(raw, int(time.time() * 1000))
    _revoked(sleeping.wait())
    assert [row["kind"]["type"] for row in world.rows()].count("runs_revoked") == 1


def test_key_taken_out_ends_nothing_and_one_revoked_does(world: World) -> None:
    first, other = world.key, Ed25519PrivateKey.generate()
    public = envelopes.PublicKey.of(other)

    def add(document: Any) -> Any:
        entry = {**document.keys[0].model_dump(), "name": "other", "public": public.raw.hex(), "root": False}
        return change.add(document, entry)

    def revoke(document: Any) -> Any:
        return change.revoke_key(document, public.keyid, now_ms=world.now_ms, reason="stolen")

    _install(world, add)
    world.key = other
    with live_runs.live(world, SLEEPS) as one:
        world.key = first
        assert _install(world, lambda document: change.remove(document, "other")) == revocation.NOTHING
        time.sleep(4.5)  # longer than a keeper takes to make up its mind about a new root
        assert _leaf(one).pids() != []
        assert [ended.run_id for ended in _install(world, revoke).ended] == [one.directory.name]
        _revoked(one.wait(), "the key of `other`, who signed, was revoked: stolen")


def test_agent_that_only_its_uid_confines_ends_as_well(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = _somebody(monkeypatch)
    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false", "memory_mb": 256, "cpu_ms": 60_000}
    package = world.sign(world.package({"main.py": SLEEPS}, **fields))
    answers: list[RunResult] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package)))
    thread.start()
    (one,) = until(lambda: registry.live(world.state / "runs"))
    alive = until(lambda: _of_uid(identity.uid))
    enforced = revoking.revoke(world, revoking.next_root(world, revoking.manifest_of(world, one.payload_digest)))
    assert enforced.failed == ()
    assert [ended.run_id for ended in enforced.ended] == [one.run_id]
    assert not set(alive) & set(_of_uid(identity.uid))
    thread.join(30)
    _revoked(answers[0])


def test_root_that_comes_just_after_last_question_ends_one_that_only_its_uid_confines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that installed the root was killed before it enforced anything.

    The shim compares with the root under which it was verified, not with the root that holds at its first look.
    """
    identity = _somebody(monkeypatch)
    monkeypatch.setattr(revocation_watch, "VERSION_EVERY", 1)
    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false", "memory_mb": 256, "cpu_ms": 60_000}
    package = world.sign(world.package({"main.py": SLEEPS}, **fields))
    listening = RunOperations.listening

    def replaced(self: RunOperations, directory: Path) -> contextlib.AbstractContextManager[None]:
        (one,) = registry.live(world.state / "runs")
        raw = revoking.next_root(world, revoking.manifest_of(world, one.payload_digest))
        with State(world.state) as state:
            state.replace_root(raw, int(time.time() * 1000))
        return listening(self, directory)

    monkeypatch.setattr(RunOperations, "listening", replaced)
    _revoked(world.run(package))
    assert not _of_uid(identity.uid)


def test_one_that_only_its_uid_confines_ends_where_whoever_stopped_it_was_killed_over_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = _somebody(monkeypatch)
    fields: dict[str, Any] = {"backend": "trusted-local", "required": "false", "memory_mb": 256, "cpu_ms": 60_000}
    package = world.sign(world.package({"main.py": SLEEPS}, **fields))
    answers: list[RunResult] = []
    thread = threading.Thread(target=lambda: answers.append(world.run(package)))
    thread.start()
    (one,) = until(lambda: registry.live(world.state / "runs"))
    until((one.path / METER).exists)  # it has its intent
    stopped = cgroup.Leaf(cgroup.Hierarchies.read(), one.run_id)
    stopped.adopt(rundir_directory.cgroups_of(one.path))
    stopped.freeze()
    try:
        marks.mark_revoked(one.path, "stolen")
        thread.join(60)
        assert not thread.is_alive()
    finally:
        cgroup_kill.kill([stopped])
        thread.join(60)
    _revoked(answers[0], "stolen")
    until(lambda: not _of_uid(identity.uid))


def _somebody(monkeypatch: pytest.MonkeyPatch) -> trusted_local.Identity:
    """Return an identity without an account, outside the range of the sandboxed runs.

    Its uid differs from those of other test processes.
    """
    uid = 2_000_000_000 + os.getpid()
    identity = trusted_local.Identity("nobody-in-particular", uid, uid)
    monkeypatch.setattr(trusted_local, "identify", lambda name, config: identity)
    return identity


def _of_uid(uid: int) -> list[int]:
    """Processes of a user."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{entry}").st_uid == uid:
                found.append(int(entry))
    return found


def _install(world: World, build: Callable[[Any], Any]) -> revocation.Enforced:
    return revoking.revoke(world, revoking.next_root(world, build))
