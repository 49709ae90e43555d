"""The runsc command line: one place that knows its flags and sub-commands.

Every call has a deadline. ``runsc exec`` is absent on purpose: what it starts has no filter (sandbox-facts).
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


# What runsc is started without. Each of its six processes of a run registers with membarrier(2) from among threads, for
# which the kernel waits out a grace period of RCU: 5 to 15 ms that nobody uses. Where a kernel has no such call, gVisor
# goes on without a word, and says the same to whoever asks inside (docs/adr/0055-runsc-without-membarrier.md).
ABSENT: Final = ("membarrier",)


@functools.cache
def own_filter(arch: str) -> bytes:
    """The seccomp filter that runsc is started under: there is none of ``ABSENT``, no call of another architecture is
    let by, and every other is.

    Raises:
        errors.HostError: there is no table for ``arch``.
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
) -> list[str]:
    """``runsc run`` in the foreground: it stays the parent of the sandbox, forwards nothing but stdio and exits
    with the first process's status. ``flags`` are the policy's, ``places`` say where this run's own files lie.
    ``broker`` is the descriptor that the agent gets by the number of the policy's ``--pass-fd``."""
    stated = [f"{name}={value}" for name, value in flags.items() if name != BROKER_FLAG]
    passed = [] if broker is None else [f"{BROKER_FLAG}={broker}:{flags[BROKER_FLAG]}"]
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
    """``runsc kill``: send a signal to the container's first process. Returns whether runsc took it in time."""
    try:
        done = subprocess.run(
            [binary, f"--root={root}", "kill", container, signal_name],
            env=ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_seconds,
            check=False,
            start_new_session=True,  # Ctrl-C is for whoever ends the run
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
