"""The main loop of the service alone: a refused client decides none of the loop's costs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox import unix_wire
from sandbox.config import Config
from sandbox.kernel.proc import pipes
from sandbox.serve import preload, server
from sandbox.shim import process
from tests.kernel.serving import CALLER, STRANGER, open_place

# Longer than any test may take: a wait for it hangs.
_LINGER_SECONDS = 600
# Of the main loop: its listening socket, and its socket to the waiting shim.
_OWN_SOCKETS = 2


@contextlib.contextmanager
def serving(place: Path, listener: socket.socket, *, goes_on: bool = False, **settings: Any) -> Iterator[int]:
    supervisor = cast(
        "Any", SimpleNamespace(path=place, config=Config(journal=False, checkpoint_seconds=0, **settings))
    )
    with pytest.MonkeyPatch.context() as patch:
        # There is no state here that a keeper could look at.
        patch.setattr(preload, "repeat", lambda supervisor: None)
        child = process.fork(server.Server(supervisor, listener, goes_on=goes_on).serve, keep=[2, listener.fileno()])
    try:
        yield child.pid
    finally:
        child.signal(signal.SIGTERM)
        child.reap()
        child.close()


def asking(place: Path, uid: int = 0) -> socket.socket:
    """A connection, which is this user's where we are root: the kernel notes who connects (SO_PEERCRED, unix(7))."""
    client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    client.settimeout(30)
    if uid:
        os.seteuid(uid)
    try:
        client.connect(str(place / "s"))
    finally:
        if uid:
            os.seteuid(0)
    return client


@contextlib.contextmanager
def listening() -> Iterator[tuple[Path, socket.socket]]:
    """A place that any user may walk into, and the socket there, at which many may wait."""
    with open_place() as place, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(place / "s"))
        (place / "s").chmod(0o666)
        listener.listen(256)
        yield place, listener


def code(client: socket.socket) -> str:
    """Return the code of the answer."""
    raw = unix_wire.receive(client, max_bytes=unix_wire.ANSWER_BYTES, until=time.monotonic() + 30)
    assert raw is not None
    return str(json.loads(raw)["code"])


def codes(clients: list[socket.socket]) -> dict[str, int]:
    """Return how often each code is answered."""
    return dict(Counter(code(client) for client in clients))


