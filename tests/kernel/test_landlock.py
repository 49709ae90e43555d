"""Landlock holds a process to TCP connections to single ports, as the connector of ports of this host is held."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable

from sandbox.kernel.fs import landlock


def in_child(call: Callable[[], None]) -> int:
    """Return the errno of a call in a process of its own, 0 where it raises none."""
    child = os.fork()
    if child == 0:
        try:
            call()
        except OSError as e:
            os._exit(e.errno or 255)
        except BaseException:
            os._exit(255)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_process_is_held_to_ports() -> None:
    granted, other = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0covenant-test-{os.getpid()}")
    abstract.listen()

    def connects(to: socket.socket, *, held: bool) -> Callable[[], None]:
        def call() -> None:
            if held:
                landlock.hold_to_ports([granted.getsockname()[1]])
            with socket.socket(to.family) as client:
                client.connect(to.getsockname())

        return call

    with granted, other, abstract:
        version = landlock.abi()
        for to in (granted, other, abstract):
            assert in_child(connects(to, held=False)) == 0
        assert in_child(connects(granted, held=True)) == 0
        assert in_child(connects(other, held=True)) == (errno.EACCES if version >= 4 else 0)
        assert in_child(connects(abstract, held=True)) == (errno.EPERM if version >= 6 else 0)
