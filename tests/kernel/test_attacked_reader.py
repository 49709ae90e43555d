"""Attacks on the process that reads filters: where it cannot read, what ends it, and which processes can reach it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox.kernel.proc.capabilities import CAPABILITIES
from sandbox.kernel.seccomp import dump
from sandbox.kernel.seccomp import reader as seccomp_reader
from sandbox.network.gate import uids
from sandbox.serve import filter_reader, server
from sandbox.shim import process
from tests import loopback_server
from tests.kernel import live_runs, serving
from tests.kernel.serving import Served
from tests.kernel.test_filter_reader import DIGESTS, filtered, reads, sleeping  # noqa: F401 - two are fixtures
from tests.kernel.test_serve import LONG, running
from tests.kernel.test_service_of_systemd import BootedSupervisor
from tests.kernel.world import SLOWNESS, World


def opened(pid: int) -> set[str]:
    """Return the links of a process's open descriptors; empty for a process that is gone."""
    found = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return found


def below(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from below(int(child))


def exited(pidfd: int) -> bool:
    """Whether it has ended, or does."""
    return process.wait(pidfd, live_runs.WAIT_SECONDS)


# --- where it cannot read --------------------------------------------------------------------------


def test_under_unit_shipped_it_is_under_no_filter_either(tmp_path: Path) -> None:
    """systemd makes filters of some of a unit's keys (SystemCallArchitectures= among them).

    A process that is started under a filter reads none. Each answer would be that nothing can be read, which is no
    drift and goes unnoticed.
    """
    with BootedSupervisor(tmp_path) as booted:
        assert booted.asked()["kind"] == "runs"
        main = booted.main()
        assert serving.status(main)["Seccomp"] == "2", "the control: it has one of its own at least"
        assert dump.digests(main), "the control: whoever is under none reads them"
        assert serving.status(serving.reader_of(main))["Seccomp"] == "0"


def test_without_thread_it_says_what_whoever_reads_by_themselves_is_told(
    filtered: int,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A read that cannot start a thread is EAGAIN (``readback_filter``), which ends no run.

    A missing reader would be drift: a machine out of threads for a moment would end each starting run for tampering.
    """

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        assert dump.digests(filtered) is None, "the control"
        with filter_reader.forked() as child:
            try:
                assert seccomp_reader.digests(filtered) is None
            finally:
                child.signal(signal.SIGKILL)
                child.reap()


def test_with_few_descriptors_it_answers_what_it_can_and_goes_on(
    filtered: int,  # noqa: F811
    reads: process.Shim,  # noqa: F811
) -> None:
    """The kernel drops descriptors over the limit with their packet, and the client sees the end of its socket."""
    live_runs.until(lambda: serving.status(reads.pid)["NoNewPrivs"] == "1")
    resource.prlimit(reads.pid, resource.RLIMIT_NOFILE, (8, 8))
    found: list[object] = []

    def ask() -> None:
        try:
            found.append(seccomp_reader.digests(filtered))
        except OSError as e:
            found.append(type(e).__name__)

    askers = [threading.Thread(target=ask) for _ in range(3 * seccomp_reader.AT_ONCE)]
    for one in askers:
        one.start()
    for one in askers:
        one.join(live_runs.WAIT_SECONDS)
    assert len(found) == len(askers), "somebody waits for good"
    assert DIGESTS in found
    assert seccomp_reader.digests(filtered) == DIGESTS
    live_runs.until(lambda: len(os.listdir(f"/proc/{reads.pid}/task")) == 1)


# --- what ends it, and what its end means ----------------------------------------------------------


def test_who_is_told_to_end_with_its_reader_has_not_failed(world: World) -> None:
    """`systemctl kill` and the end of a session signal all processes of a cgroup.

    A supervisor that reports a failure then would be restarted by Restart=on-failure, and nothing would end it.
    """
    with Served(world) as served:
        served.quiet()
        reading = serving.reader_of(served.pid)
        pidfd = os.pidfd_open(reading)
        os.kill(served.pid, signal.SIGSTOP)
        os.kill(served.pid, signal.SIGTERM)
        os.kill(reading, signal.SIGTERM)
        assert exited(pidfd)
        os.close(pidfd)
        os.kill(served.pid, signal.SIGCONT)
        assert served.process is not None
        assert served.process.wait(live_runs.WAIT_SECONDS) == 0, served.log()


def test_reader_ended_before_the_supervisor_is_told(world: World) -> None:
    """A service manager signals the processes of a cgroup one after the other, in any order."""
    with Served(world) as served:
        served.quiet()
        reading = serving.reader_of(served.pid)
        pidfd = os.pidfd_open(reading)
        os.kill(reading, signal.SIGTERM)
        assert exited(pidfd)
        os.close(pidfd)
        os.kill(served.pid, signal.SIGTERM)
        assert served.process is not None
        assert served.process.wait(live_runs.WAIT_SECONDS) == 0, served.log()


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGINT])
def test_terminal_tells_it_nothing(number: int, reads: process.Shim) -> None:  # noqa: F811
    """Signals of a terminal go to a group: it has one of its own, and a session."""
    live_runs.until(lambda: serving.status(reads.pid)["NoNewPrivs"] == "1")
    assert os.getsid(reads.pid) == os.getpgid(reads.pid) == reads.pid
    assert os.getpgid(0) != reads.pid
    if number in (signal.SIGTSTP, signal.SIGTTIN):
        reads.signal(number)
        assert not process.wait(reads.pidfd, 0.1)
        assert serving.status(reads.pid)["State"][0] == "S"


@pytest.mark.parametrize("wait_seconds", [0.0, 0.05, 0.15, 0.4])
def test_supervisor_killed_as_it_starts_leaves_no_reader(world: World, wait_seconds: float) -> None:
    with Served(world) as served:
        served.stop()
        served.start(wait=False)
        found: list[int] = []
        with contextlib.suppress(AssertionError):
            found.append(live_runs.until(lambda: _reading(served.pid), seconds=live_runs.WAIT_SECONDS))
        assert found, served.log()
        pidfd = os.pidfd_open(found[0])
        time.sleep(wait_seconds)
        served.kill()
        assert exited(pidfd)
        os.close(pidfd)
        served.start()


def _reading(pid: int) -> int:
    with contextlib.suppress(ValueError, OSError):
        return serving.reader_of(pid)
    return 0


def test_second_supervisor_of_one_state_leaves_no_reader_and_harms_no_first(world: World) -> None:
    package = world.sign(world.copy("hello"))
    with Served(world) as served:
        first, reading = served.process, serving.reader_of(served.pid)
        served.start(wait=False)
        second, served.process = served.process, first
        assert second is not None
        assert second.wait(live_runs.WAIT_SECONDS) == 1
        assert "another supervisor serves" in served.log()
        live_runs.until(lambda: _readers(world) == [reading])
        assert served.run(package).error is None


def _readers(world: World) -> list[int]:
    """Return the readers of all supervisors of a state, under any parent."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if (
                os.fsencode(world.state) in words
                and Path(f"/proc/{pid}/comm").read_text().strip() == filter_reader.NAME
            ):
                found.append(pid)
    return found


# --- who has the way to it -------------------------------------------------------------------------


def test_nothing_executed_has_way_to_it(world: World) -> None:
    """A holder of the socket can stop any process of the machine for a moment, and end the supervisor (shutdown(2))."""
    package = world.sign(world.package({"main.py": LONG}, id="long", cpu_ms=60_000 * SLOWNESS))
    port = loopback_server.free_port()
    with Served(world, metrics=f"127.0.0.1:{port}") as served:
        live_runs.until(lambda: served.waiting() and _of_user(served.pid, uids.METRICS))
        (end,) = (one for one in opened(serving.reader_of(served.pid)) if one.startswith("socket:"))
        # The one socket that is common to all processes forked with only a shim's descriptors.
        ours = set.intersection(*(opened(pid) for pid in serving.children_of(served.pid)), opened(served.pid))
        (asking,) = (one for one in ours if one.startswith("socket:"))
        assert asking != end
        with serving.asked(served.path, package):
            running(world, "long")
            own = os.stat(f"/proc/{served.pid}/exe")

            def executed() -> list[int]:
                found = []
                for pid in below(served.pid):
                    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                        if not os.path.samestat(os.stat(f"/proc/{pid}/exe"), own):
                            found.append(pid)
                return found

            assert live_runs.until(lambda: len(executed()) >= 2), "the control: the sandbox and its stubs"
            serves = _of_user(served.pid, uids.METRICS)
            assert serves, "the control: who serves the numbers, which is an executed Python"
            for pid in (*executed(), *serves):
                assert not {asking, end} & opened(pid), serving._command(pid)
            has = [pid for pid in below(served.pid) if end in opened(pid)]
            assert has == [serving.reader_of(served.pid)]


def _of_user(pid: int, uid: int) -> list[int]:
    found = []
    for one in below(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if serving.status(one)["Uid"].split()[1] == str(uid):
                found.append(one)
    return found


def test_who_only_closes_what_was_refused_does_not_keep_it(
    reads: process.Shim,  # noqa: F811
) -> None:
    """A refused client decides how long its refusal takes (its own file system).

    For so long, a reader whose supervisor has ended would remain without use, and one more with each that ends.
    """
    (fd,) = seccomp_reader.descriptors()
    asking = os.readlink(f"/proc/self/fd/{fd}")
    caught: list[tuple[process.Shim, int]] = []

    class Held(server.Server):
        def _fork(
            self, work: Callable[[], object], keep: tuple[int, ...], ended: Callable[[int], None], **more: Any
        ) -> int:
            holds = os.open(f"/proc/self/fd/{keep[0]}", os.O_WRONLY | os.O_CLOEXEC)
            caught.append((process.fork(work, keep=keep, **more), holds))
            return caught[-1][0].pidfd

    supervisor: Any = None
    null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    refused, stranger = socket.socketpair()
    with stranger:
        one = Held(supervisor, refused)
        one._alive = null
        one._refuse(refused, b"no")
        one._let_go()
        ((closer, holds),) = caught
        number = os.readlink(f"/proc/self/fd/{stranger.fileno()}")
        try:
            live_runs.until(lambda: len(opened(closer.pid)) <= 4)  # it has closed what is not its own
            found = opened(closer.pid)
            assert number not in found
            assert len([link for link in found if link.startswith("socket:")]) >= 1, "the control: what was refused"
            live_runs.until(lambda: asking not in opened(closer.pid))
        finally:
            one._use_spare()
            os.close(null)
            os.close(holds)
            assert closer.reap() == 0
            closer.close()


def test_reader_that_stands_still_holds_up_nobody_but_who_asks_it(world: World) -> None:
    """The main loop asks it nothing, and a waiting client is answered once the reader goes on."""
    package = world.sign(world.copy("hello"))
    with Served(world) as served:
        assert served.run(package).error is None
        reading = serving.reader_of(served.pid)
        os.kill(reading, signal.SIGSTOP)
        answers: list[Any] = []
        asker = threading.Thread(target=lambda: answers.append(served.run(package)))
        begin = time.monotonic()
        asker.start()
        try:
            while time.monotonic() - begin < 3:
                done = serving.covenant("ps", "--json", served=served)
                assert done.returncode == 0, done
            assert not answers, "the control: it waits"
        finally:
            os.kill(reading, signal.SIGCONT)
            asker.join(live_runs.WAIT_SECONDS)
        assert answers[0].error is None


def test_reader_that_traces_as_it_is_killed_lets_go() -> None:
    """The kernel lets go of whom a tracer that ended had stopped: no agent stands still for good."""
    with sleeping() as pid, filter_reader.forked() as child:
        live_runs.until(lambda: serving.status(child.pid)["NoNewPrivs"] == "1")
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    seccomp_reader.digests(pid)

        asker = threading.Thread(target=ask)
        asker.start()
        live_runs.until(lambda: serving.status(pid)["TracerPid"] != "0")
        child.signal(signal.SIGKILL)
        child.reap()
        over.set()
        asker.join(live_runs.WAIT_SECONDS)
        live_runs.until(lambda: serving.status(pid)["State"][0] == "S" and serving.status(pid)["TracerPid"] == "0")


def test_bounding_set_of_unit_has_what_it_keeps() -> None:
    """Else it would end at once, and the supervisor with it."""
    unit = (Path(__file__).parents[2] / "packaging/systemd/covenant-supervisor.service").read_text()
    lines = [line.partition("=")[2] for line in unit.splitlines() if line.startswith("CapabilityBoundingSet=")]
    given = {name.removeprefix("CAP_").lower() for line in lines for name in line.split()}
    assert {CAPABILITIES[name] for name in given} >= filter_reader._KEPT
