"""Attestation of live runs: every layer is tampered with by hand, and found, written down and answered."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.prove.live import Standing
from sandbox.attest import monitor, reference, verifier
from sandbox.kernel import libc
from sandbox.rundir import directory
from sandbox.storage import artefact_reader
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import Live, live
from tests.kernel.test_command_line import NOBODY, call, document
from tests.kernel.world import World


def leaf(one: Live, controller: str, file: str) -> Path:
    """A file of the run's own cgroup."""
    return Path(one.made.cgroup_files[controller], file)


def within(pid: int, code: str) -> None:
    """As ``attempt``, which must work."""
    failure = attempt(pid, code)
    assert failure == "", failure


def attempt(pid: int, code: str) -> str:
    """Run code in the mount namespace of one of the run's processes: root's hand, from the machine."""
    program = (
        "import ctypes, os, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from sandbox.kernel import libc\n"
        f"fd = os.open('/proc/{pid}/ns/mnt', os.O_RDONLY)\n"
        "assert ctypes.CDLL(None, use_errno=True).setns(fd, 0) == 0\n"
        # It sees a part of its namespace as its root (chroot).
        f"os.chroot({os.readlink(f'/proc/{pid}/root')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", program + code], capture_output=True, text=True, timeout=60)
    return done.stderr if done.returncode else ""


READ_ONLY = libc.MS_RDONLY | libc.MS_NOSUID | libc.MS_NODEV


@contextlib.contextmanager
def raised(one: Live, controller: str, file: str, value: str) -> Iterator[None]:
    """A limit of the run, raised by hand and put back."""
    path = leaf(one, controller, file)
    before = path.read_text().strip()
    path.write_text(value)
    try:
        yield
    finally:
        path.write_text(before)


@contextlib.contextmanager
def another_mount(one: Live) -> Iterator[None]:
    """The agent's root gets a file system more."""
    gofer = one.family().gofer.name.pid
    within(gofer, "libc.mount('tmpfs', '/usr', 'tmpfs')")
    try:
        yield
    finally:
        within(gofer, "libc.umount2('/usr', libc.MNT_DETACH)")


@contextlib.contextmanager
def covered_package(one: Live) -> Iterator[None]:
    """Another directory lies over the package, with the same flags."""
    gofer = one.family().gofer.name.pid
    within(gofer, f"libc.mount('/usr', '/workspace', flags={libc.MS_BIND})")
    within(gofer, f"libc.mount('none', '/workspace', flags={libc.MS_REMOUNT | libc.MS_BIND | READ_ONLY})")
    try:
        yield
    finally:
        within(gofer, "libc.umount2('/workspace', libc.MNT_DETACH)")


@contextlib.contextmanager
def package_with_noexec(one: Live) -> Iterator[None]:
    """The package's mount gets a flag by which its libraries can no longer be mapped."""
    gofer, flags = one.family().gofer.name.pid, libc.MS_REMOUNT | libc.MS_BIND | READ_ONLY
    within(gofer, f"libc.mount('none', '/workspace', flags={flags | libc.MS_NOEXEC})")
    try:
        yield
    finally:
        within(gofer, f"libc.mount('none', '/workspace', flags={flags})")


@contextlib.contextmanager
def moved_out(one: Live) -> Iterator[None]:
    """The sandbox's process leaves the cgroup that holds its memory."""
    aside = leaf(one, "memory", "").parent / f"aside-{one.made.run_id}"
    aside.mkdir()
    pid = one.family().sandbox.name.pid
    (aside / "cgroup.procs").write_text(str(pid))
    try:
        yield
    finally:
        leaf(one, "memory", "cgroup.procs").write_text(str(pid))
        aside.rmdir()


@contextlib.contextmanager
def one_thread_out(one: Live) -> Iterator[None]:
    """On version 1 a single thread can leave, and its process seems to have stayed."""
    aside = leaf(one, "cpu", "").parent / f"aside-{one.made.run_id}"
    aside.mkdir()
    pid = one.family().sandbox.name.pid
    thread = next(task for task in os.listdir(f"/proc/{pid}/task") if task != str(pid))
    (aside / "tasks").write_text(thread)
    try:
        yield
    finally:
        # A thread that it began meanwhile was born there, and would stay.
        while left := (aside / "tasks").read_text().split():
            for task in left:
                with contextlib.suppress(ProcessLookupError):
                    leaf(one, "cpu", "tasks").write_text(task)
        aside.rmdir()


