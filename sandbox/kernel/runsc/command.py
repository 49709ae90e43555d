"""Build runsc command lines: the one place that knows its flags and sub-commands.

Every call has a deadline. ``runsc exec`` is absent on purpose: its processes have no filter (sandbox-facts).
"""

from __future__ import annotations

import errno
import functools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from policy.compile import seccomp

# A privileged program gets an environment of our making, never the caller's.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}

# A flag of ``runsc run`` and not of runsc: a policy has it with the number inside.
BROKER_FLAG = "--pass-fd"
# A flag of ``runsc run`` too: the socket that takes the agent's terminal (kernel.runsc.console).
CONSOLE_FLAG = "--console-socket"

# The system calls that runsc is started without. Each of the six runsc processes of a run registers with membarrier(2)
# while it has threads. The kernel then waits for an RCU grace period: 5 to 15 ms, with no use for a run. If a kernel
# lacks the call, gVisor continues silently, and reports it as absent inside
# (docs/adr/0055-runsc-without-membarrier.md).
ABSENT: Final = ("membarrier",)


@functools.cache
def own_filter(arch: str) -> bytes:
    """Compile the seccomp filter for runsc itself.

    It refuses the calls in ``ABSENT`` with ENOSYS and all calls of other architectures, and allows every other call.

    Raises:
        errors.HostError: Raised when there is no table for ``arch``.
    """
    return seccomp.compile_without(ABSENT, arch=arch, error=errno.ENOSYS)


def run_arguments(
    binary: str,
    flags: Mapping[str, str],
    *,
    root: Path,
    places: Mapping[str, str],
    bundle: Path,
    container: str,
    broker: int | None = None,
    console: str | None = None,
) -> list[str]:
    """Return the arguments of ``runsc run`` in the foreground.

    It stays the parent of the sandbox, forwards only stdio, and exits with the first process's status. ``flags`` are
    the policy's, ``places`` name this run's own files. ``broker`` is the descriptor that the agent gets under the
    number of the policy's ``--pass-fd``. ``console`` is the socket that takes the terminal of an agent with one.
    """
    stated = [f"{name}={value}" for name, value in flags.items() if name != BROKER_FLAG]
    passed = [] if broker is None else [f"{BROKER_FLAG}={broker}:{flags[BROKER_FLAG]}"]
    passed += [] if console is None else [f"{CONSOLE_FLAG}={console}"]
    return [
        binary,
        f"--root={root}",
        *stated,
        *(f"{name}={value}" for name, value in places.items()),
        "run",
        *passed,
        f"--bundle={bundle}",
        container,
    ]


def kill(binary: str, *, root: Path, container: str, signal_name: str, timeout_seconds: float) -> bool:
    """Send a signal to the container's first process by ``runsc kill``. Returns whether runsc did it in time."""
    try:
        done = subprocess.run(
            [binary, f"--root={root}", "kill", container, signal_name],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_seconds,
            check=False,
            start_new_session=True,  # Ctrl-C must reach only the process that ends the run
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
