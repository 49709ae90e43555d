"""The process that holds the instances of one package: each in a thread of its own, which does what a shim does.

Most of what a shim takes of memory are pages that it has in common with any other of its package, and has by itself
because a reference was counted in them. Here they are had once. What an instance is, what is asked of it and what ends
it stays as it is in a shim (sandbox.standby): it has its own descriptors, locks, log and sandbox, and its thread is
the parent of its sandbox, which dies with that thread and so with this process.

The main loop asks over a socket for one more (``ASK``), one at a time, and is told how far each is (``TOLD``). When it
wants no more of this process it closes its side for writing, and the process ends after its last instance.

Nothing is forked here that does not execute at once (kernel.process), and nothing between such a fork and
its execve takes a lock that another thread could hold.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import select
import socket
import struct
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass, field
from typing import Final

from policy import errors
from sandbox.kernel import libc
from sandbox.kernel.fs import hanging
from sandbox.serve import connection, systemd
from sandbox.shim import process, signals
from sandbox.standby.instance import READY
from sandbox.standby.wanted import Wanted
from sandbox.supervisor import Supervisor

# The number of the instance that is to be made; the number of one, and what it says of itself comes behind it.
ASK, TOLD = struct.Struct("=Q"), struct.Struct("=Q")
# Beside what an instance says (sandbox.standby): it has ended, and with which status; no more are to be made here.
ENDED, FULL = b"e", b"f"
# As `ps` shows it; the kernel takes 15 bytes of a name.
NAME: Final = "covenant-holder"
# What one that is dispatched waits for at most for each turn of one that is made meanwhile (seconds).
_SWITCH_SECONDS: Final = 0.0002
# How often it is collected where nothing ends.
COLLECT_SECONDS: Final = 60.0
# Of a thread's stack; the interpreter's own calls take none of it.
_STACK_BYTES: Final = 1 << 20
# When the process has so much more memory than when it began, and so much more for each that lives, it takes no more.
GROWN_BYTES, _EACH_BYTES = 24 << 20, 2 << 20


@dataclass
class Holder:
    """``alive`` is readable once the main loop is gone."""

    supervisor: Supervisor
    wanted: Wanted
    sock: socket.socket
    alive: int
    _threads: set[threading.Thread] = field(default_factory=set)
    _told: int = -1
    _began: int = 0

    def serve(self) -> None:
        """Make instances until no more are asked for and the last has ended. A signal ends all of them."""
        _prepare()
        self._began = _resident()
        with signals.told_to_end() as told:
            self._told = told
            poll = select.poll()
            for fd in (told, self.sock.fileno()):
                poll.register(fd, select.POLLIN)
            while True:
                ready = [fd for fd, _ in poll.poll(COLLECT_SECONDS * 1000)]
                if not ready:
                    gc.collect()  # a look by the clock leaves a circle now and then, and may be all that happens
                elif told in ready or not (raw := _receive(self.sock)):
                    break
                else:
                    self._make(*ASK.unpack(raw))
            for one in list(self._threads):
                one.join()

    def _make(self, number: int) -> None:
        thread: threading.Thread | None = None
        try:
            thread = threading.Thread(target=functools.partial(self._keep, number), name=f"instance {number}")
            self._threads.add(thread)
            thread.start()
        except (RuntimeError, MemoryError):  # the first is how Python says EAGAIN; those that there are go on
            if thread is not None:
                self._threads.discard(thread)
            self._say(number, ENDED + b"\1")

    def _keep(self, number: int) -> None:
        """In its thread. Nothing that goes wrong with one may reach another."""
        status = 1
        try:
            say = functools.partial(self._said, number)
            self.supervisor.stand_by(self.wanted, alive=self.alive, tell=say, told=self._told)
            status = 0
        except errors.CovenantError as e:
            systemd.tell(f"standby of agent `{self.wanted.agent_id}`: {e.message}")
        except BaseException:
            with contextlib.suppress(BaseException):
                os.write(2, traceback.format_exc().encode())
        finally:
            # The instance holds reference circles, and the collector is off (serve.main). This takes 2 ms, after the
            # answer.
            gc.collect()
            self._say(number, ENDED + bytes([status]))
            # INVARIANT: after it was said. The process ends when there is none left.
            self._threads.discard(threading.current_thread())

    def _said(self, number: int, word: bytes) -> None:
        self._say(number, word)
        if word.startswith(READY) and _resident() - self._began > GROWN_BYTES + _EACH_BYTES * len(self._threads):
            self._say(number, FULL)

    def _say(self, number: int, word: bytes) -> None:
        # The pool may be gone, which is seen elsewhere.
        with contextlib.suppress(OSError):
            self.sock.send(TOLD.pack(number) + word)


def keep(supervisor: Supervisor, wanted: Wanted, fd: int, alive: int, host_network: int) -> None:
    """In the process, which has one thread still: every other inherits its network namespace."""
    connection.enter_host_network(supervisor, host_network)
    libc.set_name(NAME)
    with socket.socket(fileno=fd) as sock:
        Holder(supervisor, wanted, sock, alive).serve()


def _prepare() -> None:
    # INVARIANT: before the first thread. A fork among threads is what this module is written for; it executes at once.
    process.has_threads()
    hanging.announce_on(None)  # a page is for one thread
    warnings.filterwarnings("ignore", message=".*multi-threaded.*", category=DeprecationWarning)
    sys.setswitchinterval(_SWITCH_SECONDS)
    threading.stack_size(_STACK_BYTES)
    libc.one_arena()


def _receive(sock: socket.socket) -> bytes:
    """One message; empty when the main loop wants no more, or is gone."""
    try:
        return sock.recv(ASK.size)
    except ConnectionError:
        return b""


def _resident() -> int:
    """The memory that this process has, in bytes; a page that is shared after a fork counts before and after."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
