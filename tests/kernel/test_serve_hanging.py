"""A client's package on a file system that stops answering: the request is ended, the client answered, and the rest
of the supervisor goes on. The file system is a real FUSE server (hanging_server.py)."""

from __future__ import annotations

import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.serve import client, overdue
from tests.kernel import hanging_files, serving
from tests.kernel.conftest import leftovers
from tests.kernel.hanging_files import Hanging
from tests.kernel.serving import CALLER, STRANGER, Served
from tests.kernel.world import World

SECONDS = 2
# The limit of a request, the grace, the wait for the death, and a machine that is busy.
ENDED_SECONDS = 30


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), callers=[CALLER, STRANGER], caller_requests=4, request_seconds=SECONDS) as made,
    ):
        yield made
        made.stop()
        assert leftovers(made.world) == []


@pytest.fixture
def files(served: Served) -> Iterator[Hanging]:
    source = served.world.sign(served.world.copy("hello"))
    with hanging_files.mounted(source, served.world.base / "hangs", uid=CALLER) as made:
        yield made


def started(served: Served, package: Path, *, uid: int = CALLER) -> subprocess.Popen[str]:
    """``covenant run`` of a caller."""
    return subprocess.Popen(
        serving.covenant_command("run", str(package), "hi", "--json"), stdout=subprocess.PIPE, text=True,
        env=serving.environment_of(served, uid), **serving.identity(uid),
    )  # fmt: skip


def asked(served: Served, directory: int, *, uid: int = CALLER) -> dict[str, Any]:
    """The answer to a request that brings this directory, from a process of that user."""
    found = hanging_files.as_user(uid, lambda: _ask(served, directory))
    assert isinstance(found, dict)
    return found


def _ask(served: Served, directory: int) -> dict[str, Any]:
    with client.connected(str(served.path)) as sock:
        assert sock is not None
        try:
            return {"kind": "answer", "error": client.run(sock, directory, "hi").error}
        except errors.CovenantError as e:
            return e.to_json()


def await_log(served: Served, pattern: str) -> re.Match[str]:
    until = time.monotonic() + ENDED_SECONDS
    while not (found := re.search(pattern, served.log())):
        assert time.monotonic() < until, served.log()
        time.sleep(0.05)
    return found


@pytest.mark.parametrize("operation", ["READ", "OPEN", "LOOKUP", "READDIR", "GETATTR", "FLUSH"])
def test_hanging_package_is_answered_by_name(served: Served, files: Hanging, operation: str) -> None:
    with serving.opened(files.place) as directory:
        # The control: the same file system answers, and its package runs.
        assert asked(served, directory) == {"kind": "answer", "error": None}
        files.hang(operation)
        begin = time.monotonic()
        said = asked(served, directory)
        assert said["code"] == "file_system_hangs", said
        assert str(files.place) in said["message"] or "package's directory" in said["message"]
        assert "request_wait_answer" in said["message"]
        assert SECONDS <= time.monotonic() - begin < ENDED_SECONDS
        # A request that FUSE's server has read ends by no signal: the process is named.
        found = await_log(served, r"process (\d+) survives SIGKILL: (.*) does not answer \(state D, .*`request_wait_")
        assert Path(f"/proc/{found[1]}/stat").exists()
        # Its own package, from where it answers, runs at once for the same caller.
        other = served.world.base / "packages" / "hello"
        with serving.opened(other) as good:
            assert asked(served, good) == {"kind": "answer", "error": None}
        files.answer()
        await_log(served, rf"process {found[1]}, which hung, has ended")
        assert asked(served, directory) == {"kind": "answer", "error": None}
