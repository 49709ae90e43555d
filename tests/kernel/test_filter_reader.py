"""A process under a filter has filters read for it by one process.

The reader has no more rights than that takes, and no malformed question ends it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from sandbox.attest import verifier
from sandbox.kernel import libc
from sandbox.kernel.net import netns
from sandbox.kernel.proc.capabilities import CAPABILITIES
from sandbox.kernel.runsc import command as runsc_command
from sandbox.kernel.seccomp import dump
from sandbox.kernel.seccomp import reader as seccomp_reader
from sandbox.serve import filter_reader, hardening
from sandbox.shim import process
from tests.kernel import live_runs, serving
from tests.kernel.serving import Served
from tests.kernel.test_after_a_restart import _killed, at_work
from tests.kernel.test_serve import live
from tests.kernel.world import ROOT, World

ARCH = os.uname().machine
OWN = runsc_command.own_filter(ARCH)
DIGESTS = (f"{len(OWN) // 8}:{hashlib.sha256(OWN).hexdigest()}",)
OTHERS: Final = "0" * 64
SLEEPS = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from sandbox.kernel import libc
libc.set_seccomp_filter(bytes.fromhex(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def filtered() -> Iterator[int]:
    """A process under the filter that runsc is started under."""
    command = [sys.executable, "-c", SLEEPS, OWN.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == b"ready\n"
        yield popen.pid
        assert popen.stdin is not None
        popen.stdin.close()
        assert popen.wait(live_runs.WAIT_SECONDS) == 0, "it goes on"


@contextlib.contextmanager
def sleeping() -> Iterator[int]:
    """A process under no filter."""
    with subprocess.Popen(["sleep", "300"]) as popen:
        try:
            yield popen.pid
        finally:
            popen.kill()


@pytest.fixture
def reads() -> Iterator[process.Shim]:
    """A reader that this process and what it forks asks."""
    with filter_reader.forked() as child:
        yield child
        child.signal(signal.SIGKILL)
        child.reap()


def under_a_filter(look: Callable[[], object]) -> Any:
    """Return the result of ``look`` in a process under the supervisor's own filter."""
    read, write = os.pipe2(os.O_CLOEXEC)

    def work() -> None:
        libc.set_seccomp_filter(hardening.program(ARCH))
        try:
            said = look()
        except OSError as e:
            said = [type(e).__name__, e.errno, e.strerror]
        os.write(write, json.dumps(said).encode())

    child = process.fork(work, keep=(2, write))
    os.close(write)
    with os.fdopen(read, "rb") as out:
        raw = out.read()
    assert child.reap() == 0
    child.close()
    return json.loads(raw)


def ended(child: process.Shim) -> bool:
    """Whether it has ended, or does."""
    return process.wait(child.pidfd, live_runs.WAIT_SECONDS)


def asking() -> socket.socket:
    """The socket that questions go over."""
    (fd,) = seccomp_reader.descriptors()
    return socket.socket(fileno=os.dup(fd))


# --- the process -----------------------------------------------------------------------------------


def test_who_is_under_filter_reads_none_and_is_answered(filtered: int, reads: process.Shim) -> None:
    assert under_a_filter(lambda: dump.digests(filtered)) is None, "the control: the kernel shows none"
    assert under_a_filter(lambda: seccomp_reader.digests(filtered)) == list(DIGESTS)
    assert dump.digests(filtered) == DIGESTS, "and it is what is there"


def test_process_without_filters_and_one_gone(reads: process.Shim) -> None:
    with sleeping() as pid:
        assert seccomp_reader.digests(pid) is dump.digests(pid) is None
    for digests in (dump.digests, seccomp_reader.digests):
        with pytest.raises((ProcessLookupError, FileNotFoundError)):
            digests(pid)