@contextlib.contextmanager
def a_stranger(one: Live) -> Iterator[None]:
    """Put a foreign process under the run's limits."""
    with subprocess.Popen(["/usr/bin/sleep", "60"]) as stranger:
        leaf(one, "pids", "cgroup.procs").write_text(str(stranger.pid))
        try:
            yield
        finally:
            stranger.kill()


@contextlib.contextmanager
def edited(path: Path) -> Iterator[None]:
    """A file of the run, changed on the disk."""
    before, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o600)
    path.write_bytes(before.replace(b"true", b"false") + b" ")
    path.chmod(mode)
    try:
        yield
    finally:
        path.write_bytes(before)


Tamper = Callable[[Live], contextlib.AbstractContextManager[None]]
DOUBLED = {1: ("cpu.cfs_quota_us", "200000"), 2: ("cpu.max", "200000 100000")}
# What is done by hand -> the layer that says so, and a word of what it says.
TAMPERS: dict[str, tuple[Tamper, str, str]] = {
    "tasks without limit": (lambda one: raised(one, "pids", "pids.max", "max"), "cgroup", "no whole number"),
    "tasks doubled": (lambda one: raised(one, "pids", "pids.max", str(64 + 4 * 64)), "cgroup", "not of 64"),
    "processor doubled": (
        lambda one: raised(one, "cpu", *DOUBLED[one.made.cgroup_version]), "cgroup", "cpu_millis 2000",
    ),
    "a mount more": (another_mount, "mounts", "a mount that nobody made"),
    "another package": (covered_package, "mounts", "one over another"),
    "a package that cannot be mapped": (package_with_noexec, "mounts", "noexec is not set on the host"),
    "out of the cgroup": (moved_out, "cgroup", "it is in"),
    "a stranger": (a_stranger, "cgroup", "process"),
    "another configuration": (
        lambda one: edited(one.directory / "bundle" / "config.json"), "bundle", "not as it was written",
    ),
    "another program": (lambda one: edited(Path(one.made.package, "main.py")), "package", ""),
}  # fmt: skip
ON_VERSION_1: dict[str, tuple[Tamper, str, str]] = {
    "a thread out of the cgroup": (one_thread_out, "cgroup", "it is in")
}


def test_every_tamper_is_found_within_period_and_told(tmp_path: Path, warm: Path) -> None:
    """One run whose operator is only told: each tamper is found, undone, and the run is as it was made again."""
    world = World(tmp_path, warm=warm)
    world.configure(attest_seconds=1, on_drift="alarm")
    with live(world) as one:
        time.sleep(2.5)
        assert one.drift() == [], "control: nothing was tampered with"
        assert {layer.standing for layer in one.report().layers} == {Standing.EQUAL}
        for name, (tamper, layer, says) in {
            **TAMPERS,
            **(ON_VERSION_1 if one.made.cgroup_version == 1 else {}),
        }.items():
            before = len(one.drift())
            with tamper(one):
                from_outside = one.report()
                assert [found.name for found in from_outside.layers if not found.holds] == [layer], name
                found = one.drift_after(before)
                assert found[0][0] == layer, (name, found)
                assert says in found[0][1], (name, found)
            assert one.report().holds, name
        assert not one.answers, "an alarm ends nothing"
    started = one.rows("run_started")[0]
    assert any("on_drift = alarm" in line for line in started["not_enforced"])
    assert leftovers(world) == []


@pytest.mark.parametrize("name", ["processor doubled", "a mount more"])
def test_drift_ends_agent_and_its_row_comes_first(world: World, name: str) -> None:
    world.configure(attest_seconds=1)
    tamper, layer, _ = TAMPERS[name]
    # What was tampered with is gone when the hand wants to put it back.
    with live(world) as one, contextlib.suppress(FileNotFoundError, AssertionError), tamper(one):
        answer = one.wait()
    assert isinstance(answer.error, errors.DriftError)
    assert answer.error.details["layer"] == layer
    kinds = [row["kind"].get("state", row["kind"]["type"]) for row in world.rows()]
    assert kinds[-4:] == ["drift", "Terminated", "Archived", "run_ended"]
    assert one.rows("run_ended")[0]["code"] == "drift"
    assert not any("on_drift" in line for line in one.rows("run_started")[0]["not_enforced"])


def test_what_is_changed_before_agent_is_told_anything_is_found_at_start(world: World) -> None:
    """A period that never ends: the look at the start is every run's own."""
    world.configure(attest_seconds=3600)
    assert world.ask("answer = 1") == 1
    copy = next((world.state / "packages").iterdir())
    assert world.run(world.base / "packages" / "probe").error is None, "control"
    with edited(copy / "main.py"):
        answer = world.run(world.base / "packages" / "probe")
    assert isinstance(answer.error, errors.DriftError)
    assert answer.error.details["layer"] == "package"


