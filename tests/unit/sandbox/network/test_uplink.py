"""Check the lock that all runs share while they connect to the uplink: a run that hangs does not keep it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from sandbox.network import addresses, uplink
from sandbox.storage import atomic_file

PLACE = addresses.Uplink("192.0.2.2", "2001:db8::2")


class Made:
    """The steps that make and remove the uplink's parts, in order; each checks the lock at that moment."""

    def __init__(self, lock: Path) -> None:
        self._lock, self.steps = lock, list[str]()

    def step(self, name: str, *, locked: bool) -> None:
        assert self.is_free() is not locked, name
        self.steps.append(name)

    def is_free(self) -> bool:
        with open(self._lock) as file:
            return atomic_file.take(file.fileno(), 0.0)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    lock = tmp_path / "lock"
    lock.touch()
    made = Made(lock)

    def held() -> Any:
        made.step("table", locked=True)
        return uplink.Before("eth0", True, None, True, 0)

    def plug(*given: object) -> addresses.Uplink:
        made.step("plug", locked=True)
        return PLACE

    monkeypatch.setattr(uplink, "LOCK", lock)
    monkeypatch.setattr(uplink, "held_table", held)
    monkeypatch.setattr(uplink, "look", lambda device: uplink.Before(device, True, None, True, 0))
    monkeypatch.setattr(uplink, "forward", lambda before, *, on: None)
    monkeypatch.setattr(uplink, "plug", plug)
    monkeypatch.setattr(uplink, "unplug", lambda name, place: made.step("unplug", locked=False))
    monkeypatch.setattr(uplink, "end", lambda name, binary: made.step("end", locked=False))
    return made


@contextlib.contextmanager
def connecting() -> Iterator[Any]:
    spaces: Any = None  # no step here enters a namespace
    with uplink.connecting(spaces, "run", device="eth0", binary=Path("nft")) as connect:
        yield connect
    assert not any(thread.name == "netns" for thread in threading.enumerate())


def test_run_on_its_way_keeps_lock_until_it_has_its_device(made: Made) -> None:
    with connecting() as connect:
        assert connect() == PLACE
        assert made.is_free()
    assert made.steps == ["table", "plug", "unplug", "end"]


def test_one_that_stands_on_its_way_lets_others_pass_and_looks_again(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uplink, "KEEP_SECONDS", 0.01)
    with connecting() as connect:
        until = time.monotonic() + 60
        while "table" not in made.steps or not made.is_free():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert connect() == PLACE
        assert made.is_free()
    assert made.steps[:3] == ["table", "table", "plug"]
    assert made.is_free()


def test_child_that_was_forked_meanwhile_and_stands_keeps_lock_from_nobody(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the starter, runsc is started by a fork beside the thread that holds the lock."""
    monkeypatch.setattr(uplink, "KEEP_SECONDS", 600.0)
    until, (told, tell) = time.monotonic() + 60, os.pipe()
    with connecting() as connect:
        while "table" not in made.steps:
            assert time.monotonic() < until
            time.sleep(0.01)
        child = os.fork()
        if not child:
            os.close(tell)
            os.read(told, 1)  # like a child that joins a frozen cgroup
            os._exit(0)
        try:
            assert not made.is_free()
            assert connect() == PLACE
            assert made.is_free()
        finally:
            for fd in (told, tell):
                os.close(fd)
            os.waitpid(child, 0)


def test_one_that_never_comes_so_far_leaves_lock(made: Made) -> None:
    with pytest.raises(RuntimeError), connecting():
        raise RuntimeError
    assert made.is_free()
    assert made.steps == ["table", "end"]


def test_what_cannot_be_taken_away_is_told_and_replaces_no_error(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(name: str, binary: Path) -> None:
        raise errors.KernelError("nft: Cannot allocate memory")

    monkeypatch.setattr(uplink, "end", refuses)
    told: list[str] = []
    spaces: Any = None
    with (
        pytest.raises(errors.KernelError, match="Cannot allocate"),
        uplink.connecting(spaces, "run", device="eth0", binary=Path("nft"), stays=lambda: told.append("1")) as connect,
    ):
        connect()

    def fails() -> None:
        with uplink.connecting(spaces, "run", device="eth0", binary=Path("nft"), stays=lambda: told.append("2")):
            raise RuntimeError("the first")

    with pytest.raises(RuntimeError, match="the first") as first:
        fails()
    assert told == ["1", "2"]
    assert any("could not be taken away" in note for note in first.value.__notes__)
