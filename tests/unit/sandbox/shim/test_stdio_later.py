"""Check a late intent with real children: the agent starts, is held, and gets the intent when a client connects."""

from __future__ import annotations

import array
import fcntl
import os
import select
import signal
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from policy import errors
from sandbox.run_io import ContainerIO, IntentDelivery, Limits, PeriodicCheck
from sandbox.shim.agent_loop import AgentLoop
from sandbox.shim.stdio import StdioSession
from tests.unit.sandbox.shim.test_stdio import READ, child

START, TASK = Limits(60.0, 0.0, "none"), Limits(60.0, 60.0, "timeout", 0.5)
NEVER: Sequence[PeriodicCheck] = ()
OPEN: list[int] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while OPEN:
        os.close(OPEN.pop())


@dataclass
class Scripted:
    """Hold the agent after ``after`` looks; then call ``come`` once, and let each client bring one of ``brings``."""

    brings: list[IntentDelivery | errors.RunError | None]
    after: int = 1
    come: Callable[[], None] = lambda: None
    rounds: Sequence[PeriodicCheck] = NEVER
    watches: Mapping[int, Callable[[], errors.RunError | None]] = field(default_factory=dict)
    looks: int = 0
    held_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_SEMAPHORE | os.EFD_CLOEXEC)
        OPEN.append(self.fd)

    def settled(self) -> bool:
        self.looks += 1
        if self.looks < self.after:
            return False
        self.held_at.append(self.looks)
        if self.brings:
            os.eventfd_write(self.fd, len(self.brings))
        self.come()
        return True

    def fileno(self) -> int:
        return self.fd

    def take(self) -> IntentDelivery | errors.RunError | None:
        os.eventfd_read(self.fd)
        return self.brings.pop(0)


def _run(code: str, later: Scripted, *, start: Limits = START) -> AgentLoop:
    with child(code) as channel:
        exchange = AgentLoop(channel, StdioSession(), b"", start, later=later)
        exchange.run()
    return exchange


def test_agent_is_told_when_another_comes_and_its_clocks_count_from_then() -> None:
    later = Scripted([None, IntentDelivery(b"hi\n", TASK)], after=3)
    done = _run(READ + "print(line.strip(), repr(sys.stdin.read()))", later)
    assert done.error is None
    assert bytes(done.stdout) == b"hi ''\n"
    assert later.held_at == [3]
    assert done.started_at is not None
    assert 0 <= done.started_at <= done.ended_at


def test_task_has_its_own_clock_and_waiting_has_none() -> None:
    later = Scripted([IntentDelivery(b"hi\n", structs.replace(TASK, task_seconds=2.5))])
    done = _run(READ + "time.sleep(30)", later, start=structs.replace(START, start_seconds=2.0))
    assert isinstance(done.error, errors.DeadlineError)
    assert done.error.details["clock"] == "timeout"


def test_agent_that_never_waits_has_deadline_of_start() -> None:
    done = _run(
        "import time; time.sleep(30)", Scripted([], after=10**6), start=structs.replace(START, start_seconds=0.2)
    )
    assert isinstance(done.error, errors.StartTimeoutError)
    assert done.started_at is None


@pytest.mark.parametrize("after", [2, 10**6], ids=["held", "not yet"])
def test_who_speaks_before_its_intent_is_refused_as_ever(after: int) -> None:
    done = _run("print('early', flush=True)\n" + READ + "time.sleep(30)", Scripted([], after=after))
    assert isinstance(done.error, errors.EarlyOutputError)


def test_who_spoke_before_it_was_held_is_refused_before_it_is_told() -> None:
    """The agent's word is in the pipe when a client brings the intent, in the same turn."""
    released: list[str] = []

    class Late(Scripted):
        def take(self) -> IntentDelivery | errors.RunError | None:
            code_says.wait_for_word()
            return super().take()

    class Word:
        def wait_for_word(self) -> None:
            select.select([exchange.channel.stdout], [], [])

    code_says = Word()
    with child("print('now', flush=True)\n" + READ + "print(len(line))") as channel:
        given = IntentDelivery(b"hi\n", TASK, release=lambda: released.append("released"))
        exchange = AgentLoop(channel, StdioSession(), b"", START, later=Late([given], after=0))
        exchange.run()
    assert isinstance(exchange.error, errors.EarlyOutputError)
    assert not released