@pytest.mark.parametrize("what", ["nothing", "written", "removed"])
def test_run_of_which_part_is_gone_is_given_no_intent(world: World, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """A missing file is no reason to say that the run is gone while its sandbox exists."""
    examine, looks = verifier.examine, []

    def look(made: reference.ReferenceValues, *rest: Any, **more: Any) -> verifier.Examination:
        monkeypatch.setattr(monitor, "examine", examine)
        config = Path(made.directory, "bundle", "config.json")
        if what == "written":
            config.write_bytes(config.read_bytes() + b" {}")
        elif what == "removed":
            config.unlink()
        looks.append(examine(made, *rest, **more))
        return looks[-1]

    monkeypatch.setattr(monitor, "examine", look)
    answer = world.run(world.sign(world.copy("hello")))
    states = [row["kind"]["state"] for row in world.rows() if row["kind"]["type"] == "run_state"]
    assert (answer.error is None, looks[0].holds, "Running" in states) == (what == "nothing",) * 3
    assert what == "nothing" or isinstance(answer.error, errors.DriftError)


def test_look_at_run_being_ended_is_left_at_its_next_part(world: World) -> None:
    with live(world) as one:
        policy, asked = artefact_reader.read(one.directory / directory.POLICY), [0]

        def look(most: int) -> verifier.Examination:
            asked[0] = 0

            def over() -> bool:
                asked[0] += 1
                return asked[0] > most

            return verifier.examine(one.made, policy, verifier.VerifierCache(), state=world.state, over=over)

        whole = look(1000)
        assert whole.holds, "control"
        parts = asked[0]
        assert parts > 4
        for most in range(parts):
            assert look(most) == verifier.Examination(one.made.run_id, (), gone=True)
            assert asked[0] == most + 1


def test_kernel_lets_not_even_root_take_flag_from_mount_of_gofer(world: World) -> None:
    """Its mounts came to it through a user namespace, which locks their flags: that tamper cannot be made."""
    with live(world) as one:
        gofer = one.family().gofer.name.pid
        flags = libc.MS_REMOUNT | libc.MS_BIND | READ_ONLY
        assert attempt(gofer, f"libc.mount('none', '/workspace', flags={flags})") == "", "control: the same flags"
        for taken in (libc.MS_RDONLY, libc.MS_NOSUID, libc.MS_NODEV):
            refused = attempt(gofer, f"libc.mount('none', '/workspace', flags={flags & ~taken})")
            assert "Operation not permitted" in refused


def test_command_says_layer_by_layer_and_answers_with_3_when_it_does_not_hold(tmp_path: Path, warm: Path) -> None:
    """From another process, as an operator; then the run's own record is forged, and the signed log knows better."""
    world = World(tmp_path, warm=warm)
    # The run's own first examination may come after the change; it would end the run.
    world.configure(attest_seconds=3600, on_drift="alarm")
    with live(world) as one:
        by_name = call(world.home, "attest", one.made.run_id[:8])
        assert by_name.returncode == 0, by_name.stderr
        assert b"held within its manifest" in by_name.stdout
        with raised(one, "pids", "pids.max", "max"):
            tampered = call(world.home, "attest", "--all", "--json")
        assert tampered.returncode == 3
        (run,) = document(tampered)["runs"]
        assert (run["holds"], run["run_id"]) == (False, one.made.run_id)
        standings = {layer["layer"]: layer["standing"] for layer in run["layers"]}
        assert standings.keys() >= {"policy", "bundle", "cgroup", "mounts", "rights", "filter", "package"}
        assert [layer for layer, standing in standings.items() if standing != "equal"] == ["cgroup"]
        assert any(line.startswith("resources: equal") for line in run["domains"])
        with edited(one.directory / "policy" / "cgroup.json"):
            forged = document(call(world.home, "attest", one.made.run_id, "--json"))["runs"][0]["layers"]
        assert [(layer["layer"], layer["standing"]) for layer in forged[:1]] == [("policy", "wider")]
        assert document(call(world.home, "attest", "ffff", "--json"))["code"] == "no_such_run"
        assert document(call(world.home, "attest", "--all", "--json", uid=NOBODY))["code"] == "needs_root"
    nothing = {"kind": "attest", "holds": True, "runs": [], "waiting": []}
    assert document(call(world.home, "attest", "--all", "--json")) == nothing
