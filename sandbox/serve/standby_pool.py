"""The instances that are kept ready, as the supervisor's main loop sees them: made one at a time, each by its holder.

A holder is a process that has the instances of one package (sandbox.serve.standby_worker), so many of them that what
all have in common costs little and its death is not that of all; where it has had its part, another is forked.

It decides nothing about an agent and reads nothing of one: which packages are asked for stands in records
(standby_records), how many there may be is computed (policy.standby), and each instance sees for itself that it is
still what it was made of (sandbox.standby). An intent finds its instance without this loop (standby_wire).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from policy import errors, standby
from sandbox.config import Config
from sandbox.host import memory
from sandbox.serve import standby_worker, systemd
from sandbox.serve.standby_worker import ASK, ENDED, FULL, TOLD
from sandbox.standby import backoff, dispatch
from sandbox.standby import wanted as standby_wanted
from sandbox.standby.instance import HOPELESS, READY, RESTLESS, TAKEN
from sandbox.standby.wanted import Wanted
from sandbox.supervisor import Supervisor

# How often the machine's memory is looked at while anything is kept ready.
TICK_SECONDS = 5.0
# An instance that was ready for so long before it ended was no failure to make one.
_LASTED_SECONDS = 60.0
# One that is not ready after so long takes its time, and not the processors': others are made meanwhile, or a package
# whose agent is slow to come to its stdin would have all the making for as long as it is asked for.
_SLOW_SECONDS = 10.0
# As many instances one holder has at once, and has had in all when another is forked in its place.
AT_ONCE, IN_ALL = 32, 512
# What one of them says at once, at most.
_SAID_BYTES = 4096


class PoolLoop(Protocol):
    """The main loop, as the pool uses it."""

    def fork(self, work: Callable[[], None], keep: tuple[int, ...], ended: Callable[[int], None]) -> None:
        """Fork a shim; ``ended`` is told its exit status."""

    def listen(self, fd: int, act: Callable[[], None]) -> None:
        """Call ``act`` whenever ``fd`` is readable."""

    def forget(self, fd: int) -> None:
        """No more of it."""

    def recover(self) -> None:
        """A shim ended badly: take away what it left."""


@dataclass
class _Holder:
    """A process that has instances of ``key``, these by number: what it knows is as old as ``config``. One that is
    ``full`` makes no more, and ends after its last."""

    key: str
    config: Config
    sock: socket.socket
    numbers: set[int] = field(default_factory=set)
    made: int = 0
    full: bool = False
    gone: bool = False

    def close(self) -> None:
        """Ask for no more."""
        self.full = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


@dataclass
class _Made:
    """One instance, and who has it."""

    key: str
    agent_id: str
    holder: _Holder
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
    """``alive`` is readable by shims once the main loop's process is gone. ``machine`` says what memory there is."""

    supervisor: Supervisor
    loop: PoolLoop
    alive: int
    host_network: int = -1
    machine: Callable[[], standby.Machine] = memory.machine
    _made: dict[int, _Made] = field(default_factory=dict)
    _holders: list[_Holder] = field(default_factory=list)
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
        # INVARIANT: nothing that the disk or the kernel refuses is raised from here, or from ``tick``: the runs of all
        # hang on the main loop, and what cannot be read or written now is tried again.
        with contextlib.suppress(OSError):
            version = standby_wanted.version(self.supervisor.path)
            if version != self._version:
                self._wanted = {one.key: one for one in standby_wanted.wanted(self.supervisor.path)}
                self._due, self._version = 0.0, version

    def soon(self) -> None:
        """Another configuration holds."""
        self._due = 0.0

    def tick(self, now: float) -> None:
        """One step towards what is asked for, when one is due."""
        if (due := self.due()) is None or now < due:
            return
        self._due = now + TICK_SECONDS
        self.look()
        self._let_go()
        try:
            machine = self.machine()
        except OSError:
            return
        there = [
            standby.Instance(number, one.key, one.since, bool(one.run_id) or now - one.since >= _SLOW_SECONDS)
            for number, one in self._made.items()
            if not one.taken and not one.asked_to_end
        ]
        waiting = [key for key, one in self._failures.items() if now < one.until]
        counts = {key: one.count for key, one in self._wanted.items()}
        step = standby.plan(counts, there, machine, waiting=waiting)
        for number in step.end:
            self._end(self._made[number], "the pool has no room for it")
        if step.make is not None:
            self._make(self._wanted[step.make], now)
        soonest = min((one.until for one in self._failures.values() if one.until > now), default=self._due)
        self._due = min(self._due, soonest)

    def close(self) -> None:
        """Nothing more is asked for, and nothing heard."""
        for one in self._holders:
            self._forget(one)

    # --- holders ----------------------------------------------------------------------------------

    def _let_go(self) -> None:
        """Close the workers that are not wanted, are used up, or have another configuration than the supervisor.

        The instances of the last kind end too: they were made before the supervisor read the new configuration.
        """
        config = self.supervisor.config
        for one in self._holders:
            if one.key not in self._wanted or one.made >= IN_ALL or one.config != config:
                one.close()
        for made in self._made.values():
            if made.holder.config != config and not made.taken and not made.asked_to_end:
                self._end(made, "another configuration holds")

    def _holder(self, wanted: Wanted) -> _Holder:
        """One with room for another.

        Raises:
            errors.KernelError, OSError: there is none, and none can be forked.
        """
        for one in self._holders:
            if one.key == wanted.key and not one.full and len(one.numbers) < AT_ONCE:
                return one
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            ours.setblocking(False)
            made = _Holder(wanted.key, self.supervisor.config, ours)
            work = functools.partial(
                standby_worker.keep, self.supervisor, wanted, theirs.fileno(), self.alive, self.host_network
            )
            keep = tuple(fd for fd in (2, theirs.fileno(), self.alive, self.host_network) if fd >= 0)
            self.loop.fork(work, keep, functools.partial(self._holder_ended, made))
            undo.pop_all()
        self._holders.append(made)
        self.loop.listen(ours.fileno(), functools.partial(self._hear, made))
        return made

    def _hear(self, one: _Holder) -> None:
        """Read the words of a worker about its instances, as many as there are."""
        while not one.gone:
            try:
                said = one.sock.recv(_SAID_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # it ended and had not read all of ours; what it said lies behind this
            except OSError:
                said = b""
            if not said:
                self._forget(one)
            else:
                (number,), word = TOLD.unpack_from(said), said[TOLD.size :]
                self._told(number, word)

    def _forget(self, one: _Holder) -> None:
        if not one.gone:
            one.gone = one.full = True
            self.loop.forget(one.sock.fileno())
            one.sock.close()

    def _holder_ended(self, one: _Holder, status: int) -> None:
        self._hear(one)  # what it said last
        self._forget(one)
        self._holders.remove(one)
        for number in sorted(one.numbers):
            self._ended(number)
        if status:
            self.loop.recover()

    # --- one instance -----------------------------------------------------------------------------

    def _make(self, one: Wanted, now: float) -> None:
        number = next(self._numbers)
        try:
            having = self._holder(one)
            having.sock.send(ASK.pack(number))
        except (errors.KernelError, OSError):
            self._failed(one.key, one.agent_id, now)
            return
        having.made += 1
        having.numbers.add(number)
        self._made[number] = _Made(one.key, one.agent_id, having, now)

    def _told(self, number: int, said: bytes) -> None:
        one = self._made.get(number)
        if one is None:
            return
        if said.startswith(ENDED):
            self._ended(number)
            if said[1]:
                # After a failure another worker makes the next instance.
                one.holder.close()
                self.loop.recover()
        elif said.startswith(READY):
            one.run_id, one.since = said[1:].decode("ascii", "replace"), time.monotonic()
        elif said == RESTLESS:
            one.restless = True
        elif said == TAKEN:
            one.taken = True
            self._recovered(one)
        elif said == HOPELESS:
            with contextlib.suppress(OSError):  # it stays asked for, ever more seldom
                standby_wanted.drop(self.supervisor.path, one.agent_id)
                backoff.over(self.supervisor.path, one.agent_id)
            self.look()
        elif said == FULL:
            one.holder.close()
        self._due = 0.0

    def _end(self, one: _Made, why: str) -> None:
        """Ask it; one that was given an intent at the same moment goes on. What is being made ends when it is ready."""
        if one.run_id:
            runs = self.supervisor.path / "runs"
            one.asked_to_end = dispatch.end(runs, one.run_id, why)

    def _ended(self, number: int) -> None:
        one = self._made.pop(number)
        one.holder.numbers.discard(number)
        now = time.monotonic()
        if not one.taken and not one.asked_to_end:
            if one.run_id and now - one.since >= _LASTED_SECONDS:
                self._recovered(one)
            else:
                self._failed(one.key, one.agent_id, now, restless=one.restless)
        self._due = 0.0

    def _recovered(self, one: _Made) -> None:
        if self._failures.pop(one.key, None) is not None:
            with contextlib.suppress(OSError):  # who asks is told of a wait that is over
                backoff.over(self.supervisor.path, one.agent_id)

    def _failed(self, key: str, agent_id: str, now: float, *, restless: bool = False) -> None:
        failures = self._failures.setdefault(key, _Failures())
        failures.count += 1
        wait = standby.wait_after(failures.count, restless=restless)
        failures.until = now + wait
        state, count = self.supervisor.path, failures.count
        backoff.note(state, agent_id, count=count, restless=restless, wait_seconds=wait)
        if restless:
            systemd.tell(
                f"`{agent_id}` asks for standby and did not wait for its intent, the next try is in {wait:.0f} s"
            )
