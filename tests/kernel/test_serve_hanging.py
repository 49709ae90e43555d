"""A client's package on a file system that stops answering: the request is ended, the client answered, and the rest
of the supervisor goes on. The file system is a real FUSE server (hanging_server.py)."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.kernel.fs import hanging
from sandbox.serve.api import client
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


def asked(served: Served, directory: int, *, uid: int = CALLER) -> dict[str, Any]:
    """The answer to a request that brings this directory, from a process of that user."""
    found = hanging_files.as_user(uid, lambda: _ask(served, directory))
    assert isinstance(found, dict)
    return found


def _ask(served: Served, directory: int) -> dict[str, Any]:
    with client.connected(str(served.path)) as sock:
        if sock is None:  # the supervisor stopped before this connection
            return {"kind": "none"}
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


def await_waiting(served: Served) -> None:
    """Until a keeper waits for FUSE's answer."""
    until = time.monotonic() + ENDED_SECONDS
    while not any("request_wait" in hanging.place(pid) for pid in served.children()):
        assert time.monotonic() < until, served.log()
        time.sleep(0.02)


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


def test_deaf_file_system_is_ended_by_sigkill(served: Served, files: Hanging) -> None:
    """FUSE's server has not read the request, so that SIGKILL ends the wait: nothing is left to name."""
    with serving.opened(files.place) as directory:
        files.deaf()
        assert asked(served, directory)["code"] == "file_system_hangs"
    served.quiet()
    assert "survives SIGKILL" not in served.log()


def test_slow_file_system_below_limit_is_served(served: Served, files: Hanging) -> None:
    files.hang("READ")
    with serving.opened(files.place) as directory:
        heard: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: heard.append(asked(served, directory)))
        thread.start()
        files.await_hung()
        time.sleep(SECONDS / 2)
        files.answer()
        thread.join()
    assert heard == [{"kind": "answer", "error": None}]


def test_others_are_served_while_request_hangs(served: Served, files: Hanging) -> None:
    files.hang("READ")
    with serving.opened(files.place) as directory, serving.opened(served.world.base / "packages" / "hello") as good:
        heard: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: heard.append(asked(served, directory)))
        thread.start()
        files.await_hung()
        begin = time.monotonic()
        assert asked(served, good, uid=STRANGER) == {"kind": "answer", "error": None}
        assert thread.is_alive(), time.monotonic() - begin
        thread.join()
    assert heard[0]["code"] == "file_system_hangs"


def test_clients_places_are_bounded_by_what_hangs(served: Served, files: Hanging) -> None:
    """A place comes back, but not without end: a client has at most as many processes that hang as requests."""
    files.hang("READ")
    with serving.opened(files.place) as directory:
        said = [asked(served, directory)["code"] for _ in range(5)]
        assert said == ["file_system_hangs"] * 5
        files.answer()
        served.quiet()
        assert asked(served, directory) == {"kind": "answer", "error": None}


@pytest.mark.parametrize("hang", ["hang", "deaf"])
def test_stop_waits_for_no_file_system(served: Served, files: Hanging, hang: str) -> None:
    with serving.opened(files.place) as directory, contextlib.ExitStack() as stack:
        files.hang("READ") if hang == "hang" else files.deaf()
        for _ in range(2):
            stack.callback(threading.Thread.join, thread := threading.Thread(target=asked, args=(served, directory)))
            thread.start()
        await_waiting(served)
        if hang == "hang":
            await_log(served, "survives SIGKILL")
        begin = time.monotonic()
        assert served.stop() == 0, served.log()
        assert time.monotonic() - begin < 15
    left = re.findall(r"process (\d+) survives SIGKILL", served.log())
    assert bool(left) == (hang == "hang")
    assert {serving.status(int(pid))["State"][0] for pid in left} <= {"D"}


def test_stop_ends_access_before_its_time(warm: Path) -> None:
    """A limit of ten minutes for a request is none for the end of the supervisor."""
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), callers=[CALLER], request_seconds=600) as served,
        hanging_files.mounted(served.world.sign(served.world.copy("hello")), base / "hangs", uid=CALLER) as files,
        serving.opened(files.place) as directory,
    ):
        files.hang("READ")
        heard: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: heard.append(asked(served, directory)))
        thread.start()
        files.await_hung()
        begin = time.monotonic()
        assert served.stop() == 0, served.log()
        assert time.monotonic() - begin < 15
        thread.join()
        assert heard[0]["code"] == "file_system_hangs"
        assert "survives SIGKILL" in served.log()


def test_user_with_four_hung_processes_is_refused(warm: Path) -> None:
    """Each keeps in memory what it has read, and SIGKILL frees none of it."""
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), callers=[CALLER, STRANGER], caller_requests=16, request_seconds=1) as served,
    ):
        source = served.world.sign(served.world.copy("hello"))
        with hanging_files.mounted(source, base / "hangs", uid=CALLER) as files:
            files.hang("FLUSH")
            with serving.opened(files.place) as directory:
                for number in range(4):
                    assert "does not answer" in asked(served, directory)["message"]
                    await_log(served, rf"(?s)(survives SIGKILL.*){{{number + 1}}}")
                refused = asked(served, directory)
            assert (refused["code"], refused["message"]) == (
                "file_system_hangs", "4 processes of this user wait for a file system",
            )  # fmt: skip
            with serving.opened(source) as other:
                assert asked(served, other, uid=STRANGER)["kind"] == "answer", "control: another user"
            files.answer()
            await_log(served, r"(?s)(which hung, has ended.*){4}")
            with serving.opened(files.place) as directory:
                assert asked(served, directory)["kind"] == "answer", "the fix of the refusal"
        served.stop()
        assert leftovers(served.world) == []
