"""A real supervisor process for tests: started on a world's state, asked over its socket, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sandbox import unix_wire
from sandbox.run_result import RunResult
from sandbox.serve import filter_reader, worker_pool
from sandbox.serve.api import client
from sandbox.standby import backoff
from tests.kernel.world import ROOT, SLOWNESS, World, worlds_ended

# A user of this machine's that no file belongs to, and who may ask.
CALLER, STRANGER = 64_123, 64_124
# A user of one file alone, which waits for the end of all processes of this user, and kills them.
LONE = 64_125
_MAIN = "import sys; from sandbox.serve import main; sys.exit(main.main(sys.argv[1:]))"
START_SECONDS = 60 * SLOWNESS


class Served:
    """A supervisor of ``world``, whose socket ``CALLER`` reaches too. ``settings`` are its configuration's."""

    def __init__(self, world: World, *, before: Sequence[str] = (), **settings: Any) -> None:
        self.world = world
        for place in (world.base, world.base / "packages"):
            place.chmod(0o755)
        self.path = world.base / "s.sock"
        # A follower of the log is one more process; test_live_view.py tests it.
        world.configure(
            **{"callers": [CALLER], "socket": str(self.path), "journal": False, "checkpoint_seconds": 0, **settings}
        )
        self._before = before
        self.log_path = world.base / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._killed: set[int] = set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(
        self, *, environment: Mapping[str, str] | None = None, wait: bool = True, fds: Sequence[int] = ()
    ) -> None:
        """Start it, and wait until it answers."""
        command = [*self._before, sys.executable, "-c", _MAIN, "--state", str(self.world.state)]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                env={**os.environ, **(environment or {})},
            )
        if wait:
            self.await_socket()

    def await_socket(self) -> None:
        """Wait until a supervisor listens. The child that a killed one was forking has its socket a moment longer."""
        assert self.process is not None
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            with client.connected(str(self.path)) as sock:
                if sock is not None and _listener(sock) not in self._killed:
                    return
            time.sleep(0.05)
        raise AssertionError(self.log())

    @contextlib.contextmanager
    def stopping(self) -> Iterator[None]:
        """It is stopped when the block ends, however that is."""
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> int:
        """SIGTERM, and its exit status."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(120)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL."""
        assert self.process is not None
        self._killed.add(self.process.pid)
        self.process.kill()
        self.process.wait()

    @property
    def pid(self) -> int:
        """The id of the main process."""
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        """Return the text that it wrote to stderr."""
        return self.log_path.read_text()

    @contextlib.contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """One connection as root."""
        with client.connected(str(self.path)) as sock:
            assert sock is not None, self.log()
            yield sock

    def run(self, package: Path, text: str = "hi", **request: Any) -> RunResult:
        """Run a package as root."""
        with self.connected() as sock, opened(package) as directory:
            return client.run(sock, directory, text, **request)

    def children(self) -> list[int]:
        """Its keepers, and what else it has to reap, but for those that wait for a connection."""
        return [pid for pid in children_of(self.pid) if not _waits(pid)]

    def waiting(self) -> list[int]:
        """The idle worker, if there is one."""
        return [pid for pid in children_of(self.pid) if _waits(pid)]

    def descriptors(self) -> int:
        """How many its main process has open, two of them for the idle worker."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def quiet(self) -> None:
        """Wait until its one child is the idle worker."""
        until = time.monotonic() + 60
        while [_waits(pid) for pid in children_of(self.pid)] != [True]:
            assert time.monotonic() < until, [_command(pid) for pid in children_of(self.pid)]
            time.sleep(0.02)

    def alone(self) -> int:
        """The idle worker, once it is the only child."""
        self.quiet()
        (found,) = self.waiting()
        return found


@contextlib.contextmanager
def open_place() -> Iterator[Path]:
    """A directory that every user may walk into, which those of pytest are not, for worlds that leave no cgroup."""
    with tempfile.TemporaryDirectory(prefix="covenant-test-") as made, worlds_ended(Path(made)):
        Path(made).chmod(0o755)
        yield Path(made)


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    """A descriptor of a directory, as a client has it."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield fd
    finally:
        os.close(fd)


def asked(path: Path, package: Path, text: str = "hi", **fields: Any) -> socket.socket:
    """Send a request without a wait for its answer. The client leaves when the socket is closed."""
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(path))
    with opened(package) as directory:
        frame = unix_wire.encode({"kind": "run", "text": text, **fields})
        unix_wire.send(made, frame, until=None, fds=[directory])
    return made


def why_not_ready(served: Served) -> list[str]:
    """Why instances that are waited for may not be made."""
    return backoff.why_not_ready(served.world.state, now_ms=int(time.time() * 1000))


def children_of(pid: int) -> list[int]:
    """The processes that this one has to reap, but for the one that reads filters."""
    return [child for child in _children(pid) if _comm(child) != filter_reader.NAME]


def reader_of(pid: int) -> int:
    """The process of a supervisor that reads filters."""
    (found,) = (child for child in _children(pid) if _comm(child) == filter_reader.NAME)
    return found


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def status(pid: int) -> dict[str, str]:
    """The lines of a process's status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def covenant(
    *arguments: str, served: Served, uid: int = 0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command, as root with this world's home, or as another user who knows the socket alone."""
    return subprocess.run(
        covenant_command(*arguments), env=environment_of(served, uid, environment), capture_output=True, text=True,
        timeout=120 * SLOWNESS, **identity(uid),
    )  # fmt: skip


def covenant_command(*arguments: str) -> list[str]:
    """How a test calls the command: its interpreter is one that any user may read."""
    code = "import sys; sys.path[:0] = sys.argv.pop(1).split(':'); from covenant.cli.main import entry; entry()"
    return ["/usr/bin/python3", "-c", code, f"{ROOT}:{_packages()}", *arguments]


def environment_of(served: Served, uid: int, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that tell the command its places."""
    known = {"COVENANT_HOME": str(served.world.home)} if uid == 0 else {"HOME": "/nonexistent"}
    return {"PATH": "/usr/bin:/bin", "COVENANT_SOCKET": str(served.path), **known, **(more or {})}


def identity(uid: int) -> dict[str, Any]:
    """For subprocess: who the child is."""
    return {"user": uid, "group": uid, "extra_groups": []} if uid else {}


def _packages() -> str:
    import click

    return str(Path(click.__file__).parents[1])


def _waits(pid: int) -> bool:
    return _comm(pid) == worker_pool.WAITS


def _comm(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return "gone"


def _listener(sock: socket.socket) -> int:
    """The process that made the socket listen which this one is connected to (unix(7))."""
    pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid)
