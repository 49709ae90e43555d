"""Sessions of the command line: `covenant run` and `covenant stdio`, in one process and through a supervisor."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sandbox import unix_wire
from sandbox.rundir import registry
from tests.kernel import serving
from tests.kernel.conftest import leftovers, unfinished
from tests.kernel.serving import CALLER, Served
from tests.kernel.test_contract_terminal import TERMINAL
from tests.kernel.test_serve import eventually
from tests.kernel.world import World
from tests.unit.sandbox.shim.test_stream import CAT

STDIO = '[process]\ncontract = "stdio"\n'
SECONDS = 120.0


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base, Served(World(base, warm=warm)) as one:
        yield one


def _package(world: World, code: str, **fields: Any) -> Path:
    return world.sign(world.package({"main.py": code}, **{"more": STDIO, **fields}))


def _environment(served: Served, *, supervised: bool, uid: int) -> dict[str, str]:
    environment = serving.environment_of(served, uid)
    if not supervised:
        del environment["COVENANT_SOCKET"]
    return environment


def _started(
    served: Served, *arguments: str, uid: int = 0, supervised: bool = True, **streams: Any
) -> subprocess.Popen[bytes]:
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        serving.covenant_command(*arguments),
        env=_environment(served, supervised=supervised, uid=uid),
        **{**pipes, **streams},
        **serving.identity(uid),
    )


@pytest.fixture(params=["supervisor", "process"])
def supervised(request: pytest.FixtureRequest, warm: Path) -> Iterator[tuple[Served, bool]]:
    """A supervisor, or none: then the command does the work itself."""
    with serving.open_place() as base:
        one = Served(World(base, warm=warm))
        if request.param == "process":
            yield one, False
        else:
            with one:
                yield one, True


@pytest.mark.parametrize("verb", ["run", "stdio"])
def test_command_relays_streams_and_status(supervised: tuple[Served, bool], verb: str) -> None:
    served, through = supervised
    data = os.urandom(1_000_000)
    path = _package(served.world, CAT + "os.write(2, b'said')\nos._exit(7)")
    process = _started(served, verb, str(path), supervised=through)
    out, err = process.communicate(data, timeout=SECONDS)
    assert process.returncode == 7, err
    assert out == data
    assert b"said" in err
    assert (b"home " in err or b"supervisor of" in err) == (verb == "run")


def test_command_relays_files(supervised: tuple[Served, bool], tmp_path: Path) -> None:
    """Descriptors that are no pipes stay in the client; its own output is complete before it ends."""
    served, through = supervised
    data = os.urandom(700_000)
    (tmp_path / "in").write_bytes(data)
    path = _package(served.world, CAT)
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as sink:
        process = _started(served, "stdio", str(path), supervised=through, stdin=source, stdout=sink)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert (tmp_path / "out").read_bytes() == data


def test_user_has_session_through_supervisor(served: Served) -> None:
    path = _package(served.world, CAT)
    process = _started(served, "stdio", str(path), uid=CALLER)
    out, err = process.communicate(b"hello", timeout=SECONDS)
    assert (process.returncode, out, err) == (0, b"hello", b"")
    row = next(row["kind"] for row in served.world.rows() if row["kind"]["type"] == "session_ended")
    assert row["in_hash_hex"] == row["out_hash_hex"] == hashlib.sha256(b"hello").hexdigest()


def test_session_refused_has_status_of_its_own(supervised: tuple[Served, bool]) -> None:
    """The fix that the refusal names works: an intent for a line agent, no TEXT for a stream."""
    served, through = supervised
    code = "import json\ninput()\nprint(json.dumps({'text': 'fine'}))"
    line = _package(served.world, code, more="", name="line", id="line")
    process = _started(served, "stdio", str(line), supervised=through)
    out, err = process.communicate(b"", timeout=SECONDS)
    assert (process.returncode, out) == (125, b"")
    assert b"wrong_contract" in err
    assert b"covenant run PACKAGE TEXT" in err
    process = _started(served, "run", str(line), "TEXT", supervised=through)
    out, err = process.communicate(b"", timeout=SECONDS)
    assert (process.returncode, out) == (0, b"fine\n"), err
    stream = _package(served.world, CAT)
    process = _started(served, "run", str(stream), "TEXT", supervised=through)
    out, err = process.communicate(b"", timeout=SECONDS)
    assert (process.returncode, out) == (1, b"")
    assert b"without a TEXT" in err
    process = _started(served, "run", str(stream), supervised=through)
    out, _ = process.communicate(b"x", timeout=SECONDS)
    assert (process.returncode, out) == (0, b"x")


def _live(world: World) -> list[Any]:
    return list(registry.live(world.state / "runs"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_client_ends_session(supervised: tuple[Served, bool], number: signal.Signals) -> None:
    """After a SIGKILL in one process nothing is left either: the sandbox dies with its parent."""
    served, through = supervised
    path = _package(served.world, "import time\nprint('ready', flush=True)\ntime.sleep(300)", cpu_ms=300_000)
    process = _started(served, "stdio", str(path), supervised=through)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (entry,) = _live(served.world)
    leaf = [] if through else serving._children(process.pid)
    process.send_signal(number)
    process.communicate(timeout=SECONDS)
    eventually(lambda: not _live(served.world))
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in leaf))
    assert entry.run_id
    if not through and number == signal.SIGKILL:
        # The empty cgroup stays until the next supervisor starts.
        with served:
            assert leftovers(served.world) == []


def test_killed_shim_leaves_nothing(served: Served) -> None:
    path = _package(served.world, "import time\nprint('ready', flush=True)\ntime.sleep(300)", cpu_ms=300_000)
    process = _started(served, "stdio", str(path))
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    (shim,) = [pid for pid in served.children() if serving._children(pid)]
    os.kill(shim, signal.SIGKILL)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 125, err
    assert out == b""
    eventually(lambda: unfinished(served.world) == [])
    eventually(lambda: [row["kind"]["code"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"])
    ends = [row["kind"]["code"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"]
    assert ends == ["cut_off"]


@pytest.mark.parametrize("bad", ["null", "directory", "wrong way", "socket"])
def test_descriptor_that_is_no_pipe_is_refused(served: Served, tmp_path: Path, bad: str) -> None:
    path = _package(served.world, CAT)
    read, write = os.pipe()
    ours, theirs = socket.socketpair()
    given = {
        "null": os.open("/dev/null", os.O_RDONLY),
        "directory": os.open(tmp_path, os.O_RDONLY),
        "wrong way": os.dup(write),
        "socket": os.dup(ours.fileno()),
    }
    with served.connected() as sock, serving.opened(path) as directory, ours, theirs:
        fds = [directory, given[bad], write, write]
        unix_wire.send(sock, unix_wire.encode({"kind": "session"}), until=None, fds=fds)
        answer = unix_wire.receive(sock, max_bytes=1 << 20, until=time.monotonic() + SECONDS)
    for fd in (read, write, *given.values()):
        os.close(fd)
    assert answer is not None
    assert b"bad_request" in answer
    assert b"descriptor 1" in answer


class Client:
    """A client that speaks the protocol itself: its socket, and its ends of the pipes that it sent."""

    def __init__(self, served: Served, path: Path, *, terminal: bool, keeps: bool = False) -> None:
        (in_r, self.stdin), (self.stdout, out_w), (last_r, last_w) = os.pipe(), os.pipe(), os.pipe()
        self.sizes, given = (last_w, last_r) if terminal else (last_r, last_w)
        asked = {"terminal": {"rows": 24, "columns": 80}} if terminal else {}
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(str(served.path))
        with serving.opened(path) as directory:
            frame = unix_wire.encode({"kind": "session", **asked})
            unix_wire.send(self.sock, frame, until=None, fds=[directory, in_r, out_w, given])
        self.kept = [in_r, out_w, given] if keeps else []
        for fd in [] if keeps else [in_r, out_w, given]:
            os.close(fd)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()
        for fd in (self.stdin, self.stdout, self.sizes, *self.kept):
            with contextlib.suppress(OSError):
                os.close(fd)

    def ready(self) -> None:
        said = b""
        while b"READY" not in said:
            data = os.read(self.stdout, 65536)
            assert data
            said += data


WAITS = "import time\nprint('READY', flush=True)\ntime.sleep(300)"


def test_byte_after_request_ends_session(served: Served) -> None:
    with Client(served, _package(served.world, WAITS, cpu_ms=300_000), terminal=False) as client:
        client.ready()
        client.sock.send(b"x")
        eventually(lambda: unfinished(served.world) == [])
    ends = [row["kind"]["code"] for row in served.world.rows() if row["kind"]["type"] == "run_ended"]
    assert ends == ["stopped"]


def test_client_without_pipes_holds_nothing(served: Served) -> None:
    """It keeps its socket and closes all else: the agent sees both ends, and its exit is the session's."""
    code = (
        "import os, sys\nprint('READY', flush=True)\nsys.stdin.read()\n"
        "try:\n    while True: os.write(1, b'x' * 65536)\nexcept BrokenPipeError: os._exit(5)"
    )
    with Client(served, _package(served.world, code, cpu_ms=300_000), terminal=False) as client:
        client.ready()
        for fd in (client.stdin, client.stdout, client.sizes):
            os.close(fd)
        eventually(lambda: unfinished(served.world) == [])
    row = next(row["kind"] for row in served.world.rows() if row["kind"]["type"] == "run_ended")
    assert (row["code"], row["exit_status"]) == ("agent_failed", 5)


