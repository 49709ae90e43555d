"""A granted host path on a file system that stops answering, before a run, at its start, while an agent reads it and
while it is attested: each ends in bounded time, by name. The file system is a real FUSE server (hanging_server.py)."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from policy import errors
from tests.kernel import hanging_files, serving
from tests.kernel.conftest import leftovers
from tests.kernel.hanging_files import Hanging
from tests.kernel.serving import Served
from tests.kernel.world import HEAD, TAIL, World

SECONDS = 2
ENDED_SECONDS = 45


@pytest.fixture
def served(warm: Path) -> Iterator[Served]:
    with serving.open_place() as base:
        world = World(base, warm=warm)
        with Served(world, request_seconds=SECONDS, attest_seconds=1, start_deadline_seconds=10) as made:
            yield made
            made.stop()
        until = time.monotonic() + ENDED_SECONDS
        while found := leftovers(world):
            assert time.monotonic() < until, found
            time.sleep(0.2)


@pytest.fixture
def files(served: Served) -> Iterator[Hanging]:
    source = served.world.base / "source"
    source.mkdir()
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
    """An agent that reads the granted file after ``before``."""
    code = HEAD + before + f"\nanswer = open('{files.place}/word').read()" + TAIL
    grant = f'[permissions.filesystem]\nread = ["{files.place}"]\n'
    return served.world.sign(served.world.package({"main.py": code}, more=grant))


def test_hanging_grant_is_named_before_a_run(served: Served, files: Hanging) -> None:
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
    assert re.search(r"survives SIGKILL: .*granted path", served.log())


def test_agent_that_reads_a_hanging_grant_ends(served: Served, files: Hanging) -> None:
    package = reader(served, files)
    files.hang("READ")
    begin = time.monotonic()
    answer = served.run(package, timeout_ms=3000)
    print(answer.error, time.monotonic() - begin)
    assert answer.error is not None
    assert time.monotonic() - begin < ENDED_SECONDS
    print(served.log())
    begin = time.monotonic()
    served.stop()
    print("stop", time.monotonic() - begin)
    print(served.log())
    assert 0
