"""Check the pool by itself: a loop that forks no process, and records on disk."""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from policy import errors, standby
from policy.package import Package
from sandbox.config import Config
from sandbox.serve import standby_worker, systemd
from sandbox.serve.standby_pool import Pool
from sandbox.standby import backoff, dispatch
from sandbox.standby import wanted as standby_wanted
from sandbox.standby.instance import HOPELESS, READY, RESTLESS, TAKEN
from sandbox.supervisor import Supervisor

AMPLE = standby.Machine(24_000, 20_000)
SHORT = standby.Machine(24_000, 100)


class Loop:
    """Records each requested holder, the holder's end of the socket, and the callback for its end."""

    def __init__(self) -> None:
        self.holders: list[tuple[socket.socket, Callable[[int], None]]] = []
        self.acts: dict[int, Callable[[], None]] = {}
        self.recovered = 0
        self.fails = False

    def fork(self, work: Callable[[], None], keep: tuple[int, ...], ended: Callable[[int], None]) -> None:
        if self.fails:
            raise errors.KernelError("fork: no memory")
        sock = socket.socket(fileno=os.dup(cast("Any", work).args[2]))
        sock.setblocking(False)
        self.holders.append((sock, ended))

    def listen(self, fd: int, act: Callable[[], None]) -> None:
        self.acts[fd] = act

    def forget(self, fd: int) -> None:
        del self.acts[fd]

    def recover(self) -> None:
        self.recovered += 1

    @property
    def made(self) -> list[tuple[int, int]]:
        """Return the requests for instances so far, each with its number and its holder."""
        for index, (sock, _) in enumerate(self.holders):
            with contextlib.suppress(BlockingIOError, OSError):
                while raw := sock.recv(64):
                    self._asked.append((*standby_worker.ASK.unpack(raw), index))
        return sorted(self._asked)

    @functools.cached_property
    def _asked(self) -> list[tuple[int, int]]:
        return []

    def say(self, index: int, word: bytes) -> None:
        """Have one instance send a word."""
        number, having = self.made[index]
        self.holders[having][0].send(standby_worker.TOLD.pack(number) + word)
        for act in list(self.acts.values()):
            act()

    def ends(self, index: int, status: int = 0) -> None:
        """Have one instance end."""
        self.say(index, standby_worker.ENDED + bytes([status]))

    def wanted(self, having: int) -> bool:
        """Whether the pool may ask a holder for more instances."""
        assert self.made is not None
        try:
            return bool(self.holders[having][0].recv(64))
        except BlockingIOError:
            return True

    def dies(self, having: int, status: int = 137) -> None:
        """Have a holder end with all its instances."""
        sock, ended = self.holders[having]
        sock.close()
        ended(status)


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    for sock, _ in made.holders:
        sock.close()


