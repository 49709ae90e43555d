"""The one process of a supervisor that is under no filter, and so can read those of others: forked first of all.

It has no secret and no lock, since nothing was opened yet, two capabilities, and of descriptors the socket that it is
asked over and stderr. It ends with the last that could ask: a shim that outlives its supervisor is still answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator

from sandbox import core_dumps
from sandbox.kernel import libc, procfs
from sandbox.kernel.proc.capabilities import CAPABILITIES
from sandbox.kernel.seccomp import reader
from sandbox.shim import process
from sandbox.shim.process import Shim

# As `ps` shows it.
NAME = "covenant-reader"
# Of each of its threads, of which there may be more than a hundred.
_STACK_BYTES = 512 << 10
# The kernel shows filters only with CAP_SYS_ADMIN, and those of other users' processes with CAP_SYS_PTRACE.
_KEPT = frozenset({CAPABILITIES["sys_admin"], CAPABILITIES["sys_ptrace"]})


@contextlib.contextmanager
def forked() -> Iterator[Shim]:
    """Within the block this process, and what it forks, has its questions answered; the caller sees to its end.

    Raises:
        errors.KernelError: there is no process left.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            child = process.fork(lambda: _work(theirs), keep=(2, theirs.fileno()))
        reader.through(ours)
        try:
            yield child
        finally:
            reader.through(None)
            child.close()


def sees_nothing() -> bool:
    """Whether this process was itself started under a filter, such as a container's: then none is shown to it, nor to
    the reader that it forks, and those of runs are counted alone."""
    one = procfs.process(os.getpid())
    return one is None or one.seccomp != 0


def _work(sock: socket.socket) -> None:
    libc.set_name(NAME)
    os.chdir("/")
    core_dumps.forbid()
    libc.unshare(libc.CLONE_NEWNET)
    libc.keep_capabilities(_KEPT)
    libc.set_no_new_privs()
    threading.stack_size(_STACK_BYTES)
    reader.serve(sock)