def lingering(stack: contextlib.ExitStack) -> socket.socket:
    """A connection whose last close waits for its other end to read, which it does not."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    client = socket.create_connection(listener.getsockname())
    stack.enter_context(listener.accept()[0])
    client.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            client.send(bytes(1 << 16))
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, _LINGER_SECONDS))
    return client


def test_descriptors_that_nobody_took_hold_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ROOT_REQUESTS", 0)  # so that root is refused as well
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(tmp_path / "s"))
        listener.listen(16)
        hostile = stack.enter_context(asking(tmp_path))
        with lingering(stack) as sent:
            socket.send_fds(hostile, [b"x"], [sent.fileno()])
        with serving(tmp_path, listener) as pid:
            for client in (hostile, *(stack.enter_context(asking(tmp_path)) for _ in range(3))):
                raw = unix_wire.receive(client, max_bytes=unix_wire.ANSWER_BYTES, until=None)
                assert raw is not None
                assert json.loads(raw)["code"] == ("too_many_requests" if os.geteuid() == 0 else "not_a_caller")
                assert client.recv(1) == b""
            # What was refused is let go of in the end, and not only said to be.
            until = time.monotonic() + 30
            while _sockets(pid) > _OWN_SOCKETS and time.monotonic() < until:
                time.sleep(0.01)
            assert _sockets(pid) == _OWN_SOCKETS


@pytest.mark.parametrize("waits", ["accepted", "queued"])
def test_whoever_waits_when_it_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    if waits == "queued":
        monkeypatch.setattr(server, "_ACCEPTS", 0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(tmp_path / "s"))
        listener.listen(16)
        with serving(tmp_path, listener) as pid:
            clients = [stack.enter_context(asking(tmp_path)) for _ in range(3)]
            _until(lambda: _serves(pid) and _sockets(pid) == _OWN_SOCKETS + (0 if waits == "queued" else 3))
        for client in clients:
            raw = unix_wire.receive(client, max_bytes=unix_wire.ANSWER_BYTES, until=None)
            assert raw is not None
            assert json.loads(raw)["code"] == "supervisor_silent"
        # No client is left in a queue that is no longer read.
        with socket.socket(socket.AF_UNIX) as late, pytest.raises(ConnectionRefusedError):
            late.connect(str(tmp_path / "s"))


def test_whoever_waits_at_socket_of_another_is_left_to_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_ACCEPTS", 0)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(str(tmp_path / "s"))
        listener.listen(16)
        client = stack.enter_context(asking(tmp_path))
        with serving(tmp_path, listener, goes_on=True) as pid:
            _until(lambda: _serves(pid))
        listener.setblocking(True)
        served = stack.enter_context(listener.accept()[0])
        client.sendall(b"x")
        assert served.recv(1) == b"x"


# Those who say nothing are told when it ends.
_WAITED = "supervisor_silent"


@pytest.mark.parametrize("uid", [CALLER, 0])
def test_user_asks_no_more_often_than_they_may_and_root_as_often_as_it_likes(
    monkeypatch: pytest.MonkeyPatch, uid: int
) -> None:
    monkeypatch.setattr(server, "PER_SECOND", 0.0)  # however slow this machine is
    more = 20
    with contextlib.ExitStack() as stack:
        place, listener = stack.enter_context(listening())
        with serving(place, listener, callers=(CALLER,), caller_requests=1000):
            clients = [stack.enter_context(asking(place, uid)) for _ in range(int(server.BURST) + more)]
            # They are accepted in their order: with this one, all of them were.
            assert code(stack.enter_context(asking(place, STRANGER))) == "not_a_caller"
            if uid:
                # What one user asks too often is no matter of another's.
                clients.append(stack.enter_context(asking(place)))
                assert code(stack.enter_context(asking(place, STRANGER))) == "not_a_caller"
        waited = len(clients) if uid == 0 else int(server.BURST) + 1
        assert codes(clients) == {_WAITED: waited} | ({"too_many_requests": more} if uid else {})


def test_whoever_asked_too_often_may_ask_again_after_moment() -> None:
    with contextlib.ExitStack() as stack:
        place, listener = stack.enter_context(listening())
        with serving(place, listener, callers=(CALLER,), caller_requests=1000):
            clients: list[socket.socket] = []
            begin = time.monotonic()
            # A machine on which they are slower than they may be comes to no end with this.
            while not clients or not pipes.readable(clients[-1].fileno(), 0.002):
                assert time.monotonic() < begin + 30
                clients.append(stack.enter_context(asking(place, CALLER)))
            # Refused in the order in which they came; what has begun is over within a second.
            time.sleep(1)
            later = [stack.enter_context(asking(place, CALLER)) for _ in range(5)]
            assert code(stack.enter_context(asking(place, STRANGER))) == "not_a_caller"
        assert codes(later) == {_WAITED: 5}
        assert codes(clients)["too_many_requests"] >= 1


def test_all_together_have_no_more_open_than_there_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3
    monkeypatch.setattr(server, "MAX_OPEN", most + 1)  # one is the keeper that waits
    with contextlib.ExitStack() as stack:
        place, listener = stack.enter_context(listening())
        with serving(place, listener, callers=(CALLER,)) as pid:
            _until(lambda: _sockets(pid) == _OWN_SOCKETS)
            clients = [stack.enter_context(asking(place, uid)) for uid in (0, CALLER, 0, CALLER, 0)]
            assert [code(client) for client in clients[most:]] == ["too_many_requests"] * 2
            # A client that leaves makes room for the next, once the refused ones are closed as well.
            clients.pop(0).close()
            _until(lambda: _sockets(pid) == _OWN_SOCKETS + most - 1 and not _lets_go(pid))
            clients[most - 1 :] = [stack.enter_context(asking(place, uid)) for uid in (CALLER, 0)]
            assert code(clients[-1]) == "too_many_requests"
        assert codes(clients[:most]) == {_WAITED: most}


def test_watcher_that_lasted_is_replaced_however_many_did_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    one = server.Server(cast("Any", None), cast("Any", None))
    monkeypatch.setattr(server.Server, "_watch", lambda self: made.append(1))
    lasted = time.monotonic() - server._WATCHED_SECONDS
    for _ in range(3 * server._WATCHERS):
        one._watched_since = lasted
        one._watched(1)
    assert len(made) == 3 * server._WATCHERS
    # The control: one that ends as soon as it is made is given up.
    one._watched_since = time.monotonic() + 3600
    for _ in range(2 * server._WATCHERS):
        one._watched(1)
    assert len(made) == 4 * server._WATCHERS - 2


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def _serves(pid: int) -> bool:
    """Whether it listens to its signals: the last thing before its first turn."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGCHLD - 1) & 1)


def _lets_go(pid: int) -> bool:
    """Whether it has another child than the keeper that waits."""
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()) > 1


def _sockets(pid: int) -> int:
    found = 0
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found += os.readlink(f"/proc/{pid}/fd/{fd}").startswith("socket:")
    return found
