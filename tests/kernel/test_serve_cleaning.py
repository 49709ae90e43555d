"""A stop of the main loop while a shim takes away what a killed one left: it may finish within its limit."""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandbox.serve import overdue
from sandbox.serve.overdue import Overdue
from sandbox.serve.server import Server

PATIENCE = 60.0


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Callable[[Callable[[], None]], Server]]:
    """Return a function that makes a main loop whose recovery does the given work, and begins one."""
    begun = tmp_path / "begun"
    with contextlib.ExitStack() as stack:

        def made(work: Callable[[], None]) -> Server:
            def recover() -> None:
                begun.touch()
                work()

            own = SimpleNamespace(recover=recover)
            supervisor: Any = SimpleNamespace(
                config=SimpleNamespace(request_seconds=PATIENCE), in_shim=lambda: contextlib.nullcontext(own)
            )
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            server = Server(supervisor, listener)
            server._selector = stack.enter_context(selectors.DefaultSelector())
            server._overdue = Overdue(tmp_path, server)
            server.recover()
            until = time.monotonic() + PATIENCE
            while not begun.exists():
                assert time.monotonic() < until
                time.sleep(0.01)
            return server

        yield made


def test_clean_up_that_is_under_way_is_finished(loop: Callable[..., Server], tmp_path: Path) -> None:
    def work() -> None:
        time.sleep(0.5)
        (tmp_path / "done").touch()

    server = loop(work)
    server._overdue.end_all(server._exited, PATIENCE)
    assert (tmp_path / "done").exists()
    assert server._keepers == {}


def test_clean_up_that_takes_longer_is_ended(
    loop: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SIGTERM, as every shim: the next start does the rest."""
    monkeypatch.setattr(overdue, "CLEAN_SECONDS", 0.1)

    def work() -> None:
        try:
            time.sleep(10 * PATIENCE)
        except KeyboardInterrupt:
            (tmp_path / "ended").touch()

    server = loop(work)
    server._overdue.end_all(server._exited, PATIENCE)
    assert (tmp_path / "ended").exists()
    assert server._keepers == {}