def test_it_has_what_it_needs_and_no_more(reads: process.Shim) -> None:
    live_runs.until(lambda: serving.status(reads.pid)["NoNewPrivs"] == "1")
    status = serving.status(reads.pid)
    both = 1 << CAPABILITIES["sys_admin"] | 1 << CAPABILITIES["sys_ptrace"]
    assert [int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")] == [both] * 3
    assert [int(status[name], 16) for name in ("CapInh", "CapAmb")] == [0, 0]
    assert status["Seccomp"] == "0", "under a filter it could not read"
    assert os.readlink(f"/proc/{reads.pid}/ns/net") != os.readlink("/proc/self/ns/net")
    assert os.readlink(f"/proc/{reads.pid}/cwd") == "/"
    opened = {os.readlink(f"/proc/{reads.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{reads.pid}/fd") if int(fd) > 2}
    assert len(opened) == 1
    assert opened.pop().startswith("socket:")


def test_it_ends_with_last_that_could_ask(filtered: int) -> None:
    read, write = os.pipe2(os.O_CLOEXEC)
    with filter_reader.forked() as child:
        kept = process.Shim(child.pid, os.pidfd_open(child.pid))
        heir = process.fork(lambda: os.read(read, 1), keep=(2, read))
    os.close(read)
    assert not process.wait(kept.pidfd, 0.3), "a fork of ours may still ask"
    assert seccomp_reader.descriptors() == (), "we do not any more"
    os.close(write)
    assert heir.reap() == 0
    heir.close()
    assert ended(kept)
    assert kept.reap() == 0
    kept.close()


def test_without_it_nothing_is_taken_for_read(filtered: int, reads: process.Shim) -> None:
    assert seccomp_reader.digests(filtered) == DIGESTS
    reads.signal(signal.SIGKILL)
    assert ended(reads)
    with pytest.raises(OSError, match="does not answer"):
        seccomp_reader.digests(filtered)


def test_one_stopped_is_not_waited_for_without_end(
    filtered: int, reads: process.Shim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seccomp_reader, "ANSWER_SECONDS", 0.3)
    reads.signal(signal.SIGSTOP)
    begin = time.monotonic()
    # The first few wait for an answer, those after them for room in the queue.
    for _ in range(20):
        with pytest.raises(TimeoutError):
            seccomp_reader.digests(filtered)
    assert time.monotonic() - begin < live_runs.WAIT_SECONDS
    reads.signal(signal.SIGCONT)
    monkeypatch.undo()
    assert seccomp_reader.digests(filtered) == DIGESTS


# --- questions that are none -----------------------------------------------------------------------

QUESTION = struct.Struct("=I")


def packet(raw: bytes, *fds: int) -> None:
    """Send the reader a packet."""
    with asking() as sock:
        if fds:
            socket.send_fds(sock, [raw], list(fds))
        else:
            sock.send(raw)


def test_nonsense_is_answered_by_nothing_and_harms_nobody(filtered: int, reads: process.Shim) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    null = os.open("/dev/null", os.O_RDONLY)
    full, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, full, far:
        full.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                full.send(b"x" * 65536)
        question = QUESTION.pack(filtered)
        for raw in (b"", b"\0", question[:-1], question + b"\0", b"x" * 1000):
            packet(raw)
            packet(raw, theirs.fileno())
        packet(question)
        packet(question, null)  # cannot be written
        packet(question, full.fileno())  # is not read
        packet(question, *[theirs.fileno()] * 50)

        os.close(null)
        assert seccomp_reader.digests(filtered) == DIGESTS
        # Only one of all these was a question with a socket for its answer.
        assert json.loads(ours.recv(65536)) == {"digests": list(DIGESTS)}
        assert not select.select([ours], [], [], 0.2)[0]
    live_runs.until(lambda: len(os.listdir(f"/proc/{reads.pid}/fd")) == 4)
    live_runs.until(lambda: len(os.listdir(f"/proc/{reads.pid}/task")) == 1)


@pytest.mark.parametrize("pid", [0, 2**31, 2**32 - 1, 1 << 22])
def test_number_no_process(pid: int, filtered: int, reads: process.Shim) -> None:
    with pytest.raises(OSError):  # noqa: PT011 - which one is the kernel's matter
        seccomp_reader.digests(pid)
    assert seccomp_reader.digests(filtered) == DIGESTS


def test_it_does_not_read_itself(filtered: int, reads: process.Shim) -> None:
    assert seccomp_reader.digests(reads.pid) is None
    assert seccomp_reader.digests(filtered) == DIGESTS


def test_who_asks_of_another_traced_holds_up_nobody(filtered: int, reads: process.Shim) -> None:
    found: list[int | None] = []
    begun, over = threading.Event(), threading.Event()
    with sleeping() as other:

        def trace() -> None:
            dump._ptrace(dump.PTRACE_SEIZE, other)
            begun.set()
            over.wait(live_runs.WAIT_SECONDS)

        def ask() -> None:
            try:
                seccomp_reader.digests(other)
            except OSError as e:
                found.append(e.errno)

        wait = netns.aside(trace)
        assert begun.wait(live_runs.WAIT_SECONDS)
        askers = [threading.Thread(target=ask) for _ in range(8)]
        for one in askers:
            one.start()
        assert seccomp_reader.digests(filtered) == DIGESTS
        assert not found, "they wait, and we did not"
        for one in askers:
            one.join(live_runs.WAIT_SECONDS)
        over.set()
        wait()
    assert found == [errno.EBUSY] * 8


def test_more_than_are_answered_at_once(filtered: int, reads: process.Shim) -> None:
    found: list[object] = []
    askers = [
        threading.Thread(target=lambda: found.append(seccomp_reader.digests(filtered)))
        for _ in range(4 * seccomp_reader.AT_ONCE)
    ]
    for one in askers:
        one.start()
    for one in askers:
        one.join(live_runs.WAIT_SECONDS)
    assert found == [DIGESTS] * len(askers)


def test_end_that_one_says_for_all_is_end(filtered: int, reads: process.Shim) -> None:
    """And is not looked at again and again, for good."""
    with asking() as sock:
        sock.shutdown(socket.SHUT_WR)
    assert ended(reads)
    with pytest.raises(OSError, match="does not answer"):
        seccomp_reader.digests(filtered)


# --- the supervisor --------------------------------------------------------------------------------


def test_filters_of_run_under_supervisor_are_held_to_those_before(world: World) -> None:
    package = world.sign(world.copy("hello"))
    path = world.state / "closures" / verifier.FILTERS
    path.unlink(missing_ok=True)  # and not written over: its file is every test's
    with Served(world) as served:
        assert served.run(package).error is None
        held = json.loads(path.read_text())
        known = [one for one in held.values() if isinstance(one, dict)]
        assert known
        for one in known:
            assert {name: len(loaded) for name, loaded in one.items()} == {"runsc-gofer": 1, "runsc-sandbox": 1}
        assert served.run(package).error is None, "the control: they are the same again"
        for one in known:
            one["runsc-sandbox"] = [f"1:{OTHERS}"]
        path.write_text(json.dumps(held))
        answer = served.run(package)
        assert answer.error is not None
        assert answer.error.code == "drift"
        assert "filter is not as it was made" in answer.error.message


def test_who_is_nice_is_held_to_what_nice_are_under(world: World) -> None:
    """runsc's filter names its niceness; what was seen at another says nothing of it."""
    package = world.sign(world.copy("hello"))
    path = world.state / "closures" / verifier.FILTERS
    path.unlink(missing_ok=True)
    environment = {**os.environ, "COVENANT_HOME": str(world.home), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "covenant", "run", str(package), "hi", "--json"]
    seen = []
    for nice in (0, 7, 0, 7):
        done = subprocess.run(["nice", "-n", str(nice), *command], env=environment, capture_output=True, check=False)
        assert done.returncode == 0, (nice, done.stdout, done.stderr)
        seen.append(len(json.loads(path.read_text())))
    assert seen == [1, 2, 2, 2], "each is remembered, and compared"
    held = json.loads(path.read_text())
    path.write_text(json.dumps({key: {**one, "runsc-sandbox": [f"1:{OTHERS}"]} for key, one in held.items()}))
    done = subprocess.run(["nice", "-n", "7", *command], env=environment, capture_output=True, check=False)
    assert json.loads(done.stdout)["code"] == "drift"
    path.unlink()  # its file is every test's


def test_supervisor_that_cannot_read_any_more_says_so_and_ends(world: World) -> None:
    package = world.sign(world.copy("hello"))
    with Served(world) as served:
        assert served.run(package).error is None
        os.kill(serving.reader_of(served.pid), signal.SIGKILL)
        assert served.process is not None
        assert served.process.wait(live_runs.WAIT_SECONDS) == 1
        assert "the process that reads filters has ended" in served.log()
        served.start()
        assert served.run(package).error is None


@pytest.mark.parametrize("under", [False, True])
def test_supervisor_started_under_filter_says_that_it_compares_none(world: World, *, under: bool) -> None:
    """As in a container: runs are what they were, and root is told what is missing."""
    program = OWN.hex()
    before = [sys.executable, "-c", _FILTERED, str(ROOT), program] if under else []
    path = world.state / "closures" / verifier.FILTERS
    path.unlink(missing_ok=True)
    with Served(world, before=before) as served:
        assert served.run(world.sign(world.copy("hello"))).error is None
        assert ("it was started under a filter" in served.log()) == under
        assert path.exists() != under


# Goes on as what comes behind it, under a filter.
_FILTERED = """
import os, sys
sys.path.insert(0, sys.argv[1])
from sandbox.kernel import libc
libc.set_seccomp_filter(bytes.fromhex(sys.argv[2]))
os.execv(sys.argv[3], sys.argv[3:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_reader_outlives_its_supervisor_for_nobody(world: World, number: int) -> None:
    with Served(world) as served:
        served.quiet()
        fd = os.pidfd_open(serving.reader_of(served.pid))
        if number == signal.SIGKILL:
            served.kill()
        else:
            assert served.stop() == 0, served.log()
        assert process.wait(fd, live_runs.WAIT_SECONDS)
        os.close(fd)


def test_run_that_outlives_its_supervisor_is_still_attested(world: World) -> None:
    """Also when its reader ends too: what was read of a process once is known of it."""
    with Served(world, on_supervisor_exit="continue", attest_seconds=1) as served, at_work(served) as (entry, sock):
        reading = serving.reader_of(served.pid)
        fd = os.pidfd_open(reading)
        served.kill()
        time.sleep(3)  # of its looks
        assert not process.wait(fd, 0)
        assert not drift(world)
        # What was read once of a process need not be read again: nothing of it is in doubt.
        os.kill(reading, signal.SIGKILL)
        assert process.wait(fd, live_runs.WAIT_SECONDS)
        os.close(fd)
        time.sleep(3)
        assert not drift(world)
        assert live(world, "long")[0].run_id == entry.run_id
        served.start()
        _killed(served, entry, sock)


def drift(world: World) -> list[Any]:
    """The log's rows of it."""
    return [row for row in world.rows() if row["kind"]["type"] == "drift"]
