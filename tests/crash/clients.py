"""Clients of the killed supervisor: forked before any step is counted, so that their own steps do not count."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

# So long an instance is waited for; one that was killed is made anew, or the intent is run cold.
_READY_SECONDS = 10.0

Tell = Callable[[Mapping[str, Any]], None]


def fork(subject: Any, tell: Tell, failed: Callable[[BaseException], None]) -> None:
    """A client of the supervisor that this process is about to be: it asks for one run after another, and ends the
    supervisor when nothing of them is left; with instances that wait, at once."""
    parent = os.getpid()
    if os.fork() != 0:
        return
    until = time.monotonic() + subject.deadline

    def goes_on() -> bool:
        return time.monotonic() < until and os.getppid() == parent

    standby = subject.work == "standby"
    state = Path(subject.state)
    try:
        for number in range(2 if standby else 1):
            if standby:
                _until(lambda: not goes_on() or _ready(state), seconds=_READY_SECONDS)
            _ask(subject, f"intent {number}", goes_on, tell)
    except BaseException as e:
        failed(e)
    finally:
        tell({"over": True})
        if not standby:
            _until(lambda: not goes_on() or not _something_of_runs(state), seconds=subject.deadline)
        if os.getppid() == parent:
            os.kill(parent, signal.SIGTERM)
        os._exit(0)


def _ask(subject: Any, text: str, goes_on: Callable[[], bool], tell: Tell) -> None:
    """Send one intent once; after a failure it is not sent again."""
    from sandbox.serve.api import client

    directory = os.open(subject.package, os.O_RDONLY | os.O_DIRECTORY)
    for sock in _connections(subject.state, goes_on):
        tell({"asked": text})
        answer = client.run(sock, directory, text, user=subject.user)
        if answer.error is not None:
            raise answer.error
        assert answer.result is not None
        tell({"asked": text, "run": answer.run_id, "said": json.loads(answer.result.text)})
        break
    os.close(directory)


def _connections(state: str, goes_on: Callable[[], bool]) -> Iterator[socket.socket]:
    """Yield the connection, once a supervisor listens."""
    from sandbox.serve.api import client, paths

    while goes_on():
        with client.connected(paths.socket_of(state)) as sock:
            if sock is not None:
                yield sock
                return
        time.sleep(0.005)


def _until(true: Callable[[], bool], *, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.005)


def _ready(state: Path) -> bool:
    try:
        return any((state / "runs").glob("*/standby-*"))
    except FileNotFoundError:
        return False  # one of them has just ended


def _something_of_runs(state: Path) -> bool:
    return any(path.is_dir() for path in (state / "runs").iterdir()) or any((state / "unended").glob("*-*"))
