"""Carry connections by a proxy that is reached over TLS: one thread of a connector, for all of its connections.

The caller gets one end of a socket pair in the place of the connection, with the bytes in clear. So the gates treat it
as any other socket.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import select
import socket
import ssl
import threading
import time
from typing import Final

# A side that is gone may leave bytes behind. They are written for so long.
_REST_SECONDS: Final = 30.0
_READ_BYTES: Final = 64 << 10
# Reads of one direction in one turn, before others have theirs.
_AT_ONCE: Final = 16


@functools.cache
def context(bundles: tuple[str, ...]) -> ssl.SSLContext:
    """A context that takes certificates of these files' authorities alone. A connector makes it before it is sealed.

    Raises:
        OSError: Raised when a file is missing, or holds no certificate.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for one in bundles:
        made.load_verify_locations(one)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    return made


class _Pair:
    """Both sides of a connection. Neither blocks."""

    def __init__(self, tls: ssl.SSLSocket, plain: socket.socket) -> None:
        self._tls, self._plain = tls, plain
        self._up, self._down = memoryview(b""), memoryview(b"")
        self._up_over = self._down_over = False
        self._events: dict[int, int] = {}
        self._rests_until: float | None = None
        self.goes_on = False

    def turn(self, hung_up: bool, now: float) -> bool:
        """Carry what can be carried now. Returns whether the connection lives on."""
        if hung_up and self._rests_until is None:
            self._rests_until = now + _REST_SECONDS
        self._events, self.goes_on = {self._tls.fileno(): 0, self._plain.fileno(): 0}, False
        try:
            self._carry_up()
            self._carry_down()
        except OSError:
            return False
        if self._rests_until is not None:
            return bool(self._up) and now < self._rests_until
        return not (self._up_over and self._down_over and not self._up and not self._down)

    def interest(self) -> dict[int, int]:
        """The events to wait for, by descriptor. A side that has hung up would report it again and again."""
        if self._rests_until is not None:
            return {self._tls.fileno(): self._events[self._tls.fileno()]}
        return self._events

    @property
    def rests(self) -> bool:
        """Whether the plain side is gone."""
        return self._rests_until is not None

    @property
    def plain_fd(self) -> int:
        """The descriptor of the side in clear."""
        return self._plain.fileno()

    def close(self) -> None:
        """Close both sides."""
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()  # says so to the proxy, and does not wait for its word
        for one in (self._tls, self._plain):
            with contextlib.suppress(OSError):
                one.close()

    def _wait(self, side: socket.socket, event: int) -> None:
        self._events[side.fileno()] |= event

    def _carry_up(self) -> None:
        for _ in range(_AT_ONCE):
            if not self._up:
                if self._up_over:
                    return
                try:
                    self._up = memoryview(self._plain.recv(_READ_BYTES))
                except BlockingIOError:
                    self._wait(self._plain, select.POLLIN)
                    return
                if not self._up:
                    # TLS has no half-open end: many a proxy would drop what still comes. The carried TLS has told.
                    self._up_over = True
                    return
            try:
                self._up = self._up[self._tls.send(self._up) :]
            except ssl.SSLWantWriteError:
                self._wait(self._tls, select.POLLOUT)
                return
            except ssl.SSLWantReadError:
                self._wait(self._tls, select.POLLIN)
                return
        self.goes_on = True

    def _carry_down(self) -> None:
        for _ in range(_AT_ONCE):
            if self._down:
                try:
                    self._down = self._down[self._plain.send(self._down) :]
                except BlockingIOError:
                    self._wait(self._plain, select.POLLOUT)
                    return
                continue
            if self._down_over:
                return
            try:
                self._down = memoryview(self._tls.recv(_READ_BYTES))
            except ssl.SSLWantReadError:
                self._wait(self._tls, select.POLLIN)
                return
            except ssl.SSLWantWriteError:
                self._wait(self._tls, select.POLLOUT)
                return
            if not self._down:
                self._down_over = True
                self._plain.shutdown(socket.SHUT_WR)
                return
        self.goes_on = True


class ProxyRelay:
    """Carries connections in a thread of its own, which begins with the first one."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[_Pair] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._bell: socket.socket | None = None

    def plain(self, tls: ssl.SSLSocket) -> socket.socket:
        """Return a socket with the bytes of a connection in clear. ``tls`` is the relay's from then on.

        Raises:
            OSError: Raised when there is no descriptor or thread left.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            theirs.setblocking(False)
            tls.setblocking(False)
            bell = self._started()
        except BaseException:
            ours.close()
            theirs.close()
            raise
        self._new.put(_Pair(tls, theirs))
        with contextlib.suppress(BlockingIOError):  # then it has not heard the last one yet
            bell.send(b"\0")
        return ours

    def _started(self) -> socket.socket:
        with self._lock:
            if self._bell is None:
                bell, hears = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                for one in (bell, hears):
                    one.setblocking(False)
                try:
                    threading.Thread(target=self._carry, args=(hears,), daemon=True).start()
                except RuntimeError as e:
                    raise OSError(str(e)) from e
                self._bell = bell
            return self._bell

    def _carry(self, hears: socket.socket) -> None:
        poll, pairs, waited = select.poll(), dict[int, _Pair](), dict[_Pair, dict[int, int]]()
        poll.register(hears, select.POLLIN)
        while True:
            if any(pair.goes_on for pair in waited):
                timeout: float | None = 0
            else:
                timeout = 1000 if any(pair.rests for pair in waited) else None
            events = dict(poll.poll(timeout))
            if events.pop(hears.fileno(), 0):
                hears.recv(_READ_BYTES)
            now, due = time.monotonic(), {pairs[fd] for fd in events}
            due |= {pair for pair in waited if pair.goes_on or pair.rests}
            while not self._new.empty():
                due.add(self._new.get())
            for pair in due:
                hung_up = bool(events.get(pair.plain_fd, 0) & (select.POLLHUP | select.POLLERR))
                _turn(pair, hung_up, now, poll, pairs, waited)


def _turn(
    pair: _Pair,
    hung_up: bool,
    now: float,
    poll: select.poll,
    pairs: dict[int, _Pair],
    waited: dict[_Pair, dict[int, int]],
) -> None:
    """Give a pair its turn, and wait for what it waits for then."""
    lives = pair.turn(hung_up, now)
    before, after = waited.pop(pair, {}), pair.interest() if lives else {}
    for fd in before.keys() - after.keys():
        poll.unregister(fd)
        del pairs[fd]
    for fd, mask in after.items():
        poll.register(fd, mask)  # a known one changes its events
        pairs[fd] = pair
    if lives:
        waited[pair] = after
    else:
        pair.close()


RELAY: Final = ProxyRelay()
