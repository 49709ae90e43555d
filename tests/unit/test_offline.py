"""The fixtures of tests/conftest.py hold: offline tests have no network and no caller's home."""

from __future__ import annotations

import os
import pathlib
import socket

import pytest


def test_internet_socket_cannot_connect_in_unit_test() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock, pytest.raises(AssertionError):
        sock.connect(("127.0.0.1", 9))


def test_name_lookup_is_refused_in_unit_test() -> None:
    with pytest.raises(AssertionError):
        socket.getaddrinfo("localhost", 80)


def test_unix_socket_connects_in_unit_test(tmp_path: pathlib.Path) -> None:
    """The control: the guard refuses the network, not sockets."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind(path)
        server.listen(1)
        client.connect(path)
        assert client.getpeername() == path


def test_home_is_private_temporary_folder(covenant_home: pathlib.Path) -> None:
    assert os.environ["COVENANT_HOME"] == str(covenant_home)
    assert covenant_home.parent.stat().st_mode & 0o777 == 0o700
    assert "COVENANT_STATE" not in os.environ