@pytest.fixture
def pool(tmp_path: Path, loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    class Own:
        path, config = tmp_path, Config()

    monkeypatch.setattr(dispatch, "end", _end)
    ended.clear()
    deaf.clear()
    _want(tmp_path, "a", 2)
    made = Pool(cast("Supervisor", Own()), loop, alive=0, machine=lambda: AMPLE)
    made.look()
    yield made
    made.close()
    assert loop.acts == {}


ended: list[str] = []
deaf: list[str] = []


def _end(runs: Path, run_id: str, reason: str) -> bool:
    ended.append(run_id)
    return run_id not in deaf


def _want(state: Path, agent_id: str, count: int, envelope: bytes = b"e") -> None:
    package = Package({"agent.toml": b"[agent]"}, envelope)
    standby_wanted.want(state, package, agent_id=agent_id, count=count, package_name="/p")


def _ready(number: int) -> bytes:
    return READY + f"{number:036d}".encode()


def test_instances_are_made_one_at_time_and_no_more_than_are_asked_for(pool: Pool, loop: Loop) -> None:
    for _ in range(3):
        pool.tick(0.0)
    assert len(loop.made) == 1
    loop.say(0, _ready(0))
    pool.tick(0.0)
    loop.say(1, _ready(1))
    pool.tick(0.0)
    assert len(loop.made) == 2


def test_one_that_was_taken_is_replaced_while_it_works(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    loop.say(0, _ready(0))
    pool.tick(0.0)
    loop.say(1, _ready(1))
    loop.say(0, TAKEN)
    pool.tick(0.0)
    assert len(loop.made) == 3
    loop.ends(0)
    pool.tick(0.0)
    assert len(loop.made) == 3


def test_one_that_was_taken_as_soon_as_it_was_ready_is_no_failure(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    for word in (_ready(0), TAKEN, standby_worker.ENDED + b"\0"):
        ((number, _),) = loop.made
        loop.holders[0][0].send(standby_worker.TOLD.pack(number) + word)
    for act in list(loop.acts.values()):
        act()
    pool.tick(0.0)
    assert len(loop.made) == 2


def test_failure_waits_before_next_and_its_debris_is_taken_away(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    loop.ends(0, 1)
    assert loop.recovered == 1
    pool.tick(0.0)
    assert len(loop.made) == 1
    pool.tick(1e9)
    assert len(loop.made) == 2


def test_one_that_was_killed_may_leave_its_socket_with_what_it_had_just_forked(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    assert loop.made == [(0, 0)]
    sock, ended = loop.holders[0]
    (act,) = loop.acts.values()
    ended(137)
    assert (loop.acts, loop.recovered) == ({}, 1)
    # The loop may see the ready socket and the end in the same turn.
    act()
    sock.close()


def test_instances_of_package_share_holder_and_those_of_another_have_their_own(
    pool: Pool, loop: Loop, tmp_path: Path
) -> None:
    _want(tmp_path, "b", 1)
    pool.look()
    for index in range(3):
        pool.tick(0.0)
        loop.say(index, _ready(index))
    pool.tick(0.0)
    assert sorted(having for _, having in loop.made) == [0, 0, 1]
    assert len(loop.holders) == 2


def test_holder_that_dies_takes_all_of_its_instances_along_and_another_makes_them_anew(pool: Pool, loop: Loop) -> None:
    for index in range(2):
        pool.tick(0.0)
        loop.say(index, _ready(index))
    loop.dies(0)
    assert loop.recovered == 1
    pool.tick(1e9)
    loop.say(2, _ready(2))
    pool.tick(2e9)
    assert [having for _, having in loop.made] == [0, 0, 1, 1]


def test_what_holder_said_last_counts_though_it_ended_before_it_read_all(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    sock, ended = loop.holders[0]
    sock.send(standby_worker.TOLD.pack(0) + HOPELESS)
    sock.close()  # with the request still in it
    ended(0)
    assert standby_wanted.wanted(pool.supervisor.path) == []


@pytest.mark.parametrize("why", ["it says so", "one went wrong", "it had its part", "another configuration holds"])
def test_holder_that_makes_no_more_is_told_and_another_takes_over(
    pool: Pool, loop: Loop, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    pool.tick(0.0)
    loop.say(0, _ready(0))
    now = 0.0
    if why == "it says so":
        loop.say(0, standby_worker.FULL)
    elif why == "one went wrong":
        loop.ends(0, 1)
        now = 1e9
    elif why == "it had its part":
        monkeypatch.setattr("sandbox.serve.standby_pool.IN_ALL", 1)
    else:
        pool.supervisor.config = Config(grace_seconds=7)
    pool.tick(now)
    assert [having for _, having in loop.made] == [0, 1]
    assert not loop.wanted(0)
    assert loop.wanted(1)


def test_what_was_made_under_configuration_before_ends_and_what_works_goes_on(pool: Pool, loop: Loop) -> None:
    """It was made after the file was written but before the supervisor read it: by time it looks current."""
    for index in range(2):
        pool.tick(0.0)
        loop.say(index, _ready(index))
    loop.say(0, TAKEN)
    pool.tick(0.0)  # its replacement is being made
    pool.supervisor.config = Config()
    pool.tick(1e9)
    assert ended == []  # the configuration is read again and is the same
    pool.supervisor.config = Config(grace_seconds=7)
    pool.tick(1e9)
    assert ended == []  # nothing is due, and there was no notice
    pool.soon()
    pool.tick(1e9)
    assert ended == [f"{1:036d}"]
    loop.say(2, _ready(2))
    pool.tick(2e9)
    assert ended == [f"{1:036d}", f"{2:036d}"]
    pool.tick(3e9)
    assert len(ended) == 2
    assert not loop.wanted(0)
    assert loop.wanted(1)


def test_one_slow_to_wait_does_not_keep_others_from_being_made(pool: Pool, loop: Loop, tmp_path: Path) -> None:
    _want(tmp_path, "b", 1)
    pool.look()
    pool.tick(0.0)
    pool.tick(9.9)
    assert len(loop.made) == 1
    pool.tick(20.0)
    assert [having for _, having in loop.made] == [0, 1]  # of the other package, which has no instance
    pool.tick(29.0)
    assert len(loop.made) == 2  # still one at a time
    # The control: once an instance is ready in time, the next one is made at once.
    loop.say(1, _ready(1))
    pool.tick(29.0)
    assert len(loop.made) == 3


def test_holder_takes_so_many_at_once_and_more_when_some_have_ended(
    pool: Pool, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandbox.serve.standby_pool.AT_ONCE", 1)
    for index in range(2):
        pool.tick(0.0)
        loop.say(index, _ready(index))
    assert [having for _, having in loop.made] == [0, 1]
    loop.say(0, TAKEN)
    loop.ends(0)
    pool.tick(0.0)
    assert [having for _, having in loop.made] == [0, 1, 0]


def test_whose_agent_does_not_wait_is_tried_ever_more_seldom_and_it_is_said(
    pool: Pool, loop: Loop, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    tries: list[float] = []
    while now < 10 * 86_400:
        pool.tick(now)
        if len(loop.made) > len(tries):
            tries.append(now)
            loop.say(len(tries) - 1, RESTLESS)
            loop.ends(len(tries) - 1)
        now = (pool.due() or now) + 0.001 if (pool.due() or now) > now else now + 5.0
    gaps = [round(later - one) for one, later in itertools.pairwise(tries)]
    assert gaps[0] <= 6
    assert 86_400 <= gaps[-1] <= 86_410
    said = capfd.readouterr().err.splitlines()
    assert len(said) == len(tries)
    assert "`a` asks for standby and did not wait for its intent, the next try is in 86400 s" in said[-1]


def test_what_is_refused_is_not_asked_for_again_until_run_succeeds(pool: Pool, loop: Loop, tmp_path: Path) -> None:
    pool.tick(0.0)
    loop.say(0, HOPELESS)
    loop.ends(0, 1)
    assert standby_wanted.wanted(tmp_path) == []
    pool.tick(1e9)
    assert len(loop.made) == 1
    assert pool.due() is None
    _want(tmp_path, "a", 1)
    pool.look()
    pool.tick(2e9)
    assert len(loop.made) == 2


def test_another_package_of_agent_takes_place(pool: Pool, loop: Loop, tmp_path: Path) -> None:
    pool.tick(0.0)
    loop.say(0, _ready(7))
    _want(tmp_path, "a", 1, b"another")
    pool.look()
    pool.tick(0.0)
    assert ended == [f"{7:036d}"]
    assert len(loop.made) == 2


def test_short_machine_makes_none_and_gives_back(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    loop.say(0, _ready(0))
    pool.machine = lambda: SHORT
    pool.tick(0.0)
    assert ended == [f"{0:036d}"]
    assert len(loop.made) == 1
    # The pool ends it only once; an instance that got an intent at that moment continues.
    pool.tick(1e9)
    assert len(ended) == 1


def test_one_that_could_not_be_asked_is_asked_again(pool: Pool, loop: Loop) -> None:
    pool.tick(0.0)
    loop.say(0, _ready(0))
    pool.machine = lambda: SHORT
    deaf.append(f"{0:036d}")
    pool.tick(0.0)
    deaf.clear()
    pool.tick(1e9)
    pool.tick(2e9)
    assert ended == [f"{0:036d}"] * 2


def test_what_disk_or_kernel_refuses_ends_no_main_loop(pool: Pool, loop: Loop, tmp_path: Path) -> None:
    """All runs depend on the loop: the disk is read-only, no descriptor is free, or stderr has no reader."""

    def refused() -> standby.Machine:
        raise OSError(errno.EMFILE, "too many open files")

    pool.machine = refused
    pool.tick(0.0)
    assert loop.made == []
    pool.machine = lambda: AMPLE
    pool.tick(1e9)
    # The note of its next try cannot be removed, and then neither can its record.
    loop.ends(0)
    note = backoff._place(tmp_path, "a")
    note.unlink()
    note.mkdir()
    pool.tick(2e9)
    loop.say(1, _ready(1))
    loop.say(1, TAKEN)
    assert pool._failures == {}
    (record,) = (tmp_path / "standby").glob("*.json")
    record.unlink()
    record.mkdir()
    loop.say(1, HOPELESS)
    # No record can be read; once the records are readable, the pool reads them.
    (tmp_path / "standby").rename(tmp_path / "aside")
    (tmp_path / "standby").write_text("no directory")
    pool.look()
    pool.tick(3e9)
    (tmp_path / "standby").unlink()
    _want(tmp_path, "c", 1)
    pool.look()
    pool.tick(4e9)
    assert [one.agent_id for one in pool._wanted.values()] == ["c"]
    assert len(loop.made) == 3


@pytest.mark.parametrize("how", ["full", "closed"])
def test_whoever_does_not_read_stderr_holds_up_nobody(how: str) -> None:
    kept, (read, write) = os.dup(2), os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while how == "full":
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    if how == "closed":
        os.close(read)
    os.dup2(write, 2)
    try:
        systemd.tell("it cannot be heard")
    finally:
        os.dup2(kept, 2)
        for fd in (kept, write, *((read,) if how == "full" else ())):
            os.close(fd)


def test_no_process_is_failure_like_any_other(pool: Pool, loop: Loop) -> None:
    loop.fails = True
    before = len(os.listdir("/proc/self/fd"))
    pool.tick(0.0)
    pool.tick(0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert loop.made == []
