"""Check the socket of a home: it appears only when the daemon listens, and it replaces no live socket."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from covenant import daemon_home
from covenant.wire import client
from policy import errors

SOCKET = client.SOCKET


@pytest.mark.parametrize("left", [None, SOCKET, f".{SOCKET}"])
def test_whoever_sees_socket_can_connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str | None) -> None:
    """Also after a daemon was killed, before it listened or after."""
    real, seen = socket.socket.listen, list[bool]()

    class Watched(socket.socket):
        def listen(self, backlog: int = 0) -> None:
            seen.append((tmp_path / SOCKET).exists())
            real(self, backlog)

    monkeypatch.setattr(socket, "socket", Watched)
    if left is not None:
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(tmp_path / left))
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with daemon_home.listening(directory, tmp_path), socket.socket(socket.AF_UNIX) as one:
        assert seen == [False]
        one.connect(str(tmp_path / SOCKET))
        assert (tmp_path / SOCKET).stat().st_mode & 0o777 == 0o600
        assert os.listdir(tmp_path) == [SOCKET]
    os.close(directory)
    assert os.listdir(tmp_path) == []


def test_socket_that_came_in_between_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that does not take the lock binds the socket first."""
    link = os.link

    def faster(*args: str, **more: Any) -> None:
        other.bind(str(tmp_path / SOCKET))
        other.listen()
        link(*args, **more)

    monkeypatch.setattr(os, "link", faster)
    directory = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as probe:
        with pytest.raises(errors.HomeError, match="File exists"), daemon_home.listening(directory, tmp_path):
            pass
        probe.connect(str(tmp_path / SOCKET))
    os.close(directory)
    assert os.listdir(tmp_path) == [SOCKET]