def test_session_that_feeds_itself_ends_by_deadline(served: Served) -> None:
    """The client gives one pipe as stdin and as stdout: the bytes go round, and the deadline holds."""
    path = _package(served.world, CAT, cpu_ms=2000)
    read, write = os.pipe()
    err_r, err_w = os.pipe()
    os.write(write, b"round and round")
    with served.connected() as sock, serving.opened(path) as directory:
        frame = unix_wire.encode({"kind": "session"})
        unix_wire.send(sock, frame, until=None, fds=[directory, read, write, err_w])
        answer = b'"state"'
        while b'"state"' in answer[:40]:
            found = unix_wire.receive(sock, max_bytes=1 << 20, until=time.monotonic() + SECONDS)
            assert found is not None
            answer = found
    for fd in (read, write, err_r, err_w):
        os.close(fd)
    assert b"deadline" in answer


@pytest.mark.parametrize("sizes", [b"\xff" * 65536, b"x", b"\0" * 4], ids=["flood", "half", "zero"])
def test_sizes_of_hostile_client_do_no_harm(served: Served, sizes: bytes) -> None:
    code = "import os\nprint('READY', flush=True)\ninput()\nprint(os.get_terminal_size(), flush=True)"
    with Client(served, _package(served.world, code, more=TERMINAL), terminal=True) as client:
        client.ready()
        os.write(client.sizes, sizes)
        os.write(client.stdin, b"go\n")
        shown = b""
        while data := os.read(client.stdout, 65536):
            shown += data
    assert b"terminal_size" in shown
    eventually(lambda: unfinished(served.world) == [])


