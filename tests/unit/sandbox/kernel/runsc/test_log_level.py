"""The level of a sandbox's log: asked for once, and the agent's stdout is full until the answer is there.

What answers here is a socket of the test; gVisor's own answer is in tests/kernel/test_prelude.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel.runsc.log_level import Raising


@dataclass
class Sandbox:
    """What stands where gVisor listens; ``reader`` and ``writer`` are the ends of an agent's stdout."""

    root: Path
    listener: socket.socket
    reader: int
    writer: int

    def is_held(self) -> bool:
        return not select.select([], [self.writer], [], 0)[1]

    def asked(self) -> tuple[socket.socket, object]:
        connection, _ = self.listener.accept()
        return connection, json.loads(connection.recv(65536))


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    # A path that is far too long for a socket's address.
    root = tmp_path / ("r" * 120)
    root.mkdir()
    folder = os.open(root, os.O_PATH)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, folder)
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listener.bind(f"/proc/self/fd/{folder}/runsc-one.sock")
        listener.listen(1)
        ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for fd in ends:
            stack.callback(os.close, fd)
        yield Sandbox(root, listener, *ends)


def test_the_agent_is_held_from_the_start_until_the_answer_and_its_first_byte_is_its_own(sandbox: Sandbox) -> None:
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        assert sandbox.is_held()
        raising.ask()
        connection, request = sandbox.asked()
        assert request == {"method": "Logging.Change", "arg": {"SetLevel": True, "Level": "debug"}}
        assert not raising.poll()
        # An answer in two pieces.
        connection.send(b'{"success":true,"er')
        assert select.select([raising.fileno()], [], [], 30)[0]
        assert not raising.poll()
        assert sandbox.is_held()
        connection.send(b'r":"","result":0}')
        assert select.select([raising.fileno()], [], [], 30)[0]
        assert raising.poll()
        assert not sandbox.is_held()
        os.write(sandbox.writer, b"agent")
        assert os.read(sandbox.reader, 100) == b"agent"
        # A sandbox that ends waits for whoever is still connected.
        assert connection.recv(1) == b""
        connection.close()
        assert not raising.asking
        assert not raising.poll()


@pytest.mark.parametrize(
    "answer", [b'{"success":false,"err":"no"}', b"[]", b"0", b'{"success":1}', b"x" * 70000, b"[" * 70000]
)
def test_an_answer_that_is_no_yes_ends_the_run_and_the_agent_is_never_let_go(sandbox: Sandbox, answer: bytes) -> None:
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        raising.ask()
        connection, _ = sandbox.asked()
        connection.sendall(answer)
        connection.close()
        with pytest.raises(errors.KernelError, match="does not say what its filter refuses"):
            all(not raising.poll() for _ in range(100))
        assert sandbox.is_held()


def test_a_sandbox_that_has_ended_is_not_asked(sandbox: Sandbox) -> None:
    sandbox.listener.close()
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        raising.ask()
        assert not raising.asking
        assert not raising.poll()
    (sandbox.root / "runsc-one.sock").unlink()
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        raising.ask()
        assert not raising.asking


@pytest.mark.parametrize("begun", [b"", b'{"success":'])
def test_nor_is_one_that_ends_over_its_answer_waited_for(sandbox: Sandbox, begun: bytes) -> None:
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        raising.ask()
        connection, _ = sandbox.asked()
        connection.send(begun)
        connection.close()
        for _ in range(2):
            assert not raising.poll()
        assert not raising.asking
        assert sandbox.is_held()


def test_what_cannot_be_asked_is_an_error(sandbox: Sandbox) -> None:
    (sandbox.root / "runsc-one.sock").unlink()
    (sandbox.root / "runsc-one.sock").symlink_to("runsc-one.sock")
    raising = Raising(sandbox.reader, sandbox.root, "one")
    with contextlib.closing(raising), pytest.raises(errors.KernelError, match="cannot be asked for its log"):
        raising.ask()


def test_an_answer_without_an_end_is_not_waited_for(sandbox: Sandbox) -> None:
    """In the smallest pieces, each of which is looked at with all before it: whoever holds the run computes for it."""
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        raising.ask()
        connection, _ = sandbox.asked()

        def bytewise() -> None:
            for _ in range(4096):
                connection.send(b"[")
                assert select.select([raising.fileno()], [], [], 30)[0]
                assert not raising.poll()

        with pytest.raises(errors.KernelError, match="does not say what its filter refuses"):
            bytewise()
        connection.close()
        assert sandbox.is_held()


@pytest.mark.parametrize("ended", [False, True])
def test_a_stdout_that_somebody_else_reads_makes_nobody_wait_for_good(sandbox: Sandbox, ended: bool) -> None:
    with contextlib.closing(Raising(sandbox.reader, sandbox.root, "one")) as raising:
        raising.ask()
        connection, _ = sandbox.asked()
        connection.send(b'{"success":true}')
        connection.close()
        assert os.read(sandbox.reader, 1)
        if ended:
            os.dup2(sandbox.reader, sandbox.writer)  # nobody can write any more
        with pytest.raises(errors.KernelError, match="somebody else reads"):
            raising.poll()


def test_a_stdout_that_is_no_pipe_is_refused(sandbox: Sandbox, tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(errors.KernelError, match="cannot be filled"):
            Raising(fd, sandbox.root, "one")
    finally:
        os.close(fd)
