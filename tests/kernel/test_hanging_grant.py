"""A granted host path on a file system that stops answering, before a run, at its start, while an agent reads it and
while it is attested: each ends in bounded time, by name. The file system is a real FUSE server (hanging_server.py)."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from policy import errors
from sandbox.supervisor import Supervisor
from tests.kernel import hanging_files, serving
from tests.kernel.conftest import leftovers, unfinished
from tests.kernel.hanging_files import Hanging
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, TAIL, World

SECONDS = 2
ENDED_SECONDS = 45
# The time of a run, in which its agent comes to read the file; then the hanging read is named, and its run cleaned up.
LIMIT, NAMED, CLEANED = 8, 10, 10


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        with Served(world, request_seconds=SECONDS, attest_seconds=1, start_deadline_seconds=10) as made:
            yield made
            # The file system is gone, and so is what hung: the supervisor removes what such runs left.
            await_true(lambda: unfinished(world) == [])
            made.stop()


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hanging]:
    source = tmp_path_factory.mktemp("source")
    source.chmod(0o755)
    (source / "word").write_text("granted")
    # What pytest makes lies below a directory that others can change.
    place = Path(f"/srv/covenant-hangs-{os.getpid()}")
    place.mkdir(mode=0o755)
    try:
        with hanging_files.mounted(source, place) as made:
            yield made
    finally:
        place.rmdir()


def reader(served: Served, files: Hanging, *, before: str = "") -> Path:
    return world_reader(served.world, files, before=before)


def world_reader(world: World, files: Hanging, *, before: str = "") -> Path:
    """An agent that reads the granted file after ``before``."""
    code = HEAD + before + f"\nanswer = open('{files.place}/word').read()" + TAIL
    grant = f'[permissions.filesystem]\nread = ["{files.place}"]\n'
    return world.sign(world.package({"main.py": code}, more=grant))


def test_hanging_grant_is_named_before_run(served: Served, files: Hanging) -> None:
    package = reader(served, files)
    # The control: it is granted, and read.
    assert served.run(package).error is None
    files.hang("GETATTR")
    begin = time.monotonic()
    with pytest.raises(errors.CovenantError) as told:
        served.run(package)
    assert told.value.code == "file_system_hangs"
    assert f"granted path `{files.place}`" in str(told.value)
    assert time.monotonic() - begin < ENDED_SECONDS
    await_true(lambda: bool(re.search(r"survives SIGKILL: .*granted path", served.log())))


def test_agent_that_reads_hanging_grant_ends(served: Served, files: Hanging) -> None:
    package = reader(served, files)
    files.hang("READ")
    begin = time.monotonic()
    # The process that opens granted files for gVisor waits for FUSE's answer, and ends with that alone.
    with pytest.raises(errors.KernelError, match=r"\(state D, in the kernel's `request_wait_answer`\) survive SIGKILL"):
        served.run(package, timeout_ms=LIMIT * 1000)
    assert time.monotonic() - begin < ENDED_SECONDS
    files.answer()
    assert served.run(package).error is None


def test_timeout_ends_hanging_run_in_one_process(world: World, files: Hanging) -> None:
    files.hang("READ")
    begin = time.monotonic()
    with pytest.raises(errors.KernelError, match="survive SIGKILL"):
        world.run(world_reader(world, files), timeout_ms=LIMIT * 1000)
    assert time.monotonic() - begin < ENDED_SECONDS
    files.answer()
    until = time.monotonic() + ENDED_SECONDS
    while leftovers(world):
        assert time.monotonic() < until
        with Supervisor(world.state) as supervisor:
            supervisor.recover()


def test_attested_hanging_grant_ends_its_run(served: Served, files: Hanging) -> None:
    package = reader(served, files, before="import time; time.sleep(3 if intent['text'] == 'short' else 60)")
    # The control: attested each second, it comes to its end.
    assert served.run(package, "short").error is None
    heard: list[errors.CovenantError] = []

    def run() -> None:
        try:
            served.run(package)
        except errors.CovenantError as e:
            heard.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    # The second run has its intent: it was attested once by then.
    await_true(lambda: sum(row["kind"].get("state") == "Running" for row in served.world.rows()) == 2)
    assert sandboxes(served), "control"
    files.hang("GETATTR")
    thread.join(ENDED_SECONDS)
    assert [e.code for e in heard] == ["file_system_hangs"]
    assert f"what the agent has at `{files.place}`" in str(heard[0])
    # Its keeper waits still, and its sandbox is dead.
    await_true(lambda: not sandboxes(served))
    await_true(lambda: "survives SIGKILL" in served.log())


def sandboxes(served: Served) -> list[int]:
    """The processes of runsc that this supervisor has below it and that run."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{entry}/cmdline").read_bytes()
            if b"runsc" in command and os.fsencode(served.world.state) in command:
                found.append(int(entry))
    return found


def await_true(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + ENDED_SECONDS
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("hangs", [False, True], ids=["control: the agent sleeps", "it reads a hanging file"])
def test_read_that_hangs_is_named_after_ten_seconds(served: Served, files: Hanging, *, hangs: bool) -> None:
    package = reader(served, files, before="" if hangs else "import time; time.sleep(600)")
    if hangs:
        files.hang("READ")
    begin, code = time.monotonic(), ""
    try:
        answer = served.run(package, timeout_ms=LIMIT * 1000)
        code = answer.error.code if answer.error else ""
    except errors.CovenantError as e:
        code = e.code
    seconds = time.monotonic() - begin
    files.answer()
    assert code == ("kernel" if hangs else "deadline")
    assert seconds < LIMIT + NAMED + CLEANED, f"it took {seconds:.0f} s"