@pytest.mark.parametrize("terminal", [False, True], ids=["stdio", "terminal"])
def test_client_cannot_make_shim_wait(served: Served, terminal: bool) -> None:
    """The client makes its copies of the pipes blocking, and reads nothing: the deadline holds."""
    code = "import os\nprint('READY', flush=True)\nwhile True: os.write(1, b'x' * 65536)"
    more = TERMINAL if terminal else STDIO
    path = _package(served.world, code, more=more, cpu_ms=8000)
    with Client(served, path, terminal=terminal, keeps=True) as client:
        client.ready()
        for fd in (client.stdin, client.sizes):
            os.set_blocking(fd, False)
        until = time.monotonic() + SECONDS
        while not [row for row in served.world.rows() if row["kind"]["type"] == "run_ended"]:
            assert time.monotonic() < until
            for fd in client.kept:
                os.set_blocking(fd, True)
            if terminal:
                with contextlib.suppress(BlockingIOError):
                    os.write(client.sizes, b"\0\x10\0\x10")
            with contextlib.suppress(BlockingIOError):
                os.write(client.stdin, b"x")
    row = next(row["kind"] for row in served.world.rows() if row["kind"]["type"] == "run_ended")
    assert row["code"] == "deadline"
    eventually(lambda: unfinished(served.world) == [])