def test_it_is_let_go_only_when_its_intent_is_there() -> None:
    with child(READ + "print(line.strip())") as channel:
        os.kill(pid_of(channel), signal.SIGSTOP)
        there: list[int] = []

        def release() -> None:
            there.append(pending(pid_of(channel)))
            os.kill(pid_of(channel), signal.SIGCONT)

        exchange = AgentLoop(
            channel, StdioSession(), b"", START, later=Scripted([IntentDelivery(b"hi\n", TASK, release=release)])
        )
        exchange.run()
    assert there == [3]
    assert bytes(exchange.stdout) == b"hi\n"


def pid_of(channel: ContainerIO) -> int:
    """The process behind a pidfd."""
    lines = Path(f"/proc/self/fdinfo/{channel.pidfd}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pid:"))


def pending(pid: int) -> int:
    """Return the number of unread bytes in the pipe of a process's stdin."""
    held = array.array("i", [0])
    with open(f"/proc/{pid}/fd/0", "rb", buffering=0) as pipe:
        fcntl.ioctl(pipe, termios.FIONREAD, held)
    return held[0]


def test_one_that_dies_while_it_is_held_ends_exchange_untold() -> None:
    with child(READ + "time.sleep(30)") as channel:
        later = Scripted([], come=channel.handle.kill)
        done = AgentLoop(channel, StdioSession(), b"", START, later=later)
        done.run()
    assert (done.started_at, done.error) == (None, None)


def test_error_instead_of_intent_ends_it() -> None:
    done = _run(READ + "time.sleep(30)", Scripted([errors.KilledError("the package was revoked")]))
    assert isinstance(done.error, errors.KilledError)
    assert done.started_at is None


def test_while_it_is_held_only_its_own_rounds_are_looked_at() -> None:
    seen: list[str] = []

    def held() -> None:
        seen.append("held")
        if seen.count("held") == 5:
            later.brings.append(IntentDelivery(b"hi\n", TASK))
            os.eventfd_write(later.fd, 1)

    later = Scripted([], rounds=(PeriodicCheck(0.02, held),))
    with child(READ + "time.sleep(0.2); print(1)") as channel:
        one = PeriodicCheck(0.02, lambda: seen.append("run"))
        AgentLoop(structs.replace(channel, rounds=(one,)), StdioSession(), b"", START, later=later).run()
    first, last = seen.index("held"), len(seen) - 1 - seen[::-1].index("held")
    assert set(seen[first : last + 1]) == {"held"}
    assert "run" in seen[last + 1 :]


def test_who_may_end_it_while_it_waits_cannot_any_more_once_it_is_told_and_who_came_can() -> None:
    gone, asker = (os.eventfd(1, os.EFD_CLOEXEC) for _ in range(2))
    OPEN.extend((gone, asker))
    heard: list[str] = []
    later = Scripted([], watches={gone: lambda: errors.KilledError("the supervisor went")})
    with child(READ + "time.sleep(30)") as channel:
        done = AgentLoop(channel, StdioSession(), b"", START, later=later)
        done.run()
    assert "supervisor" in str(done.error)

    os.eventfd_read(gone)  # the descriptor is not readable again until it is written to
    later = Scripted([], watches={gone: lambda: heard.append("too late")})

    def take() -> IntentDelivery:
        os.eventfd_read(later.fd)
        os.eventfd_write(gone, 1)
        return IntentDelivery(b"hi\n", TASK, {asker: lambda: errors.KilledError("whoever asked went")})

    later.brings, later.take = [None], take  # type: ignore[method-assign]
    with child(READ + "time.sleep(30)") as channel:
        done = AgentLoop(channel, StdioSession(), b"", START, later=later)
        done.run()
    assert "whoever asked" in str(done.error)
    assert done.started_at is not None
    assert not heard


def test_what_was_forgotten_in_turn_ends_nothing_in_same_turn() -> None:
    """The intent and the end of the standby's holder come at once: the first one seen counts."""
    gone = os.eventfd(1, os.EFD_CLOEXEC)
    OPEN.append(gone)
    later = Scripted([IntentDelivery(b"hi\n", TASK)], watches={gone: lambda: errors.KilledError("the supervisor went")})
    done = _run(READ + "print(line.strip())", later)
    assert done.error is None
    assert bytes(done.stdout) == b"hi\n"
