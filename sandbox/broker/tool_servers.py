"""The tool servers of a run: each has a shim forked from the run's own, and its sandbox's stdin and stdout are pipes.

The tool gate asks for a server by its alias and gets the ends of the pipes. Each server's shim holds the read end of a
pipe whose only write end is the run's shim's: at its end of file, for any cause, the server is ended.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final

from msgspec import Struct

from policy import errors
from sandbox.network.tools.ledger import StartedServer
from sandbox.rate_limit import Tokens
from sandbox.run_io import Outcome
from sandbox.shim import process

# Starts of one server: so many at once, and then one in so many seconds. The gate keeps to fewer (tools.desk).
STARTS, START_SECONDS = 8, 10.0
# How long a server may take to end once the run is over, and then after SIGTERM (seconds).
_LEAVING_SECONDS: Final = 20.0


class ServerRequest(Struct, frozen=True):
    """The request for one server. Its descriptors are those of the sandbox's streams.

    ``alive`` is at its end of file once the shim of the agent's run is gone. ``calls`` says whether calls are under way
    (shim.idleness).
    """

    alias: str
    stdin: int
    stdout: int
    stderr: int
    alive: int
    calls: int

    def watches(self, stack: contextlib.ExitStack) -> dict[int, Callable[[], Outcome]]:
        """Return the watch that ends the server with the run of its agent. ``stack`` owns its descriptor."""
        epoll = stack.enter_context(contextlib.closing(select.epoll()))
        # A pipe at its end of file stays readable: report it once.
        epoll.register(self.alive, select.EPOLLIN | select.EPOLLONESHOT)

        def ended() -> Outcome:
            return errors.ParentEndedError("the run of its agent has ended") if epoll.poll(0) else None

        return {epoll.fileno(): ended}


class ToolServers:
    """Start and end the tool servers of one run. ``start`` runs one, in its own shim; ``keep`` are descriptors for it.

    ``aliases`` are the servers that there are.
    """

    def __init__(
        self, aliases: Collection[str], start: Callable[[ServerRequest], None], *, keep: Collection[int] = ()
    ) -> None:
        self._aliases, self._run, self._keep = frozenset(aliases), start, tuple(keep)
        self._shims: list[process.Shim] = []
        self._rates = {alias: Tokens(1 / START_SECONDS, STARTS, time.monotonic()) for alias in self._aliases}
        self._alive: tuple[int, int] | None = None

    def start(self, alias: str) -> StartedServer | None:
        """Start a server. Returns None where there is no such server, it started too often, or no process is left."""
        self._shims = list(self._living())
        if alias not in self._aliases or not self._rates[alias].take(time.monotonic()):
            return None
        try:
            return self._fork(alias)
        except (OSError, errors.KernelError):
            return None

    def _fork(self, alias: str) -> StartedServer:
        if self._alive is None:
            self._alive = os.pipe2(os.O_CLOEXEC)
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(4)]
            (stdin, to_server), (from_server, stdout), (errors_read, stderr), (calls, tell) = pipes
            for fd in (stdin, stdout, stderr, calls):
                theirs.callback(os.close, fd)
            for fd in (to_server, from_server, errors_read, tell):
                ours.callback(os.close, fd)
            request = ServerRequest(alias, stdin, stdout, stderr, self._alive[0], calls)
            keep = {stdin, stdout, stderr, request.alive, calls, *self._keep}
            self._shims.append(process.fork(functools.partial(self._run, request), keep=keep))
            ours.pop_all()
        return StartedServer(to_server, from_server, errors_read, tell)

    def _living(self) -> Iterator[process.Shim]:
        for one in self._shims:
            if one.reap(block=False) is None:
                yield one
            else:
                one.close()

    def close(self) -> None:
        """End all, and wait until they are gone."""
        if self._alive is None:
            return
        os.close(self._alive[1])
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _LEAVING_SECONDS
            for one in self._shims:
                if number is not None:
                    one.signal(number)
            for one in self._shims:
                process.wait(one.pidfd, max(0.0, until - time.monotonic()))
            self._shims = list(self._living())
        os.close(self._alive[0])
        self._alive = None
