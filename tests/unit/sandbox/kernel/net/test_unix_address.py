"""Check sockets whose path is too long for an address, and whose directory is a symlink."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.kernel.net import unix_address
from sandbox.kernel.runsc.start_trace import StartTrace
from sandbox.serve.api import client


@pytest.fixture
def deep(tmp_path: Path) -> Path:
    """Make a directory whose own path is too long for an address."""
    made = tmp_path / ("d" * 108)
    made.mkdir()
    return made


@pytest.fixture
def listener(deep: Path) -> Iterator[socket.socket]:
    """Listen on a socket in that directory."""
    with socket.socket(socket.AF_UNIX) as made:
        with pytest.raises(OSError, match="too long"):
            made.bind(str(deep / "socket"))
        with unix_address.within(deep, "socket") as address:
            made.bind(address)
        made.listen()
        yield made


def test_socket_is_found_through_descriptor_closed_afterwards(deep: Path, listener: socket.socket) -> None:
    before = os.listdir("/proc/self/fd")
    with socket.socket(socket.AF_UNIX) as one, unix_address.within(deep, "socket") as address:
        one.connect(address)
        assert one.getpeername() == listener.getsockname()
    assert os.listdir("/proc/self/fd") == before
    assert not Path(address).exists()


def test_symlink_is_followed_by_whoever_says_so(tmp_path: Path, deep: Path, listener: socket.socket) -> None:
    link = tmp_path / "link"
    link.symlink_to(deep)
    with pytest.raises(NotADirectoryError), unix_address.within(link, "socket"):
        pytest.fail("it was followed")
    with unix_address.within(link, "socket", follow=True) as address:
        assert Path(address).is_socket()


@pytest.mark.parametrize("linked", [False, True])
def test_client_finds_supervisor_of_such_state(
    tmp_path: Path, deep: Path, listener: socket.socket, *, linked: bool
) -> None:
    """The client's state path may be a symlink; the supervisor's may not, because it holds it by its own path."""
    link = tmp_path / "link"
    link.symlink_to(deep)
    before = os.listdir("/proc/self/fd")
    # The listener here is the user who runs the test.
    refused = pytest.raises(errors.ImpostorError) if os.geteuid() else contextlib.nullcontext()
    with refused, client.connected(str((link if linked else deep) / "socket")) as sock:
        assert sock is not None
        with listener.accept()[0] as theirs:
            theirs.sendall(b"it is")
            assert sock.recv(5) == b"it is"
    assert os.listdir("/proc/self/fd") == before


def test_another_process_finds_trace_by_same_address(deep: Path) -> None:
    """runsc connects from its own process, where /proc/self would be its own."""
    one = StartTrace(deep)
    try:
        address = one.config.read_text().split('"endpoint": "')[1].split('"')[0]
        assert len(address) < 108
        assert address.startswith(f"/proc/{os.getpid()}/fd/")
        assert Path(address).samefile(deep / "trace.sock")
    finally:
        one.close()
