"""A supervisor that has no descriptor or no process left: who asks is told so or waits, what lives is not touched, and
it serves again as soon as there is room."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import unix_wire
from sandbox.kernel.cgroup import cgroup
from sandbox.kernel.proc import pipes
from sandbox.rundir import registry
from sandbox.serve.api import client
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.live_runs import until
from tests.kernel.serving import CALLER, STRANGER, Served, asked
from tests.kernel.test_lifecycle import COUNTS
from tests.kernel.world import SLOWNESS, World

# Of the silent: so long that none of these tests waits for it but the one that does.
SECONDS = 5 * SLOWNESS
PS = unix_wire.encode({"kind": "ps"})
BUSY = "too_many_requests"


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), caller_requests=2, request_seconds=SECONDS) as made,
    ):
        yield made
        made.quiet()
        assert leftovers(made.world) == []


@pytest.fixture
def unharmed(served: Served) -> Iterator[None]:
    """A run that lives meanwhile works on, and afterwards nothing is open that was not before."""
    world = served.world
    package = world.sign(world.package({"main.py": COUNTS}, name="counts", id="counts", cpu_ms=250_000))
    with asked(served.path, package) as run:
        run_id = until(lambda: [one.run_id for one in _live(served) if one.state == "Running"])[0]
        counted = until(lambda: _counted(served, run_id))
        _settled(served)
        before, pid = served.descriptors(), served.pid
        yield
        _settled(served)
        until(lambda: served.descriptors() == before)
        assert (served.pid, [one.run_id for one in _live(served)]) == (pid, [run_id])
        assert until(lambda: _counted(served, run_id) > counted)
        with served.connected() as sock:
            assert client.ask(sock, "operate", operation="kill", run=run_id)["runs"] == [run_id]
        # Its client was there all the time, and is told of its end.
        answer = until(lambda: _last(run))
        assert (answer["kind"], answer["error"]["code"]) == ("answer", "stopped")
    served.quiet()


def _live(served: Served) -> list[registry.Entry]:
    return registry.live(served.world.state / "runs")


def _counted(served: Served, run_id: str) -> int:
    """How many lines the run has written, asked of the supervisor."""
    with served.connected() as sock:
        return len(client.ask(sock, "logs", run=run_id)["text"].split())


def _last(run: socket.socket) -> dict[str, Any] | None:
    """Return the next message that is no state."""
    said = client._next(run)
    return None if said["kind"] == "state" else said


def _settled(served: Served) -> None:
    """Wait until the supervisor has the keeper of the one live run and an idle worker: then it closes nothing more."""
    until(lambda: (len(served.children()), len(served.waiting())) == (1, 1))


def asking(served: Served, said: bytes, uid: int = 0) -> socket.socket:
    """A connection of this uid's, on which this was said."""
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(60 * SLOWNESS)
    os.setegid(uid)
    os.seteuid(uid)
    try:
        made.connect(str(served.path))  # the kernel notes who it is now (SO_PEERCRED, unix(7))
    finally:
        os.seteuid(0)
        os.setegid(0)
    with contextlib.suppress(BrokenPipeError):  # it was refused before it spoke, which it can hear
        made.sendall(said)
    return made


def word(sock: socket.socket) -> str:
    """Return the code of the answer, or its kind where it is no error."""
    raw = unix_wire.receive(sock, max_bytes=unix_wire.ANSWER_BYTES, until=time.monotonic() + 60 * SLOWNESS)
    assert raw is not None
    document = json.loads(raw)
    return str(document.get("code") or document["kind"])


def silent(*socks: socket.socket) -> bool:
    """Whether none of them is told anything for a second."""
    time.sleep(1)
    return not any(pipes.readable(sock.fileno(), 0) for sock in socks)


def _numbers(pid: int) -> set[int]:
    return {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}


def lower(pid: int, room: int = 0) -> None:
    """It may have so many more descriptors than it has, and no more (getrlimit(2): the limit is of their numbers)."""
    taken = _numbers(pid)
    free = [number for number in range(len(taken) + room + 1) if number not in taken]
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free[room], most))


