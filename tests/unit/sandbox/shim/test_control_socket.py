"""Check the control socket: each client gets an answer, and a misbehaving client does not affect the run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.shim import control_socket


class Keeper:
    """A shim's double that serves a control socket in a thread, as an exchange does in its turns."""

    def __init__(self, directory: Path) -> None:
        self.ended_by: BaseException | None = None
        self.asked: list[Mapping[str, Any]] = []
        self.server = control_socket.ControlServer(
            directory, {"echo": self._echo, "refuse": self._refuse, "stop": self._stop, "full": self._full}
        )
        self._stop_read, self._stop_write = os.pipe()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        os.write(self._stop_write, b"x")
        self._thread.join(60)
        assert not self._thread.is_alive()
        self.server.close()
        os.close(self._stop_read)
        os.close(self._stop_write)

    def _serve(self) -> None:
        ((fd, act),) = self.server.watches.items()
        while fd in select.select([fd, self._stop_read], [], [])[0]:
            try:
                self.ended_by = act() or self.ended_by
            except errors.LedgerError as e:
                self.ended_by = e

    def _echo(self, request: Mapping[str, Any]) -> control_socket.Reply:
        self.asked.append(request)
        return control_socket.Reply({"said": dict(request)})

    def _refuse(self, request: Mapping[str, Any]) -> control_socket.Reply:
        raise errors.WrongStateError("it is suspended already", hint="resume it")

    def _stop(self, request: Mapping[str, Any]) -> control_socket.Reply:
        return control_socket.Reply({}, errors.KilledError("asked to"))

    def _full(self, request: Mapping[str, Any]) -> control_socket.Reply:
        raise errors.LedgerError("no space left")


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    one = Keeper(tmp_path)
    try:
        yield one
    finally:
        one.close()


def _connected(directory: Path) -> socket.socket:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.settimeout(60)
    fd = os.open(directory, os.O_PATH)
    one.connect(f"/proc/self/fd/{fd}/control")
    os.close(fd)
    return one


def test_answer_comes_back(keeper: Keeper, tmp_path: Path) -> None:
    assert control_socket.ask(tmp_path, "echo", text="ä\x1b") == {"said": {"text": "ä\x1b"}}


def test_one_connection_may_ask_twice(keeper: Keeper, tmp_path: Path) -> None:
    with control_socket.ControlConnection(tmp_path) as one:
        assert one.ask("echo", n=1) == {"said": {"n": 1}}
        assert one.ask("echo", n=2) == {"said": {"n": 2}}
        assert not one.closed(0)


def test_refusal_is_same_error_at_other_end(keeper: Keeper, tmp_path: Path) -> None:
    with pytest.raises(errors.WrongStateError, match="suspended already") as caught:
        control_socket.ask(tmp_path, "refuse")
    assert caught.value.hint == "resume it"


def test_operation_may_end_run(keeper: Keeper, tmp_path: Path) -> None:
    assert control_socket.ask(tmp_path, "stop") == {}
    control_socket.ask(tmp_path, "echo")  # in the next turn
    assert isinstance(keeper.ended_by, errors.KilledError)


def test_log_that_takes_no_row_is_told_and_ends_run(keeper: Keeper, tmp_path: Path) -> None:
    with pytest.raises(errors.LedgerError, match="no space left"):
        control_socket.ask(tmp_path, "full")
    control_socket.ask(tmp_path, "echo")
    assert isinstance(keeper.ended_by, errors.LedgerError)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "malformed"),
        (b"[]", "names no operation"),
        (b"{}", "names no operation"),
        (b'{"op": 1}', "names no operation"),
        (b'{"op": "echo", "op": "stop"}', "stands twice"),
        (b'{"op": "none"}', "no such operation"),
        (b"[" * 8000, "nested too deeply"),
        (b" " * (control_socket.REQUEST_BYTES + 1), "larger than"),
        (b" " * 100_000, "larger than"),
    ],
)
def test_what_is_no_request_is_answered_with_error(keeper: Keeper, tmp_path: Path, raw: bytes, says: str) -> None:
    with _connected(tmp_path) as one:
        one.send(raw)
        error = json.loads(one.recv(100_000))["error"]
        assert says in error["message"]
        one.send(b'{"op": "echo"}')  # the connection still works
        assert json.loads(one.recv(100_000)) == {"answer": {"said": {}}}
    assert keeper.ended_by is None


def test_silent_are_few_and_longest_silent_goes_first(keeper: Keeper, tmp_path: Path) -> None:
    silent = []
    for _ in range(3 * control_socket.CLIENTS):
        silent.append(_connected(tmp_path))
        control_socket.ask(tmp_path, "echo")  # the server has accepted each by then
    with contextlib.ExitStack() as stack:
        for one in silent:
            stack.enter_context(one)
        silent[-1].send(b'{"op": "echo"}')
        assert b"answer" in silent[-1].recv(1000)
        assert silent[0].recv(1000) == b""
    assert keeper.ended_by is None


def test_who_never_reads_its_answers_is_let_go(keeper: Keeper, tmp_path: Path) -> None:
    with _connected(tmp_path) as one:
        one.settimeout(0.5)
        with contextlib.suppress(OSError):  # the buffer is full, or the server has disconnected
            for _ in range(10_000):
                one.send(b'{"op": "echo", "pad": "' + b"x" * 8000 + b'"}')
        assert control_socket.ask(tmp_path, "echo") == {"said": {}}


def test_descriptors_that_come_along_do_not_stay(keeper: Keeper, tmp_path: Path) -> None:
    read, write = os.pipe()
    with _connected(tmp_path) as one:
        socket.send_fds(one, [b'{"op": "echo"}'], [write])
        assert b"answer" in one.recv(1000)
        os.close(write)
        assert os.read(read, 1) == b""  # the server does not hold the writing end
    os.close(read)


def test_run_that_has_ended_is_named_so(tmp_path: Path) -> None:
    one = Keeper(tmp_path)
    with control_socket.ControlConnection(tmp_path) as connection:
        assert not connection.closed(0)
        one.close()
        assert connection.closed(10)
        with pytest.raises(errors.NoRunError, match="has ended"):
            connection.ask("echo")
    with pytest.raises(errors.NoRunError, match="has ended"):
        control_socket.ask(tmp_path, "echo")
    with pytest.raises(errors.NoRunError, match="has ended"):
        control_socket.ask(tmp_path / "nowhere", "echo")


def test_keeper_that_hangs_is_error_in_time(tmp_path: Path) -> None:
    with control_socket.ControlServer(tmp_path, {}), pytest.raises(errors.KeeperError, match="does not answer"):
        control_socket.ask(tmp_path, "echo", seconds=0.05)


def test_long_path_is_no_hindrance(tmp_path: Path) -> None:
    deep = tmp_path
    for _ in range(4):
        deep = deep / ("d" * 60)
    deep.mkdir(parents=True)
    one = Keeper(deep)
    try:
        assert control_socket.ask(deep, "echo") == {"said": {}}
    finally:
        one.close()
    assert (deep / control_socket.NAME).stat().st_mode & 0o777 == 0o600
