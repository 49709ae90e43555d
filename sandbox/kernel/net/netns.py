"""Network namespaces as open descriptors, without names: the kernel takes one away with the last that holds it.

A thread enters a namespace, not a process; whoever has to do something in one does it in a thread that ends there.
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
    """A descriptor of the calling thread's own network namespace; the caller closes it."""
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


def make(count: int = 1) -> list[int]:
    """Descriptors of ``count`` new namespaces, empty but for a loopback that is down; the caller closes them.

    Raises:
        errors.KernelError: the kernel makes none.
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
    """The value of ``call`` in that namespace. Sockets that it makes stay there, and can be used from anywhere.

    Raises:
        errors.KernelError: the namespace cannot be entered. What ``call`` raises is raised here.
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
