"""Network namespaces as open descriptors, without names: the kernel removes one with its last descriptor.

A thread enters a namespace, not a process. Each function therefore works in a thread that ends in the namespace.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from policy import errors
from sandbox.kernel import libc

T = TypeVar("T")
_OWN = "/proc/thread-self/ns/net"


def current() -> int:
    """Return a descriptor of the calling thread's own network namespace. The caller closes it."""
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def make(count: int = 1) -> list[int]:
    """Make ``count`` namespaces, empty but for a loopback that is down. The caller closes the descriptors.

    Raises:
        errors.KernelError: Raised when the kernel makes none.
    """

    def work() -> list[int]:
        made: list[int] = []
        with contextlib.ExitStack() as undo:
            for _ in range(count):
                libc.unshare(libc.CLONE_NEWNET)
                made.append(current())
                undo.callback(os.close, made[-1])
            undo.pop_all()
        return made

    return _in_thread(work)


def within(namespace: int, call: Callable[[], T]) -> T:
    """Return the value of ``call`` in that namespace. Its sockets stay there, and can be used from anywhere.

    Raises:
        errors.KernelError: Raised when the namespace cannot be entered. Errors of ``call`` are raised here.
    """

    def work() -> T:
        libc.setns(namespace, libc.CLONE_NEWNET)
        return call()

    return _in_thread(work)


def aside(call: Callable[[], T]) -> Callable[[], T]:
    """Begin ``call`` in its own thread. The returned function waits for its value and raises its error.

    It raises OSError if there is no thread left.
    """
    out: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        # What the main thread holds off (spawn.spawn) must not come to it by way of this one.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            out.append((call(), None))
        except BaseException as e:  # it is raised again in the waiting thread
            out.append((None, e))

    thread = threading.Thread(target=run, name="netns")
    try:
        thread.start()
    except RuntimeError as e:  # how Python says EAGAIN
        out.append((None, OSError(errno.EAGAIN, str(e))))

    def wait() -> T:
        if thread.ident is not None:
            thread.join()
        value, error = out[0]
        if error is not None:
            raise error
        result: Any = value
        return result  # type: ignore[no-any-return]

    return wait


def _in_thread(work: Callable[[], T]) -> T:
    try:
        return aside(work)()
    except OSError as e:
        raise errors.KernelError(f"network namespace: {e}") from e
