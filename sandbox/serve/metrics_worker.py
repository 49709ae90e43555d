"""The metrics worker: follow the log, write each step of a run to stderr as JSON, keep the numbers, and sign
checkpoints of the log by a timer.

``metrics`` in config.toml names where they are served: `unix:/run/covenant/metrics.sock`, for root alone, or an address
of the loopback, for everybody on this machine. A process without rights (metrics_http) answers the clients
and asks here. A result is kept for a second, so that frequent requests cost nothing.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import select
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from policy import errors
from sandbox.audit import checkpoint_row
from sandbox.config import Config, check_owner
from sandbox.control import metrics
from sandbox.network.gate import process, uids
from sandbox.serve import metrics_http, systemd

_LOOK_SECONDS, _KEPT_SECONDS = 1.0, 1.0
# What a line says of a row beside whose it is; numbers and words of closed tables, and what an operator wrote.
_SAID = ("state", "status", "code", "exit_status", "exit_signal", "duration_ms", "layer", "denial", "count", "passed",
         "name", "version", "version_to", "rule", "backend", "reason")  # fmt: skip


@contextlib.contextmanager
def listening(config: Config) -> Iterator[socket.socket | None]:
    """The socket that ``metrics`` names; None where it names none.

    Raises:
        errors.ConfigError: the place cannot be used.
    """
    if not config.metrics:
        yield None
        return
    with contextlib.ExitStack() as stack:
        try:
            if config.metrics.startswith("unix:"):
                listener = _of_path(Path(config.metrics.removeprefix("unix:")), stack)
            else:
                host, _, port = config.metrics.rpartition(":")
                address = ipaddress.ip_address(host.strip("[]"))
                family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
                listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((str(address), int(port)))
            listener.listen(16)
        except OSError as e:
            raise errors.ConfigError(f"`{config.metrics}` cannot serve the metrics: {e.strerror}") from e
        yield listener


def keep(state: Path, config: Config, listener: int, alive: int) -> None:
    """In its own process, until ``alive`` ends. ``listener`` is -1 for none.

    Raises:
        errors.KernelError: the process that answers ended.
    """
    counted = metrics.tally(state, whole=True)
    for _ in counted.read():
        pass
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        poll.register(alive, select.POLLIN)
        ours, gate = None, None
        if listener >= 0:
            # The first scraper does not wait for the import.
            import prometheus_client  # noqa: F401 - sandbox.control.prometheus uses it

            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.enter_context(ours)
            with theirs:
                fds = {"listener": listener, "numbers": theirs.fileno()}
                gate = stack.enter_context(process.start(_gate(fds)))
            poll.register(ours, select.POLLIN)
            poll.register(gate.pidfd, select.POLLIN)
            ours.setblocking(False)
        text, kept_until = b"", 0.0
        signing = Signing(state, config.checkpoint_seconds, time.monotonic())
        while True:
            ready = dict(poll.poll(_LOOK_SECONDS * 1000))
            if alive in ready:
                return
            for event in counted.read():
                if config.journal:
                    _say(event)
            signing.tick(time.monotonic())
            if gate is not None and gate.pidfd in ready:
                raise errors.KernelError("the process that serves the metrics ended")
            if ours is not None and ours.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    ours.recv(16)
                if time.monotonic() > kept_until:
                    times = metrics.times(state, int(time.time() * 1000))
                    whole = metrics.text(metrics.live(state, counted), counted, times)
                    text = whole.encode()[: metrics_http.TEXT_BYTES]
                    kept_until = time.monotonic() + _KEPT_SECONDS
                # The worker never waits for a client: one that does not read gets nothing and delays no line.
                with contextlib.suppress(BlockingIOError):
                    ours.send(text)


class Signing:
    """Sign a checkpoint of the log, where rows came, once in so many seconds. What prevents it is reported once."""

    def __init__(self, state: Path, seconds: float, now: float) -> None:
        self._state, self._seconds = state, seconds
        self._due = now + seconds
        self._told = ""

    def tick(self, now: float) -> None:
        """Sign one where it is due; never with an interval of 0."""
        if now < self._due or not self._seconds:
            return
        self._due = now + self._seconds
        try:
            checkpoint_row.make(self._state)
            self._told = ""
        except (errors.CovenantError, OSError) as e:
            if str(e) != self._told:
                self._told = str(e)
                systemd.tell(f"no checkpoint of the log could be signed: {e}")


def line(event: Mapping[str, Any]) -> bytes:
    """One row of the log in a few words, as JSON on one line; every character of an agent's is escaped."""
    row = event["kind"]
    about = {name: row[name] for name in ("run_id", "agent_id", *_SAID) if row.get(name) is not None}
    return json.dumps({"time_ms": event["timestamp_ms"], "event": row["type"], **about}).encode() + b"\n"


def _say(event: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(2, line(event))


def _gate(fds: Mapping[str, int]) -> process.Gate:
    return process.Gate(
        module="sandbox.serve.metrics_http",
        layer="metrics",
        codes=(),
        uid=uids.METRICS,
        plan={},
        fds=fds,
        calls=metrics_http.CALLS,
        descriptors=16,
    )


def _of_path(path: Path, stack: contextlib.ExitStack) -> socket.socket:
    """A socket that only root can connect to, in a directory where only root can put one."""
    # Of a directory above it that is in other hands, another could be put in its place.
    for one in path.parents:
        check_owner(one)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise errors.ConfigError(f"`{path}` is there and is no socket", where=str(path))
        os.unlink(path)
    made = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    finally:
        os.umask(before)
    stack.callback(path.unlink, missing_ok=True)
    return made
