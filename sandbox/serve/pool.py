"""The instances that are kept ready, as the supervisor's main loop sees them: made one at a time, each by its keeper.

It decides nothing about an agent and reads nothing of one: which packages are asked for stands in records
(standby_records), how many there may be is computed (policy.standby), and each instance sees for itself that it is
still what it was made of (sandbox.standby). An intent finds its instance without this loop (standby_wire).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from policy import errors, standby
from sandbox import standby_records, standby_retries, standby_wire
from sandbox.serve import connection
from sandbox.standby import HOPELESS, READY, RESTLESS, TAKEN
from sandbox.standby_records import Wanted
from sandbox.supervisor import Supervisor

# How often the machine's memory is looked at while anything is kept ready.
TICK_SECONDS = 5.0
# An instance that was ready for so long before it ended was no failure to make one.
_LASTED_SECONDS = 60.0


def memory(proc: Path = Path("/proc")) -> standby.Machine:
    """What the kernel says of this machine's memory, in MiB."""
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (int(fields[name].split()[0]) >> 10 for name in ("MemTotal", "MemAvailable"))
    stalls = {"some": 0.0, "full": 0.0}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "pressure" / "memory").read_text().splitlines():
            words = line.split()
            stalls[words[0]] = float(words[1].removeprefix("avg10="))
    return standby.Machine(total, available, stalls["some"], stalls["full"])


class Loop(Protocol):
    """What the pool needs of the main loop."""

    def fork(self, work: Callable[[], None], keep: tuple[int, ...], ended: Callable[[int], None]) -> None:
        """Fork a keeper; ``ended`` is told its exit status."""

    def listen(self, fd: int, act: Callable[[], None]) -> None:
        """Call ``act`` whenever ``fd`` is readable."""

    def forget(self, fd: int) -> None:
        """No more of it."""

    def recover(self) -> None:
        """A keeper ended badly: take away what it left."""


@dataclass
class _Made:
    """One instance: ``told`` is where it says how far it is."""

    key: str
    agent_id: str
    told: int
    since: float
    run_id: str = ""
    taken: bool = False
    asked_to_end: bool = False
    restless: bool = False


@dataclass
class _Failures:
    count: int = 0
    until: float = 0.0


@dataclass
class Pool:
    """``alive`` is readable by keepers once the main loop's process is gone. ``machine`` says what memory there is."""

    supervisor: Supervisor
    loop: Loop
    alive: int
    host_network: int = -1
    machine: Callable[[], standby.Machine] = memory
    _made: dict[int, _Made] = field(default_factory=dict)
    _wanted: dict[str, Wanted] = field(default_factory=dict)
    _version: int = -1
    _failures: dict[str, _Failures] = field(default_factory=dict)
    _due: float = 0.0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def due(self) -> float | None:
        """When to call ``tick`` (time.monotonic) if nothing happens before; None for never."""
        return self._due if self._wanted or self._made else None

    def look(self) -> None:
        """Something may have changed: a run has ended, or an instance."""
        if standby_records.version(self.supervisor.path) != self._version:
            self._due = 0.0
            self._version = standby_records.version(self.supervisor.path)
            self._wanted = {one.key: one for one in standby_records.wanted(self.supervisor.path)}

    def tick(self, now: float) -> None:
        """One step towards what is asked for, when one is due."""
        if (due := self.due()) is None or now < due:
            return
        self._due = now + TICK_SECONDS
        self.look()
        there = [
            standby.Instance(number, one.key, one.since, bool(one.run_id))
            for number, one in self._made.items()
            if not one.taken and not one.asked_to_end
        ]
        waiting = [key for key, one in self._failures.items() if now < one.until]
        counts = {key: one.count for key, one in self._wanted.items()}
        step = standby.plan(counts, there, self.machine(), waiting=waiting)
        for number in step.end:
            self._end(self._made[number])
        if step.make is not None:
            self._make(self._wanted[step.make], now)
        soonest = min((one.until for one in self._failures.values() if one.until > now), default=self._due)
        self._due = min(self._due, soonest)

    # --- one instance -----------------------------------------------------------------------------

    def _make(self, one: Wanted, now: float) -> None:
        told, tell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        number = next(self._numbers)
        try:
            work = functools.partial(_keep, self.supervisor, one, self.alive, tell, self.host_network)
            keep = tuple(fd for fd in (2, self.alive, tell, self.host_network) if fd >= 0)
            self.loop.fork(work, keep, functools.partial(self._ended, number))
        except errors.KernelError:
            os.close(told)
            self._failed(one.key, one.agent_id, now)
            return
        finally:
            os.close(tell)
        self._made[number] = _Made(one.key, one.agent_id, told, now)
        self.loop.listen(told, functools.partial(self._told, number))

    def _told(self, number: int) -> None:
        one = self._made.get(number)
        if one is None:
            return  # its end was seen in the same turn
        try:
            said = os.read(one.told, 4096)
        except BlockingIOError:
            return  # it was killed, and what it had just forked has the other end for a moment more
        if not said:
            self.loop.forget(one.told)
            os.close(one.told)
            one.told = -1
        if said.startswith(READY):
            one.run_id, one.since = said[1:37].decode("ascii", "replace"), time.monotonic()
            said = said[37:]
        if RESTLESS in said:
            one.restless = True
        if TAKEN in said:
            one.taken = True
            self._recovered(one)
        if HOPELESS in said:
            standby_records.drop(self.supervisor.path, one.agent_id)
            standby_retries.over(self.supervisor.path, one.agent_id)
            self.look()
        self._due = 0.0

    def _end(self, one: _Made) -> None:
        """Ask it; one that was given an intent at the same moment goes on. What is being made ends when it is ready."""
        if one.run_id:
            runs = self.supervisor.path / "runs"
            one.asked_to_end = standby_wire.end(runs, one.run_id, "the pool has no room for it")

    def _ended(self, number: int, status: int) -> None:
        one = self._made.pop(number)
        if one.told >= 0:
            self._made[number] = one
            self._told(number)  # what it said last
            del self._made[number]
            if one.told >= 0:
                self.loop.forget(one.told)
                os.close(one.told)
        now = time.monotonic()
        if not one.taken and not one.asked_to_end:
            if one.run_id and now - one.since >= _LASTED_SECONDS:
                self._recovered(one)
            else:
                self._failed(one.key, one.agent_id, now, restless=one.restless)
        if status:
            self.loop.recover()
        self._due = 0.0

    def _recovered(self, one: _Made) -> None:
        if self._failures.pop(one.key, None) is not None:
            standby_retries.over(self.supervisor.path, one.agent_id)

    def _failed(self, key: str, agent_id: str, now: float, *, restless: bool = False) -> None:
        failures = self._failures.setdefault(key, _Failures())
        failures.count += 1
        wait = standby.wait_after(failures.count, restless=restless)
        failures.until = now + wait
        state, count = self.supervisor.path, failures.count
        standby_retries.note(state, agent_id, count=count, restless=restless, wait_seconds=wait)
        if restless:
            words = f"`{agent_id}` asks for standby and did not wait for its intent, the next try is in {wait:.0f} s"
            os.write(2, f"covenant-supervisor: {words}\n".encode())


def _keep(supervisor: Supervisor, one: Wanted, alive: int, tell: int, host_network: int) -> None:
    """In the instance's keeper."""
    connection.enter_host_network(supervisor, host_network)

    def say(word: bytes) -> None:
        # Whoever made it may be gone, which is seen elsewhere.
        with contextlib.suppress(OSError):
            os.write(tell, word)

    supervisor.stand_by(one, alive=alive, tell=say)