@contextlib.contextmanager
def lowered(pid: int, room: int = 0) -> Iterator[None]:
    """``lower``, while the block lasts."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    lower(pid, room)
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@contextlib.contextmanager
def without_a_process(pid: int) -> Iterator[None]:
    """Let no fork of this process succeed in the block. RLIMIT_NPROC does not bind a process with CAP_SYS_ADMIN."""
    hierarchies = cgroup.Hierarchies.read()
    lines = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
    wanted = "pids" if hierarchies.version == 1 else ""
    home = next(path for _, names, path in lines if wanted in names.split(","))
    with cgroup.Leaf(hierarchies, f"test-{uuid.uuid4()}") as leaf:
        leaf.apply([cgroup.Limit("pids", "pids.max", "0")])
        (leaf.paths["pids"] / "cgroup.procs").write_text(str(pid))
        try:
            yield
        finally:
            (hierarchies.mounts["pids"] / home.strip("/") / "cgroup.procs").write_text(str(pid))
            assert leaf.pids() == []


def _has_no_worker(served: Served) -> bool:
    """Whether only the keeper of the live run is left, and no worker can be forked; an idle worker is killed."""
    for pid in served.waiting():
        os.kill(pid, signal.SIGKILL)
    lower(served.pid)
    # What an ended child leaves is closed a moment later, and would be room for the next.
    open_now = served.descriptors()
    time.sleep(0.2)
    if served.descriptors() != open_now or len(serving.children_of(served.pid)) != 1:
        return False
    lower(served.pid)
    return served.descriptors() == open_now and len(serving.children_of(served.pid)) == 1


def _may_ask_twice_at_once(served: Served) -> bool:
    """Whether nothing that the caller had open is counted any more: they may have two."""
    with asking(served, b"", CALLER) as one, asking(served, b"", CALLER) as other:
        for sock in (one, other):
            with contextlib.suppress(BrokenPipeError):  # it was refused before it spoke
                sock.sendall(PS)
        return [word(one), word(other)] == ["runs", "runs"]


@pytest.mark.usefixtures("unharmed")
def test_without_descriptor_whoever_asks_waits_or_is_told(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        before = served.descriptors()
        early, caller = (stack.enter_context(asking(served, b"", uid)) for uid in (0, CALLER))
        until(lambda: served.descriptors() == before + 2)
        with lowered(served.pid):
            late = stack.enter_context(asking(served, PS))
            assert silent(late)
            # The idle worker serves the client that was there before. Then there is room for one more.
            early.sendall(PS)
            assert word(early) == "runs"
            assert word(late) in ("runs", BUSY)
            until(lambda: _has_no_worker(served))
            caller.sendall(PS)
            assert word(caller) == BUSY
        # What has just been answered may count for a moment more.
        until(lambda: _may_ask_twice_at_once(served))


@pytest.mark.usefixtures("unharmed")
def test_without_process_whoever_asks_is_told(served: Served) -> None:
    with contextlib.ExitStack() as stack:
        before = served.descriptors()
        early = stack.enter_context(asking(served, b"", CALLER))
        until(lambda: served.descriptors() == before + 1)
        with without_a_process(served.pid):
            # The idle worker serves one request.
            with asking(served, PS) as sock:
                assert word(sock) == "runs"
            for uid in (0, CALLER, CALLER):
                with asking(served, PS, uid) as sock:
                    assert word(sock) == BUSY
            with asking(served, PS, STRANGER) as sock:
                assert word(sock) == "not_a_caller"
        early.sendall(PS)
        assert word(early) == "runs"
        # What has just been answered may count for a moment more.
        until(lambda: _may_ask_twice_at_once(served))


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("who", ["the silent", "strangers while there is no process"])
def test_what_was_refused_keeps_no_descriptor_that_it_would_take_to_let_go_of_it(served: Served, who: str) -> None:
    """Open more of them than there is room for: if they got all of it, no client could be accepted again."""
    room, uid, told = 6, *((0, "bad_request") if who == "the silent" else (STRANGER, "not_a_caller"))
    with contextlib.ExitStack() as stack:
        stack.enter_context(lowered(served.pid, room))
        with contextlib.nullcontext() if uid == 0 else without_a_process(served.pid):
            clients = [stack.enter_context(asking(served, b"", uid)) for _ in range(room + 3)]
            assert silent(*clients[room:])
        assert [word(sock) for sock in clients] == [told] * len(clients)
        # With as little as before, and with them gone.
        with asking(served, PS) as sock:
            assert word(sock) == "runs"


def test_log_is_followed_again_as_soon_as_there_is_process(warm: Path) -> None:
    with serving.open_place() as base, Served(World(base, warm=warm), journal=True) as made:
        # Beside the keeper that waits, which is among the children until it does.
        (follows,) = until(lambda: len(made.waiting()) == len(found := made.children()) == 1 and found)
        with without_a_process(made.pid):
            os.kill(follows, signal.SIGKILL)
            until(lambda: made.children() == [])
        assert until(made.children) != [follows]
